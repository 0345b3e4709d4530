package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
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
	return pssOf(in.Host["cgroup"])
}

// pssOf is the memory of all processes of a cgroup of a sandbox in MiB.
func pssOf(cgroup string) (float64, error) {
	pids := map[int]bool{}
	for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		err := filepath.WalkDir(filepath.Dir(mount+cgroup), func(path string, _ fs.DirEntry, err error) error {
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
		return 0, fmt.Errorf("there is no process in the cgroup %s", cgroup)
	}
	var kb int64
	for pid := range pids {
		kb += processKB(pid, "smaps_rollup", "Pss:")
	}
	return float64(kb) / 1024, nil
}

const benchPool = "bench"

// pooled makes a pool, and returns when so many members are ready, and after how long.
func pooled(ctx context.Context, b *bench, rt string, members int) (took time.Duration, err error) {
	start := time.Now()
	t, err := json.Marshal(wire.PoolTemplate{Image: &wire.Image{URI: image}, Extensions: map[string]string{wire.ExtRuntime: rt}})
	if err != nil {
		return 0, err
	}
	_, err = b.cl.System().Pools().Create(ctx, wire.PoolRequest{Name: benchPool, Template: t, CapacitySpec: &wire.PoolCapacity{
		BufferMin: members, BufferMax: members, PoolMax: 3 * members,
	}})
	if err == nil {
		_, err = poolFull(ctx, b, members)
	}
	return time.Since(start), err
}

// poolFull waits until so many members are ready.
func poolFull(ctx context.Context, b *bench, members int) (wire.PoolStatus, error) {
	deadline := time.Now().Add(2 * time.Minute)
	for {
		p, err := b.cl.System().Pools().Get(ctx, benchPool)
		switch {
		case err != nil, p.Status.Available == members:
			return p.Status, err
		case p.Status.Message != "", time.Now().After(deadline):
			return p.Status, fmt.Errorf("a pool has %d of %d members: %s", p.Status.Available, members, p.Status.Message)
		}
		time.Sleep(2 * time.Millisecond) // no event tells of a member
	}
}

// unpool removes the pool, and waits until its members are gone. No sandbox is left then.
func unpool(ctx context.Context, b *bench) error {
	ctx = context.WithoutCancel(ctx)
	members := ids()
	errz := []error{b.cl.System().Pools().Remove(ctx, benchPool)}
	for _, id := range members {
		errz = append(errz, settle(id))
	}
	return errors.Join(errz...)
}

// ids are those of all sandboxes and members, by their links.
func ids() (all []string) {
	prefix := "/sys/class/net/sb-"
	links, _ := filepath.Glob(prefix + string(inst) + "*")
	for _, link := range links {
		all = append(all, strings.TrimPrefix(link, prefix))
	}
	return all
}

// claiming asks for what a member is bound to: an environment and a network policy.
func claiming(rt string) wire.CreateRequest {
	r := request(rt)
	r.Env = map[string]*string{"GREETING": new("hello")}
	r.Extensions[wire.ExtPool] = benchPool
	r.Extensions[wire.ExtRules] = "allow=192.0.2.7:443"
	return r
}

const (
	claimMembers = 20
	claimTime    = time.Minute
)

// warmClaims: a create that takes a member of a pool, and the first command in the sandbox, at half
// the rate at which members are made; and the same command in a sandbox that stands. They take
// turns, each after the same pause.
func warmClaims(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		standing, err := b.create(ctx, rt)
		if err != nil {
			return err
		}
		took, err := pooled(ctx, b, rt, claimMembers)
		var a, c []float64
		if err == nil {
			pause := took / claimMembers // claims come in every other one
			n := int(claimTime / (2 * pause))
			a, c, err = claims(ctx, b, rt, standing.ID, pause, b.times(n, n/20))
		}
		var status wire.PoolStatus
		if err == nil {
			status, err = poolFull(ctx, b, claimMembers)
		}
		if err := errors.Join(err, b.drop(ctx, standing.ID), unpool(ctx, b)); err != nil {
			return err
		}
		b.add(row("warm_claim_to_first_command", rt, "ms", a, "exec_true, as often", c, goal{maxOver: 3}))
		b.add(row("warm_claim_p99", rt, "ms", []float64{percentile(a, 99)}, "its p50", []float64{percentile(a, 50)}, goal{maxRatio: 5}))
		b.add(row("warm_claim_misses", rt, "creates", []float64{float64(status.Misses)}, "", nil, goal{}))
	}
	return nil
}

