package sandbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// story visits every transition there is. It goes on after an error, as
// clients do; a dead daemon fails whatever comes after its death.
func story(ctx context.Context, m *Manager, h *host) (failed int) {
	note := func(err error) {
		if err != nil {
			failed++
		}
	}
	create := func(s record.Spec) string {
		s.Runtime = "runc"
		r, err := m.Create(ctx, s)
		note(err)
		synctest.Wait() // every history makes the same calls
		if err == nil {
			_, err = m.Await(ctx, r.ID)
			note(err)
		}
		return r.ID
	}
	a := create(record.Spec{Name: "lab", Timeout: time.Hour, Limits: record.Limits{CPUMillis: 100}, Volumes: []record.VolumeMount{
		{Claim: "kept", Create: true, Path: "/kept"}, {Claim: "mine", Create: true, Owned: true, Path: "/mine"},
	}})
	note(m.Pause(ctx, a))
	note(m.Resume(ctx, a))
	_, err := m.Renew(ctx, a, now().Add(2*time.Hour))
	note(err)
	_, err = m.Update(ctx, a, func(l *record.Terms) error {
		l.Limits = record.Limits{MemoryBytes: 1 << 30, CPUMillis: 200, Pids: 100, DiskBytes: 1 << 30, IOReadBps: 1 << 20}
		return nil
	})
	note(err)
	synctest.Wait()
	b := create(record.Spec{Limits: record.Limits{CPUMillis: 2500}})
	h.exit(b, Obituary{ExitCode: 3, LastOutput: "bye"}) // it ends by itself
	synctest.Wait()
	snapshot := func(id string) string {
		s, err := m.Snapshots().Create(ctx, id, record.SnapshotRequest{})
		note(err)
		synctest.Wait() // Await asks once or twice, as it comes; every run must make the same calls
		if err == nil {
			_, err = m.Snapshots().Await(ctx, s.ID)
			note(err)
		}
		return s.ID
	}
	ended, running := snapshot(b), snapshot(a)
	note(m.Snapshots().Delete(ctx, ended))
	note(m.Delete(ctx, a))
	synctest.Wait() // what Delete leaves to the background
	c := create(record.Spec{
		Name: "lab", Snapshot: running, Entrypoint: []string{"deaf"}, Inspect: true,
		Volumes: []record.VolumeMount{{Claim: "kept", Create: true, Path: "/kept"}},
	})
	note(m.Pause(ctx, c))
	_, err = m.Update(ctx, c, func(l *record.Terms) error { l.CPUShares = 512; return nil })
	note(err)
	_, err = m.Update(ctx, c, func(l *record.Terms) error { l.Network.Mode = record.NetworkOpen; return nil })
	note(err)
	snapshot(c)
	note(m.Stop(ctx, c, 10*time.Second))
	_, err = m.Start(ctx, c)
	note(err)
	synctest.Wait()
	_, err = m.Await(ctx, c)
	note(err)
	note(m.Stop(ctx, c, 10*time.Second)) // it runs: it is asked first
	_, err = m.Start(ctx, b)
	note(err)
	synctest.Wait()
	note(m.Recover(ctx))
	_, err = VolumesOf(m).Create(ctx, "spare", 1<<20)
	note(err)
	note(VolumesOf(m).Delete(ctx, "spare"))
	d := create(record.Spec{Timeout: time.Minute})
	time.Sleep(time.Minute + time.Second)
	note(m.Expire(ctx, d))
	create(record.Spec{ImageURI: "far:1"})
	create(record.Spec{ImageURI: "nowhere:1"})
	return failed
}

