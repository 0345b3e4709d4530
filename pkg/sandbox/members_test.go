package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// withPools has a daemon read the template of a pool as a specification, and draw another
// token for each sandbox.
func withPools(c *Config) {
	var mu sync.Mutex
	drawn := 0
	c.NewToken = func() string {
		mu.Lock()
		defer mu.Unlock()
		drawn++
		return fmt.Sprintf("token-%d", drawn)
	}
	c.Member = memberOf
}

func memberOf(_ context.Context, p record.Pool) (s record.Spec, err error) {
	if err = json.Unmarshal(p.Template, &s); err == nil && s.ImageURI == "nowhere:1" {
		err = errs.New(errs.NotFound, "no image nowhere:1")
	}
	return s, err
}

// pooled is a pool on the host whose members are like s.
func (h *host) pooled(name string, s record.Spec, c record.Capacity, change ...func(*record.Pool)) record.Pool {
	if s.Runtime == "" {
		s.Runtime = "runc"
	}
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	p := record.Pool{Name: name, Template: b, Capacity: c}
	for _, f := range change {
		f(&p)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pools[name] = p
	return p
}

// warmedBy has each member run a line.
func warmedBy(line string) func(*record.Pool) { return func(p *record.Pool) { p.Warm = line } }

// readyBy has each member be ready when a line succeeds.
func readyBy(line string) func(*record.Pool) { return func(p *record.Pool) { p.Ready = line } }

// memberStory visits all that happens to members of pools. Each is made when the story says
// so.
func memberStory(ctx context.Context, m *Manager, h *host) (failed int) {
	note, create := telling(ctx, m, &failed, func(s *record.Spec) { s.Runtime = "runc" })
	limits := record.Limits{CPUMillis: 1000, MemoryBytes: 1 << 28, Pids: 64, DiskBytes: 1 << 30}
	room := record.Capacity{BufferMax: 2, PoolMax: 9}
	plain := h.pooled("plain", record.Spec{Limits: limits}, room)
	warm := h.pooled("warm", record.Spec{Limits: limits}, room, warmedBy("make"), readyBy("true"))
	fill := func(p record.Pool) {
		s, err := memberOf(ctx, p)
		note(err)
		note(m.stock.makeMember(ctx, &p, s))
		synctest.Wait()
	}
	fill(plain)
	fill(warm)
	a := create(record.Spec{
		Name: "lab", Env: map[string]string{"A": "1"}, Network: record.Network{Mode: record.NetworkOpen}, Pool: "warm",
		Limits: record.Limits{CPUMillis: 100, MemoryBytes: 1 << 27, Pids: 32, DiskBytes: 1 << 29}, Publish: []record.Publish{{Port: 80}},
	})
	create(record.Spec{Limits: limits}) // it takes the plain one
	create(record.Spec{Pool: "warm"})   // there is none: cold
	fill(warm)
	if _, err := m.Create(ctx, record.Spec{Name: "lab", Runtime: "runc", Pool: "warm", Limits: limits}); !errs.Is(err, errs.Exists) {
		note(err)
	}
	synctest.Wait()
	create(record.Spec{Pool: "warm", Inspect: true}) // no member can
	note(m.Recover(ctx))
	b := create(record.Spec{Pool: "warm", Limits: limits, Env: map[string]string{"B": "2"}})
	fill(warm)
	for _, id := range h.prepared() { // nobody asked for it yet
		h.shoot(id)
		synctest.Wait()
	}
	fill(warm)
	// Its claim fails in the last row before the agent: all others have made their calls then, in
	// every history. It comes up cold.
	create(record.Spec{Pool: "warm", Limits: limits, Env: map[string]string{"C": "3"}, Hostname: unnamable})
	note(m.Stop(ctx, a, 0))
	_, err := m.Start(ctx, a)
	note(err)
	synctest.Wait()
	note(m.Delete(ctx, b))
	synctest.Wait()
	fill(plain)
	m.stock.MakeRoom(ctx)
	fill(plain)
	h.pooled("plain", record.Spec{Limits: limits}, room, warmedBy("other"))
	m.stock.fillPools(ctx) // another revision
	fill(warm)
	m.stock.empty(ctx) // as Close does
	return failed
}

// unnamable is a hostname that no guest which runs can be given.
const unnamable = "unnamable"

// memberKinds are what a member holds.
var memberKinds = []string{"namespaces", "disk", "rootfs", "cgroup", "network", "egress", "bundle", "runc", "process"}

// TestMembers: a pool has as many ready members as its capacity says; no client sees them; a
// creation takes one, and all of it is bound to the creation.
func TestMembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		limits := record.Limits{CPUMillis: 1000, MemoryBytes: 1 << 28}
		h.pooled("p", record.Spec{Limits: limits}, record.Capacity{BufferMin: 1, BufferMax: 2, PoolMax: 3}, warmedBy("make"))
		m, d := h.boot(t, withPools)
		end := keeps(t, m)
		synctest.Wait()
		ready := h.prepared()
		if len(ready) != 2 {
			t.Fatalf("ready are %v:\n%s", ready, h)
		}
		for _, id := range ready {
			for _, kind := range memberKinds {
				if !h.has(kind + "/" + id) {
					t.Errorf("member %s has no %s", id, kind)
				}
			}
			if h.warmed[id] != 1 {
				t.Errorf("member %s was warmed %d times", id, h.warmed[id])
			}
			if _, err := m.Get(t.Context(), id); !errs.Is(err, errs.NotFound) {
				t.Errorf("clients see member %s: %v", id, err)
			}
		}
		if r := createdAs(t, m, record.Spec{Limits: limits}); r.Prepared || r.Pool != (record.PoolUse{}) {
			t.Errorf("a creation without poolRef took a member that a command has warmed: %+v", r.Pool)
		}
		was, _ := h.record(ready[0])
		r := createdAs(t, m, record.Spec{Pool: "p", Name: "lab", Env: map[string]string{"A": "1"}, Limits: record.Limits{CPUMillis: 200}})
		if r.ID != ready[0] || !r.Prepared || r.Slot != was.Slot || r.Token == was.Token || r.MemberToken != "" ||
			r.Pool != (record.PoolUse{Name: "p", Revision: was.Pool.Revision}) {
			t.Errorf("the sandbox is %+v, and the oldest member was %+v", r, was)
		}
		if g := h.agents[r.ID]; g.hostname != "lab" || g.env["A"] != "1" {
			t.Errorf("the guest knows %+v", g)
		}
		if n := calls(h, r.ID, "make"); n["rootfs"] != 1 || n["bundle"] != 1 || n["egress"] != 2 {
			t.Errorf("made %v", n)
		}
		time.Sleep(2 * calm)
		synctest.Wait()
		if now := h.prepared(); len(now) != 1 {
			t.Errorf("with bufferMin ready members another was made: %v", now)
		}
		createdAs(t, m, record.Spec{Pool: "p", Limits: limits})
		time.Sleep(2 * calm)
		synctest.Wait()
		if now := h.prepared(); len(now) != 1 {
			t.Errorf("with two sandboxes in a pool of three there are %v", now)
		}
		all, err := m.stock.Pools(t.Context())
		if err != nil || len(all) != 1 || all[0].Available != 1 || all[0].Allocated != 2 || all[0].Work[record.PoolHit].N != 2 ||
			all[0].Work[record.PoolMade].N != 3 {
			t.Errorf("%+v, %v", all, err)
		}
		end()
		if now := h.prepared(); len(now) > 0 {
			t.Errorf("the daemon has left %v", now)
		}
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestMembersTaken: of many creations at once as many as there are members take one, each
// its own; those beyond poolMax are refused; without poolRef they come up cold.
func TestMembersTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.pooled("p", record.Spec{}, record.Capacity{BufferMin: 3, BufferMax: 3, PoolMax: 5})
		m, d := h.boot(t, withPools)
		end := keeps(t, m)
		synctest.Wait()
		var (
			wg   sync.WaitGroup
			made [20]record.Record
			errz [20]error
		)
		for i := range made {
			s := record.Spec{Runtime: "runc"}
			if i%2 == 0 {
				s.Pool = "p"
			}
			wg.Go(func() { made[i], errz[i] = m.Create(t.Context(), s) })
		}
		wg.Wait()
		ids, hits, named, refused := map[string]bool{}, 0, 0, 0
		for i, r := range made {
			switch {
			case errs.Is(errz[i], errs.Exhausted) && i%2 == 0:
				refused++
				if e, ok := errors.AsType[*errs.Error](errz[i]); !ok || e.Wire != record.CodePoolFull || e.Retry == 0 {
					t.Errorf("%#v", errz[i])
				}
				continue
			case errz[i] != nil:
				t.Error(errz[i])
				continue
			}
			ids[r.ID] = true
			if r.Prepared {
				hits++
			}
			if r.Pool.Name != "" {
				named++
			}
			if r, err := m.Await(t.Context(), r.ID); err != nil || r.State != record.Running {
				t.Errorf("%+v, %v", r, err)
			}
		}
		if len(ids) != 20-refused || hits != 3 || named > 5 || refused < 5 {
			t.Errorf("%d sandboxes, %d members taken, %d in the pool, %d refused", len(ids), hits, named, refused)
		}
		end()
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestMembersLast: two creations want the last member of a pool that is at its maximum. One
// gets it, and the other is refused.
func TestMembersLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.pooled("p", record.Spec{}, record.Capacity{BufferMin: 1, BufferMax: 1, PoolMax: 1})
		m, _ := h.boot(t, withPools)
		defer stop(t, m)
		defer keeps(t, m)()
		synctest.Wait()
		var wg sync.WaitGroup
		var errz [2]error
		for i := range errz {
			wg.Go(func() { _, errz[i] = m.Create(t.Context(), record.Spec{Runtime: "runc", Pool: "p"}) })
		}
		wg.Wait()
		if (errz[0] == nil) == (errz[1] == nil) || !errs.Is(errors.Join(errz[:]...), errs.Exhausted) {
			t.Errorf("%v", errz)
		}
		if _, err := m.Create(t.Context(), record.Spec{Runtime: "runc", Pool: "none"}); !errs.Is(err, errs.NotFound) {
			t.Errorf("a pool that does not exist: %v", err)
		}
	})
}

