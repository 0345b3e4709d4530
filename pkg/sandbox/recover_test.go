package sandbox

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// reincarnate kills the daemon and starts another.
func reincarnate(t *testing.T, h *host, m *Manager, change ...func(*Config)) (*Manager, *incarnation) {
	t.Helper()
	stop(t, m)
	m, d := h.boot(t, change...)
	if err := m.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
	return m, d
}

func agree(t *testing.T, h *host, d *incarnation) {
	t.Helper()
	if w := h.wrong(d); len(w) > 0 {
		t.Fatalf("host and store do not agree:\n%s\nhost:\n%s", strings.Join(w, "\n"), h)
	}
}

// TestRestart has sandboxes live, and die, while no daemon does.
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		lives, dies, paused := mustCreate(t, m, spec()), mustCreate(t, m, spec()), mustCreate(t, m, spec())
		if err := m.Pause(t.Context(), paused.ID); err != nil {
			t.Fatal(err)
		}
		stop(t, m)
		h.exit(dies.ID, Obituary{ExitCode: 7, LastOutput: "alone"})

		m, d := reincarnate(t, h, m)
		agree(t, h, d)
		if r, err := m.Get(t.Context(), dies.ID); err != nil || r.State != record.Ended || *r.ExitCode != 7 || r.LastOutput != "alone" {
			t.Fatalf("%+v, %v", r, err)
		}
		if r, _ := m.Get(t.Context(), paused.ID); r.State != record.Paused {
			t.Fatalf("the paused one is %s", r.State)
		}
		// The survivor is watched by the new daemon.
		h.exit(lives.ID, Obituary{})
		synctest.Wait()
		if r, _ := m.Get(t.Context(), lives.ID); r.State != record.Ended {
			t.Fatalf("nobody saw it end: %s", r.State)
		}
		agree(t, h, d)
		stop(t, m)
	})
}

func TestReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		running, paused, ended := mustCreate(t, m, spec()), mustCreate(t, m, spec()), mustCreate(t, m, spec())
		if err := m.Pause(t.Context(), paused.ID); err != nil {
			t.Fatal(err)
		}
		h.exit(ended.ID, Obituary{})
		synctest.Wait()
		h.gate("agent.Ready dddddddddddd")
		creating, err := m.Create(t.Context(), spec())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		h.mu.Lock()
		for id := range h.dead { // the dead daemon must not see its sandboxes die
			h.dead[id] = make(chan struct{})
		}
		h.mu.Unlock()
		h.reboot()
		m2, d := h.boot(t)
		if err := m2.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		agree(t, h, d)
		for id, want := range map[string]record.Reason{
			running.ID: record.HostReboot, paused.ID: record.HostReboot,
			ended.ID: record.Exited, creating.ID: record.CreateFailed,
		} {
			if r, err := m2.Get(t.Context(), id); err != nil || r.State != record.Ended || r.Reason != want {
				t.Errorf("%s: %s %s, %v; want %s", id, r.State, r.Reason, err, want)
			}
			if !h.has("disk/" + id) {
				t.Errorf("%s lost its disk", id)
			}
		}
		stop(t, m2)
		m.cancel(errClosing)
		stop(t, m)
	})
}

func TestStrays(t *testing.T) {
	strays := []string{"disk/dghostaaaaaa", "rootfs/dghostaaaaaa", "network/dghostaaaaaa", "runsc/dghostaaaaaa", "network/dghostbbbbbb"}
	foreign := []string{"disk/eghostaaaaaa", "network/eghostaaaaaa", "cgroup/dghost", "disk/lost+found", "disk/dghostXXXXXX"}
	plant := func(h *host) {
		for _, s := range slices.Concat(strays, foreign) {
			h.plant(s)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		mustCreate(t, m, spec())
		plant(h)
		m, _ = reincarnate(t, h, m, func(c *Config) { c.NoSweep = "the pool belongs to another store" })
		for _, s := range strays {
			if !h.has(s) {
				t.Errorf("%s was swept in spite of NoSweep", s)
			}
		}
		m, d := reincarnate(t, h, m)
		for _, s := range strays {
			if h.has(s) {
				t.Errorf("%s is still there", s)
			}
		}
		if !slices.Equal(h.strays, []string{"dghostaaaaaa"}) {
			t.Errorf("in lost+found: %v", h.strays)
		}
		for _, s := range foreign {
			if !h.has(s) {
				t.Errorf("%s is somebody else's, and was swept", s)
			}
			h.remove(s)
		}
		agree(t, h, d)
		stop(t, m)
	})
}

