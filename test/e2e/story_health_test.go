package e2e_test

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// tellReady: a sandbox is waited for until what it serves can be reached, on
// its address or on loopback only, and says when it no longer can.
func tellReady(t *testing.T, l *lab) {
	for _, listen := range []string{"0.0.0.0", "127.0.0.1"} {
		begin := time.Now()
		id := l.make("--ready-port", "8000", "--health-interval", "1s", "--health-retries", "2", "--health-start-period", "20s",
			"python", "--", "sh", "-c", "sleep 2; exec python3 -m http.server --bind "+listen+" 8000 >/dev/null 2>&1")
		if d := time.Since(begin); d < 2*time.Second {
			t.Errorf("%s: create returned after %v, before anything listened", listen, d)
		}
		if ps := l.ok("ps"); !strings.Contains(ps, "Running (healthy)") {
			t.Errorf("%s: ps printed %s", listen, ps)
		}
		// The server hangs: its connections are still accepted by the kernel, so
		// it is killed below; here all of the sandbox is paused, which is no failure.
		l.ok("pause", id)
		time.Sleep(3 * time.Second)
		if h := l.health(id); h.State != wire.HealthHealthy {
			t.Errorf("%s: paused, it is %+v", listen, h)
		}
		l.ok("resume", id)
		l.ok("rm", "-f", id)
	}
	// Ready by a command; ready for a while only, and again.
	id := l.make("--ready-cmd", "echo looked; test ! -e /tmp/broken", "--health-interval", "1s", "--health-retries", "2", "base")
	if h := l.health(id); h.State != wire.HealthHealthy || h.LastOutput != "looked\n" || h.CheckedAt == nil {
		t.Errorf("%+v", h)
	}
	l.ok("exec", id, "--", "touch", "/tmp/broken")
	l.awaitHealth(id, wire.HealthUnhealthy, 10*time.Second)
	if h := l.health(id); h.Failures < 2 || !strings.Contains(h.LastOutput, "exited with code 1: looked") {
		t.Errorf("%+v", h)
	}
	if ps := l.ok("ps"); !strings.Contains(ps, "Running (unhealthy)") {
		t.Errorf("ps printed %s", ps)
	}
	l.ok("exec", id, "--", "rm", "/tmp/broken")
	l.awaitHealth(id, wire.HealthHealthy, 10*time.Second)

	// One that never becomes it says so, and stays for a look.
	l.wants(l.ctl("create", "--name", "never", "--runtime", l.runtime, "--ready-port", "81", "--health-interval", "1s", "--health-retries",
		"1", "--health-start-period", "0s", "base"), 125, "nothing accepts connections at port 81")
	l.answers(t, "never")
}

// health is how a sandbox feels.
func (l *lab) health(id string) wire.Health {
	l.Helper()
	if h := l.inspect(id).Sandboxd.Health; h != nil {
		return *h
	}
	return wire.Health{}
}

func (l *lab) awaitHealth(id, state string, limit time.Duration) {
	l.Helper()
	eventually(l.T, limit, func() error {
		if h := l.health(id); h.State != state {
			return fmt.Errorf("sandbox %s is %+v, not %s", id, h, state)
		}
		return nil
	})
}

// tellHangingProbe: a probe that hangs, floods or forks is a failure, and holds
// up nobody.
func tellHangingProbe(t *testing.T, l *lab) {
	commands := []string{"sleep 1000", "yes", "exec 1>&- 2>&-; trap '' TERM; while :; do :; done"}
	hang := func(i int) string {
		return l.make("--no-wait", "--name", fmt.Sprintf("hangs%d", i), "--ready-cmd", commands[i],
			"--health-interval", "1s", "--health-timeout", "2s", "--health-retries", "1", "--health-start-period", "0s", "base")
	}
	var ids []string
	for i := range commands {
		ids = append(ids, hang(i))
	}
	for i, id := range ids {
		soon(t, 3*time.Second, "ps, inspect and rm beside the probe "+commands[i], func() time.Duration {
			if id == "" {
				id = hang(i)
			}
			l.awaitHealth(id, wire.HealthUnhealthy, patience)
			l.answers(t, id)
			lasted := took(func() {
				l.ok("ps")
				l.ok("inspect", id)
				l.ok("rm", "-f", id)
			})
			id = "" // once more, one anew
			return lasted
		})
	}
}

