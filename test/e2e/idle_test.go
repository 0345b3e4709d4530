package e2e_test

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// idleLimit is how long a sandbox with an idle time of a second may take to fall asleep: what it did
// before may count once as CPU time.
const idleLimit = 30 * time.Second

// awaitSleep waits until the idle policy has paused a sandbox.
func (l *lab) awaitSleep(id string) {
	l.Helper()
	eventually(l.T, idleLimit, func() error {
		sb, err := l.api.Get(l.Context(), id)
		if err == nil && (sb.Status.State != wire.Paused || !sb.Sandboxd.Idle.Asleep) {
			err = fmt.Errorf("sandbox %s is %+v, %+v", id, sb.Status, sb.Sandboxd.Idle)
		}
		return err
	})
}

// wakes counts how often a sandbox was woken, since the daemon started.
func (l *lab) wakes(id string) (n int) {
	for line := range strings.Lines(l.Daemon.Log()) {
		if strings.Contains(line, "wake") && strings.Contains(line, id) && strings.Contains(line, "operation") {
			n++
		}
	}
	return n
}

// TestIdle: a sandbox that nobody uses is paused and uses no CPU; its next use wakes it once, and
// nothing else does, before and after a restart of the daemon.
func TestIdle(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	daemontest.Image(t, h.Daemon, "python")
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: runtime}
			defer h.deleteAll(t)
			tellIdle(l)
			if chosen(runtime, "IdleRestarts") {
				tellIdleRestarts(l)
			}
			if chosen(runtime, "IdleEnds") {
				tellIdleEnds(l)
			}
		})
	}
}

// idler makes a sandbox that is idle after a second.
func (l *lab) idler(ext ...string) string {
	l.Helper()
	r := spec(l.runtime)
	r.Image.URI = "python"
	r.Extensions[wire.ExtIdleAfter] = "1s"
	for i := 0; i < len(ext); i += 2 {
		r.Extensions[ext[i]] = ext[i+1]
	}
	return l.create(l.T, r).ID
}

func tellIdle(l *lab) {
	at := hosttest.FreePort(l.T)
	id := l.idler(wire.ExtPublish, fmt.Sprintf("%s:8000", at))
	server, err := l.api.Start(l.Context(), id, client.Command{
		Argv: []string{"python3", "-m", "http.server", "8000"}, Background: true,
	})
	if err != nil {
		l.Fatal(err)
	}
	server.Close()
	port := "/v1/sandboxes/" + id + "/proxy/8000/"
	eventually(l.T, idleLimit, func() error {
		if a := l.request("GET", port, nil); a.status != 200 {
			return fmt.Errorf("the server in the sandbox: %d %s", a.status, a.body)
		}
		return nil
	})
	l.awaitSleep(id)
	if ps := l.ok("ps"); !strings.Contains(ps, "Paused (idle)") {
		l.Errorf("ps printed %s", ps)
	}
	// Neither pings nor reads wake it, and it uses no CPU.
	woken := l.wakes(id)
	before := int64(-1)
	same := func() (err error) {
		was := before
		if before = l.usage(id).CPUMicros; before != was {
			err = fmt.Errorf("asleep, it has used %d µs of CPU, and before %d", before, was)
		}
		return err
	}
	settles(l.T, same) // the kernel counts a process as frozen just before it gives up its CPU
	pings := func() error {
		for range 10 {
			if a := l.request("GET", "/v1/sandboxes/"+id+"/proxy/44772/ping", nil); a.status != 200 {
				l.Fatalf("ping: %d %s", a.status, a.body)
			}
			l.inspect(id)
		}
		return same()
	}
	if err := pings(); err != nil {
		l.T.Log(err)
		if err := pings(); err != nil { // it was no process that gave up its CPU so late
			l.Error(err)
		}
	}
	if n := l.wakes(id); n != woken {
		l.Errorf("pings and inspections woke it %d times", n-woken)
	}
	l.awaitSleep(id)
	// Each kind of use wakes it.
	for what, use := range map[string]func(){
		"a command": func() { l.answers(l.T, id) },
		"a port": func() {
			if a := l.request("GET", port, nil); a.status != 200 {
				l.Errorf("a port: %d %s", a.status, a.body)
			}
		},
		"a file call": func() {
			if a := l.request("GET", "/v1/sandboxes/"+id+"/proxy/44772/files/info?path=/etc/passwd", nil); a.status != 200 {
				l.Errorf("a file call: %d %s", a.status, a.body)
			}
		},
		"a command that lasts": func() {
			start := time.Now()
			out, err := l.exec(l.Context(), id, "python3", "-c", "import time; time.sleep(3); print(time.time_ns())")
			if err != nil {
				l.Error(err)
			}
			end, err := strconv.ParseInt(strings.TrimSpace(out), 10, 64)
			if err != nil {
				l.Error(err)
			}
			// The line of a pause is written when it is over: that of the last one perhaps after start. Since
			// end, the sandbox may have fallen asleep again.
			for _, pause := range l.said(start, "op=idle_pause sandbox="+id+" ") {
				if began := pause.at.Add(-pause.took(l.T)); began.After(start) && began.Before(time.Unix(0, end)) {
					l.Errorf("it was paused while a command ran: %s", pause.text)
				}
			}
		},
	} {
		use()
		l.awaitSleep(id)
		if n := l.wakes(id); n <= woken {
			l.Errorf("%s has not woken it", what)
		}
		woken = l.wakes(id)
	}
	// Many at once wake it once.
	l.connectAll(at, 20)
	if n := l.wakes(id); n != woken+1 {
		l.Errorf("20 connections woke it %d times", n-woken)
	}
}

