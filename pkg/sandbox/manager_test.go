package sandbox

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// bubble runs f with a fresh host and a daemon on it, in a time of its own.
// Afterwards host and store must agree.
func bubble(t *testing.T, f func(t *testing.T, h *host, m *Manager)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, d := h.boot(t)
		f(t, h, m)
		synctest.Wait()
		stop(t, m)
		if w := h.wrong(d); len(w) > 0 && !t.Failed() {
			t.Errorf("host and store do not agree:\n%s\nhost:\n%s", strings.Join(w, "\n"), h)
		}
	})
}

func spec() record.Spec {
	return record.Spec{Runtime: "runc", Limits: record.Limits{MemoryBytes: 64 << 20, DiskBytes: 64 << 20, Pids: 16}}
}

func mustCreate(t *testing.T, m *Manager, s record.Spec) record.Record {
	t.Helper()
	r, err := m.Create(t.Context(), s)
	if err == nil {
		r, err = m.Await(t.Context(), r.ID)
		synctest.Wait() // Await may see it run a moment before its creation is over
	}
	if err != nil || r.State != record.Running {
		t.Fatalf("create: %v, state %q: %s", err, r.State, r.Message)
	}
	return r
}

func wantCode(t *testing.T, err error, code errs.Code) {
	t.Helper()
	if !errs.Is(err, code) {
		t.Fatalf("got %v, want %s", err, code)
	}
}

// gate makes a call wait; the returned function lets it go on.
func (h *host) gate(call string) (open func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := make(chan struct{})
	h.block[call] = g
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.block, call)
		close(g)
	}
}

const first, second = "daaaaaaaaaaa", "dbbbbbbbbbbb"

func TestCreateIsAsynchronous(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		open := h.gate("agent.Ready " + first)
		ctx, hangUp := context.WithCancel(t.Context())
		s := spec()
		s.Timeout = time.Hour
		r, err := m.Create(ctx, s)
		if err != nil || r.State != record.Creating || r.Token == "" || !r.Expires.Equal(now().Add(time.Hour)) {
			t.Fatalf("%+v, %v", r, err)
		}
		hangUp() // no longer matters

		short, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if r, err := m.Await(short, r.ID); !errors.Is(err, context.DeadlineExceeded) || r.State != record.Creating {
			t.Fatalf("await: %s, %v", r.State, err)
		}
		if m.Steps(r.ID) != nil {
			t.Fatal("steps of a creation that goes on")
		}
		wantCode(t, m.Pause(t.Context(), r.ID), errs.WrongState) // at once

		open()
		if r, err := m.Await(t.Context(), r.ID); err != nil || r.State != record.Running {
			t.Fatalf("await: %s, %v", r.State, err)
		}
		synctest.Wait()
		var names []string
		for _, s := range m.Steps(r.ID) {
			names = append(names, s.Name)
		}
		if want := []string{
			"namespaces", "disk", "rootfs", "cgroup", "network", "egress", "bundle", "runtime", "agent", "ports",
			"cpu",
		}; !slices.Equal(names, want) {
			t.Fatalf("steps %v, want %v", names, want)
		}
	})
}

// TestTrust: only a sandbox whose hosts may be inspected plans what it trusts, at each start
// and on a root file system that is mounted. The bundle of no sandbox waits for that.
func TestTrust(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		open := h.gate("rootfs.make " + first)
		s := spec()
		s.Inspect = true
		r, err := m.Create(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if !h.has("bundle/"+r.ID) || h.has("trust/"+r.ID) {
			t.Fatalf("before the root file system is mounted there is\n%s", h)
		}
		open()
		if r, err = m.Await(t.Context(), r.ID); err != nil || r.State != record.Running || !h.has("trust/"+r.ID) {
			t.Fatalf("%+v, %v, of\n%s", r, err, h)
		}
		synctest.Wait()
		planned := func(id string) bool {
			return slices.ContainsFunc(m.Steps(id), func(s table.Step) bool { return s.Name == "trust" })
		}
		if other := mustCreate(t, m, spec()); planned(other.ID) || !planned(r.ID) {
			t.Errorf("steps %v, and %v of one without inspected hosts", m.Steps(r.ID), m.Steps(other.ID))
		}
		if err := m.Stop(t.Context(), r.ID, 0); err != nil || h.has("trust/"+r.ID) {
			t.Fatalf("after a stop: %v, of\n%s", err, h)
		}
		if _, err = m.Start(t.Context(), r.ID); err != nil {
			t.Fatal(err)
		}
		if r, err = m.Await(t.Context(), r.ID); err != nil || r.State != record.Running || !h.has("trust/"+r.ID) {
			t.Fatalf("after another start: %+v, %v, of\n%s", r, err, h)
		}
	})
}