// policyStory edits a policy that sandboxes in three states follow, of which one has
// changed its own meanwhile. Another policy is in the configuration.
func policyStory(ctx context.Context, m *Manager, _ *host) (failed int) {
	note := func(err error) {
		if err != nil {
			failed++
		}
	}
	create := func() string {
		r, err := m.Create(ctx, record.Spec{Runtime: "runc", Policy: record.PolicyUse{Name: "build"}})
		note(err)
		synctest.Wait()
		if err == nil {
			_, err = m.Await(ctx, r.ID)
			note(err)
		}
		return r.ID
	}
	put := func(name string, rules int) {
		n := record.Network{Mode: record.NetworkRules, Rules: make([]record.Rule, rules)}
		_, err := PoliciesOf(m).Put(ctx, name, record.PolicyVersion{Network: n})
		note(err)
		synctest.Wait()
	}
	note(m.Recover(ctx))
	put("build", 1)
	create()
	stopped, own := create(), create()
	note(m.Stop(ctx, stopped, 0))
	_, err := m.Update(ctx, own, func(t *record.Terms) error { t.Network.Mode = record.NetworkOpen; return nil })
	note(err)
	put("build", 2)
	_, err = PoliciesOf(m).Use(ctx, own, record.PolicyUse{Name: "build"})
	note(err)
	note(m.Recover(ctx))
	put("spare", 0)
	note(PoliciesOf(m).Delete(ctx, "spare"))
	return failed
}

// telling returns what most stories are told with: note counts an error, and create, after fill,
// makes a sandbox and waits until it has come up or failed.
func telling(
	ctx context.Context, m *Manager, failed *int, fill func(*record.Spec),
) (note func(error), create func(record.Spec) string) {
	note = func(err error) {
		if err != nil {
			*failed++
		}
	}
	return note, func(s record.Spec) string {
		fill(&s)
		r, err := m.Create(ctx, s)
		note(err)
		synctest.Wait()
		if err == nil {
			_, err = m.Await(ctx, r.ID)
			note(err)
		}
		return r.ID
	}
}

// slotStory visits all that happens to prepared slots. Each is made when the story says
// so: Keep would make them at times of its own.
func slotStory(ctx context.Context, m *Manager, h *host) (failed int) {
	note, create := telling(ctx, m, &failed, func(s *record.Spec) { s.Runtime = "runc" })
	note(m.stock.make(ctx, "runc"))
	note(m.stock.make(ctx, "runc"))
	a := create(record.Spec{
		Name: "lab", Limits: record.Limits{CPUMillis: 100, MemoryBytes: 1 << 28, DiskBytes: 1 << 30},
		Volumes: []record.VolumeMount{{Claim: "mine", Create: true, Owned: true, Path: "/mine"}},
	})
	if _, err := m.Create(ctx, record.Spec{Name: "lab", Runtime: "runc"}); !errs.Is(err, errs.Exists) { // it gives its slot back
		note(err)
	}
	synctest.Wait()
	note(m.Recover(ctx))
	b := create(record.Spec{Publish: []record.Publish{{Port: 80}}})
	note(m.stock.make(ctx, "runc"))
	for _, id := range h.prepared() {
		h.remove("network/" + id)
		note(m.Recover(ctx, id))
	}
	note(m.stock.make(ctx, "runc"))
	m.stock.MakeRoom(ctx)
	note(m.stock.make(ctx, "runc"))
	for _, id := range h.prepared() { // the next to take it brings these up again
		h.remove("cgroup/" + id)
		h.remove("namespaces/" + id)
	}
	create(record.Spec{})
	note(m.Stop(ctx, a, 0))
	_, err := m.Start(ctx, a)
	note(err)
	synctest.Wait()
	_, err = m.Await(ctx, a)
	note(err)
	note(m.Delete(ctx, a))
	synctest.Wait()
	note(m.Delete(ctx, b))
	synctest.Wait()
	note(m.stock.make(ctx, "runc"))
	m.stock.empty(ctx) // as Close does
	return failed
}