// connectAll sends n requests at once to a published port, of which none ends before all are answered.
func (l *lab) connectAll(at netip.AddrPort, n int) {
	l.Helper()
	var all, answered sync.WaitGroup
	for range n {
		answered.Add(1)
		all.Go(func() {
			line, err := "", error(nil)
			c, err := net.Dial("tcp", at.String())
			if err == nil {
				defer c.Close()
				c.SetDeadline(time.Now().Add(idleLimit)) //nolint:errcheck // then it hangs
				fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
				line, err = bufio.NewReader(c).ReadString('\n')
			}
			if err != nil || !strings.Contains(line, "200 OK") {
				l.Errorf("published port: %q, %v", line, err)
			}
			answered.Done()
			answered.Wait()
		})
	}
	all.Wait()
}

// tellIdleRestarts: what paused a sandbox survives the daemon.
func tellIdleRestarts(l *lab) {
	id := l.idler()
	ctx := l.Context()
	restart := func() {
		l.Stop()
		l.Start()
	}
	l.awaitSleep(id)
	restart()
	l.awaitSleep(id)
	l.answers(l.T, id)
	l.awaitSleep(id)
	if err := l.api.Pause(ctx, id); err != nil { // now it is the client's
		l.Fatal(err)
	}
	for range 2 {
		if _, err := l.exec(ctx, id, "true"); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "resume it first") {
			l.Errorf("a command in a sandbox that a client paused: %v", err)
		}
		if sb, err := l.api.Get(ctx, id); err != nil || sb.Status.State != wire.Paused || sb.Sandboxd.Idle.Asleep {
			l.Errorf("%+v, %+v, %v", sb.Status, sb.Sandboxd.Idle, err)
		}
		restart()
	}
	if err := l.api.Resume(ctx, id); err != nil {
		l.Fatal(err)
	}
	l.awaitSleep(id)
}

// tellIdleEnds: a policy may stop a sandbox, which no use starts, or delete it.
func tellIdleEnds(l *lab) {
	ctx := l.Context()
	stops, goes := l.make("--idle", "1s", "--on-idle", "stop", "base"), l.make("--idle", "1s", "--on-idle", "kill", "base")
	l.wants(l.ctl("create", "--on-idle", "stop", "base"), 125, "add that")
	l.wants(l.ctl("create", "--idle", "1s", "--on-idle", "sleep", "base"), 125, "one of pause, hibernate, stop, kill")
	sb := l.awaitState(l.T, stops, wire.Terminated, idleLimit)
	_, err := l.exec(ctx, stops, "true")
	if sb.Status.Reason != "stopped" || err == nil || !strings.Contains(err.Error(), "it was idle for 1s") {
		l.Errorf("%+v; a command: %v", sb.Status, err)
	}
	eventually(l.T, idleLimit, func() error {
		if _, err := l.api.Get(ctx, goes); !errs.Is(err, errs.NotFound) {
			return fmt.Errorf("sandbox %s is not deleted: %w", goes, err)
		}
		return nil
	})
}

// TestKillAsleep kills the daemon at each step of an idle pause and of a wake. The next daemon finishes
// or undoes it, and knows that it was no client's pause: a use finds the sandbox running, or wakes it.
func TestKillAsleep(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		for _, point := range []string{
			"store:put:pausing", "after:store:put:pausing", "freeze", "after:freeze", "store:put:paused", "after:store:put:paused",
			"store:put:resuming", "after:store:put:resuming", "thaw", "after:thaw", "store:put:running", "after:store:put:running",
		} {
			if !everything && (!strings.HasPrefix(point, "after:") || !chosen(runtime, "asleep"+point)) {
				continue
			}
			t.Run(runtime+"/"+point, func(t *testing.T) {
				l := &lab{host: h, T: t, runtime: runtime}
				h.Stop()
				arm := point + "=kill"
				if strings.HasSuffix(point, "running") {
					arm = point + ":2=kill" // the first is the creation's
				}
				if err := h.StartArmed(arm); err != nil {
					t.Fatalf("start: %v", err)
				}
				defer h.deleteAll(t)
				id := l.make("--idle", "1s", "base")
				eventually(t, idleLimit, func() error {
					select {
					case <-h.Ended():
						return nil
					default:
					}
					sb, err := h.api.Get(t.Context(), id)
					if err != nil || !sb.Sandboxd.Idle.Asleep || sb.Status.State != wire.Paused {
						return fmt.Errorf("sandbox %s is %+v: %w", id, sb.Status, err)
					}
					_, err = h.exec(t.Context(), id, "true") // and the daemon dies
					return fmt.Errorf("the daemon never passed %s: %w", point, err)
				})
				if err := h.TryStart(); err != nil {
					t.Fatalf("start again: %v", err)
				}
				h.answers(t, id) // refused, if it seemed a client's pause
				l.awaitSleep(id)
			})
		}
	}
}