func TestCreateRefused(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		for _, s := range []record.Spec{
			{Runtime: "kata"},
			{Runtime: "runc", Name: "a/b"},
			{Runtime: "runc", Name: "aaaaaaaaaaaa"}, // an ID
			{Runtime: "runc", Name: strings.Repeat("x", 64)},
		} {
			_, err := m.Create(t.Context(), s)
			wantCode(t, err, errs.Invalid)
		}
		if h.String() != "" {
			t.Fatalf("left:\n%s", h)
		}
		// A store that says no and did it nevertheless.
		h.fault = fault{call: "store.Insert " + first + " #1", mode: errAfter}
		if _, err := m.Create(t.Context(), spec()); !errors.Is(err, errInjected) {
			t.Fatalf("got %v", err)
		}
		if h.String() != "" {
			t.Fatalf("left:\n%s", h)
		}
		// A client that hung up before anything was durable.
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := m.Create(ctx, spec()); !errors.Is(err, context.Canceled) {
			t.Fatalf("got %v", err)
		}
	})
}

func TestCreateFails(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		h.fault = fault{call: "network.make " + first + " #1", mode: errAfter}
		r, err := m.Create(t.Context(), spec())
		if err != nil {
			t.Fatal(err)
		}
		r, err = m.Await(t.Context(), r.ID)
		if err != nil || r.State != record.Ended || r.Reason != record.CreateFailed || r.OK() {
			t.Fatalf("%+v, %v", r, err)
		}
		if !strings.Contains(r.Message, "step network") || strings.Contains(r.Message, "injected") {
			t.Fatalf("message %q: want the step, and not what only the log may say", r.Message)
		}
		if got := h.String(); strings.Count(got, "\n") > 1 {
			t.Fatalf("holds:\n%v", got)
		}
		select {
		case <-m.Life(r.ID).Done():
		default:
			t.Fatal("its life has not ended")
		}
	})
}

func TestEntrypointNotFound(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		h.gate("agent.Ready " + first) // never answers
		r, err := m.Create(t.Context(), spec())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		h.exit(r.ID, Obituary{ExitCode: 127, Message: `"nginx" is not in the image`, LastOutput: "x"})
		start := time.Now()
		r, err = m.Await(t.Context(), r.ID)
		if err != nil || r.Reason != record.CreateFailed || *r.ExitCode != 127 || r.LastOutput != "x" {
			t.Fatalf("%+v, %v", r, err)
		}
		if r.Message != `could not be created: "nginx" is not in the image; its last lines:`+"\nx" {
			t.Fatalf("message %q", r.Message)
		}
		if d := time.Since(start); d > time.Second {
			t.Fatalf("it took %v to notice", d)
		}
	})
}

func TestLastLines(t *testing.T) {
	code, ok := 1, 0
	many := strings.Repeat("line\n", 100)
	for _, c := range []struct {
		d    death
		want string
	}{
		{death{output: "a\n\tb\n", code: &code}, "a\n\tb"},
		{death{output: "a\n", code: &ok}, ""},
		{death{output: "\n\x1b\n"}, ""},
		{death{output: "red \x1b[31m\a\r\u202e\xff", code: &code}, "red [31m"},
		{death{output: many}, strings.TrimSpace(many[:20*5])},
		{death{output: strings.Repeat("ü", 4<<10)}, strings.Repeat("ü", 1<<10)},
	} {
		if got := c.d.lastLines(); got != "" && got != "; its last lines:\n"+c.want || got == "" && c.want != "" {
			t.Errorf("%.40q: %q", c.d.output, got)
		}
	}
}