// tellRestart: what fails comes up again, as often as its policy says, with its
// files; stop and rm end that.
func tellRestart(t *testing.T, l *lab) {
	// It fails in each of its lives, and says in which.
	id := l.make("--restart", "on-failure:2", "base", "--", "sh", "-c", "echo life >>/lives; wc -l </lives; exit 3")
	seen := false
	eventually(t, 20*time.Second, func() error {
		i, err := l.api.Inspect(t.Context(), id) // no program: it would be late for a wait of a second
		if err != nil {
			return err
		}
		if i.Sandboxd.NextStart != nil && i.Status.State == wire.Pending && i.Status.Reason == "exited" {
			seen = true
		}
		if i.Status.State != wire.Failed {
			return fmt.Errorf("it is %+v", i.Status)
		}
		return nil
	})
	i := l.inspect(id)
	if !seen || i.Sandboxd.Restarts != 2 || i.Sandboxd.NextStart != nil || i.Status.Reason != "exited" || *i.Sandboxd.ExitCode != 3 ||
		i.LastOutput != "3\n" {
		t.Errorf("seen waiting: %v; %+v, %+v, last output %q", seen, i.Status, i.Sandboxd, i.LastOutput)
	}
	if d := l.ok("inspect", id); !strings.Contains(d, `"restarts": 2`) {
		t.Errorf("inspect printed %s", d)
	}

	// While it waits, stop keeps it and rm removes it.
	for _, end := range []string{"stop", "rm"} {
		id := l.make("--no-wait", "--restart", "always", "base", "--", "sh", "-c", "echo life >>/lives")
		var i wire.Inspection
		var ps string
		for n := 1; ; n = i.Sandboxd.Restarts + 1 { // each wait is twice as long as the last: in one of them there is time
			eventually(t, 20*time.Second, func() (err error) {
				if i, err = l.api.Inspect(t.Context(), id); err == nil && (i.Sandboxd.NextStart == nil || i.Sandboxd.Restarts < n) {
					err = fmt.Errorf("%+v, %+v", i.Status, i.Sandboxd)
				}
				return err
			})
			if i.Sandboxd.NextStart == nil || i.Sandboxd.Restarts > 4 {
				t.Fatalf("no wait was long enough: %+v", i.Sandboxd)
			}
			if ps = l.ok("ps"); time.Until(*i.Sandboxd.NextStart) > 1500*time.Millisecond {
				break
			}
		}
		if !strings.Contains(ps, "Pending (restarting, exited)") {
			t.Errorf("ps printed %s", ps)
		}
		before := i.Sandboxd.Restarts
		l.ok(end, id)
		time.Sleep(time.Until(*i.Sandboxd.NextStart) + time.Second) // it is not started then
		if end == "rm" {
			l.gone(t, id)
			continue
		}
		if i := l.inspect(id); i.Status.State != wire.Terminated || i.Status.Reason != "stopped" || i.Sandboxd.Restarts != before {
			t.Errorf("%s: %+v, %+v", end, i.Status, i.Sandboxd)
		}
	}

	// One that runs and is stopped stays stopped; started, it counts anew.
	id = l.make("--restart", "unless-stopped", "base")
	l.ok("stop", id)
	time.Sleep(2 * time.Second)
	if i := l.inspect(id); i.Status.Reason != "stopped" {
		t.Errorf("%+v", i.Status)
	}
	l.ok("start", id)
	l.answers(t, id)
}

