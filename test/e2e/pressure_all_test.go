//go:build all

package e2e_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// TestDiskPressure fills a pool of 512 MiB step by step: what has ended goes, then nothing new is made,
// then a sandbox that nobody uses is paused, and at the last byte only writes fail, also over a daemon
// that is killed. Then there is room again, and all is as before.
func TestDiskPressure(t *testing.T) {
	h := connect(t, daemontest.NewWith(t, daemontest.Options{
		Instance: daemontest.Other, StateDir: filepath.Join(t.TempDir(), "state"), Pool: pool.BtrfsLoop, PoolSize: "512Mi",
		Storage: []string{`reserve = "64Mi"`},
	}))
	daemontest.Image(t, h.Daemon, "base")
	p := &pressed{host: h, T: t, fill: filepath.Join(h.StateDir, "pool", "fill")}
	p.follow()
	one, err := h.api.Create(t.Context(), spec("runc", "true"), true)
	must(t, err)
	over, ended := one.ID, time.Now()
	idler := spec("runc")
	idler.Extensions[wire.ExtIdleAfter], idler.Extensions[wire.ExtIdleAction] = "1h", "stop"
	asleep, busy := h.create(t, idler).ID, h.create(t, spec("runsc")).ID
	for _, id := range []string{asleep, busy} {
		p.exec(id, "head -c 1000000 /dev/urandom > /mark; md5sum /mark > /sum; sync")
	}
	p.rungs("0")

	p.leave(100)
	p.rungs("1")
	h.answers(t, h.create(t, spec("runc")).ID) // nothing is refused
	eventually(t, time.Until(ended)+2*time.Minute, func() error {
		if _, err := h.api.Get(t.Context(), over); !errs.Is(err, errs.NotFound) {
			return fmt.Errorf("what has ended is still there: %v", err)
		}
		return nil
	})

	p.leave(40)
	p.rungs("2")
	h.refused(t, errs.Exhausted, "the storage pool has", "storage.reserve", "sandboxctl system df")
	if _, err := h.api.Snapshots().Create(t.Context(), busy, "", true); !errs.Is(err, errs.Exhausted) ||
		!strings.Contains(err.Error(), "no room for another snapshot: the storage pool has") {
		t.Errorf("a snapshot: %v", err)
	}
	found, _ := doctor(t, h.Config)
	if i := slices.IndexFunc(found, func(f finding) bool { return f.Check == "disk-pressure" }); i < 0 || found[i].Status != "fail" ||
		!strings.Contains(found[i].Detail, "refuse: the storage pool has") {
		t.Errorf("the doctor: %+v", found)
	}

	p.leave(8)
	p.rungs("3")
	eventually(t, 2*time.Minute, func() error {
		p.exec(busy, "true") // a use
		sb, err := h.api.Get(t.Context(), asleep)
		if err == nil && (sb.Status.State != wire.Paused || !sb.Sandboxd.Idle.Asleep) {
			err = fmt.Errorf("sandbox %s is %+v", asleep, sb.Status)
		}
		return err
	})
	if sb, err := h.api.Get(t.Context(), busy); err != nil || sb.Status.State != wire.Running {
		t.Errorf("a sandbox without a policy: %+v, %v", sb.Status, err)
	}
	p.exec(asleep, "md5sum -c /sum") // a use wakes it

	p.full()
	if out, err := h.exec(t.Context(), busy, "sh", "-c", "head -c 30000000 /dev/urandom > /more && sync /more"); err == nil ||
		!strings.Contains(err.Error(), "No space left") {
		t.Errorf("a write beyond the last byte: %q, %v", out, err)
	}
	h.Kill()
	h.Start()
	p.rungs("3")
	h.refused(t, errs.Exhausted, "the storage pool has")
	for _, id := range []string{asleep, busy} {
		p.exec(id, "md5sum -c /sum")
	}

	must(t, os.Remove(p.fill))
	p.exec(busy, "rm -f /more")
	must(t, flush(filepath.Dir(p.fill)))
	p.rungs("0")
	h.answers(t, h.create(t, spec("runc")).ID)
	for _, id := range []string{asleep, busy} {
		p.exec(id, "md5sum -c /sum")
	}
	settles(t, func() error {
		if got := p.events(); !slices.Equal(slices.Compact(got), []string{"collect", "refuse", "rest", "calm"}) {
			return fmt.Errorf("events tell of %q", got)
		}
		return nil
	})
	h.deleteAll(t)
}

// pressed is a daemon whose pool a test fills by a file.
type pressed struct {
	host
	*testing.T
	fill string

	mu   sync.Mutex
	told []string // reasons of events; guarded by mu
}

// follow reads events until the test ends.
func (p *pressed) follow() {
	ctx, cancel := context.WithCancel(p.Context())
	p.Cleanup(cancel)
	go func() {
		for e, err := range p.api.Events(ctx, time.Now().Add(-time.Hour), client.Notices{}) {
			if err == nil && e.Type == "pressure" {
				p.mu.Lock()
				p.told = append(p.told, e.Reason)
				p.mu.Unlock()
			}
		}
	}()
}

func (p *pressed) events() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.told)
}

// exec runs a command of the shell that must succeed.
func (p *pressed) exec(id, line string) {
	p.Helper()
	if out, err := p.host.exec(p.Context(), id, "sh", "-c", line); err != nil {
		p.Errorf("%s in %s: %s, %v", line, id, out, err)
	}
}

// leave makes the file as large as leaves so many MiB of the pool free.
func (p *pressed) leave(mib int64) {
	p.Helper()
	f, err := os.OpenFile(p.fill, os.O_CREATE|os.O_RDWR, 0o600)
	must(p.T, err)
	defer f.Close()
	for try := 0; ; try++ {
		must(p.T, flush(filepath.Dir(p.fill)))
		var st unix.Statfs_t
		must(p.T, unix.Fstatfs(int(f.Fd()), &st))
		more := int64(st.Bavail)*st.Bsize - mib<<20
		if more < 1<<20 {
			return
		}
		if try == 20 {
			p.Fatalf("%d bytes more than %d MiB are free", more, mib)
		}
		end, err := f.Seek(0, 2)
		must(p.T, err)
		must(p.T, f.Truncate(end+more))
		must(p.T, unix.Fallocate(int(f.Fd()), 0, end, more))
	}
}

// full leaves nothing.
func (p *pressed) full() {
	p.Helper()
	f, err := os.OpenFile(p.fill, os.O_WRONLY|os.O_APPEND, 0)
	must(p.T, err)
	defer f.Close()
	for err == nil {
		if _, err = f.Write(make([]byte, 1<<16)); err == nil {
			err = f.Sync()
		}
	}
}

// rungs fails unless the pool comes to a rung, and has it in the metrics.
func (p *pressed) rungs(want string) {
	p.Helper()
	eventually(p.T, time.Minute, func() error {
		text := scrape(p.T, p.Daemon)
		if !strings.Contains(text, `sandboxd_disk_pressure_rung{space="pool"} `+want+"\n") {
			_, at, _ := strings.Cut(text, "\nsandboxd_disk_pressure_rung")
			return fmt.Errorf("want rung %s: %.40s", want, at)
		}
		return nil
	})
}
