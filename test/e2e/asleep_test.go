package e2e_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestHibernateTerminals: a terminal wakes a sandbox that its policy hibernates, by sandboxctl and by a
// WebSocket.
func TestHibernateTerminals(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	l := &lab{host: h, T: t, runtime: "runsc"}
	defer h.deleteAll(t)
	ctx := t.Context()
	id := l.make("--idle", "1s", "--on-idle", "hibernate", "base")
	l.awaitHibernation(id)
	s := l.sit("exec", "-it", id, "sh", "-c", "echo awake; read x; echo got $x")
	s.says("awake")
	s.types("it\r")
	s.says("got it")
	<-s.done
	l.awaitHibernation(id)
	woken := l.wakes(id)
	var w *socket
	eventually(t, idleLimit, func() (err error) { // it may fall asleep between the two requests, and a use waits for 15 s
		w, err = h.tcpDoor().start(ctx, id, "stty -echo; echo ready; read x; echo got $x")
		return err
	})
	if w == nil {
		t.FailNow()
	}
	if err := w.until(ctx, "ready\r\n"); err != nil {
		t.Error(err)
	}
	if err := w.types(ctx, "it\n"); err != nil {
		t.Error(err)
	}
	if err := w.until(ctx, "got it\r\n"); err != nil {
		t.Error(err)
	}
	if err := w.exits(ctx, 0); err != nil {
		t.Error(err)
	}
	if n := l.wakes(id); n < woken+1 { // it may have fallen asleep between the request that made the session and the WebSocket
		t.Error("a terminal has not woken it")
	}
}

// TestHibernateUsedMeanwhile: a use that comes while the policy hibernates a sandbox waits, and then
// wakes it.
func TestHibernateUsedMeanwhile(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	l := &lab{host: h, T: t, runtime: "runsc"}
	defer h.deleteAll(t)
	ctx := t.Context()
	r := spec("runsc")
	r.Extensions[wire.ExtIdleAfter], r.Extensions[wire.ExtIdleAction] = "1s", "hibernate"
	id := h.create(t, r).ID
	if _, err := h.exec(ctx, id, "sh", "-c", "head -c 50000000 /dev/urandom > /dev/shm/fill"); err != nil {
		t.Fatal(err)
	}
	limited, cancel := context.WithTimeout(ctx, hosttest.Patient(idleLimit))
	defer cancel()
	for e, err := range h.api.Events(limited, time.Now().Add(-time.Minute), client.Notices{}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.ID == id && e.Type == "hibernating" {
			break
		}
	}
	eventually(t, idleLimit, func() error { // a large memory, or a busy host, may take longer than a use waits
		_, err := h.exec(ctx, id, "true")
		if err != nil && !errs.Is(err, errs.Unavailable) {
			t.Errorf("a use meanwhile: %v", err)
		}
		return err
	})
	if l.wakes(id) == 0 {
		t.Error("it was not woken")
	}
	l.awaitHibernation(id)
}

// TestRestoreAsleep: a backup has the records of hibernated sandboxes, and the pool their images. What
// hibernates now wakes; what has woken since runs on; what has hibernated since begins with its files.
func TestRestoreAsleep(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	l := &lab{host: h, T: t, runtime: "runsc"}
	ctx := t.Context()
	mark := func(id string) string {
		t.Helper()
		out, err := h.exec(ctx, id, "sh", "-c", "cat /dev/shm/mark 2>/dev/null; cat /root/file")
		if err != nil {
			t.Error(err)
		}
		return out
	}
	var ids []string
	for range 3 {
		id := h.create(t, spec("runsc")).ID
		if _, err := h.exec(ctx, id, "sh", "-c", "echo memory > /dev/shm/mark; echo file > /root/file"); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	sleeps, woke, slept := ids[0], ids[1], ids[2]
	must(t, client.Hibernate(ctx, h.api, sleeps))
	must(t, client.Hibernate(ctx, h.api, woke))
	file := h.backup(t)
	must(t, h.api.Resume(ctx, woke))
	must(t, client.Hibernate(ctx, h.api, slept))
	h.Stop()
	t.Cleanup(func() { // the state directory is that of all tests
		h.Stop()
		if said, err := h.restore(t, "--accept"); err != nil {
			t.Errorf("%v: %s", err, said)
		}
		kept, _ := filepath.Glob(filepath.Join(h.StateDir, "sandboxd.db.before-restore-*"))
		for _, path := range kept {
			os.Remove(path)
		}
	})
	restore := func(arg string) {
		t.Helper()
		if said, err := h.restore(t, arg); err != nil {
			t.Fatalf("%v\n%s", err, said)
		}
	}
	restore(file)
	h.Start()
	if sb := l.inspect(sleeps); sb.Status.State != wire.Paused || sb.Sandboxd.HibernatedBytes == 0 {
		t.Errorf("one that hibernates is %+v", sb.Status)
	}
	must(t, h.api.Resume(ctx, sleeps))
	for _, id := range []string{sleeps, woke} {
		if got := mark(id); got != "memory\nfile\n" {
			t.Errorf("sandbox %s has %q", id, got)
		}
	}
	if sb := l.inspect(slept); sb.Status.State != wire.Failed {
		t.Errorf("one that ran at the time of the backup, and hibernated when it was restored, is %+v", sb.Status)
	}
	if _, err := h.api.Restart(ctx, slept, true); err != nil {
		t.Error(err)
	}
	h.Stop()
	restore("--accept")
	h.Start()
	if got := mark(slept); got != "file\n" {
		t.Errorf("started again, it has %q", got)
	}
	for _, id := range []string{sleeps, woke} {
		if got := mark(id); got != "memory\nfile\n" {
			t.Errorf("when it was accepted, sandbox %s has %q", id, got)
		}
	}
	for _, id := range ids {
		if _, err := os.Stat(filepath.Join(h.StateDir, "pool", pool.MemoryDir, id)); !os.IsNotExist(err) {
			t.Errorf("an image of %s is left: %v", id, err)
		}
	}
	h.deleteAll(t)
}

// TestHibernateOnce: a sandbox of --rm that hibernates survives a crash of the host, as any other.
func TestHibernateOnce(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	defer h.deleteAll(t)
	ctx := t.Context()
	r := spec("runsc")
	r.Extensions[wire.ExtOneShot] = "true"
	id := h.create(t, r).ID
	if _, err := h.exec(ctx, id, "sh", "-c", "echo here > /root/file"); err != nil {
		t.Fatal(err)
	}
	crash := func() { // as far as the disk can tell
		must(t, unix.Setxattr(filepath.Join(h.StateDir, "pool", id), "trusted.sandboxd.boot", []byte("another"), 0))
	}
	must(t, client.Hibernate(ctx, h.api, id))
	h.Stop()
	crash()
	h.Start()
	must(t, h.api.Resume(ctx, id))
	if out, err := h.exec(ctx, id, "cat", "/root/file"); err != nil || out != "here\n" {
		t.Errorf("%q, %v", out, err)
	}
	must(t, client.Hibernate(ctx, h.api, id))
	crash()
	must(t, h.api.Stop(ctx, id, 0))
	if _, err := h.api.Restart(ctx, id, true); err != nil {
		t.Error(err)
	}
	if out, err := h.exec(ctx, id, "cat", "/root/file"); err != nil || out != "here\n" {
		t.Errorf("stopped and started: %q, %v", out, err)
	}
}