// TestMembersUnfit: a creation that no member can serve comes up cold, and its record says
// why.
func TestMembersUnfit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.pooled("p", record.Spec{}, record.Capacity{BufferMin: 1, BufferMax: 1, PoolMax: 9})
		m, d := h.boot(t, withPools)
		end := keeps(t, m)
		synctest.Wait()
		if r := createdAs(t, m, record.Spec{Pool: "p", ReadOnly: true}); r.MemberToken != "" || r.Prepared ||
			!strings.Contains(r.Pool.Miss, "read-only") || r.Pool.Name != "p" {
			t.Errorf("%+v", r)
		}
		member := h.prepared()[0]
		h.remove("cgroup/" + member)
		r := createdAs(t, m, record.Spec{Pool: "p", Env: map[string]string{"A": "1"}})
		if r.ID != member || r.Prepared || !strings.Contains(r.Pool.Miss, "could not be used") {
			t.Errorf("%+v", r)
		}
		if steps := m.Steps(r.ID); len(steps) == 0 || steps[0].Name != stepPool {
			t.Errorf("%v", steps)
		}
		end()
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestMembersGo: members are released when they die, grow too old, their pool changes, goes
// or loses its image, and while the host has no room.
func TestMembersGo(t *testing.T) {
	var room error
	one := record.Capacity{BufferMin: 1, BufferMax: 1, PoolMax: 9}
	for name, c := range map[string]struct {
		do    func(h *host, id string)
		after int
	}{
		"it dies":          {func(h *host, id string) { h.shoot(id) }, 1},
		"its link goes":    {func(h *host, id string) { h.remove("network/" + id) }, 1},
		"its time is over": {func(*host, string) { time.Sleep(2 * time.Hour) }, 1},
		"its pool changes": {func(h *host, _ string) { h.pooled("p", record.Spec{}, one, warmedBy("make")) }, 1},
		"its pool goes":    {func(h *host, _ string) { h.mu.Lock(); delete(h.pools, "p"); h.mu.Unlock() }, 0},
		"its image goes":   {func(h *host, _ string) { h.pooled("p", record.Spec{ImageURI: "nowhere:1"}, one) }, 0},
		"it is in the way": {func(h *host, _ string) { h.mu.Lock(); room = errors.New("full"); h.mu.Unlock() }, 0},
		"nothing":          {func(*host, string) {}, -1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost()
				room = nil
				h.pooled("p", record.Spec{}, one, func(p *record.Pool) { p.MaxAge = time.Hour })
				m, d := h.boot(t, withPools, func(c *Config) {
					c.Room = func(context.Context, string) error { h.mu.Lock(); defer h.mu.Unlock(); return room }
				})
				end := keeps(t, m)
				synctest.Wait()
				was := h.prepared()
				if len(was) != 1 {
					t.Fatalf("ready are %v", was)
				}
				c.do(h, was[0])
				if err := m.Recover(t.Context()); err != nil {
					t.Error(err)
				}
				synctest.Wait()
				switch now := h.prepared(); {
				case c.after == -1 && !slices.Equal(now, was), c.after >= 0 && (len(now) != c.after || slices.Contains(now, was[0])):
					t.Errorf("ready were %v, and are %v", was, now)
				}
				end()
				if w := h.wrong(d); len(w) > 0 {
					t.Errorf("%s", strings.Join(w, "\n"))
				}
				stop(t, m)
			})
		})
	}
}

