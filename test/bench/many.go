package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/oci"
)

const many = 200

// manySandboxes: what 200 sandboxes cost the daemon, how long it takes to list them, and to
// create one more. Creations on the empty host are measured before and after, so that a
// host that became busier does not count as the cost of 200 sandboxes.
func manySandboxes(ctx context.Context, b *bench) error {
	const mb = 1e6
	empty := float64(processKB(b.pid, "status", "VmRSS:")) * 1024 / mb
	g := goal{maxP50: 60}
	b.add(row("daemon_rss_at_0", "-", "MB", []float64{empty}, "", nil, g))
	n := b.times(20, 4)
	at0, at200 := map[string][]float64{}, map[string][]float64{}
	if err := b.creations(ctx, n, at0); err != nil {
		return err
	}
	ids, err := b.crowd(ctx, oci.Runc, many)
	if err != nil {
		return errors.Join(err, b.dropAll(ctx, ids))
	}
	var lists []float64
	err = b.creations(ctx, n, at200)
	for range b.times(100, 20) {
		start := time.Now()
		l, listErr := b.cl.List(ctx, client.Filter{})
		lists = append(lists, ms(time.Since(start)))
		if err = errors.Join(err, listErr); err == nil && len(l) != many {
			err = fmt.Errorf("listed %d sandboxes of %d", len(l), many)
		}
	}
	full := float64(processKB(b.pid, "status", "VmRSS:")) * 1024 / mb
	if err := errors.Join(err, b.dropAll(ctx, ids)); err != nil {
		return err
	}
	if err := b.creations(ctx, n, at0); err != nil {
		return err
	}
	g.maxP50 += 0.2 * many
	b.add(row("daemon_rss_at_200", "-", "MB", []float64{full}, "", nil, g))
	b.add(row("list_200", "-", "ms", lists, "", nil, goal{maxP50: 5}))
	for _, rt := range runtimes {
		b.add(row("create_at_200", rt, "ms", at200[rt], "the same on an empty host", at0[rt], goal{maxRatio: 1.2}))
	}
	return nil
}

// crowd creates n sandboxes. With an error it also returns the sandboxes that it made.
func (b *bench) crowd(ctx context.Context, runtime string, n int) ([]string, error) {
	ids := make([]string, n)
	_, err := inParallel(n, func(i int) error {
		sb, err := b.create(ctx, runtime)
		ids[i] = sb.ID
		return err
	})
	return ids, err
}

// creations creates and drops n sandboxes on each runtime.
func (b *bench) creations(ctx context.Context, n int, into map[string][]float64) error {
	for i := range n + 1 {
		for _, rt := range runtimes {
			start := time.Now()
			sb, err := b.create(ctx, rt)
			took := ms(time.Since(start))
			if err != nil {
				return err
			}
			if err := b.drop(ctx, sb.ID); err != nil {
				return err
			}
			if i > 0 { // the first warms up
				into[rt] = append(into[rt], took)
			}
		}
	}
	return nil
}

// idleMemory: proportional set size of all host processes of an idle sandbox.
func idleMemory(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		var ids []string
		var sizes []float64
		var failed error
		for range b.times(20, 4) {
			sb, err := b.create(ctx, rt)
			if err != nil {
				failed = err
				break
			}
			ids = append(ids, sb.ID)
		}
		time.Sleep(time.Second) // memory that only the start needed is freed
		for _, id := range ids {
			size, err := b.pss(ctx, id)
			failed = errors.Join(failed, err)
			sizes = append(sizes, size)
		}
		if err := errors.Join(failed, b.dropAll(ctx, ids)); err != nil {
			return err
		}
		b.add(row("idle_memory", rt, "MiB", sizes, "", nil, goal{maxP50: pick(rt, 3.0, 22.0)}))
	}
	return nil
}

// pss is the memory of one sandbox in MiB.
func (b *bench) pss(ctx context.Context, id string) (float64, error) {
	in, err := b.cl.Inspect(ctx, id)
	if err != nil {
		return 0, err
	}
	pids := map[int]bool{}
	for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		err := filepath.WalkDir(filepath.Dir(mount+in.Host["cgroup"]), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || filepath.Base(path) != "cgroup.procs" {
				return nil // another cgroup layout has no such group
			}
			procs, err := os.ReadFile(path)
			for _, f := range strings.Fields(string(procs)) {
				pid, _ := strconv.Atoi(f)
				pids[pid] = true
			}
			return err
		})
		if err != nil {
			return 0, err
		}
	}
	if len(pids) == 0 {
		return 0, fmt.Errorf("sandbox %s has no process in its cgroup %s", id, in.Host["cgroup"])
	}
	var kb int64
	for pid := range pids {
		kb += processKB(pid, "smaps_rollup", "Pss:")
	}
	return float64(kb) / 1024, nil
}

// processKB reads a line of /proc/pid/file that is in kB; 0 if it is absent.
func processKB(pid int, file, key string) int64 {
	f, err := os.Open(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		return 0
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if words := strings.Fields(sc.Text()); len(words) > 1 && words[0] == key {
			n, _ := strconv.ParseInt(words[1], 10, 64)
			return n
		}
	}
	return 0
}

// sample prints the memory of PID 1 of a sandbox, in kB, again and again: gVisor keeps
// no high-water mark.
const sample = `while :; do
  while read -r key kb _; do [ "$key" = VmRSS: ] && echo "$kb"; done </proc/1/status
  sleep 0.02
done`

// agentPeak runs f and returns the most memory that the agent of a sandbox had during f,
// in MiB. It slows f down.
func (b *bench) agentPeak(ctx context.Context, id string, f func() error) (float64, error) {
	p, err := b.cl.Start(ctx, id, client.Command{Argv: []string{"sh", "-c", sample}})
	if err != nil {
		return 0, err
	}
	var out bytes.Buffer
	ended := make(chan error, 1)
	go func() {
		_, err := p.Wait(&out, io.Discard)
		ended <- err
	}()
	err = errors.Join(f(), p.Signal(ctx, "SIGKILL"), <-ended)
	most := int64(0)
	for sc := bufio.NewScanner(&out); sc.Scan(); {
		kb, _ := strconv.ParseInt(sc.Text(), 10, 64) // the last line may be cut
		most = max(most, kb)
	}
	if err == nil && most == 0 {
		err = fmt.Errorf("sandbox %s says nothing of the memory of its PID 1", id)
	}
	return float64(most) / 1024, err
}

// daemonPeak runs f and returns the most memory that the daemon had during f, in MiB.
func (b *bench) daemonPeak(f func() error) (float64, error) {
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", b.pid), []byte("5"), 0); err != nil { // proc(5): resets the peak
		return 0, err
	}
	err := f()
	return float64(processKB(b.pid, "status", "VmHWM:")) / 1024, err
}
