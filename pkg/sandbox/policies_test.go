package sandbox

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// allowing is a network that allows one address.
func allowing(last byte) record.Network {
	return record.Network{Mode: record.NetworkRules, Rules: []record.Rule{
		{Allow: true, Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{203, 0, 113, last}), 32)},
	}}
}

func mustPut(t *testing.T, m *Manager, name string, last byte) record.PolicyEdit {
	t.Helper()
	e, err := PoliciesOf(m).Put(t.Context(), name, record.PolicyVersion{Network: allowing(last)})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// using is a spec that names a policy, or a version of one.
func using(policy string) record.Spec {
	s := spec()
	s.Policy, _ = record.ParsePolicyUse(policy)
	return s
}

func idsOf(users []record.PolicyUser) (ids []string) {
	for _, u := range users {
		ids = append(ids, u.ID)
	}
	return ids
}

// reaches is the last byte of the only address that this daemon's egress allows a sandbox.
func (h *host) reaches(id string) byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.last.registered[id]
	if len(n.Rules) != 1 {
		return 0
	}
	return n.Rules[0].Prefix.Addr().As4()[3]
}

// TestPolicyEdit: an edit moves those that follow and no others, and says which.
func TestPolicyEdit(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx, p := t.Context(), PoliciesOf(m)
		if e := mustPut(t, m, "build", 1); !e.Added || !e.Changed || e.Newest().Number != 1 || len(e.Moved) > 0 {
			t.Errorf("made: %+v", e)
		}
		running, paused := mustCreate(t, m, using("build")).ID, mustCreate(t, m, using("build")).ID
		stopped, pinned := mustCreate(t, m, using("build")).ID, mustCreate(t, m, using("build@1")).ID
		own, other := mustCreate(t, m, using("build")).ID, mustCreate(t, m, spec()).ID
		_, err := m.Update(ctx, own, func(t *record.Terms) error { t.Network = allowing(9); return nil })
		for _, err := range []error{err, m.Pause(ctx, paused), m.Stop(ctx, stopped, 0)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		news := m.Subscribe(ctx)
		e := mustPut(t, m, "build", 2)
		if e.Added || !e.Changed || !slices.Equal(idsOf(e.Moved), []string{running, paused, stopped}) ||
			len(e.Pending)+len(e.Failed) > 0 {
			t.Errorf("edited: %+v; followers are %s, %s and %s", e, running, paused, stopped)
		}
		for id, want := range map[string]byte{running: 2, paused: 2, pinned: 1, own: 9, other: 0} {
			if got := h.reaches(id); got != want {
				t.Errorf("%s reaches %d, not %d", id, got, want)
			}
		}
		for range 3 {
			if ev := <-news; ev.Type != events.Updated {
				t.Errorf("event %+v", ev)
			}
		}
		if r, err := m.Get(ctx, stopped); err != nil || r.Spec.Policy.Version != 2 || r.Spec.Network.Rules[0] != allowing(2).Rules[0] {
			t.Errorf("the stopped one: %+v, %v", r.Spec, err)
		}
		if r, err := m.Get(ctx, own); err != nil || !r.Spec.Policy.Left || r.Spec.Policy.Version != 1 {
			t.Errorf("the one that was changed by hand: %+v, %v", r.Spec.Policy, err)
		}
		if i, err := p.Get(ctx, "build"); err != nil || len(i.UsedBy) != 4 || len(i.Versions) != 2 {
			t.Errorf("%+v, %v", i, err)
		}

		if e := mustPut(t, m, "build", 2); e.Changed || len(e.Moved) > 0 || e.Newest().Number != 2 {
			t.Errorf("the same once more: %+v", e)
		}
		if r, err := p.Use(ctx, own, record.PolicyUse{Name: "build"}); err != nil || h.reaches(own) != 2 ||
			r.Spec.Policy != (record.PolicyUse{Name: "build", Version: 2}) {
			t.Errorf("it uses it again: %+v, %v; it reaches %d", r.Spec.Policy, err, h.reaches(own))
		}
		if _, err := p.Use(ctx, own, record.PolicyUse{Name: "build", Version: 1, Pinned: true}); err != nil || h.reaches(own) != 1 {
			t.Errorf("it uses a version: %v; it reaches %d", err, h.reaches(own))
		}
		for _, use := range []record.PolicyUse{{Name: "none"}, {Name: "build", Version: 3, Pinned: true}} {
			if _, err := p.Use(ctx, own, use); !errs.Is(err, errs.NotFound) || h.reaches(own) != 1 {
				t.Errorf("%+v: %v; it reaches %d", use, err, h.reaches(own))
			}
		}
		if _, err := p.Use(ctx, stopped, record.PolicyUse{Name: "build"}); !errs.Is(err, errs.WrongState) {
			t.Errorf("a stopped one: %v", err)
		}
		if err := p.Delete(ctx, "build"); !errs.Is(err, errs.WrongState) {
			t.Errorf("deleted in use: %v", err)
		}
		for _, id := range []string{running, paused, stopped, pinned, own} {
			if err := m.Delete(ctx, id); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.Delete(ctx, "build"); err != nil {
			t.Error(err)
		}
		if _, err := p.Get(ctx, "build"); !errs.Is(err, errs.NotFound) {
			t.Errorf("deleted: %v", err)
		}
	})
}

