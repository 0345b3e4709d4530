package sandbox

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// far is a sandbox whose image is not on this host.
func far() record.Spec {
	s := spec()
	s.Image, s.ImageURI = record.Image{Name: "far", Tag: "1"}, "far:1"
	return s
}

// slowly is a Fetch that lasts for an hour, and tells so.
func slowly(ctx context.Context, _ *record.Record, progress func(string)) (record.Image, error) {
	progress("half of it is here")
	select {
	case <-time.After(time.Hour):
		return record.Image{
			Name: "far", Tag: "1", Layers: []string{"sha256:far"},
			Config: record.ImageConfig{Labels: map[string]string{"of": "the image"}, Cmd: []string{"serve"}},
		}, nil
	case <-ctx.Done():
		return record.Image{}, context.Cause(ctx)
	}
}

// TestFetch has an image come, for longer than a creation may take: meanwhile the
// sandbox is like any other that waits, and takes no turn.
func TestFetch(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		turns := 0
		m.life.cfg.Fetch = slowly
		m.life.cfg.Admit = func(context.Context, string) Turn { turns++; return atOnce{} }
		events := m.Subscribe(t.Context())
		start := time.Now()
		r, err := m.Create(t.Context(), far())
		if err != nil || r.State != record.Creating || time.Since(start) > 0 {
			t.Fatalf("%s after %v, %v", r.State, time.Since(start), err)
		}
		time.Sleep(30 * time.Minute)
		if h.String() != r.ID+": creating " || turns > 0 {
			t.Errorf("while its image comes it has %d turns and holds\n%s", turns, h)
		}
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		blue := "blue"
		if _, err := m.Relabel(t.Context(), r.ID, "", map[string]*string{"colour": &blue}); err != nil {
			t.Fatal(err)
		}
		r, err = m.Await(t.Context(), r.ID)
		if err != nil || r.State != record.Running || r.Spec.Labels["colour"] != "blue" ||
			!slices.Equal(r.Spec.Image.Layers, []string{"sha256:far"}) || r.Spec.Image.Config.Labels != nil {
			t.Errorf("%+v, %v", r, err)
		}
		synctest.Wait()
		if s := m.Steps(r.ID); s[0] != (table.Step{Name: stepImage, Took: time.Hour}) || turns != 1 {
			t.Errorf("steps %v, %d turns", s, turns)
		}
		var said []string
		for len(events) > 0 {
			e := <-events
			said = append(said, e.Type+" "+e.Message)
		}
		if !slices.Equal(said, []string{"creating ", "pulling half of it is here", "labels ", "running "}) {
			t.Errorf("events %q", said)
		}
	})
}

// TestFetchedCommand: what the image runs is known, and run, when it is here.
func TestFetchedCommand(t *testing.T) {
	bubble(t, func(t *testing.T, _ *host, m *Manager) {
		m.life.cfg.Fetch = slowly
		s := far()
		s.Entrypoint, s.ImageCommand = nil, true
		r, err := m.Create(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		r, err = m.Await(t.Context(), r.ID)
		if err != nil || r.State != record.Running || !slices.Equal(r.Spec.Entrypoint, []string{"serve"}) {
			t.Errorf("%+v, %v", r, err)
		}
		m.life.cfg.Fetch = func(context.Context, *record.Record, func(string)) (record.Image, error) {
			return record.Image{Name: "far", Tag: "1", Layers: []string{"sha256:far"}}, nil
		}
		s.Name = "other"
		if r, err = m.Create(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if r, err = m.Await(t.Context(), r.ID); err != nil || r.Reason != record.CreateFailed ||
			!strings.Contains(r.Message, "far:1 has neither ENTRYPOINT nor CMD") {
			t.Errorf("%+v, %v", r, err)
		}
	})
}

func TestFetchFails(t *testing.T) {
	bubble(t, func(t *testing.T, _ *host, m *Manager) {
		s := far()
		s.ImageURI = "nowhere:1"
		r, err := m.Create(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		r, err = m.Await(t.Context(), r.ID)
		if err != nil || r.State != record.Ended || r.Reason != record.CreateFailed ||
			r.Message != "could not be created: step image: there is none" {
			t.Errorf("%+v, %v", r, err)
		}
	})
}

// TestDeletedWhileFetching ends the fetch, and leaves nothing.
func TestDeletedWhileFetching(t *testing.T) {
	bubble(t, func(t *testing.T, _ *host, m *Manager) {
		m.life.cfg.Fetch = slowly
		r, err := m.Create(t.Context(), far())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		start := time.Now()
		if err := m.Delete(t.Context(), r.ID); err != nil || time.Since(start) > 0 {
			t.Fatalf("after %v: %v", time.Since(start), err)
		}
		synctest.Wait()
		_, err = m.Get(t.Context(), r.ID)
		wantCode(t, err, errs.NotFound)
	})
}

// TestClosedWhileFetching has a daemon end at once; the next one says what
// became of the sandbox.
func TestClosedWhileFetching(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t, func(c *Config) { c.Fetch = slowly })
		r, err := m.Create(t.Context(), far())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		start := time.Now()
		if err := m.Close(t.Context()); err != nil || time.Since(start) > 0 {
			t.Fatalf("after %v: %v", time.Since(start), err)
		}
		m, d := h.boot(t)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if r, err := m.Get(t.Context(), r.ID); err != nil || r.State != record.Ended ||
			!strings.Contains(r.Message, "sandboxd stopped in the middle") {
			t.Errorf("%+v, %v", r, err)
		}
		if w := h.wrong(d); len(w) > 0 {
			t.Error(w)
		}
		stop(t, m)
	})
}