// TestMembersTrouble: a pool whose members cannot be made says why, is tried again after a
// while, and does not keep another pool from its members.
func TestMembersTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		one := record.Capacity{BufferMin: 1, BufferMax: 1, PoolMax: 9}
		h.pooled("a-bad", record.Spec{}, one, warmedBy("false"))
		h.pooled("b-nowhere", record.Spec{ImageURI: "nowhere:1"}, one)
		h.pooled("c-good", record.Spec{}, one)
		m, d := h.boot(t, withPools)
		end := keeps(t, m)
		synctest.Wait()
		trouble := func() (out []string) {
			all, err := m.stock.Pools(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range all {
				out = append(out, fmt.Sprintf("%s %d %v", p.Name, p.Available, p.Trouble != ""))
			}
			return out
		}
		want := []string{"a-bad 0 true", "b-nowhere 0 true", "c-good 1 false"}
		if got := trouble(); !slices.Equal(got, want) {
			t.Errorf("%v", got)
		}
		made := h.born
		m.stock.Look()
		synctest.Wait()
		if h.born != made {
			t.Error("a member was tried again at once")
		}
		h.pooled("a-bad", record.Spec{}, one, warmedBy("true"))
		m.stock.Changed("a-bad")
		synctest.Wait()
		if got := trouble(); got[0] != "a-bad 1 false" {
			t.Errorf("after it was mended: %v", got)
		}
		end()
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestMembersReady: a check is tried until it succeeds, for a minute; a member that dies meanwhile
// is not waited for.
func TestMembersReady(t *testing.T) {
	one := record.Capacity{BufferMin: 1, BufferMax: 1, PoolMax: 9}
	for line, c := range map[string]struct {
		took    time.Duration
		trouble string
	}{
		"true":  {0, ""},
		"third": {2 * readyPause, ""},
		"false": {readyLimit, "not ready after 1m0s: it failed"},
		"exit":  {0, "it died before it was ready"},
	} {
		t.Run(line, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost()
				p := h.pooled("p", record.Spec{}, one, readyBy(line))
				m, d := h.boot(t, withPools)
				s, _ := memberOf(t.Context(), p)
				start := time.Now()
				err := m.stock.makeMember(t.Context(), &p, s)
				took := time.Since(start)
				if took < c.took || took > c.took+2*readyPause {
					t.Errorf("it took %s, not %s", took, c.took)
				}
				if (err == nil) != (c.trouble == "") || err != nil && !strings.Contains(clientText(err), c.trouble) {
					t.Errorf("%v, want %q", err, c.trouble)
				}
				if r := createdAs(t, m, record.Spec{}); r.Prepared {
					t.Error("a creation that names no pool took a member that a check has run in")
				}
				if r := createdAs(t, m, record.Spec{Pool: "p"}); r.Prepared != (err == nil) {
					t.Errorf("%+v", r)
				}
				if w := h.wrong(d); len(w) > 0 {
					t.Errorf("%s", strings.Join(w, "\n"))
				}
				stop(t, m)
			})
		})
	}
}