// tellRecycle: what is unhealthy is ended, with that reason, and comes up anew.
func tellRecycle(t *testing.T, l *lab) {
	seen := l.events(t)
	id := l.make("--restart", "on-failure", "--ready-cmd", "test ! -e /dev/shm/broken",
		"--health-interval", "1s", "--health-retries", "2", "base")
	l.ok("exec", id, "--", "touch", "/dev/shm/broken", "/kept")
	eventually(t, 20*time.Second, func() error {
		if i := l.inspect(id); i.Sandboxd.Restarts != 1 || i.Sandboxd.Health == nil || i.Sandboxd.Health.State != wire.HealthHealthy {
			return fmt.Errorf("%+v, %+v", i.Status, i.Sandboxd)
		}
		return nil
	})
	l.ok("exec", id, "--", "test", "-e", "/kept")
	for _, w := range []string{"health healthy", "health unhealthy", "ended unhealthy", "restarted unhealthy", "health healthy"} {
		kind, reason, _ := strings.Cut(w, " ")
		seen(t, id, kind, reason)
	}
}

// tellHealthBad: what makes no sense is refused, with what to do.
func tellHealthBad(t *testing.T, l *lab) {
	for _, c := range []struct {
		ext  map[string]string
		says string
	}{
		{map[string]string{wire.ExtRestart: "sometimes"}, "always"},
		{map[string]string{wire.ExtRestart: "on-failure:-1"}, "from 1"},
		{map[string]string{wire.ExtReadyPort: "0"}, "1 to 65535"},
		{map[string]string{wire.ExtReadyPort: "70000"}, "1 to 65535"},
		{map[string]string{wire.ExtReadyCmd: " "}, "give a command"},
	} {
		r := spec(l.runtime)
		for k, v := range c.ext {
			r.Extensions[k] = v
		}
		if _, err := l.api.Create(t.Context(), r, true); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v: %v", c.ext, err)
		}
	}
	l.wants(l.ctl("create", "--ready-cmd", "", "base"), 125, "empty")
	l.wants(l.ctl("create", "--ready-cmd", "a", "--health-cmd", "a", "base"), 125, "the same")
	l.wants(l.ctl("run", "--restart", "always", "base", "true"), 125, "exclude each other")
}

// TestRestartAcrossDaemons: policies are kept although the daemon is killed:
// what waited for its restart comes up, and so does what died meanwhile.
func TestRestartAcrossDaemons(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			r := spec(runtime, "sh", "-c", "echo life >>/lives; test -e /stay && sleep 1000")
			r.Extensions[wire.ExtRestart] = "always"
			waits, err := h.api.Create(t.Context(), r, false)
			if err != nil {
				t.Fatal(err)
			}
			r = spec(runtime)
			r.Extensions[wire.ExtRestart] = "on-failure:5"
			dies := h.create(t, r)
			r.Extensions[wire.ExtRestart] = "no"
			stays := h.create(t, r)
			eventually(t, 20*time.Second, func() error {
				i, err := h.api.Inspect(t.Context(), waits.ID)
				if err == nil && (i.Sandboxd.NextStart == nil || i.Sandboxd.Restarts < 2) {
					err = fmt.Errorf("%+v, %+v", i.Status, i.Sandboxd)
				}
				return err
			})
			victim := mainProcess(t, runtime, dies.ID)
			h.Kill()
			if err := syscall.Kill(victim, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if err := h.TryStart(); err != nil {
				t.Fatal(err)
			}
			eventually(t, 20*time.Second, func() error {
				i, err := h.api.Inspect(t.Context(), waits.ID)
				if err == nil && i.Sandboxd.Restarts < 3 {
					err = fmt.Errorf("%+v, %+v", i.Status, i.Sandboxd)
				}
				return err
			})
			eventually(t, 10*time.Second, func() error {
				i, err := h.api.Inspect(t.Context(), dies.ID)
				if err == nil && (i.Status.State != wire.Running || i.Sandboxd.Restarts != 1) {
					err = fmt.Errorf("%+v, %+v", i.Status, i.Sandboxd)
				}
				return err
			})
			h.answers(t, dies.ID)
			h.answers(t, stays.ID)
			h.deleteAll(t)
		})
	}
}
