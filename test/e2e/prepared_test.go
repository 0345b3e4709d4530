package e2e_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/btrfs"
)

// hasSlots waits until the host has so many prepared slots, or the daemon has ended.
func (h host) hasSlots(t *testing.T, n int) {
	t.Helper()
	settles(t, func() error {
		select {
		case <-h.Ended():
			return nil
		default:
		}
		df, err := h.api.System().DiskUsage(t.Context())
		if err == nil && df.Prepared.Slots != n {
			err = fmt.Errorf("there are %d prepared slots, not %d", df.Prepared.Slots, n)
		}
		return err
	})
}

// links lists the IDs that have a link on the host.
func (h host) links() (ids []string) {
	for _, line := range hosttest.Held(h.Instance) {
		if name, ok := strings.CutPrefix(line, "link sb-"); ok {
			ids = append(ids, name)
		}
	}
	return ids
}

// TestPreparedSlots: slots are made while nothing comes up, a create takes one, another
// is made, and all are released when the host drains and when the daemon stops.
func TestPreparedSlots(t *testing.T) {
	const each = 2
	h := newHost(t, daemontest.Options{Prepared: each, Pool: pool.BtrfsLoop})
	all := each * len(runtimes)
	ctx := t.Context()
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			h.hasSlots(t, all)
			slots := h.links()
			if boxes, err := h.api.List(ctx, client.Filter{}); err != nil || len(boxes) > 0 {
				t.Errorf("clients see %+v, %v", boxes, err)
			}
			for _, id := range slots {
				if err := h.api.Delete(ctx, id); !errs.Is(err, errs.NotFound) {
					t.Errorf("delete of a prepared slot: %v", err)
				}
			}
			sb := h.create(t, spec(runtime))
			if !slices.Contains(slots, sb.ID) {
				t.Errorf("sandbox %s took none of the slots %v", sb.ID, slots)
			}
			if line := operation(t, h, "create", sb.ID); !strings.Contains(line, "prepared=true") {
				t.Error(line)
			}
			h.answers(t, sb.ID)
			if out, err := h.exec(ctx, sb.ID, "sh", "-c", "echo here >/root/f && cat /root/f"); err != nil || out != "here\n" {
				t.Errorf("its disk: %q, %v", out, err)
			}
			h.hasSlots(t, all)
			text := scrape(t, h.Daemon)
			for _, want := range []string{
				fmt.Sprintf("\nsandboxd_prepared_slots{runtime=%q} %d\n", runtime, each),
				fmt.Sprintf("\nsandboxd_sandboxes{runtime=%q,state=\"running\"} 1\n", runtime),
			} {
				if !strings.Contains(text, want) {
					t.Errorf("the metrics do not say %s", want)
				}
			}
			h.deletes(t, sb.ID)
			h.holdsNothingOf(t, sb.ID)
		})
	}
	h.saysReady(t, all)
	if err := h.api.System().Drain(ctx, true); err != nil {
		t.Fatal(err)
	}
	h.hasSlots(t, 0)
	settles(t, func() error {
		if ids := h.links(); len(ids) > 0 {
			return fmt.Errorf("a host that drains has the links of %v", ids)
		}
		return nil
	})
	if err := h.api.System().Drain(ctx, false); err != nil {
		t.Fatal(err)
	}
	h.hasSlots(t, all)
	h.Stop()
	if ids := h.links(); len(ids) > 0 {
		t.Errorf("the daemon that stopped has left the links of %v", ids)
	}
}