// TestMembersWaited: how long creations of a pool wait until their sandboxes run is counted by what
// became of them.
func TestMembersWaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		p := h.pooled("p", record.Spec{}, record.Capacity{BufferMax: 1, PoolMax: 9})
		m, _ := h.boot(t, withPools)
		defer stop(t, m)
		slow := func(call, id string, took time.Duration) {
			wait := make(chan struct{})
			h.block[call+" "+id] = wait
			r, err := m.Create(t.Context(), record.Spec{Runtime: "runc", Pool: "p"})
			if err != nil || r.ID != id {
				t.Fatalf("%s, not %s: %v", r.ID, id, err)
			}
			time.Sleep(took)
			close(wait)
			if r, err := m.Await(t.Context(), id); err != nil || r.State != record.Running {
				t.Fatalf("%+v, %v", r, err)
			}
		}
		fill := func() string {
			s, _ := memberOf(t.Context(), p)
			if err := m.stock.makeMember(t.Context(), &p, s); err != nil {
				t.Fatal(err)
			}
			return h.prepared()[0]
		}
		slow("agent.Ready", "d"+strings.Repeat("a", record.IDLen-1), 3*time.Second)
		slow("agent.Adopt", fill(), 2*time.Second)
		dead := fill()
		h.remove("cgroup/" + dead)
		slow("agent.Ready", dead, time.Second)
		all, err := m.stock.Pools(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for result, want := range map[string]record.PoolWork{
			record.PoolMiss: {N: 1, Took: 3 * time.Second}, record.PoolHit: {N: 2, Took: 2 * time.Second},
			record.PoolLost: {N: 1, Took: time.Second},
		} {
			if got := all[0].Work[result]; got != want {
				t.Errorf("%s: %+v, want %+v", result, got, want)
			}
		}
	})
}

