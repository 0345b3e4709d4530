package e2e_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// TestHibernate: what a client hibernates uses no memory and answers nobody, over restarts of the
// daemon; then its programs go on, with the disk of the same instant.
func TestHibernate(t *testing.T) {
	h := newHost(t, daemontest.Options{Pool: pool.BtrfsLoop})
	daemontest.Image(t, h.Daemon, "python")
	l := &lab{host: h, T: t, runtime: "runsc"}
	ctx := t.Context()
	r := spec("runsc", "python3", "-c", counting)
	r.Image.URI, r.Extensions[wire.ExtName] = "python", "lab"
	id := h.create(t, r).ID
	before := h.countsOn(t, id, counted{})
	l.ok("hibernate", "lab")
	image := filepath.Join(h.StateDir, "pool", pool.MemoryDir, id)
	sb := l.inspect("lab")
	if s := sb.Status; s.State != wire.Paused || sb.Sandboxd.HibernatedBytes < 16<<20 {
		t.Errorf("it is %+v, with %d bytes of memory on disk", s, sb.Sandboxd.HibernatedBytes)
	}
	if ps := l.ok("ps"); !strings.Contains(ps, "Paused (hibernated)") {
		t.Errorf("ps printed %s", ps)
	}
	if _, err := os.Stat(image); err != nil {
		t.Error(err)
	}
	settles(t, func() error { // the kernel removes links late
		for _, held := range h.holds() {
			if strings.Contains(held, id) && !strings.HasPrefix(held, "file ") { // of its disk and its image
				return fmt.Errorf("it holds %s", held)
			}
		}
		return nil
	})
	for range 2 {
		if _, err := h.exec(ctx, id, "true"); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "hibernates") ||
			!strings.Contains(err.Error(), "sandboxctl resume "+id) {
			t.Errorf("a command in it: %v", err)
		}
		h.Kill()
		h.Start()
	}
	snap, err := h.api.Snapshots().Create(ctx, "lab", "asleep", true) // its files
	if err != nil || snap.Status.State != wire.SnapshotReady {
		t.Errorf("a snapshot of it: %+v, %v", snap, err)
	}
	l.wants(l.ctl("stats", "lab"), 125, "only running and paused sandboxes", "its memory is on disk")
	l.ok("resume", "lab")
	now := h.countsOn(t, id, before)
	h.answers(t, id)
	if _, err := os.Stat(image); !os.IsNotExist(err) {
		t.Errorf("its image is still there: %v", err)
	}
	// Stopped in its sleep, it begins anew with its files.
	l.ok("hibernate", "lab")
	l.ok("stop", "lab")
	if _, err := os.Stat(image); !os.IsNotExist(err) {
		t.Errorf("the image of a stopped sandbox is still there: %v", err)
	}
	l.ok("start", "lab")
	if anew := h.countsOn(t, id, counted{}); anew.Sum == now.Sum {
		t.Error("a sandbox that was stopped went on with its memory")
	}
	l.ok("rm", "-f", "lab")
	onRunc := l.ok("create", "--runtime", "runc", "base")
	l.wants(l.ctl("hibernate", strings.TrimSpace(onRunc)), 125, "on runtime runsc only")
	l.wants(l.ctl("create", "--runtime", "runc", "--idle", "1m", "--on-idle", "hibernate", "base"), 125, "on runtime runsc only")
}

// TestHibernateIdle: a policy hibernates a sandbox that nobody uses; each kind of use wakes it, many
// at once wake it once, and neither pings nor reads do.
func TestHibernateIdle(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	daemontest.Image(t, h.Daemon, "python")
	l := &lab{host: h, T: t, runtime: "runsc"}
	defer h.deleteAll(t)
	at := hosttest.FreePort(t)
	id := l.idler(wire.ExtIdleAction, "hibernate", wire.ExtPublish, fmt.Sprintf("%s:8000", at))
	server, err := l.api.Start(t.Context(), id, client.Command{Argv: []string{"python3", "-m", "http.server", "8000"}, Background: true})
	if err != nil {
		t.Fatal(err)
	}
	server.Close()
	port := "/v1/sandboxes/" + id + "/proxy/8000/"
	eventually(t, idleLimit, func() error {
		if a := l.request("GET", port, nil); a.status != 200 {
			return fmt.Errorf("the server in the sandbox: %d %s", a.status, a.body)
		}
		return nil
	})
	l.awaitHibernation(id)
	woken := l.wakes(id)
	for range 5 {
		if a := l.request("GET", "/v1/sandboxes/"+id+"/proxy/44772/ping", nil); a.status != 200 {
			t.Fatalf("ping: %d %s", a.status, a.body)
		}
		l.inspect(id)
	}
	for what, use := range map[string]func(){
		"a command": func() { l.answers(t, id) },
		"a port": func() {
			if a := l.request("GET", port, nil); a.status != 200 {
				t.Errorf("a port: %d %s", a.status, a.body)
			}
		},
		"a file call": func() {
			if a := l.request("GET", "/v1/sandboxes/"+id+"/proxy/44772/files/info?path=/etc/passwd", nil); a.status != 200 {
				t.Errorf("a file call: %d %s", a.status, a.body)
			}
		},
		"twenty connections": func() { l.connectAll(at, 20) },
	} {
		use()
		if n := l.wakes(id); n != woken+1 {
			t.Errorf("%s woke it %d times", what, n-woken)
		}
		l.awaitHibernation(id)
		woken = l.wakes(id)
	}
	h.Kill()
	h.Start()
	l.connectAll(at, 1) // the next daemon serves the port of a sandbox that hibernates
	l.awaitHibernation(id)
}