// TestPolicyEditOfBusy: a sandbox that another operation holds does not delay the answer
// for long, and moves when that ends.
func TestPolicyEditOfBusy(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		mustPut(t, m, "build", 1)
		busy, free := mustCreate(t, m, using("build")).ID, mustCreate(t, m, using("build")).ID
		unlock, err := m.locks.Lock(t.Context(), busy)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		e := mustPut(t, m, "build", 2)
		if took := time.Since(start); took != moveLimit || len(e.Pending) != 1 || e.Pending[0].ID != busy || len(e.Moved) != 1 ||
			e.Moved[0].ID != free {
			t.Errorf("after %s: %+v", took, e)
		}
		if h.reaches(busy) != 1 || h.reaches(free) != 2 {
			t.Errorf("they reach %d and %d", h.reaches(busy), h.reaches(free))
		}
		unlock()
		synctest.Wait()
		if h.reaches(busy) != 2 {
			t.Errorf("it reaches %d after the operation", h.reaches(busy))
		}
	})
}

// TestPolicyEditFails: a sandbox that cannot move is named with the reason, keeps what it
// has, and moves with the next sweep.
func TestPolicyEditFails(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		mustPut(t, m, "build", 1)
		id := mustCreate(t, m, using("build")).ID
		h.mu.Lock()
		h.fault = fault{call: numberedNext(h.calls, "egress.make "+id), mode: errBefore}
		h.mu.Unlock()
		e := mustPut(t, m, "build", 2)
		if len(e.Failed) != 1 || e.Failed[0].ID != id || e.Reasons[id] == nil || len(e.Moved) > 0 || h.reaches(id) != 1 {
			t.Errorf("%+v; it reaches %d", e, h.reaches(id))
		}
		if err := m.Recover(context.Background()); err != nil || h.reaches(id) != 2 {
			t.Errorf("after the sweep it reaches %d, %v", h.reaches(id), err)
		}
	})
}

// numberedNext names the next call of that kind, as a fault does.
func numberedNext(calls []string, kind string) string {
	return numbered(append(append([]string(nil), calls...), kind))[len(calls)]
}

// TestPoliciesOfConfiguration: recovery takes them over, moves the sandboxes to what they
// say now, and keeps those that left the configuration only while they are in use.
func TestPoliciesOfConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		restart := func(all map[string]record.Network) *Manager {
			t.Helper()
			m, _ := h.boot(t, func(c *Config) { c.Policies = all })
			for range 2 {
				if err := m.Recover(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			return m
		}
		m := restart(map[string]record.Network{"build": allowing(1), "spare": {Mode: record.NetworkOpen}})
		id := mustCreate(t, m, using("build")).ID
		synctest.Wait()
		for _, err := range []error{
			refused(PoliciesOf(m).Put(t.Context(), "build", record.PolicyVersion{})), PoliciesOf(m).Delete(t.Context(), "spare"),
		} {
			if !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "configuration") {
				t.Errorf("by the API: %v", err)
			}
		}
		stop(t, m)
		m = restart(map[string]record.Network{"build": allowing(2)})
		if h.reaches(id) != 2 {
			t.Errorf("after the restart it reaches %d", h.reaches(id))
		}
		if all, err := PoliciesOf(m).List(t.Context()); err != nil || len(all) != 1 || all[0].Newest().Number != 2 || !all[0].Fixed {
			t.Errorf("%+v, %v", all, err)
		}
		stop(t, m)
		m = restart(nil)
		if i, err := PoliciesOf(m).Get(t.Context(), "build"); err != nil || i.Fixed || i.Newest().Number != 2 || h.reaches(id) != 2 {
			t.Errorf("left: %+v, %v", i, err)
		}
		if e := mustPut(t, m, "build", 3); len(e.Moved) != 1 || h.reaches(id) != 3 {
			t.Errorf("by the API then: %+v", e)
		}
		stop(t, m)
	})
}

