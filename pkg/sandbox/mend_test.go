package sandbox

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestMend takes rows from sandboxes that live, beside one that must not feel it.
func TestMend(t *testing.T) {
	for _, c := range []struct {
		runtime, row string
		ends, back   bool
	}{
		{"runc", "network", false, true},
		{"runsc", "network", true, false},
		{"runc", "egress", false, true},
		{"runsc", "egress", false, true},
		{"runc", "disk", true, false},
		{"runc", "bundle", false, false},
		{"runc", "rootfs", false, false},
		{"runc", "namespaces", false, false},
		{"runsc", "broken rootfs", false, true},
		{"runc", "broken namespaces", false, true},
		{"runc", "broken network", false, true},
		{"runsc", "broken network", false, true},
	} {
		t.Run(c.runtime+" "+c.row, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost()
				var said bytes.Buffer
				m, _ := h.boot(t, func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&said, nil)) })
				s := spec()
				s.Runtime = c.runtime
				hurt, other := mustCreate(t, m, s), mustCreate(t, m, spec())
				if broken, ok := strings.CutPrefix(c.row, "broken "); ok {
					h.plant(c.row + "/" + hurt.ID)
					c.row = broken
				} else {
					h.remove(c.row + "/" + hurt.ID)
				}
				if err := m.Recover(t.Context(), hurt.ID); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				r, err := m.Get(t.Context(), hurt.ID)
				if err != nil || (r.State == record.Ended) != c.ends {
					t.Fatalf("%+v, %v", r, err)
				}
				if c.ends && (r.Reason != record.RuntimeCrash || !strings.Contains(r.Message, "removed its "+c.row)) {
					t.Errorf("it ended as %s: %s", r.Reason, r.Message)
				}
				if h.has("broken network/" + hurt.ID) {
					t.Error("the link stays broken")
				}
				if h.has(c.row+"/"+hurt.ID) != c.back {
					t.Errorf("the %s is back: %v", c.row, !c.back)
				}
				for range 3 { // the sweep does not say it again
					time.Sleep(time.Minute)
					if err := m.Recover(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				if n := strings.Count(said.String(), "something on the host removed a resource"); n != 1 ||
					!strings.Contains(said.String(), "lost="+c.row) {
					t.Errorf("it was said %d times:\n%s", n, said.String())
				}
				if r, err := m.Get(t.Context(), other.ID); err != nil || r.State != record.Running {
					t.Errorf("the neighbour is %+v, %v", r, err)
				}
				for _, id := range []string{hurt.ID, other.ID} {
					if err := m.Delete(t.Context(), id); err != nil {
						t.Fatal(err)
					}
				}
				synctest.Wait()
				if left := h.String(); left != "" && !strings.Contains(left, "broken") {
					t.Errorf("left:\n%s", h)
				}
				stop(t, m)
			})
		})
	}
}

// TestMendWithoutSweep: a disk that another pool has is not lost.
func TestMendWithoutSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t, func(c *Config) { c.NoSweep = "the pool belongs to another store" })
		r := mustCreate(t, m, spec())
		h.remove("disk/" + r.ID)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if r, err := m.Get(t.Context(), r.ID); err != nil || r.State != record.Running {
			t.Errorf("%+v, %v", r, err)
		}
		stop(t, m)
	})
}

// TestLookAtNothing: what is gone, going or unknown has lost nothing.
func TestLookAtNothing(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		if err := m.Delete(t.Context(), r.ID); err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{r.ID, "dghostaaaaaa"} {
			if err := m.Recover(t.Context(), id); err != nil {
				t.Errorf("%s: %v", id, err)
			}
		}
		if len(h.early) > 0 {
			t.Error(h.early)
		}
	})
}