func TestEntrypointFasterThanAgent(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		h.gate("agent.Ready " + first) // never answers
		r, err := m.Create(t.Context(), spec())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		h.exit(r.ID, Obituary{LastOutput: "x"})
		r, err = m.Await(t.Context(), r.ID)
		if err != nil || r.State != record.Ended || r.Reason != record.Exited || !r.OK() || r.LastOutput != "x" || r.Failed() {
			t.Fatalf("%+v, %v", r, err)
		}
	})
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		var ops []Operation
		m.life.cfg.OnOperation = func(o Operation) { ops = append(ops, o) }
		h.gate("agent.Ready " + first)
		r, err := m.Create(t.Context(), spec())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		h.exit(r.ID, Obituary{ExitCode: 3, LastOutput: "boom\n"})
		r, err = m.Await(t.Context(), r.ID)
		if err != nil || r.Reason != record.Exited || !r.Started.IsZero() || !r.Failed() ||
			r.Message != "its entrypoint exited with code 3"+record.LastLines+"boom" {
			t.Fatalf("%+v, %v", r, err)
		}
		synctest.Wait() // the line of the log comes after the answer
		// That is the guest's failure, and no operator needs to look.
		if len(ops) != 1 || ops[0].Outcome != "ok" || ops[0].Failed != "" || ops[0].Ended != record.Exited {
			t.Errorf("operations %+v", ops)
		}
	})
}

func TestStepThatHangs(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		h.gate("rootfs.make " + first)
		r, err := m.Create(t.Context(), spec())
		if err != nil {
			t.Fatal(err)
		}
		mustCreate(t, m, spec()) // is not held up
		start := time.Now()
		r, err = m.Await(t.Context(), r.ID)
		if err != nil || r.Reason != record.Timeout || !strings.Contains(r.Message, "too long") {
			t.Fatalf("%+v, %v", r, err)
		}
		if d := time.Since(start); d != stepLimit {
			t.Fatalf("gave up after %v", d)
		}
	})
}

func TestStartLimit(t *testing.T) {
	for _, call := range []string{"runc.Start ", "agent.Ready "} {
		synctest.Test(t, func(t *testing.T) {
			h := newHost()
			m, d := h.boot(t, func(c *Config) { c.StartLimit = 10 * time.Minute })
			h.gate(call + first)
			start := time.Now()
			r, err := m.Create(t.Context(), spec())
			if err != nil {
				t.Fatal(err)
			}
			r, err = m.Await(t.Context(), r.ID)
			if took := time.Since(start); err != nil || r.Reason != record.Timeout || took != 10*time.Minute {
				t.Errorf("%s: given up after %v: %+v, %v", call, took, r, err)
			}
			stop(t, m)
			agree(t, h, d)
		})
	}
}

func TestDeleteDuringCreate(t *testing.T) {
	for _, call := range []string{"disk.make ", "network.make ", "runc.Start ", "agent.Ready "} {
		bubble(t, func(t *testing.T, h *host, m *Manager) {
			h.gate(call + first)
			r, err := m.Create(t.Context(), spec())
			if err != nil {
				t.Fatal(err)
			}
			awaited := make(chan error)
			go func() {
				_, err := m.Await(t.Context(), r.ID)
				awaited <- err
			}()
			synctest.Wait()
			start := time.Now()
			if err := m.Delete(t.Context(), r.ID); err != nil {
				t.Fatal(err)
			}
			if d := time.Since(start); d > 0 {
				t.Fatalf("%s: delete waited %v", call, d)
			}
			wantCode(t, <-awaited, errs.NotFound)
			_, err = m.Get(t.Context(), r.ID)
			wantCode(t, err, errs.NotFound)
			synctest.Wait()
			if h.String() != "" {
				t.Fatalf("%s left:\n%s", call, h)
			}
		})
	}
}

