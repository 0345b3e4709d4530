//go:build all

package year

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A clock is the wall clock of the daemons under test: the machine's, and an offset that they
// read from memory which they share with this process.
type clock struct {
	file   string
	offset *int64 // seconds
}

func newClock(t *testing.T, file string) *clock {
	t.Helper()
	f, err := os.Create(file)
	if err == nil {
		err = f.Truncate(8)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := unix.Mmap(int(f.Fd()), 0, 8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	return &clock{file, (*int64)(unsafe.Pointer(&b[0]))}
}

// step sets the clock forward, or back.
func (c *clock) step(d time.Duration) { atomic.AddInt64(c.offset, int64(d/time.Second)) }

// now is what the daemons read.
func (c *clock) now() time.Time {
	return time.Now().Round(0).Add(time.Duration(atomic.LoadInt64(c.offset)) * time.Second)
}

// A change is a text of a source file, and what stands there instead for the daemon under test.
type change struct{ old, new string }

// changed are the files that a build replaces by changed ones: the clock of Go's runtime, and
// intervals of the daemon's own work. A day takes seconds, and minutes must pass in it.
func (c *clock) changed(goroot, top string) map[string]change {
	at := func(name string) string { return filepath.Join(top, name) }
	return map[string]change{
		filepath.Join(goroot, "src/runtime/time_linux_amd64.s"): {"TEXT time·now<ABIInternal>", "TEXT ·realNow<ABIInternal>"},
		at("internal/daemon/background.go"):                     {"const sweepEvery = time.Minute", "const sweepEvery = time.Minute / 30"},
		at("internal/backup/schedule/schedule.go"):              {"const tick = time.Minute", "const tick = time.Minute / 120"},
	}
}

// replaced are the files that a build replaces by files of testdata.
func (c *clock) replaced(goroot, top string) map[string]string {
	return map[string]string{
		filepath.Join(goroot, "src/runtime/timeasm.go"): "timeasm.go.txt",
		filepath.Join(goroot, "src/syscall/clock.go"):   "clock.go.txt",
		filepath.Join(top, "pkg/expiry/alarm.go"):       "alarm.go.txt",
	}
}

// overlay writes the files and their table for go build -overlay to dir, and returns the table.
func (c *clock) overlay(t *testing.T, dir, top string) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	goroot := strings.TrimSpace(string(out))
	table := struct{ Replace map[string]string }{map[string]string{}}
	put := func(path, text string) {
		file := filepath.Join(dir, fmt.Sprint(len(table.Replace))+"-"+filepath.Base(path))
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		table.Replace[path] = file
	}
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for path, ch := range c.changed(goroot, top) {
		text := read(path)
		if n := strings.Count(text, ch.old); n != 1 {
			t.Fatalf("%s has %q %d times: the change of the simulated clock does not fit any more", path, ch.old, n)
		}
		put(path, strings.Replace(text, ch.old, ch.new, 1))
	}
	for path, name := range c.replaced(goroot, top) {
		put(path, strings.ReplaceAll(read(filepath.Join("testdata", name)), "CLOCK_FILE", c.file))
	}
	b, err := json.Marshal(table)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}
