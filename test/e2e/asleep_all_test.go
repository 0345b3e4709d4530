//go:build all

package e2e_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
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

// TestHibernateFullPool: a pool that is full before the image is whole fails the hibernation, and the
// guest goes on; with room the next one works.
func TestHibernateFullPool(t *testing.T) {
	h := connect(t, daemontest.NewWith(t, daemontest.Options{
		Instance: daemontest.Other, StateDir: filepath.Join(t.TempDir(), "state"), Pool: pool.BtrfsLoop, PoolSize: "512Mi",
		Storage: []string{`reserve = "1Mi"`},
	}))
	daemontest.Image(t, h.Daemon, "base")
	ctx := t.Context()
	holds := "head -c 60000000 /dev/urandom > /dev/shm/fill; md5sum /dev/shm/fill > /tmp/sum; sleep 1d"
	id := h.create(t, spec("runsc", "sh", "-c", holds)).ID
	settles(t, func() error {
		_, err := h.exec(ctx, id, "grep", "-q", "fill", "/tmp/sum")
		return err
	})
	fill := filepath.Join(h.StateDir, "pool", "fill")
	before := len(h.Log())
	// What is written to the pool and not yet written out is counted as free, so the image seems to fit.
	for try := 0; ; try++ {
		dirty(t, fill)
		err := client.Hibernate(ctx, h.api, id)
		if err == nil {
			t.Fatal("it hibernated on a full pool")
		}
		if !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "full") && !strings.Contains(err.Error(), "no room") {
			t.Errorf("on a full pool: %v", err)
		}
		if strings.Contains(h.Log()[before:], "hibernate") && !strings.Contains(err.Error(), "no room") {
			break
		}
		if try == 5 {
			t.Fatalf("the kernel wrote out each time, so the daemon knew that there is no room: %v", err)
		}
		must(t, os.Remove(fill))
		must(t, flush(filepath.Join(h.StateDir, "pool")))
	}
	if sb, err := h.api.Get(ctx, id); err != nil || sb.Status.State != wire.Running {
		t.Errorf("afterwards: %+v, %v", sb.Status, err)
	}
	if _, err := os.Stat(filepath.Join(h.StateDir, "pool", pool.MemoryDir, id)); !os.IsNotExist(err) {
		t.Errorf("half of an image is left: %v", err)
	}
	h.answers(t, id)
	must(t, os.Remove(fill))
	must(t, flush(filepath.Join(h.StateDir, "pool")))
	settles(t, func() error { return client.Hibernate(ctx, h.api, id) })
	must(t, h.api.Resume(ctx, id))
	if _, err := h.exec(ctx, id, "md5sum", "-c", "/tmp/sum"); err != nil {
		t.Error(err)
	}
	h.deleteAll(t)
}

// dirty makes a file that leaves 30 MB of its file system free. The kernel has not yet written out the
// last 120 MB of it, and need not yet.
func dirty(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	var st unix.Statfs_t
	must(t, unix.Fstatfs(int(f.Fd()), &st))
	free := int64(st.Bavail) * st.Bsize
	must(t, unix.Fallocate(int(f.Fd()), 0, 0, free-150<<20))
	b := make([]byte, 1<<20)
	for at := free - 150<<20; at < free-30<<20; at += int64(len(b)) {
		if _, err := f.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
	}
}

// TestWakeMany: twenty hibernated sandboxes wake at the same time, each with its own memory.
func TestWakeMany(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	defer h.deleteAll(t)
	ctx := t.Context()
	var ids []string
	for i := range 20 {
		id := h.create(t, spec("runsc")).ID
		fill := fmt.Sprintf("echo %d > /dev/shm/mark; head -c 20000000 /dev/urandom > /dev/shm/fill", i)
		if _, err := h.exec(ctx, id, "sh", "-c", fill); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	all := func(f func(i int, id string) error) {
		var wg sync.WaitGroup
		for i, id := range ids {
			wg.Go(func() {
				if err := f(i, id); err != nil {
					t.Errorf("sandbox %d, %s: %v", i, id, err)
				}
			})
		}
		wg.Wait()
	}
	all(func(_ int, id string) error { return client.Hibernate(ctx, h.api, id) })
	start := time.Now()
	all(func(_ int, id string) error { return h.api.Resume(ctx, id) })
	t.Logf("20 sandboxes woke in %v", time.Since(start))
	all(func(i int, id string) error {
		out, err := h.exec(ctx, id, "cat", "/dev/shm/mark")
		if err == nil && out != fmt.Sprintf("%d\n", i) {
			err = fmt.Errorf("it has the memory of %q", out)
		}
		return err
	})
	if err := hosttest.Settles(t, func() error {
		left, err := os.ReadDir(filepath.Join(h.StateDir, "pool", pool.MemoryDir))
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("images are left: %v", left)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

func flush(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}