func refused(_ record.PolicyEdit, err error) error { return err }

// aboutRequests is a network with a rule about requests.
func aboutRequests() record.Network {
	return record.Network{Mode: record.NetworkRules, Rules: []record.Rule{
		{Allow: true, Name: "api.example.com", Requests: &record.Requests{Methods: []string{"GET"}}},
	}}
}

// TestPolicyAboutRequests: rules about requests come to no sandbox that cannot be inspected, by
// no way: its own policy, one that it is to use, an edit of the one that it follows, the sweep.
func TestPolicyAboutRequests(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx, p := t.Context(), PoliciesOf(m)
		mustPut(t, m, "build", 1)
		inspected := using("build")
		inspected.Inspect = true
		may, not := mustCreate(t, m, inspected).ID, mustCreate(t, m, using("build")).ID
		e, err := p.Put(ctx, "build", record.PolicyVersion{Network: aboutRequests()})
		if err != nil || !slices.Equal(idsOf(e.Moved), []string{may}) || !slices.Equal(idsOf(e.Failed), []string{not}) {
			t.Errorf("edited: %+v, %v; want %s moved, and not %s", e, err, may, not)
		}
		refused := func(err error) {
			t.Helper()
			if why, ok := errors.AsType[*errs.Error](err); !ok || why.Wire != record.CodeNotInspected {
				t.Errorf("got %v", err)
			}
		}
		refused(e.Reasons[not])
		if err := m.Recover(ctx); err != nil {
			t.Errorf("the sweep complains about what was refused: %v", err)
		}
		_, err = p.Use(ctx, not, record.PolicyUse{Name: "build", Version: 2, Pinned: true})
		refused(err)
		change := func(t *record.Terms) error { t.Network = aboutRequests(); return nil }
		_, err = m.Update(ctx, not, change)
		refused(err)
		if r, err := m.Get(ctx, not); err != nil || r.Spec.Policy != (record.PolicyUse{Name: "build", Version: 1}) || h.reaches(not) != 1 {
			t.Errorf("it has %+v, %v, and reaches %d", r.Spec.Policy, err, h.reaches(not))
		}
		own := mustCreate(t, m, inspected).ID
		none := func(t *record.Terms) error { t.Network.Rules = nil; return nil }
		if r, err := m.Update(ctx, own, none); err != nil || !r.Spec.Policy.Left {
			t.Errorf("own: %+v, %v", r.Spec.Policy, err)
		}
		if r, err := m.Update(ctx, own, change); err != nil || !r.Spec.Network.AboutRequests() {
			t.Errorf("own: %+v, %v", r.Spec.Network, err)
		}
		// The next edit that it may have moves it.
		if e := mustPut(t, m, "build", 3); !slices.Equal(idsOf(e.Moved), []string{may, not}) || h.reaches(not) != 3 {
			t.Errorf("edited again: %+v; it reaches %d", e, h.reaches(not))
		}
	})
}

