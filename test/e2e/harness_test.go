// Package e2e_test drives the real daemon as users do: as a process, through
// its sockets, on both runtimes. Nothing in it knows how the daemon works but
// the names of its failpoints and what it leaves on the host.
package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// runtimes are what every story is told on.
var runtimes = []string{"runc", "runsc"}

// A host is a test daemon and a client of it.
type host struct {
	*daemontest.Daemon
	api *client.Client
}

// newHost starts the daemon of instance t with the image base in it.
func newHost(t *testing.T, o daemontest.Options) host {
	t.Helper()
	h := connect(t, daemontest.NewWith(t, o))
	daemontest.Image(t, h.Daemon, "base")
	return h
}

// connect returns a client of a daemon's Unix socket, which need not be there yet.
func connect(t testing.TB, d *daemontest.Daemon) host {
	t.Helper()
	c, err := client.New("unix://"+d.Socket, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return host{d, c}
}

// spec is a sandbox of base that idles, or runs an entrypoint.
func spec(runtime string, entrypoint ...string) wire.CreateRequest {
	r := wire.CreateRequest{
		Image:          &wire.Image{URI: "base"},
		Entrypoint:     entrypoint,
		ResourceLimits: map[string]string{"memory": "256Mi", "cpu": "1"},
		Extensions:     map[string]string{wire.ExtRuntime: runtime},
	}
	if len(entrypoint) == 0 {
		r.Extensions[wire.ExtIdle] = "true"
	}
	return r
}

// create makes a sandbox that must run.
func (h host) create(t testing.TB, r wire.CreateRequest) wire.Sandbox {
	t.Helper()
	sb, err := h.api.Create(t.Context(), r, true)
	if err != nil {
		t.Fatal(err)
	}
	if sb.Status.State != wire.Running {
		t.Fatalf("created sandbox %s is %+v", sb.ID, sb.Status)
	}
	return sb
}

// exec runs a command to its end and returns what it wrote to stdout.
func (h host) exec(ctx context.Context, id string, argv ...string) (string, error) {
	p, err := h.api.Start(ctx, id, client.Command{Argv: argv})
	if err != nil {
		return "", err
	}
	var out, errw bytes.Buffer
	exit, err := p.Wait(&out, &errw)
	if err == nil && exit.Code != 0 {
		err = fmt.Errorf("%v exited with %d: %s%s", argv, exit.Code, errw.String(), exit.Error)
	}
	return out.String(), err
}

// answers fails the test unless a sandbox runs commands.
func (h host) answers(t testing.TB, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if out, err := h.exec(ctx, id, "echo", "here"); err != nil || out != "here\n" {
		t.Errorf("sandbox %s does not answer: %q, %v", id, out, err)
	}
}

// awaitState waits for a sandbox to be in a state, at most within limit.
func (h host) awaitState(t testing.TB, id, state string, limit time.Duration) wire.Sandbox {
	t.Helper()
	var sb wire.Sandbox
	eventually(t, limit, func() (err error) {
		if sb, err = h.api.Get(t.Context(), id); err == nil && sb.Status.State != state {
			err = fmt.Errorf("sandbox %s is %+v, not %s", id, sb.Status, state)
		}
		return err
	})
	return sb
}

// sandboxes finds an ID.
var sandboxes = regexp.MustCompile(`\b[a-z2-7]{12}\b`)

// deleteAll deletes every sandbox but those named.
func (h host) deleteAll(t testing.TB, but ...string) {
	t.Helper()
	all, err := h.api.List(t.Context(), client.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range all {
		if slices.Contains(but, sb.ID) {
			continue
		}
		if err := h.api.Delete(t.Context(), sb.ID); err != nil {
			t.Errorf("delete %s, which was %s: %v", sb.ID, sb.Status.State, err)
		}
	}
}

// gone fails the test unless a sandbox does not exist.
func (h host) gone(t testing.TB, id string) {
	t.Helper()
	if _, err := h.api.Get(t.Context(), id); !errs.Is(err, errs.NotFound) {
		t.Errorf("sandbox %s is still known: %v", id, err)
	}
}

// holds lists what the host holds for the instance. Process ids are left out:
// a daemon starts its helpers anew.
func (h host) holds() []string {
	all := hosttest.Held(h.Instance)
	for i, line := range all {
		if rest, ok := strings.CutPrefix(line, "process "); ok {
			_, args, _ := strings.Cut(rest, " ")
			all[i] = "process " + args
		}
	}
	slices.Sort(all)
	return all
}

// empty lists what the host holds for the instance without any sandbox, once
// each runtime has been used: the first use leaves what others share.
func (h host) empty(t testing.TB) []string {
	t.Helper()
	for _, runtime := range runtimes {
		h.create(t, spec(runtime))
	}
	h.deleteAll(t)
	var held []string
	settles(t, func() error {
		held = h.holds()
		if i := slices.IndexFunc(held, sandboxes.MatchString); i >= 0 {
			return fmt.Errorf("the host holds %s", held[i])
		}
		return nil
	})
	return held
}

// holdsOnly fails the test unless the host comes to hold what it held before:
// nothing more, and of sandboxes nothing less.
func (h host) holdsOnly(t testing.TB, before []string) {
	t.Helper()
	settles(t, func() error {
		var diff []string
		now := h.holds()
		for _, line := range now {
			if !slices.Contains(before, line) {
				diff = append(diff, "more: "+line)
			}
		}
		for _, line := range before {
			if sandboxes.MatchString(line) && !slices.Contains(now, line) {
				diff = append(diff, "less: "+line)
			}
		}
		if len(diff) == 0 {
			return nil
		}
		return errors.New("the host holds\n" + strings.Join(diff, "\n"))
	})
}

// holdsNothingOf waits until nothing of a sandbox that was deleted is left on the
// host. What was held before something else is noted only then.
func (h host) holdsNothingOf(t testing.TB, id string) {
	t.Helper()
	settles(t, func() error {
		for _, line := range h.holds() {
			if strings.Contains(line, id) {
				return fmt.Errorf("the host holds %s", line)
			}
		}
		return nil
	})
}

// A line is one of the daemon's log.
type line struct {
	at   time.Time // when the daemon wrote it
	text string
}

// took is how long the operation took that a line tells of.
func (l line) took(t testing.TB) time.Duration {
	t.Helper()
	_, rest, _ := strings.Cut(l.text, " dur=")
	word, _, _ := strings.Cut(rest, " ")
	took, err := time.ParseDuration(word)
	if err != nil {
		t.Errorf("%v: %s", err, l.text)
	}
	return took
}

// said lists the lines of the daemon's log with some words, of since or later.
func (h host) said(since time.Time, words string) (all []line) {
	since = since.Truncate(time.Millisecond) // as lines have it
	for text := range strings.Lines(h.Log()) {
		stamp, rest, _ := strings.Cut(strings.TrimPrefix(text, "time="), " ")
		if at, err := time.Parse(time.RFC3339Nano, stamp); err == nil && !at.Before(since) && strings.Contains(rest, words) {
			all = append(all, line{at, text})
		}
	}
	return all
}

// logged waits for such a line and returns the first.
func (h host) logged(t testing.TB, since time.Time, words string) line {
	t.Helper()
	for limit := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) { // twice as late as a sweep could be
		if all := h.said(since, words); len(all) > 0 {
			return all[0]
		}
		if time.Now().After(limit) {
			t.Fatalf("the daemon does not say %q", words)
		}
	}
}

// eventually tries f until it succeeds, and fails the test with the error of the
// first try that began after limit: how long a try takes does not count.
func eventually(t testing.TB, limit time.Duration, f func() error) {
	t.Helper()
	limit = hosttest.Patient(limit)
	deadline := time.Now().Add(limit)
	for {
		began := time.Now()
		err := f()
		if err == nil {
			return
		}
		if began.After(deadline) {
			t.Errorf("after %v: %v", limit, err)
			return
		}
		time.Sleep(10 * time.Millisecond) // what is waited for is looked at from outside
	}
}

// settles tries f until it succeeds, and fails the test when that is late for
// what the kernel or a process of the guest does in its own time (hosttest.Settles).
func settles(t testing.TB, f func() error) {
	t.Helper()
	if err := hosttest.Settles(t, f); err != nil {
		t.Error(err)
	}
}

// soon fails the test unless one of five tries takes no longer than limit, which
// f measures. A busy host delays one or another; what is slow by itself, or waits
// for a timeout or a tick, is slow each time.
func soon(t testing.TB, limit time.Duration, what string, f func() time.Duration) {
	t.Helper()
	limit = hosttest.Patient(limit)
	var all []time.Duration
	for len(all) < 5 {
		took := f().Round(time.Millisecond)
		if all = append(all, took); took <= limit {
			t.Logf("%s: %v", what, all)
			return
		}
	}
	t.Errorf("%s took %v, more than %v each time", what, all, limit)
}

// took is how long f takes.
func took(f func()) time.Duration {
	start := time.Now()
	f()
	return time.Since(start)
}
