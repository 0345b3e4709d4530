package versions

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// holdLock has another process hold the lock until it is killed.
func holdLock(t *testing.T, r Root) *os.Process {
	t.Helper()
	other := exec.Command(os.Args[0])
	other.Env = append(os.Environ(), "VERSIONS_TEST_LOCK="+string(r))
	out, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		other.Process.Kill() //nolint:errcheck // it may have ended
		other.Wait()         //nolint:errcheck // it is killed
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "locked\n" {
		t.Fatalf("the other process: %q, %v", line, err)
	}
	return other.Process
}

// TestHold: what waits for a trial goes on when the trial went well, and not before; with the nonce of
// the trial it goes on at once.
func TestHold(t *testing.T) {
	r := makeRoot(t, map[string]string{"1.0.0": "6", "1.1.0": "7"})
	j := Journal{Step: Trial, From: "1.0.0", To: "1.1.0", FromSchema: 6, ToSchema: 7, Nonce: "secret"}
	if h, err := r.OnTrial("1.1.0"); h != nil || err != nil {
		t.Fatalf("without a journal: %v, %v", h, err)
	}
	if err := r.Note(&j); err != nil {
		t.Fatal(err)
	}
	if h, err := r.OnTrial("1.0.0"); h != nil || err != nil {
		t.Fatalf("of another version: %v, %v", h, err)
	}
	upgrader := holdLock(t, r)
	h, err := r.OnTrial("1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Await(t.Context(), "secret"); err != nil {
		t.Error("with the nonce:", err)
	}
	hungUp := errors.New("hung up")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(hungUp)
	for _, nonce := range []string{"", "secre", "secret2"} {
		if err := h.Await(ctx, nonce); !errors.Is(err, hungUp) {
			t.Errorf("with the nonce %q: %v", nonce, err)
		}
	}
	waited := make(chan error, 1)
	go func() { waited <- h.Await(t.Context(), "") }()
	j.Step = Done
	if err := r.Note(&j); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-waited:
		t.Fatalf("it went on while the lock was held: %v", err)
	case <-h.Free():
		t.Fatal("it was free while the lock was held")
	default:
	}
	if err := upgrader.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; err != nil {
		t.Error(err)
	}
	<-h.Free()
	if err := h.Err(); err != nil {
		t.Error(err)
	}
}

// TestHoldEnds: what waits is refused, and told when to ask again, if the trial takes too long, if the
// daemon ends, and if nobody finished the upgrade. In the last case the daemon must end.
func TestHoldEnds(t *testing.T) {
	for name, c := range map[string]struct {
		do    func(t *testing.T, h *Hold, upgrader *os.Process)
		ends  bool
		after time.Duration
	}{
		"too long":    {func(*testing.T, *Hold, *os.Process) {}, false, 10 * time.Second},
		"daemon ends": {func(_ *testing.T, h *Hold, _ *os.Process) { h.limit = time.Hour; h.Stop(); h.Stop() }, false, time.Second},
		"upgrader died": {func(t *testing.T, h *Hold, p *os.Process) {
			h.limit = time.Hour
			if err := p.Kill(); err != nil {
				t.Error(err)
			}
		}, true, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			r := makeRoot(t, nil)
			if err := r.Note(&Journal{Step: Trial, From: "1.0.0", To: "1.1.0", FromSchema: 6, ToSchema: 7, Nonce: "n"}); err != nil {
				t.Fatal(err)
			}
			var h *Hold
			t.Cleanup(func() { <-h.Over() }) // when the upgrader has ended: it opens the lock
			upgrader := holdLock(t, r)
			h, err := r.OnTrial("1.1.0")
			if err != nil {
				t.Fatal(err)
			}
			h.limit = time.Millisecond
			c.do(t, h, upgrader)
			err = h.Await(t.Context(), "")
			var e *errs.Error
			if !errors.As(err, &e) || e.Code != errs.Unavailable || e.Retry != c.after {
				t.Errorf("got %v (%+v)", err, e)
			}
			if c.ends {
				<-h.Over()
				if h.Err() == nil {
					t.Error("the daemon goes on")
				}
			}
		})
	}
}

// TestHoldSchema: if both versions read the same state, an undo loses nothing, and nothing waits.
func TestHoldSchema(t *testing.T) {
	r := makeRoot(t, nil)
	if err := r.Note(&Journal{Step: Trial, From: "1.0.0", To: "1.1.0", FromSchema: 7, ToSchema: 7, Nonce: "n"}); err != nil {
		t.Fatal(err)
	}
	upgrader := holdLock(t, r)
	h, err := r.OnTrial("1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Await(t.Context(), ""); err != nil {
		t.Error(err)
	}
	<-h.Free()
	upgrader.Kill() //nolint:errcheck // Over tells
	<-h.Over()
	if h.Err() == nil {
		t.Error("nobody finished the upgrade, and the daemon goes on")
	}
	var none *Hold
	<-none.Over()
	<-none.Free()
	none.Stop()
	if err := errors.Join(none.Err(), none.Await(t.Context(), "")); err != nil {
		t.Error(err)
	}
}
