package uptime

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// a host has a book in a file, and boots as it is told.
type host struct {
	t    *testing.T
	path string
	up   time.Time // when the present boot began
}

func newHost(t *testing.T) *host { return &host{t: t, path: filepath.Join(t.TempDir(), "up.json")} }

// boot boots the host at a time before now.
func (h *host) boot(id string, ago time.Duration) *Book {
	h.t.Helper()
	h.up = time.Now().Add(-ago)
	b, err := open(h.path, id, func() time.Time { return h.up })
	if err != nil {
		h.t.Fatal(err)
	}
	return b
}

// seen has a daemon have seen the host up last at a time before now.
func (h *host) seen(ago time.Duration) {
	h.t.Helper()
	text, err := os.ReadFile(h.path)
	if err != nil {
		h.t.Fatal(err)
	}
	at := time.Now().Add(-ago)
	// The content says when it was written, which is now.
	i := strings.LastIndex(string(text), `"seen":`)
	text = fmt.Appendf(text[:i:i], "%q:%q}]", "seen", at.Format(time.RFC3339Nano))
	if err := os.WriteFile(h.path, text, 0o600); err != nil {
		h.t.Fatal(err)
	}
	if err := os.Chtimes(h.path, at, at); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) down(b *Book, since, want time.Duration) {
	h.t.Helper()
	got := b.Down(time.Now().Add(-since))
	if d := got - want; d < -time.Minute || d > time.Minute {
		h.t.Errorf("since %v the host was down for %v, want %v", since, got, want)
	}
}

// TestDown: the host was up from 100 to 90 hours ago, from 60 to 50, and from 10 on.
func TestDown(t *testing.T) {
	h := newHost(t)
	h.boot("one", 100*time.Hour)
	h.seen(90 * time.Hour)
	h.down(h.boot("one", 100*time.Hour), 95*time.Hour, 0) // another daemon of the same boot
	h.seen(90 * time.Hour)
	h.boot("two", 60*time.Hour)
	h.seen(50 * time.Hour)
	b := h.boot("three", 10*time.Hour)
	for since, want := range map[time.Duration]time.Duration{
		200 * time.Hour: 70 * time.Hour, // before all that it knows
		95 * time.Hour:  70 * time.Hour,
		80 * time.Hour:  60 * time.Hour, // while it was down
		55 * time.Hour:  40 * time.Hour,
		20 * time.Hour:  10 * time.Hour,
		5 * time.Hour:   0,
	} {
		h.down(b, since, want)
	}

	t.Run("the clock is set forward after the boot", func(t *testing.T) {
		defer func(was time.Time) { h.up = was }(h.up)
		h.up = h.up.Add(3 * time.Hour) // a clock without a battery was three hours late
		h.down(b, 95*time.Hour, 73*time.Hour)
		if err := b.Beat(); err != nil {
			t.Fatal(err)
		}
		h.seen(time.Hour)
		h.down(h.boot("four", 30*time.Minute), 95*time.Hour, 73*time.Hour+30*time.Minute)
	})
}

// TestBeat: a beat moves the time of the file and nothing of its content.
func TestBeat(t *testing.T) {
	h := newHost(t)
	b := h.boot("one", time.Hour)
	was, err := os.ReadFile(h.path)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Now().Add(-time.Minute)
	if err := os.Chtimes(h.path, at, at); err != nil {
		t.Fatal(err)
	}
	if err := b.Beat(); err != nil {
		t.Fatal(err)
	}
	fi, err := os.Stat(h.path)
	if err != nil || time.Since(fi.ModTime()) > 30*time.Second {
		t.Errorf("the file is of %v, %v", fi.ModTime(), err)
	}
	if is, err := os.ReadFile(h.path); err != nil || string(is) != string(was) {
		t.Errorf("%s\nwas\n%s, %v", is, was, err)
	}
	if err := os.Remove(h.path); err != nil {
		t.Fatal(err)
	}
	if err := b.Beat(); err != nil {
		t.Error(err)
	}
	if is, err := os.ReadFile(h.path); err != nil || !strings.Contains(string(is), `"boot":"one"`) {
		t.Errorf("after somebody removed it: %s, %v", is, err)
	}
}

// TestDamaged: of a file that cannot be read its time is left, and it is made anew.
func TestDamaged(t *testing.T) {
	for name, text := range map[string]string{"empty": "", "half": `[{"boot":"one","fro`, "no list": "{}", "an empty list": "[]"} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			if err := os.WriteFile(h.path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			at := time.Now().Add(-20 * time.Hour)
			if err := os.Chtimes(h.path, at, at); err != nil {
				t.Fatal(err)
			}
			h.up = time.Now().Add(-5 * time.Hour)
			b, err := open(h.path, "two", func() time.Time { return h.up })
			if (err == nil) != (text == "[]") || err != nil && !strings.Contains(err.Error(), h.path) {
				t.Errorf("the error is %v", err)
			}
			h.down(b, 30*time.Hour, 15*time.Hour)
			h.down(h.boot("two", 5*time.Hour), 30*time.Hour, 15*time.Hour)
		})
	}
}

// TestMost: the file does not grow without end, and what it forgets is the oldest.
func TestMost(t *testing.T) {
	h := newHost(t)
	n := most + 10
	for i := range n {
		h.boot(fmt.Sprint("boot ", i), time.Duration(2*(n-i))*time.Hour)
		h.seen(time.Duration(2*(n-i)-1) * time.Hour)
	}
	b := h.boot("the last", 0)
	h.down(b, 100000*time.Hour, (most-1)*time.Hour)
	if fi, err := os.Stat(h.path); err != nil || fi.Size() > 64<<10 {
		t.Errorf("%d bytes, %v", fi.Size(), err)
	}
}

// TestBegan: the kernel's own time of the boot, which /proc/stat has in whole seconds (proc_stat(5)).
func TestBegan(t *testing.T) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "\nbtime ")
	var want int64
	if _, err := fmt.Sscan(rest, &want); err != nil {
		t.Fatal(err)
	}
	if got := began(); got.Sub(time.Unix(want, 0)).Abs() > 2*time.Second {
		t.Errorf("the host was booted at %v, the kernel says %v", got, time.Unix(want, 0))
	}
}
