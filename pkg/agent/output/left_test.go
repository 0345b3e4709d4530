package output

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// left is what a reader finds in the file of a ring whose agent was killed just now.
func left(t *testing.T, path string) (k agent.KeptOutput, content []byte) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	k = agent.OpenOutput(f, fi.Size(), 1<<30)
	if content, err = io.ReadAll(k.Since(0)); err != nil || int64(len(content)) != k.End-k.From {
		t.Fatalf("read %d bytes of %d to %d, %v", len(content), k.From, k.End, err)
	}
	return k, content
}

// TestKilled: at each moment, the file has all that was written to the ring, also one that has wrapped
// or was settled, and also between a piece and the note of where a ring ends.
func TestKilled(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for name, c := range map[string]struct {
		limit, each, ring int64 // ring: of what size; 0: it does not wrap
		total, piece      int
	}{
		"one line":     {1 << 30, OfCommand, 0, 5, 5},
		"short":        {1 << 30, OfCommand, 0, 40_000, 500},
		"long":         {1 << 30, OfCommand, 0, 3_000_000, 64 << 10},
		"wrapped":      {1 << 30, 1 << 20, 1 << 20, 5_000_000, 64 << 10},
		"least":        {1 << 30, 64 << 10, 64 << 10, 1_000_000, 64 << 10},
		"odd":          {1 << 30, 300_000, 300_000, 2_000_000, 10_007},
		"small budget": {600 << 10, OfCommand, 512 << 10, 2_000_000, 64 << 10},
	} {
		dir := t.TempDir()
		r := NewBooks(dir, c.limit, c.each, func() {}).NewRing("x")
		path := filepath.Join(dir, "x")
		var want []byte
		check := func(when string) agent.KeptOutput {
			k, got := left(t, path)
			oldest := int64(0)
			if k.End > c.ring && c.ring > 0 {
				oldest = k.End - c.ring + agent.Gap(c.ring)
			}
			if k.End != int64(len(want)) || k.From > oldest {
				t.Errorf("%s, %s: the file has %d to %d, want at least %d to %d", name, when, k.From, k.End, oldest, len(want))
			} else if !bytes.Equal(got, want[k.From:]) {
				t.Errorf("%s, %s: the content differs", name, when)
			}
			return k
		}
		for len(want) < c.total {
			b := make([]byte, min(1+rnd.IntN(c.piece), c.total-len(want)))
			for i := range b {
				b[i] = byte(len(want) + i*i)
			}
			r.Write(b) //nolint:errcheck // never fails
			if want = append(want, b...); rnd.IntN(10) == 0 {
				check("written")
			}
		}
		k := check("at the end")
		if wrapped := k.From > 0; wrapped != (c.ring > 0) {
			t.Errorf("%s: the oldest byte is %d", name, k.From)
		}
		if c.ring > 0 { // the next piece was written, and the note was not
			pos := k.End % c.ring
			if _, err := r.file.WriteAt(make([]byte, min(agent.Gap(c.ring), c.ring-pos)), pos); err != nil {
				t.Fatal(err)
			}
			check("in the middle of a piece")
			continue
		}
		r.Settle(false)
		check("settled")
		r.Write([]byte("late\n")) //nolint:errcheck // never fails
		want = append(want, "late\n"...)
		check("after a process that was left behind has written")
		if got := r.all(0); !bytes.Equal(got, want) {
			t.Errorf("%s: the ring has other content than was written", name)
		}
		r.Drop()
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s: the file of a ring that was dropped is left", name)
		}
	}
}

// TestForgedOutput: whatever a guest has put into the file, a reader takes no more than it is long,
// and no more than it asked for.
func TestForgedOutput(t *testing.T) {
	for name, b := range map[string][]byte{
		"empty": {}, "a note alone": agent.Wrap(7), "a note of less than the ring": append(make([]byte, 100), agent.Wrap(99)...),
		"a note of a negative number": append(make([]byte, 100), agent.Wrap(-1)...),
		"a note of a huge number":     append(make([]byte, 100), agent.Wrap(1<<62)...),
	} {
		k := agent.OpenOutput(bytes.NewReader(b), int64(len(b)), 50)
		got, err := io.ReadAll(k.Since(0))
		if err != nil || len(got) > 50 || k.From < 0 || k.End < k.From {
			t.Errorf("%s: %d to %d, read %d bytes, %v", name, k.From, k.End, len(got), err)
		}
	}
	for id, want := range map[string]bool{
		agent.EntrypointID: true, "0123456789abcdef0123456789abcdef": true, "": false, "..": false, "../../etc/passwd": false,
		"0123456789abcdef0123456789abcde/": false, "0123456789ABCDEF0123456789ABCDEF": false,
	} {
		if path, ok := agent.OutputOf(id); ok != want {
			t.Errorf("%q: %q, %v", id, path, ok)
		}
	}
}