// TestMembersYield: while a sandbox comes up no member is made, and then at once.
func TestMembersYield(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, d := h.boot(t, withPools)
		comes := make(chan struct{})
		h.block["agent.Ready d"+strings.Repeat("a", record.IDLen-1)] = comes
		if _, err := m.Create(t.Context(), record.Spec{Runtime: "runc"}); err != nil {
			t.Fatal(err)
		}
		h.pooled("p", record.Spec{}, record.Capacity{BufferMin: 1, BufferMax: 1, PoolMax: 9})
		end := keeps(t, m)
		time.Sleep(time.Second)
		synctest.Wait()
		if now := h.prepared(); len(now) > 0 {
			t.Errorf("beside a creation %v was made", now)
		}
		close(comes)
		time.Sleep(2 * calm)
		synctest.Wait()
		if now := h.prepared(); len(now) != 1 {
			t.Errorf("after it there are %v", now)
		}
		end()
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestMembersHurry: a sandbox that needs room does not wait until the command of a member has
// ended.
func TestMembersHurry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.pooled("p", record.Spec{}, record.Capacity{BufferMin: 1, BufferMax: 1, PoolMax: 9}, warmedBy("slow"))
		h.block["agent.Run d"+strings.Repeat("a", record.IDLen-1)] = make(chan struct{})
		m, d := h.boot(t, withPools)
		end := keeps(t, m)
		synctest.Wait()
		if now := h.prepared(); len(now) != 1 {
			t.Fatalf("being made are %v", now)
		}
		start := time.Now()
		m.stock.MakeRoom(t.Context())
		if took := time.Since(start); took > 0 || h.has("process/d"+strings.Repeat("a", record.IDLen-1)) {
			t.Errorf("it took %s:\n%s", took, h)
		}
		m.stock.Look()
		synctest.Wait()
		if all, err := m.stock.Pools(t.Context()); err != nil || all[0].Available != 1 || all[0].Trouble != "" {
			t.Errorf("%+v, %v", all, err)
		}
		end()
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestMembersOfAnother: no daemon uses the members of another one.
func TestMembersOfAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		p := h.pooled("p", record.Spec{}, record.Capacity{BufferMax: 1, PoolMax: 9})
		m, d := h.boot(t, withPools)
		s, _ := memberOf(t.Context(), p)
		if err := m.stock.makeMember(t.Context(), &p, s); err != nil {
			t.Fatal(err)
		}
		h.mu.Lock()
		d.dead = true
		h.mu.Unlock()
		stop(t, m)
		m, d = h.boot(t, withPools)
		if r := createdAs(t, m, record.Spec{Pool: "p"}); r.Prepared {
			t.Errorf("%+v", r)
		}
		if err := m.Recover(t.Context()); err != nil || len(h.prepared()) > 0 {
			t.Errorf("%v, %v", h.prepared(), err)
		}
		if w := h.wrong(d); len(w) > 0 {
			t.Errorf("%s", strings.Join(w, "\n"))
		}
		stop(t, m)
	})
}

// TestMemberRows: each row that a member has can be claimed, and each that it has not comes
// up after its agent.
func TestMemberRows(t *testing.T) {
	names := map[string]bool{}
	for _, row := range memberRows(resources(Deps{}, Config{})) {
		names[row.Name] = true
	}
	all := maps.Clone(names)
	for _, row := range resources(Deps{}, Config{}) {
		if !names[row.Name] && !slices.Contains(row.After, "agent") {
			t.Errorf("a member lacks %s, which does not stand on its agent", row.Name)
		}
		all[row.Name] = true
	}
	if len(all)-len(names) != 1 || names["ports"] {
		t.Errorf("a member has %v of %v", names, all)
	}
}