// TestOlderThanLife restores records that are older than the lives of their
// sandboxes: what runs goes on, also when it may be swept, and what does not is
// ended.
func TestOlderThanLife(t *testing.T) {
	one := 1
	was := map[string]func(*record.Record){
		"ended": func(r *record.Record) {
			r.State, r.Reason, r.Message, r.ExitCode, r.LastOutput = record.Ended, record.Exited, "it exited", &one, "bye"
		},
		"stopped": func(r *record.Record) { r.State, r.Reason, r.Message = record.Ended, record.Stopped, "it was stopped" },
		"stopping": func(r *record.Record) {
			r.State, r.Reason, r.Message = record.Stopping, record.Stopped, "it was stopped"
		},
		"starting":                 func(r *record.Record) { r.State = record.Starting },
		"creating":                 func(r *record.Record) { r.State = record.Creating },
		"running before a reboot":  func(r *record.Record) { r.BootID = "boot-0" },
		"paused before a reboot":   func(r *record.Record) { r.State, r.BootID = record.Paused, "boot-0" },
		"starting before a reboot": func(r *record.Record) { r.State, r.BootID = record.Starting, "boot-0" },
		"running, paused since":    func(*record.Record) {},
	}
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		lives, dead := map[string]string{}, map[string]string{}
		for name := range was {
			l, d := mustCreate(t, m, spec()), mustCreate(t, m, spec())
			lives[name], dead[name] = l.ID, d.ID
		}
		stop(t, m)
		for name, change := range was {
			h.shoot(dead[name])
			for _, id := range []string{lives[name], dead[name]} {
				r, _ := h.record(id)
				change(&r)
				h.mu.Lock()
				h.records[id] = r
				h.mu.Unlock()
			}
		}
		h.plant("frozen/" + lives["running, paused since"])
		time.Sleep(2 * time.Hour) // Retain is over, too

		m, d := reincarnate(t, h, m, func(c *Config) { c.NoSweep = "the state was restored" })
		agree(t, h, d)
		for range 2 { // the second may sweep
			for name, id := range lives {
				if r, err := m.Get(t.Context(), id); err != nil || r.State != record.Running || r.BootID != h.bootID || r.Reason != "" ||
					r.ExitCode != nil || r.Started.IsZero() {
					t.Errorf("%s: %+v, %v", name, r, err)
				}
			}
			m, d = reincarnate(t, h, m)
			agree(t, h, d)
		}
		h.exit(lives["ended"], Obituary{ExitCode: 3})
		synctest.Wait()
		if r, err := m.Get(t.Context(), lives["ended"]); err != nil || r.State != record.Ended || *r.ExitCode != 3 {
			t.Errorf("nobody saw it end: %+v, %v", r, err)
		}
		for name, id := range dead {
			if r, ok := h.record(id); ok && r.State != record.Ended {
				t.Errorf("%s, and dead: %+v", name, r)
			}
		}
		stop(t, m)
	})
}

// TestStoppedWithoutSweep stops a sandbox where nothing may be swept, and the
// kill fails: the sweep goes on with that, not with the sandbox.
func TestStoppedWithoutSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, d := h.boot(t, func(c *Config) { c.NoSweep = "the state was restored" })
		r := mustCreate(t, m, spec())
		time.Sleep(time.Second)
		h.fault = fault{call: "cgroup.Kill " + r.ID + " #1", mode: errBefore}
		h.calls = nil
		if err := m.Stop(t.Context(), r.ID, 0); err == nil {
			t.Error("the kill failed and nobody said so")
		}
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		agree(t, h, d)
		if r, err := m.Get(t.Context(), r.ID); err != nil || r.State != record.Ended || r.Reason != record.Stopped {
			t.Errorf("%+v, %v", r, err)
		}
		stop(t, m)
	})
}

// TestDueWithoutSweep has sandboxes past their time that may not be erased:
// they are what they are, not forgotten.
func TestDueWithoutSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		s := spec()
		s.Timeout = time.Minute
		lives, dies := mustCreate(t, m, s), mustCreate(t, m, s)
		stop(t, m)
		h.exit(dies.ID, Obituary{ExitCode: 7})
		time.Sleep(time.Hour)

		m, d := reincarnate(t, h, m, func(c *Config) { c.NoSweep = "the pool belongs to another store" })
		agree(t, h, d)
		if r, err := m.Get(t.Context(), dies.ID); err != nil || r.State != record.Ended || *r.ExitCode != 7 {
			t.Fatalf("%+v, %v", r, err)
		}
		h.exit(lives.ID, Obituary{ExitCode: 8})
		synctest.Wait()
		if r, err := m.Get(t.Context(), lives.ID); err != nil || r.State != record.Ended || *r.ExitCode != 8 {
			t.Fatalf("nobody saw it end: %+v, %v", r, err)
		}
		agree(t, h, d)

		m, d = reincarnate(t, h, m)
		if h.String() != "" {
			t.Fatalf("left when it may be swept:\n%s", h)
		}
		agree(t, h, d)
		stop(t, m)
	})
}

func TestUnreadableIsNoStray(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.bad = []string{"dghostaaaaaa"}
		h.plant("disk/dghostaaaaaa")
		h.plant("network/dghostaaaaaa")
		m, _ := h.boot(t)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if strings.Count(h.String(), "\n") != 1 {
			t.Fatalf("holds only:\n%s", h)
		}
		stop(t, m)
	})
}