func TestDeleteAnswersWhenDead(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		s := spec()
		s.Name = "lab"
		r := mustCreate(t, m, s)
		open := h.gate("network.Gone " + r.ID) // the link takes its time
		if err := m.Delete(t.Context(), "lab"); err != nil {
			t.Fatal(err)
		}
		if h.has("process/" + r.ID) {
			t.Fatal("delete answered before the processes were dead")
		}
		<-m.Life(r.ID).Done()
		for _, key := range []string{r.ID, "lab"} {
			_, err := m.Get(t.Context(), key)
			wantCode(t, err, errs.NotFound)
		}
		if l, err := m.List(t.Context()); err != nil || len(l) != 0 {
			t.Fatalf("list: %v, %v", l, err)
		}
		wantCode(t, m.Delete(t.Context(), r.ID), errs.NotFound)
		next := mustCreate(t, m, s) // the name is free
		synctest.Wait()
		if _, ok := h.record(r.ID); !ok || next.Slot == r.Slot {
			t.Fatal("the address may be given away while a link has it")
		}
		open()
		synctest.Wait()
		if len(h.records) != 1 {
			t.Fatalf("records:\n%s", h)
		}
		wantCode(t, m.Delete(t.Context(), r.ID), errs.NotFound)
		wantCode(t, m.Delete(t.Context(), "nobody"), errs.NotFound)
	})
}

func TestTwoDeletes(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		open := h.gate("cgroup.Kill " + r.ID)
		got := make(chan error)
		for range 2 {
			go func() { got <- m.Delete(t.Context(), r.ID) }()
			synctest.Wait()
		}
		open()
		for range 2 {
			if err := <-got; err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestUnkillable has a process that does not die: it keeps what it stands on,
// holds up nobody, and can be deleted once it can be killed.
func TestUnkillable(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		open := h.gate("cgroup.Kill " + r.ID)
		start := time.Now()
		if err := m.Delete(t.Context(), r.ID); err == nil || !strings.Contains(err.Error(), "kill") {
			t.Fatalf("got %v", err)
		}
		if d := time.Since(start); d != eraseLimit {
			t.Fatalf("gave up after %v", d)
		}
		if !h.has("rootfs/"+r.ID) || !h.has("egress/"+r.ID) {
			t.Fatalf("a living process lost what it stands on:\n%s", h)
		}
		mustCreate(t, m, spec())
		open()
		if err := m.Delete(t.Context(), r.ID); err != nil {
			t.Fatal(err)
		}
	})
}

func TestHungUpDelete(t *testing.T) {
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		r := mustCreate(t, m, spec())
		open := h.gate("cgroup.Kill " + r.ID)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := m.Delete(ctx, r.ID); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("got %v", err)
		}
		open()
		synctest.Wait()
		if h.String() != "" {
			t.Fatalf("left:\n%s", h)
		}
	})
}