// memoryStory keeps the memory of a sandbox, and lets others begin with it: while the first runs
// on, after it is gone, and again from one of them.
func memoryStory(ctx context.Context, m *Manager, _ *host) (failed int) {
	note, create := telling(ctx, m, &failed, func(s *record.Spec) {
		s.Runtime, s.Entrypoint, s.MemoryBytes = "runsc", []string{"sh"}, 256<<20
	})
	keep := func(id string) string {
		s, err := m.Snapshots().Create(ctx, id, record.SnapshotRequest{Memory: true})
		note(err)
		synctest.Wait()
		if err == nil {
			s, err = m.Snapshots().Await(ctx, s.ID)
			note(err)
			if s.State != record.SnapshotReady {
				failed++
			}
		}
		return s.ID
	}
	a := create(record.Spec{Name: "lab"})
	first := keep(a)
	b := create(record.Spec{Snapshot: first, Memory: true})
	note(m.Delete(ctx, a))
	synctest.Wait()
	second := keep(b)
	note(errorOf(Promote(ctx, m, create(record.Spec{
		Snapshot: second, Memory: true, Name: "copy", Timeout: time.Hour, Fork: record.Fork{ID: "fork-d", Source: b},
	}))))
	c := create(record.Spec{Snapshot: second, Memory: true, Name: "lab"})
	note(m.Snapshots().Delete(ctx, first))
	note(m.Stop(ctx, c, time.Second))
	_, err := m.Start(ctx, c) // without the memory
	note(err)
	synctest.Wait()
	_, err = m.Await(ctx, c)
	note(err)
	create(record.Spec{Snapshot: second}) // the files alone
	return failed
}

// forkStory copies a sandbox that has a vault. The copy keeps its own when the source is gone, also
// through a stop, and is copied itself.
func forkStory(ctx context.Context, m *Manager, h *host) (failed int) {
	note, create := telling(ctx, m, &failed, func(s *record.Spec) { s.Runtime, s.Inspect = "runc", true })
	a := create(record.Spec{Labels: map[string]string{"vault": "given"}})
	if _, there := h.record(a); there {
		h.plant("vault/" + a)
	}
	s, err := m.Snapshots().Create(ctx, a, record.SnapshotRequest{})
	note(err)
	synctest.Wait()
	copied := record.Spec{Snapshot: s.ID, Fork: record.Fork{ID: "fork-d", Source: a, Vault: true}}
	b := create(copied)
	note(m.Delete(ctx, a))
	synctest.Wait()
	copied.Fork.Source = b
	create(copied)
	note(m.Stop(ctx, b, 0))
	_, err = m.Start(ctx, b)
	note(err)
	synctest.Wait()
	_, err = m.Await(ctx, b)
	note(err)
	note(m.Recover(ctx))
	return failed
}

// A tale is a story, and how the daemons in it are set up.
type tale struct {
	story  func(context.Context, *Manager, *host) (failed int)
	change []func(*Config)
}

var tales = map[string]tale{
	"life":    {story, nil},
	"slots":   {slotStory, []func(*Config){wanting(2)}},
	"memory":  {memoryStory, nil},
	"forks":   {forkStory, nil},
	"idle":    {idleStory, nil},
	"asleep":  {hibernationStory, nil},
	"members": {memberStory, []func(*Config){withPools}},
	"policies": {policyStory, []func(*Config){func(c *Config) {
		c.Policies = map[string]record.Network{"host": {Mode: record.NetworkOpen}}
	}}},
}

// numbered turns a list of calls into their names in a fault: "call #2".
func numbered(calls []string) (out []string) {
	seen := map[string]int{}
	for _, c := range calls {
		seen[c]++
		out = append(out, fmt.Sprintf("%s #%d", c, seen[c]))
	}
	return out
}

