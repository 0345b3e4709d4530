package sandbox

import (
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestPromote: a copy and its source trade names and expiry, also where one has none.
func TestPromote(t *testing.T) {
	bubble(t, func(t *testing.T, _ *host, m *Manager) {
		ctx := t.Context()
		a := mustCreate(t, m, record.Spec{Runtime: "runc", Name: "lab"})
		b := mustCreate(t, m, record.Spec{Runtime: "runc", Timeout: time.Hour, Fork: record.Fork{ID: "fork-d", Source: a.ID}})
		_, err := Promote(ctx, m, a.ID)
		wantCode(t, err, errs.WrongState)
		got, err := Promote(ctx, m, b.ID)
		was, gerr := m.Get(ctx, a.ID)
		if err != nil || gerr != nil || got.Spec.Name != "lab" || !got.Expires.IsZero() || was.Spec.Name != "" ||
			!was.Expires.Equal(b.Expires) {
			t.Errorf("%v, %v: %q expires %v, and %q %v", err, gerr, got.Spec.Name, got.Expires, was.Spec.Name, was.Expires)
		}
		if r, err := m.Get(ctx, "lab"); err != nil || r.ID != b.ID {
			t.Errorf("lab is %s, %v", r.ID, err)
		}
		if err := m.Delete(ctx, a.ID); err != nil {
			t.Fatal(err)
		}
		_, err = Promote(ctx, m, b.ID)
		wantCode(t, err, errs.WrongState)
		_, err = Promote(ctx, m, "nobody")
		wantCode(t, err, errs.NotFound)
	})
}

// TestCopyWithoutVault: a copy that comes too late to get the vault of its source fails and says so,
// and one that fails when it has it loses it; neither can be started, so nothing is left but a record.
func TestCopyWithoutVault(t *testing.T) {
	for _, c := range []struct{ fails, want string }{
		{"", "could not be created: step vault: "},
		{"agent.Ready", "could not be created: step agent failed"},
	} {
		bubble(t, func(t *testing.T, h *host, m *Manager) {
			ctx := t.Context()
			a := mustCreate(t, m, record.Spec{Runtime: "runc", Labels: map[string]string{"vault": "given"}})
			s := mustSnapshot(t, m, a.ID, "")
			if c.fails != "" {
				h.plant("vault/" + a.ID)
			}
			h.failAll = c.fails
			r, err := m.Create(ctx, record.Spec{
				Runtime: "runc", Snapshot: s.ID, Inspect: true, Fork: record.Fork{ID: "fork-d", Source: a.ID, Vault: true},
			})
			if err == nil {
				r, err = m.Await(ctx, r.ID)
			}
			if err != nil || r.State != record.Ended || !r.NeverRan() || !strings.HasPrefix(r.Message, c.want) {
				t.Errorf("it is %s: %q, %v; want %q", r.State, r.Message, err, c.want)
			}
			if h.failAll = ""; h.has("vault/" + r.ID) {
				t.Error("a copy that failed keeps its vault")
			}
			_, err = m.Start(ctx, r.ID)
			wantCode(t, err, errs.WrongState)
		})
	}
}