// saysReady reads what people read: `system df` counts the slots, and like the doctor it
// says how much of the pool is written. Where the pool is in no file, or the file system below
// does not tell (tmpfs has no FIEMAP), nobody says that.
func (h host) saysReady(t *testing.T, slots int) {
	t.Helper()
	_, size, err := btrfs.Written(pool.Image(h.StateDir))
	told := err == nil
	if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, errors.ErrUnsupported) {
		t.Fatal(err)
	}
	percent := func() int64 {
		t.Helper()
		df, err := h.api.System().DiskUsage(t.Context())
		if err != nil || (df.Pool.ReadyBytes > 0) != told {
			t.Fatalf("the API says of the pool %+v, %v; its file tells: %v", df.Pool, err, told)
		}
		return df.Pool.ReadyBytes * 100 / max(size, 1)
	}
	before := percent() // the daemon writes more of it meanwhile
	cmd := exec.CommandContext(t.Context(), daemontest.Bin("sandboxctl"), "system", "df")
	cmd.Env = append(os.Environ(), "SANDBOXD_HOST=unix://"+h.Socket)
	out, err := cmd.CombinedOutput()
	if want := fmt.Sprintf("\nprepared slots, which wait for a create: %d (", slots); err != nil || !strings.Contains(string(out), want) {
		t.Errorf("df does not say %q (%v):\n%s", want, err, out)
	}
	if regexp.MustCompile(`\nready [0-9.]+[KMG]iB of the pool: `).Match(out) != told {
		t.Errorf("df on how much of the pool is ready, which its file tells (%v):\n%s", told, out)
	}
	found, err := doctor(t, h.Config)
	if err != nil {
		t.Error(err)
	}
	i := slices.IndexFunc(found, func(f finding) bool { return f.Check == "pool" })
	if i < 0 {
		t.Fatalf("the doctor says nothing about the pool: %+v", found)
	}
	if !told {
		if strings.Contains(found[i].Detail, "ready") {
			t.Errorf("the doctor says %q, and nothing tells", found[i].Detail)
		}
		return
	}
	_, said, _ := strings.Cut(found[i].Detail, "MiB free, ")
	ready, err := strconv.ParseInt(strings.Split(said, " % ready")[0], 10, 64)
	if err != nil || ready < before || ready > percent() {
		t.Errorf("the doctor says %q (%v), and the API from %d to %d %%", found[i].Detail, err, before, percent())
	}
}

// ofSlots are the steps in which slots are prepared and taken.
func ofSlots() (names []string) {
	for _, name := range sandbox.FailpointNames() {
		switch verb, of, _ := strings.Cut(strings.TrimPrefix(name, "after:"), ":"); {
		case verb == "prepare", verb == "fit", verb == "store" && (of == "prepare" || of == "take"):
			names = append(names, name)
		}
	}
	return names
}

// TestKillWithSlots is TestKillAtEveryStep for those of prepared slots.
func TestKillWithSlots(t *testing.T) {
	h := newHost(t, daemontest.Options{Prepared: 1})
	ctx := t.Context()
	drain := func(on bool) {
		t.Helper()
		if err := h.api.System().Drain(ctx, on); err != nil {
			t.Fatal(err)
		}
	}
	bystander := h.create(t, spec(runtimes[0])).ID
	h.deleteAll(t, bystander)
	h.create(t, spec(runtimes[1])) // the first use of a runtime leaves what others share
	h.deleteAll(t, bystander)
	drain(true)
	h.hasSlots(t, 0)
	var before []string
	settles(t, func() error {
		before = h.holds()
		for _, line := range before {
			if id := sandboxes.FindString(line); id != "" && id != bystander {
				return fmt.Errorf("the host holds %s", line)
			}
		}
		return nil
	})
	drain(false)
	for _, runtime := range runtimes {
		for _, point := range ofSlots() {
			if !chosen(runtime, point) {
				continue
			}
			t.Run(runtime+"/"+point, func(t *testing.T) {
				h.Stop()
				h.StartArmed(point + "=kill") //nolint:errcheck // it makes slots before it says that it serves
				h.hasSlots(t, len(runtimes))
				if sb, err := h.api.Create(ctx, spec(runtime), true); err == nil {
					t.Fatalf("a creation with slots never passed %s: %+v", point, sb)
				}
				<-h.Ended()
				if err := h.TryStart(); err != nil {
					t.Fatalf("start again: %v", err)
				}
				agree(t, h)
				h.hasSlots(t, len(runtimes))
				h.answers(t, h.create(t, spec(runtime)).ID)
				h.deleteAll(t, bystander)
				drain(true)
				h.holdsOnly(t, before)
				drain(false)
				h.answers(t, bystander)
			})
		}
	}
}