// history is one run of a story with one fault, and a second death at one
// call of the recovery, unless that is empty. It returns the calls of the
// recovery and whether the second death came to pass.
func history(t *testing.T, of tale, f fault, second string) (recovery []string, hit bool) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		h := newHost()
		h.fault = f
		m, d := h.boot(t, of.change...)
		failed := of.story(ctx, m, h)
		synctest.Wait()
		if !h.fault.hit {
			t.Fatalf("%v %s: the story never got there", f.mode, f.call)
		}
		if f.mode >= crashBefore && failed == 0 && !d.dead {
			t.Fatalf("%v %s: nobody died", f.mode, f.call)
		}
		where := fmt.Sprintf("%v %s, then death after %q", f.mode, f.call, second)
		if f.mode < crashBefore {
			// The daemon lives on. Its own sweep heals it.
			h.calls, h.fault = nil, fault{call: second, mode: crashAfter}
			m.Recover(ctx) //nolint:errcheck // it may die here
		}
		stop(t, m)
		if f.mode >= crashBefore {
			h.calls, h.fault = nil, fault{call: second, mode: crashAfter}
			m, _ = h.boot(t, of.change...)
			m.Recover(ctx) //nolint:errcheck // it may die here
			stop(t, m)
		}
		recovery, hit = numbered(h.calls), h.fault.hit

		h.fault = fault{}
		m, d = h.boot(t, of.change...)
		if err := m.Recover(ctx); err != nil {
			t.Fatalf("%s: the last recovery: %v", where, err)
		}
		synctest.Wait()
		if w := h.wrong(d); len(w) > 0 {
			t.Fatalf("%s:\n%s\nhost:\n%s", where, strings.Join(w, "\n"), h)
		}
		before := h.String()
		if err := m.Recover(ctx); err != nil || h.String() != before {
			t.Fatalf("%s: recovery is not idempotent: %v\n%s\n->\n%s", where, err, before, h)
		}
		stop(t, m)
	})
	return recovery, hit
}

// TestEveryFault injects one fault at every call of each story, in every mode,
// then a death at every call of the recovery, and checks that a last,
// undisturbed recovery leaves host and store in agreement. `make test` takes
// some of the pairs of a fault and a death (strides).
func TestEveryFault(t *testing.T) {
	for name, of := range tales {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			everyFault(t, of)
		})
	}
}

func everyFault(t *testing.T, of tale) {
	var calls []string
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, d := h.boot(t, of.change...)
		if n := of.story(t.Context(), m, h); n > 0 {
			t.Fatalf("%d failures without a fault", n)
		}
		stop(t, m)
		if w := h.wrong(d); len(w) > 0 {
			t.Fatalf("without a fault:\n%s", strings.Join(w, "\n"))
		}
		calls = numbered(h.calls)
	})
	slices.Sort(calls) // rows come up at the same time: their order is chance
	for _, md := range []mode{errBefore, errAfter, crashBefore, crashAfter} {
		t.Run(md.String(), func(t *testing.T) {
			t.Parallel()
			oneIn, deathIn := strides()
			first, second, ran := turns(int(md), oneIn), turns(int(md), deathIn), 0
			for _, call := range calls {
				if !first() {
					continue
				}
				f := fault{call: call, mode: md}
				recovery, _ := history(t, of, f, "")
				ran++
				for _, death := range recovery {
					if second() {
						history(t, of, f, death)
						ran++
					}
				}
			}
			t.Logf("%d calls, %d histories", len(calls), ran)
		})
	}
}

// strides says how many histories are run: one in faults of those with one fault, and of
// these one in deaths of those with a death in the recovery. `make test-all` runs each.
// `make test` runs each fault by itself, and one in eight of the pairs, whichever they are.
// Under the race detector a history takes ten times as long, and what races does not depend
// on the one call that failed.
func strides() (faults, deaths int) {
	faults, deaths = 1, 1
	if testing.Short() || raceEnabled {
		faults, deaths = 7, 7
	}
	if !everything {
		deaths *= 8
	}
	return faults, deaths
}

// turns returns a function that is true for one call in stride, beginning after start.
func turns(start, stride int) func() bool {
	n := start
	return func() bool {
		n++
		return n%stride == 0
	}
}
