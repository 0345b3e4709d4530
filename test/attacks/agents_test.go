package attacks_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// agentAttacks are what guest root can do to PID 1, and what a sandbox can have the daemon
// do by living, dying and being started again.
var agentAttacks = []attack{
	{
		name: "kill the agent", wall: "the end of PID 1 is the end of its sandbox alone",
		run: []string{"sh", "-c", "kill -ABRT 1; kill -SEGV 1; sleep 5; echo ok"}, own: nothing,
		says: "runtime_crash", held: words{"gone"}, runc: unproven("guest root may: what counts is that all others are unharmed"),
		runsc: unproven("as on runc"),
	},
	{
		// On runc guest root may: see the next.
		name: "write the agent's memory as guest root", wall: "the sentry lets a program trace its descendants only",
		run: []string{"write", "/proc/1/mem"}, held: refused, runsc: without(weak.Caps),
	},
	{
		name: "answer in the agent's place", wall: "the agent's word is data: its size and time have bounds", all: true,
		held: words{"apart"}, daemon: unproven("the bounds are many; pkg/agent tests each"), ask: impersonate,
	},
	{ // CVE-2024-21626
		name: "leave by a working directory", wall: "PID 1 has no descriptor of the host", held: words{"none"},
		daemon: without(weak.Descriptors), ask: func(t *testing.T, w *target) string {
			way := strings.Repeat("../", 16) + w.marker[1:]
			for n := range 12 {
				for _, dir := range []string{fmt.Sprintf("/proc/self/fd/%d", n), fmt.Sprintf("/proc/1/fd/%d", n)} {
					p, err := w.api.Start(t.Context(), w.a.ID, client.Command{Argv: []string{"cat", way}, Dir: dir})
					if err != nil {
						continue // it is no directory
					}
					var out, errout bytes.Buffer
					p.Wait(&out, &errout) //nolint:errcheck // what it printed says whether it got there
					if strings.Contains(out.String(), secret) {
						return "ok"
					}
				}
			}
			return "none"
		},
	},
	{ // as CVE-2021-30465: the place of a mount is swapped
		name: "a link in the place of a mount", wall: "no link is followed on the way to a mount's place", held: words{"unchanged"},
		daemon: unproven("without the wall the volume would cover a directory of the host"), ask: func(t *testing.T, w *target) string {
			sb := w.create(t, "runc", func(r *wire.CreateRequest) {
				r.Volumes = []wire.VolumeMount{{Name: "v", Host: &wire.HostPath{Path: w.lent}, MountPath: "/mnt/place/lent"}}
			})
			defer w.api.Delete(t.Context(), sb.ID) //nolint:errcheck // deleteAll finds it
			swap := "mv /mnt/place /mnt/away && ln -s " + strings.Repeat("../", 12) + w.dir[1:] + " /mnt/place && echo ok"
			if g := w.exec(t, sb.ID, 0, []string{"sh", "-c", swap}); g.word != "ok" {
				return "not swapped: " + g.String()
			}
			must(t, w.api.Stop(t.Context(), sb.ID, 0))
			_, err := w.api.Restart(t.Context(), sb.ID, true) // it may be refused
			mounts, readErr := os.ReadFile("/proc/self/mountinfo")
			must(t, readErr)
			for line := range strings.Lines(string(mounts)) {
				if strings.HasPrefix(strings.Fields(line)[4], w.dir) { // where it is mounted: proc(5)
					return "ok"
				}
			}
			return unchanged(t, w, fmt.Sprint(err))
		},
	},
	{
		name: "a file of the image", wall: "the overlay writes to the sandbox's own disk", held: words{"own"},
		daemon: unproven("a rule of the kernel's overlay"), ask: func(t *testing.T, w *target) string {
			sb := w.create(t, "runc", nil)
			g := w.exec(t, sb.ID, 0, []string{"sh", "-c", "echo changed >>/etc/passwd && rm /etc/group && echo ok"})
			must(t, w.api.Delete(t.Context(), sb.ID))
			if g.word != "ok" {
				return "not changed: " + g.String()
			}
			const look = "test -e /etc/group && ! grep -q changed /etc/passwd && echo own"
			for _, id := range []string{w.b.ID, w.create(t, "runsc", nil).ID} { // one that was there, and one that comes
				if g := w.exec(t, id, 0, []string{"sh", "-c", look}); g.word != "own" {
					return g.String()
				}
			}
			return "own"
		},
	},

	// what the daemon writes and remembers
	{
		name: "the log", wall: "denials of a sandbox have a number of lines", held: words{"bounded"}, daemon: without(weak.Log),
		ask: func(t *testing.T, w *target) string {
			ctx, cancel := context.WithTimeout(t.Context(), hosttest.Patient(20*time.Second))
			defer cancel()
			w.exec(t, w.b.ID, 0, []string{"/attack", "connects", "203.0.113.9", "200"})
			for { // the kernel tells of some fifty at once
				all, loud := 0, 0
				for line := range strings.Lines(w.Log()) {
					if strings.Contains(line, "msg=denied ") && strings.Contains(line, w.b.ID) {
						all++
						if strings.Contains(line, "level=INFO") {
							loud++
						}
					}
				}
				switch {
				case loud > 26: // twenty, and one for each second
					return "ok"
				case all >= 30:
					return "bounded"
				case ctx.Err() != nil:
					return fmt.Sprintf("%d denials", all)
				}
				time.Sleep(10 * time.Millisecond) // the log tells nobody of a line
			}
		},
	},
	{
		name: "events", wall: "a restart waits, each for twice as long", held: words{"bounded"},
		daemon: unproven("TestBackOff of pkg/health measures the waits"), ask: func(t *testing.T, w *target) string {
			begin := time.Now()
			sb, err := w.api.Create(t.Context(), wire.CreateRequest{
				Image: &wire.Image{URI: "base"}, Entrypoint: []string{"sleep", "0.1"},
				ResourceLimits: map[string]string{"memory": "128Mi", "cpu": "1"},
				Extensions:     map[string]string{wire.ExtRuntime: "runc", wire.ExtRestart: "always"},
			}, true)
			must(t, err)
			defer w.api.Delete(t.Context(), sb.ID) //nolint:errcheck // deleteAll finds it
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			events := 0
			for ev, err := range w.api.Events(ctx, begin, client.Notices{}) {
				if err != nil {
					break
				}
				if ev.ID == sb.ID {
					events++
				}
			}
			if events == 0 || events > 60 { // a restart is five events
				return fmt.Sprintf("%d events", events)
			}
			return "bounded"
		},
	},
}