// TestSweep is what the minute brings: ended sandboxes go when they were kept
// for long enough, expired ones when their timer was missed, and an ended one
// that holds more than its disk is tidied.
func TestSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, d := h.boot(t)
		ended := mustCreate(t, m, spec())
		s := spec()
		s.Timeout = 30 * time.Minute
		expires := mustCreate(t, m, s)
		h.exit(ended.ID, Obituary{})
		synctest.Wait()
		h.plant("network/" + ended.ID)

		start := time.Now()
		sweep := func(minutes int) {
			for range minutes {
				time.Sleep(time.Minute)
				if err := m.Recover(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		sweep(1)
		agree(t, h, d)
		sweep(30)
		if _, ok := h.record(expires.ID); ok {
			t.Errorf("%s is %s %v after its time", expires.ID, "there", time.Since(start))
		}
		if _, ok := h.record(ended.ID); !ok {
			t.Error("an ended sandbox was not kept")
		}
		sweep(30)
		if h.String() != "" {
			t.Errorf("left after an hour:\n%s", h)
		}
		stop(t, m)
	})
}

// TestListFails sweeps nothing when it cannot see everything.
func TestListFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.plant("network/dghostaaaaaa")
		m, _ := h.boot(t)
		for _, call := range []string{"namespaces.list #1", "egress.list #1", "store.List #1", "store.Unreadable #1"} {
			h.calls, h.fault = nil, fault{call: call, mode: errBefore}
			if err := m.Recover(t.Context()); err == nil {
				t.Errorf("%s failed and nobody said so", call)
			}
			if !h.has("network/dghostaaaaaa") {
				t.Fatalf("swept, although %s failed", call)
			}
		}
		stop(t, m)
	})
}

func TestFailpointNames(t *testing.T) {
	names := FailpointNames()
	for _, want := range []string{
		"up:namespaces", "after:up:namespaces", "down:disk", "up:agent", "after:up:agent",
		"store:insert", "store:put:running", "after:store:put:deleting", "store:delete", "kill", "gone", "freeze", "thaw",
	} {
		if !slices.Contains(names, want) {
			t.Errorf("no %q in %v", want, names)
		}
	}
	if slices.Contains(names, "down:agent") {
		t.Error("down:agent is never passed")
	}
	if len(slices.Compact(slices.Clone(names))) != len(names) {
		t.Errorf("twice: %v", names)
	}
}

// TestTable checks what the order by danger promises.
func TestTable(t *testing.T) {
	rows := resources(Deps{}, Config{Instance: instance.Instance('d')})
	at := map[string]int{}
	for i, row := range rows {
		for _, name := range row.After {
			if j, ok := at[name]; !ok || j >= i {
				t.Errorf("%s stands on %s, which does not come before it", row.Name, name)
			}
		}
		at[row.Name] = i
	}
	var under func(name string) []string
	under = func(name string) (all []string) {
		for _, n := range rows[at[name]].After {
			all = append(all, n)
			all = append(all, under(n)...)
		}
		return all
	}
	for _, need := range []string{"namespaces", "disk", "rootfs", "cgroup", "network", "egress", "bundle", "trust"} {
		if !slices.Contains(under("runtime"), need) {
			t.Errorf("a process may run before there is a %s", need)
		}
	}
	if !slices.Contains(under("trust"), "rootfs") {
		t.Error("what a guest trusts may be planned before its root file system is mounted")
	}
}

// TestAdoptUnregistered: a sandbox whose policy the egress does not take is watched and served
// all the same, and each sweep tries again, with the newest version, until it is registered.
func TestAdoptUnregistered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, _ := h.boot(t)
		mustPut(t, m, "build", 1)
		id, dies := mustCreate(t, m, using("build")).ID, mustCreate(t, m, spec()).ID
		stop(t, m)

		m, d := h.boot(t)
		h.calls = nil
		sweep := func(fault string, tries int) {
			t.Helper()
			h.failAll = fault
			err := m.Recover(t.Context())
			if fault == "" && err != nil || fault != "" && (!errors.Is(err, errInjected) || !strings.Contains(err.Error(), id)) {
				t.Errorf("with fault %q: %v", fault, err)
			}
			if n := h.registered(id); n != tries {
				t.Errorf("tried %d times, want %d", n, tries)
			}
		}
		sweep("egress.make", 1)
		if _, ok := d.registered[id]; ok || !d.published[id] || m.tracker.get(id) == nil {
			t.Errorf("registered: %v, published: %v, watched: %v", ok, d.published[id], m.tracker.get(id) != nil)
		}
		h.exit(dies, Obituary{ExitCode: 3})
		synctest.Wait()
		if r, err := m.Get(t.Context(), dies); err != nil || r.State != record.Ended || *r.ExitCode != 3 {
			t.Errorf("nobody saw it end: %+v, %v", r, err)
		}
		h.remove("egress/" + id) // no reason to try twice in a sweep
		sweep("egress.make", 2)
		// An edit that it cannot be given now is one that it has when it is registered.
		if e := mustPut(t, m, "build", 2); len(e.Failed) != 1 {
			t.Errorf("edited: %+v", e)
		}
		tries := h.registered(id)
		sweep("egress.make", tries+1)
		sweep("", tries+2)
		if h.reaches(id) != 2 {
			t.Errorf("it reaches %d", h.reaches(id))
		}
		sweep("", tries+2)
		agree(t, h, d)
		stop(t, m)
	})
}