func claims(ctx context.Context, b *bench, rt, standing string, pause time.Duration, n int) (a, c []float64, err error) {
	next := time.Now()
	turn := func() {
		time.Sleep(time.Until(next))
		next = time.Now().Add(pause)
	}
	return turns(n, 3, func() (float64, error) {
		turn()
		start := time.Now()
		sb, timing, err := b.cl.CreateTimed(ctx, claiming(rt), true)
		if err != nil {
			return 0, err
		}
		created := time.Since(start)
		_, err = b.exec(ctx, sb.ID, "true")
		took := time.Since(start)
		if b.verbose {
			fmt.Fprintf(os.Stderr, "%s created %.1f ran %.1f: %s\n", rt, ms(created), ms(took), timing)
		}
		return ms(took), errors.Join(err, b.cl.Delete(ctx, sb.ID))
	}, func() (float64, error) {
		turn()
		start := time.Now()
		_, err := b.exec(ctx, standing, "true")
		return ms(time.Since(start)), err
	})
}

const claimsAtOnce = 100

// manyClaims: a hundred creates at once, for which a pool has a hundred members, until the last has
// its sandbox.
func manyClaims(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		_, err := pooled(ctx, b, rt, claimsAtOnce)
		var all []float64
		for range b.times(5, 1) {
			if err != nil {
				break
			}
			var took float64
			if took, err = claimAll(ctx, b, rt); err == nil {
				all = append(all, took)
			}
		}
		if err := errors.Join(err, unpool(ctx, b)); err != nil {
			return err
		}
		b.add(row("pool_100_claims", rt, "ms", all, "", nil, goal{maxP50: pick(rt, 500.0, 1000.0)}))
	}
	return nil
}

// claimAll is how long all claims at once take. The pool is full again then.
func claimAll(ctx context.Context, b *bench, rt string) (float64, error) {
	was, err := poolFull(ctx, b, claimsAtOnce)
	if err != nil {
		return 0, err
	}
	var wg sync.WaitGroup
	made, errz := make([]string, claimsAtOnce), make([]error, claimsAtOnce)
	start := time.Now()
	for i := range claimsAtOnce {
		wg.Go(func() {
			sb, err := b.createOf(ctx, claiming(rt))
			made[i], errz[i] = sb.ID, err
		})
	}
	wg.Wait()
	took := ms(time.Since(start))
	if err := errors.Join(append(errz, b.dropAll(ctx, made))...); err != nil {
		return 0, err
	}
	is, err := poolFull(ctx, b, claimsAtOnce)
	if hits := is.Hits - was.Hits; err == nil && hits != claimsAtOnce {
		err = fmt.Errorf("%d of %d sandboxes took a member", hits, claimsAtOnce)
	}
	return took, err
}

// memberMemory: a member of a pool beside an idle sandbox.
func memberMemory(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		n := b.times(20, 4)
		boxes, err := b.crowd(ctx, rt, n)
		var a, c []float64
		var in wire.Inspection
		if err == nil {
			_, err = pooled(ctx, b, rt, n)
		}
		if err == nil {
			time.Sleep(time.Second) // memory that only the start needed is freed
			in, err = b.cl.Inspect(ctx, boxes[0])
		}
		if err == nil {
			for _, id := range ids() {
				size, perr := pssOf(strings.ReplaceAll(in.Host["cgroup"], boxes[0], id))
				err = errors.Join(err, perr)
				if slices.Contains(boxes, id) {
					c = append(c, size)
				} else {
					a = append(a, size)
				}
			}
		}
		if err := errors.Join(err, b.dropAll(ctx, boxes), unpool(ctx, b)); err != nil {
			return err
		}
		b.add(row("pool_member_memory", rt, "MiB", a, "an idle sandbox", c, goal{maxRatio: 1.05}))
	}
	return nil
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
