package main

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"
)

// counter counts in memory and in a file, in lockstep: it adds one to both, or to none. It
// finds out if they have come apart. Beside the count it holds memory that does not change.
var counter struct {
	once sync.Once
	mu   sync.Mutex
	n    int   // guarded by mu
	err  error // guarded by mu
	fill []byte
	sum  string // of fill, when it was made
}

const countFile, fillBytes = "/count", 64 << 20

// count starts the counter, if need be, and returns what it has counted.
func count() map[string]any {
	counter.once.Do(func() {
		counter.fill = make([]byte, fillBytes)
		rand.Read(counter.fill) //nolint:errcheck // never fails since Go 1.24
		counter.sum = sum(counter.fill)
		counter.err = write(0)
		go func() {
			for step() {
				time.Sleep(time.Millisecond) // it is the guest's work, and others have a CPU too
			}
		}()
	})
	counter.mu.Lock()
	defer counter.mu.Unlock()
	err := counter.err
	if sum(counter.fill) != counter.sum {
		err = errors.Join(err, errors.New("its memory has changed"))
	}
	return map[string]any{"n": counter.n, "sum": counter.sum, "err": errText(err)}
}

// step adds one to memory and file, unless they differ.
func step() bool {
	counter.mu.Lock()
	defer counter.mu.Unlock()
	b, err := os.ReadFile(countFile)
	if want := line(counter.n); err == nil && string(b) != want {
		err = fmt.Errorf("memory has %q, and the file %q", want, b)
	}
	if err == nil && counter.err == nil {
		counter.n++
		err = write(counter.n)
	}
	counter.err = errors.Join(counter.err, err)
	return counter.err == nil
}

func write(n int) error {
	f, err := os.OpenFile(countFile, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(line(n))
	return errors.Join(err, f.Close())
}

// line has the same length for every n, so that writing it is one change.
func line(n int) string { return fmt.Sprintf("%12d%s", n, strings.Repeat(".", 500)) }

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}
