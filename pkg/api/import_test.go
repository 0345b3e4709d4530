package api

import (
	"io"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// sender sends so many bytes each time, after a pause, as a connection with a
// deadline has it.
type sender struct {
	bytes, times int
	pause        time.Duration
	until        time.Time
}

func (s *sender) Read(p []byte) (int, error) {
	if s.times--; s.times < 0 {
		return 0, io.EOF
	}
	if left := time.Until(s.until); left < s.pause {
		time.Sleep(left)
		return 0, os.ErrDeadlineExceeded
	}
	time.Sleep(s.pause)
	return min(len(p), s.bytes), nil
}

// TestUploadPace: a sender may think, and be slow, but not drip.
func TestUploadPace(t *testing.T) {
	for name, c := range map[string]struct {
		sender
		ok     bool
		within time.Duration
	}{
		"a steady one":   {sender{bytes: 20 << 10, pause: time.Second, times: 3600}, true, 2 * time.Hour},
		"a thinker":      {sender{bytes: 1 << 20, pause: 14 * time.Minute, times: 1}, true, 15 * time.Minute},
		"one of bursts":  {sender{bytes: 32 << 20, pause: 10 * time.Minute, times: 20}, true, 4 * time.Hour},
		"one that drips": {sender{bytes: 1, pause: time.Minute, times: 1000}, false, 16 * time.Minute},
		"a silent one":   {sender{bytes: 1, pause: time.Hour, times: 1}, false, 16 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := c.sender
				u := &upload{ReadCloser: io.NopCloser(&s), deadline: func(at time.Time) error { s.until = at; return nil }}
				start := time.Now()
				_, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{u}, make([]byte, 64<<20))
				if took := time.Since(start); c.ok != (err == nil) || !c.ok && !errs.Is(err, errs.Invalid) || took > c.within {
					t.Errorf("after %v: %v", took, err)
				}
			})
		})
	}
}

// TestUploadWaits: the time that the daemon takes is not the sender's.
func TestUploadWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := sender{bytes: 100, pause: time.Second, times: 10}
		u := &upload{ReadCloser: io.NopCloser(&s), deadline: func(at time.Time) error { s.until = at; return nil }}
		for range 10 {
			if _, err := u.Read(make([]byte, 100)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Hour) // it unpacks
		}
	})
}