// TestCheckPolicy: what the vault needs of a policy is asked about every change of it, and of
// no other term.
func TestCheckPolicy(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		ctx, p := t.Context(), PoliciesOf(m)
		mustPut(t, m, "build", 1)
		bound := mustCreate(t, m, using("build")).ID
		asked := 0
		m.life.cfg.CheckPolicy = func(r *record.Record, n record.Network) error {
			if r.ID != bound {
				t.Errorf("asked about %s", r.ID)
			}
			asked++
			return errs.New(errs.Invalid, "binding b needs api.example.com")
		}
		if e := mustPut(t, m, "build", 2); !slices.Equal(idsOf(e.Failed), []string{bound}) || !errs.Is(e.Reasons[bound], errs.Invalid) {
			t.Errorf("edited: %+v", e)
		}
		if _, err := p.Use(ctx, bound, record.PolicyUse{Name: "build"}); !errs.Is(err, errs.Invalid) {
			t.Errorf("used: %v", err)
		}
		change := func(t *record.Terms) error { t.Network = allowing(3); return nil }
		if _, err := m.Update(ctx, bound, change); !errs.Is(err, errs.Invalid) {
			t.Errorf("updated: %v", err)
		}
		if _, err := m.Update(ctx, bound, func(t *record.Terms) error { t.Limits.CPUMillis++; return nil }); err != nil || asked != 3 {
			t.Errorf("limits: %v, asked %d times", err, asked)
		}
		if h.reaches(bound) != 1 {
			t.Errorf("it reaches %d", h.reaches(bound))
		}
		m.life.cfg.CheckPolicy = nil // it is unbound
		if err := m.Recover(ctx); err != nil || h.reaches(bound) != 2 {
			t.Errorf("the sweep: %v; it reaches %d", err, h.reaches(bound))
		}
	})
}

// TestRefusedByConfiguration: a follower that may not have what the configuration says now keeps
// what it has, and the log says so once for each version. What cannot be told is an error.
func TestRefusedByConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, log, why := newHost(), &lines{Handler: slog.DiscardHandler}, error(nil)
		restart := func(last byte) *Manager {
			t.Helper()
			m, _ := h.boot(t, func(c *Config) {
				c.Log, c.Policies = slog.New(log), map[string]record.Network{"build": allowing(last)}
				c.CheckPolicy = func(*record.Record, record.Network) error { return why }
			})
			return m
		}
		m := restart(1)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		id, other := mustCreate(t, m, using("build")).ID, mustCreate(t, m, using("build@1")).ID
		stop(t, m)

		m = restart(2)
		why = errs.New(errs.Unavailable, "the key is missing")
		for range 2 {
			if err := m.Recover(t.Context()); !errs.Is(err, errs.Unavailable) || !strings.Contains(err.Error(), "policy build") ||
				!strings.Contains(err.Error(), id) || h.reaches(id) != 1 || m.tracker.get(id) == nil {
				t.Errorf("without the key: %v; it reaches %d", err, h.reaches(id))
			}
		}
		why = errs.New(errs.Invalid, "binding b needs api.example.com")
		for range 2 {
			if err := m.Recover(t.Context()); err != nil || h.reaches(id) != 1 {
				t.Errorf("refused: %v; it reaches %d", err, h.reaches(id))
			}
		}
		stop(t, m)
		said := func() (n int) {
			log.mu.Lock()
			defer log.mu.Unlock()
			for _, line := range log.all {
				if strings.HasPrefix(line, "WARN") && strings.Contains(line, "may not have the newest version") {
					n++
				}
			}
			return n
		}
		last := "WARN a sandbox may not have the newest version of its policy; it keeps the one that it has sandbox=" + id +
			" policy=build has=1 newest=2 err=binding b needs api.example.com"
		if n := said(); n != 1 || !slices.Contains(log.all, last) {
			t.Errorf("said %d times:\n%s", n, strings.Join(log.all, "\n"))
		}

		m = restart(3)
		for range 2 {
			if err := m.Recover(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if n := said(); n != 2 {
			t.Errorf("said %d times after the next version:\n%s", n, strings.Join(log.all, "\n"))
		}
		why = nil // it is unbound
		if err := m.Recover(t.Context()); err != nil || h.reaches(id) != 3 || h.reaches(other) != 1 {
			t.Errorf("%v; they reach %d and %d", err, h.reaches(id), h.reaches(other))
		}
		if err := m.Delete(t.Context(), id); err != nil || len(m.life.refusals.of) > 0 {
			t.Errorf("%v; %d are remembered", err, len(m.life.refusals.of))
		}
		stop(t, m)
	})
}