// impersonate replaces PID 1 of a sandbox by a program that answers as no agent would. It
// is "apart" if the daemon bears that: each request ends, it takes no memory that lasts,
// others go on, and the sandbox ends as what it was told to.
func impersonate(t *testing.T, w *target) string {
	sb := w.create(t, "runc", func(r *wire.CreateRequest) { // with an entrypoint it has logs
		r.Entrypoint, r.Extensions = []string{"sleep", "600"}, map[string]string{wire.ExtRuntime: "runc"}
	})
	defer w.api.Delete(t.Context(), sb.ID) //nolint:errcheck // deleteAll finds it
	// The agent that is asked for this is gone before it can say how it ended.
	g := w.exec(t, sb.ID, 0, []string{"/attack", "replace", "1", "impostor", "44772"})
	if scope, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil && scope[0] != '0' && g.word == "EACCES" {
		return "apart" // Yama keeps guest root from it
	}
	// The agent shares its port with nobody, so the port is taken until its last connections
	// have left TIME-WAIT, after a minute.
	limit := time.Now().Add(hosttest.Patient(90 * time.Second))
	for {
		a := w.ask(t, "GET", port(sb, wire.AgentPort, "impostor"), daemontest.Key, nil)
		if a.body == "impostor" {
			break
		}
		if time.Now().After(limit) {
			return fmt.Sprintf("not replaced: %s; %s %s", g, a.word(), a.body)
		}
		time.Sleep(100 * time.Millisecond) // nobody tells
	}
	before := w.resident(t)
	var all sync.WaitGroup
	hung := make(chan string, 100)
	for range 10 { // it answers in ten ways, in turn
		for _, r := range [][3]string{
			{"POST", port(sb, wire.AgentPort, "command"), `{"command":"true"}`},
			{"GET", port(sb, wire.AgentPort, "files/info?path=/"), ""},
			{"GET", port(sb, wire.AgentPort, "pty/x/ws"), ""},
			{"GET", "/v1/sandboxes/" + sb.ID + "/logs", ""},
			{"GET", "/v1/sandboxes/" + sb.ID + "/logs?timestamps=true", ""},
			{"GET", "/v1/sandboxes/" + sb.ID + "/diagnostics/summary", ""},
			{"PATCH", "/v1/sandboxes/" + sb.ID + "/limits", `{"resourceLimits":{"cpu":"1"}}`},
			{"GET", "/v1/sandboxes/" + sb.ID + "/proxy/8000/", ""},
		} {
			all.Go(func() {
				a := w.ask(t, r[0], r[1], daemontest.Key, strings.NewReader(r[2]), "Content-Type", "application/json")
				if a.status == 0 && strings.Contains(a.body, "deadline exceeded") {
					hung <- r[0] + " " + r[1]
				}
			})
		}
	}
	all.Wait()
	select {
	case what := <-hung:
		return "hung: " + what
	default:
	}
	if now := w.resident(t); now > before+128<<10 {
		return fmt.Sprintf("the daemon grew from %d to %d KiB", before, now)
	}
	if g := w.exec(t, w.b.ID, 0, []string{"/attack", "nothing"}); g.word != "ok" {
		return "the neighbour: " + g.String()
	}
	must(t, w.api.Stop(t.Context(), sb.ID, time.Second))
	if end, err := w.api.Get(t.Context(), sb.ID); err != nil || end.Status.Reason != "stopped" {
		return fmt.Sprintf("it ended as %+v (%v)", end.Status, err)
	}
	return "apart"
}

// resident is how much memory the daemon has, in KiB.
func (f *field) resident(t *testing.T) (n int) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(f.Pid()), "status"))
	must(t, err)
	_, rest, _ := strings.Cut(string(b), "\nVmRSS:")
	_, err = fmt.Sscan(rest, &n)
	must(t, err)
	return n
}