func TestDeaths(t *testing.T) {
	for name, c := range map[string]struct {
		die     func(h *host, id string)
		reason  record.Reason
		ok      bool
		message string
	}{
		"exit 0": {func(h *host, id string) { h.exit(id, Obituary{}) }, record.Exited, true, "code 0"},
		"exit 3": {func(h *host, id string) { h.exit(id, Obituary{ExitCode: 3}) }, record.Exited, false, "code 3"},
		"not found": {
			func(h *host, id string) { h.exit(id, Obituary{ExitCode: 127, Message: "no such file"}) }, record.Exited, false,
			"no such file",
		},
		"signal":   {func(h *host, id string) { h.exit(id, Obituary{ExitCode: 137, Signal: "SIGKILL"}) }, record.Killed, false, "SIGKILL"},
		"shot":     {func(h *host, id string) { h.shoot(id) }, record.RuntimeCrash, false, "runc"},
		"oom":      {func(h *host, id string) { h.ooms[id] = 1; h.shoot(id) }, record.OOM, false, "64 MiB"},
		"oom host": {func(h *host, id string) { h.short = true; h.ooms[id] = 1; h.shoot(id) }, record.OOM, false, "below its limit"},
		"oom, 137": {func(h *host, id string) { h.ooms[id] = 1; h.exit(id, Obituary{ExitCode: 137}) }, record.OOM, false, "64 MiB"},
		"disk full": {func(h *host, id string) {
			h.diskUsed[id], h.diskLimit[id] = 63<<20+1<<19, 64<<20
			h.exit(id, Obituary{ExitCode: 1})
		}, record.DiskFull, false, "its disk of 64 MiB was full"},
		"disk full, no word": {func(h *host, id string) {
			h.diskUsed[id], h.diskLimit[id] = 64<<20, 64<<20
			h.shoot(id)
		}, record.DiskFull, false, "could not be saved"},
		"half full": {func(h *host, id string) {
			h.diskUsed[id], h.diskLimit[id] = 32<<20, 64<<20
			h.exit(id, Obituary{ExitCode: 1, Reason: "disk_full"})
		}, record.Exited, false, "code 1"},
		"full, but well": {func(h *host, id string) {
			h.diskUsed[id], h.diskLimit[id] = 64<<20, 64<<20
			h.exit(id, Obituary{})
		}, record.Exited, true, "code 0"},
		"pids": {
			func(h *host, id string) { h.refused[id] = 3; h.exit(id, Obituary{ExitCode: 2}) }, record.PidsLimit, false,
			"limit of 16",
		},
		"pids, but well": {func(h *host, id string) { h.refused[id] = 3; h.exit(id, Obituary{}) }, record.Exited, true, "code 0"},
		"pids, a lie": {
			func(h *host, id string) { h.exit(id, Obituary{ExitCode: 2, Reason: "pids_limit"}) }, record.Exited, false,
			"code 2",
		},
		"oom beside": {func(h *host, id string) { h.ooms[id] = 1; h.exit(id, Obituary{}) }, record.Exited, true, "code 0"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *host, m *Manager) {
				ctx, cancel := context.WithCancel(t.Context())
				events := m.Subscribe(ctx)
				r := mustCreate(t, m, spec())
				c.die(h, r.ID)
				synctest.Wait()
				<-m.Life(r.ID).Done()
				r, err := m.Get(t.Context(), r.ID)
				if err != nil || r.State != record.Ended || r.Reason != c.reason || r.OK() != c.ok ||
					!strings.Contains(r.Message, c.message) {
					t.Fatalf("%+v, %v", r, err)
				}
				cancel()
				var got []string
				for e := range events {
					got = append(got, e.Type)
				}
				if want := []string{"creating", "running", "stopping", "ended"}; !slices.Equal(got, want) {
					t.Fatalf("events %v, want %v", got, want)
				}
				wantCode(t, m.Pause(t.Context(), r.ID), errs.WrongState)
			})
		})
	}
}

// TestDeleteUnreadable has the owner give up what nobody can read any more.
func TestDeleteUnreadable(t *testing.T) {
	const id = "dghostaaaaaa"
	bubble(t, func(t *testing.T, h *host, m *Manager) {
		h.bad = []string{id}
		for _, kind := range []string{"disk/", "network/", "runsc/", "process/"} {
			h.plant(kind + id)
		}
		h.mu.Lock()
		h.dead[id] = make(chan struct{})
		h.mu.Unlock()
		if err := m.Expire(t.Context(), id); err != nil || len(h.bad) == 0 {
			t.Fatalf("expired, without a known time: %v", err)
		}
		if err := m.Delete(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if h.String() != "" || len(h.bad) > 0 {
			t.Fatalf("left, unreadable %v:\n%s", h.bad, h)
		}
		wantCode(t, m.Delete(t.Context(), id), errs.NotFound)
	})
}