// TestRelief: a host that is short of memory hibernates what is asleep before it refuses anything, and
// wakes nothing for which it has no memory. What a client paused stays in memory.
func TestRelief(t *testing.T) {
	h := newHost(t, daemontest.Options{Config: []string{"[limits]", ""}})
	defer h.deleteAll(t)
	ctx := t.Context()
	asleep := spec("runsc")
	asleep.Extensions[wire.ExtIdleAfter] = "1s"
	first, second := h.create(t, asleep).ID, h.create(t, asleep).ID
	paused := h.create(t, spec("runsc")).ID
	if err := h.api.Pause(ctx, paused); err != nil {
		t.Fatal(err)
	}
	l := &lab{host: h, T: t, runtime: "runsc"}
	l.awaitSleep(first)
	l.awaitSleep(second)
	h.setting(t, "limits", `memory_reserve = "64Ti"`)
	h.refused(t, errs.Exhausted, "limits.memory_reserve")
	l.awaitHibernation(first) // a hibernation that takes longer than ten seconds is not waited for
	l.awaitHibernation(second)
	for id, on := range map[string]bool{first: true, second: true, paused: false} {
		if sb, err := h.api.Get(ctx, id); err != nil || sb.Status.State != wire.Paused || sb.Sandboxd.HibernatedBytes > 0 != on {
			t.Errorf("sandbox %s is %+v, with %d bytes on disk, %v", id, sb.Status, sb.Sandboxd.HibernatedBytes, err)
		}
	}
	if _, err := h.exec(ctx, first, "true"); !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "limits.memory_reserve") {
		t.Errorf("a use without memory: %v", err)
	}
	if err := h.api.Resume(ctx, second); !errs.Is(err, errs.Exhausted) {
		t.Errorf("a resume without memory: %v", err)
	}
	h.setting(t, "limits", "max_creating = 3")
	h.answers(t, first)
	h.answers(t, second)
}

// awaitHibernation waits until the idle policy has hibernated a sandbox.
func (l *lab) awaitHibernation(id string) {
	l.Helper()
	eventually(l.T, idleLimit, func() error {
		sb, err := l.api.Get(l.Context(), id)
		if err == nil && (sb.Status.State != wire.Paused || !sb.Sandboxd.Idle.Asleep || sb.Sandboxd.HibernatedBytes == 0) {
			err = fmt.Errorf("sandbox %s is %+v, %+v", id, sb.Status, sb.Sandboxd)
		}
		return err
	})
}

// hibernateAndWake passes all steps of it; the daemon dies at one.
func hibernateAndWake(ctx context.Context, h host, _ string) {
	ctx, cancel := context.WithTimeout(ctx, hosttest.Patient(lifeLimit))
	defer cancel()
	r := withVolumes("runsc")
	r.Extensions[wire.ExtOneShot] = "true"
	sb, err := h.api.Create(ctx, r, true)
	hibernate := func(ctx context.Context, id string) error { return client.Hibernate(ctx, h.api, id) }
	stop := func(ctx context.Context, id string) error { return h.api.Stop(ctx, id, 0) }
	for _, f := range []func(context.Context, string) error{hibernate, h.api.Resume, hibernate, stop} {
		if err == nil {
			err = f(ctx, sb.ID)
		}
	}
	if err != nil { // the daemon dies, or has died
		select {
		case <-h.Ended():
		case <-ctx.Done():
		}
	}
}

// awakes resumes a sandbox that hibernates, and has it answer.
func (h host) awakes(t *testing.T, sb wire.Sandbox) {
	t.Helper()
	if sb.Sandboxd.HibernatedBytes > 0 {
		if err := h.api.Resume(t.Context(), sb.ID); err != nil {
			t.Errorf("a sandbox that hibernates: %v", err)
		}
	}
	h.answers(t, sb.ID)
}
