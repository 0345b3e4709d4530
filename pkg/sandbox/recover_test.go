package sandbox

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
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

		m, d := reincarnate(t, h, m, func(c *Config) { c.NoSweep, c.Restored = "the state was restored", true })
		agree(t, h, d)
		for _, name := range []string{"running before a reboot", "paused before a reboot", "running, paused since"} {
			if r, err := m.Get(t.Context(), dead[name]); err != nil || r.Reason != record.Restored {
				t.Errorf("%s, and dead: %s, %v; want restored", name, r.Reason, err)
			}
		}
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

// TestSoftReboot ends all processes and leaves the kernel, its boot ID and what lies in /run. Only what
// ended by itself, and said so, ended otherwise than with the host.
func TestSoftReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := func(userspace string) func(*Config) { return func(c *Config) { c.Userspace = userspace } }
		h := newHost()
		m, _ := h.boot(t, in("one"))
		shot, termed, done := mustCreate(t, m, spec()), mustCreate(t, m, spec()), mustCreate(t, m, spec())
		old := mustCreate(t, m, spec())
		stop(t, m)
		old.Userspace = "" // a release that knew of no user space made it
		h.mu.Lock()
		h.records[old.ID] = old
		h.mu.Unlock()

		h.shoot(shot.ID)
		h.shoot(old.ID)
		h.exit(termed.ID, Obituary{ExitCode: 143, Signal: "SIGTERM"})
		h.exit(done.ID, Obituary{})
		m, d := reincarnate(t, h, m, in("two"))
		for id, want := range map[string]record.Reason{
			shot.ID: record.HostReboot, termed.ID: record.HostReboot, done.ID: record.Exited, old.ID: record.RuntimeCrash,
		} {
			if r, err := m.Get(t.Context(), id); err != nil || r.State != record.Ended || r.Reason != want {
				t.Errorf("%s: %s %s, %v; want %s", id, r.State, r.Reason, err, want)
			}
		}
		agree(t, h, d)

		// One that lives is proof that its user space has not ended, whatever systemd says.
		lives, crashes := mustCreate(t, m, spec()), mustCreate(t, m, spec())
		m, _ = reincarnate(t, h, m, in("three"))
		if r, err := m.Get(t.Context(), lives.ID); err != nil || r.State != record.Running {
			t.Errorf("%s %s, %v", r.State, r.Reason, err)
		}
		m, _ = reincarnate(t, h, m, in(""))
		stop(t, m)
		h.shoot(crashes.ID)
		m, d = reincarnate(t, h, m, in("")) // systemd did not answer
		if r, err := m.Get(t.Context(), crashes.ID); err != nil || r.Reason != record.RuntimeCrash {
			t.Errorf("%s %s, %v", r.State, r.Reason, err)
		}
		agree(t, h, d)
		stop(t, m)
	})
}

func mustRecord(t *testing.T, h *host, id string) record.Record {
	t.Helper()
	r, ok := h.record(id)
	if !ok {
		t.Fatalf("no record of %s", id)
	}
	return r
}

// TestHostEnds: systemd ends the guests and the daemon in any order, takes links away, and may then
// not end the host after all.
func TestHostEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ends atomic.Bool
		var asked atomic.Int32 // by many sweepers at once
		host := func(c *Config) {
			c.HostEnds = func(context.Context) bool { asked.Add(1); return ends.Load() }
		}
		h := newHost()
		m, _ := h.boot(t, host)
		shot, termed, done, gvisor := mustCreate(t, m, spec()), mustCreate(t, m, spec()), mustCreate(t, m, spec()), spec()
		gvisor.Runtime = "runsc"
		linkless := mustCreate(t, m, gvisor)

		ends.Store(true)
		h.exit(done.ID, Obituary{})
		synctest.Wait()
		if asked.Load() != 0 {
			t.Error("one that ended well costs a question to systemd")
		}
		h.shoot(shot.ID)
		h.exit(termed.ID, Obituary{ExitCode: 137, Signal: "SIGKILL"})
		synctest.Wait()
		h.remove("network/" + linkless.ID)
		for range 2 { // the sweep comes in between
			if err := m.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
			for id, want := range map[string]record.State{
				shot.ID: record.Running, termed.ID: record.Running, linkless.ID: record.Running, done.ID: record.Ended,
			} {
				if r := mustRecord(t, h, id); r.State != want {
					t.Errorf("%s is %s %s, want %s", id, r.State, r.Reason, want)
				}
			}
		}
		if m.Life(shot.ID).Err() == nil {
			t.Error("streams into one that is dead go on")
		}
		if !h.has("disk/" + shot.ID) {
			t.Error("a disk is gone")
		}

		ends.Store(false) // somebody cancelled it (systemctl cancel)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		for id, want := range map[string]record.Reason{shot.ID: record.RuntimeCrash, termed.ID: record.Killed} {
			if r := mustRecord(t, h, id); r.State != record.Ended || r.Reason != want {
				t.Errorf("%s is %s %s, want %s", id, r.State, r.Reason, want)
			}
		}
		stop(t, m)
	})
}

// TestKeptWhileUp: the time for which an ended sandbox and a failed snapshot are kept does not run while
// the host is down; a timeout does.
func TestKeptWhileUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := time.Duration(0)
		c := func(c *Config) { c.Down = func(time.Time) time.Duration { return down } }
		h := newHost()
		m, _ := h.boot(t, c)
		s := spec()
		s.Timeout = 10 * time.Hour
		ended, expires := mustCreate(t, m, spec()), mustCreate(t, m, s)
		h.exit(ended.ID, Obituary{ExitCode: 1})
		synctest.Wait()
		time.Sleep(30 * time.Minute)
		stop(t, m)

		time.Sleep(20 * time.Hour)
		down = 20 * time.Hour
		m, _ = reincarnate(t, h, m, c)
		if _, ok := h.record(expires.ID); ok {
			t.Error("a timeout is a time of the wall clock, and has passed")
		}
		time.Sleep(29 * time.Minute)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		r := mustRecord(t, h, ended.ID)
		if left := time.Until(m.Deadline(r)); left < 30*time.Second || left > 2*time.Minute || !h.has("disk/"+ended.ID) {
			t.Errorf("it goes in %v", left)
		}
		time.Sleep(2 * time.Minute)
		if err := m.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if h.String() != "" {
			t.Errorf("left when its hour is over:\n%s", h)
		}
		stop(t, m)
	})
}
