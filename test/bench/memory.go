package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// hold starts a process that holds 100 MB of random text in memory, and returns when it does.
const hold = `setsid sh -c 'x=$(head -c 78643200 /dev/urandom | base64 -w0); echo >/srv/holds; sleep 100000; : $x' >/dev/null 2>&1 </dev/null &
until [ -e /srv/holds ]; do sleep 0.02; done`

// memoryRows: a memory snapshot of a guest that holds 100 MB, sandboxes that begin with it, one that
// wakes, and eight live forks, each against the same by runsc's commands, without a record, a policy, and an
// agent that becomes another's.
func memoryRows(ctx context.Context, b *bench) (err error) {
	if !slices.Contains(runtimes, oci.Runsc) {
		return nil
	}
	r := request(oci.Runsc)
	r.ResourceLimits = map[string]string{"memory": "512Mi"}
	sb, err := b.createOf(ctx, r)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.drop(context.WithoutCancel(ctx), sb.ID)) }()
	if _, err := b.exec(ctx, sb.ID, "sh", "-c", hold); err != nil {
		return err
	}
	x, err := b.bare.prepare(ctx, oci.Runsc)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.drop(context.WithoutCancel(ctx))) }()
	if err := x.start(ctx); err != nil {
		return err
	}
	if _, err := ask(ctx, x.agent, "sh", "-c", hold); err != nil {
		return err
	}
	for _, rows := range []func(context.Context, *bench, string, *box) error{pauses, readies, restores, wakes, forks} {
		if err := rows(ctx, b, sb.ID, x); err != nil {
			return err
		}
	}
	return nil
}

// checkpoint is the baseline of a memory snapshot: runsc checkpoint into a new directory on the
// pool.
func (x *box) checkpoint(ctx context.Context) (image string, err error) {
	image = filepath.Join(x.b.state, "pool", "bench-image")
	if err := errors.Join(os.RemoveAll(image), os.Mkdir(image, 0o700)); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(x.b.bin, "runsc"), "--root="+filepath.Join(x.b.run, "runsc"), "--ignore-cgroups",
		"checkpoint", "--leave-running", "--compression=none", "--image-path="+image, x.id)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("runsc checkpoint: %w: %s", err, bytes.TrimSpace(out))
	}
	return image, nil
}

func memorySnapshot(ctx context.Context, b *bench, id string) (wire.Snapshot, error) {
	s, err := b.cl.Snapshots().CreateWithMemory(ctx, id, "", true)
	if err == nil && s.Status.State != wire.SnapshotReady {
		err = fmt.Errorf("snapshot %s is %s: %s", s.ID, s.Status.State, s.Status.Message)
	}
	return s, err
}

// gap runs ticks by run, which starts it and returns what waits for its output, and returns the
// longest gap in a second with do in it, in milliseconds.
func gap(run func() (wait func() (string, error), err error), do func() error) (float64, error) {
	wait, err := run()
	if err != nil {
		return 0, err
	}
	time.Sleep(300 * time.Millisecond) // so that it falls into the second
	err = do()
	out, werr := wait()
	us, perr := strconv.ParseFloat(strings.TrimSpace(out), 64)
	return us / 1000, errors.Join(err, werr, perr)
}

// pauses: how long a guest that writes every millisecond stands still.
func pauses(ctx context.Context, b *bench, id string, x *box) error {
	ours := func() (float64, error) {
		return gap(func() (func() (string, error), error) {
			p, err := b.cl.Start(ctx, id, client.Command{Argv: []string{"bash", "-c", ticks}})
			return func() (string, error) {
				var out, words bytes.Buffer
				_, err := p.Wait(&out, &words)
				return out.String(), err
			}, err
		}, func() error {
			s, err := memorySnapshot(ctx, b, id)
			return errors.Join(err, b.cl.Snapshots().Remove(ctx, s.ID))
		})
	}
	theirs := func() (float64, error) {
		return gap(func() (func() (string, error), error) {
			var out bytes.Buffer
			done := make(chan error, 1)
			go func() {
				_, err := askFor(ctx, x.agent, &out, "bash", "-c", ticks)
				done <- err
			}()
			return func() (string, error) { err := <-done; return out.String(), err }, nil
		}, func() error { _, err := x.checkpoint(ctx); return err })
	}
	a, c, err := turns(b.times(15, 2), 1, ours, theirs)
	if err == nil {
		b.add(row("memory_snapshot_pause", oci.Runsc, "ms", a, "runsc checkpoint --leave-running, the same gap", c, goal{maxRatio: 1.15}))
	}
	return err
}

// readies: from the request to a snapshot that is ready, and so durable.
func readies(ctx context.Context, b *bench, id string, x *box) error {
	ours := func() (float64, error) {
		start := time.Now()
		s, err := memorySnapshot(ctx, b, id)
		took := ms(time.Since(start))
		return took, errors.Join(err, b.cl.Snapshots().Remove(ctx, s.ID))
	}
	theirs := func() (float64, error) {
		start := time.Now()
		image, err := x.checkpoint(ctx)
		if err == nil {
			err = syncAll(image)
		}
		return ms(time.Since(start)), err
	}
	a, c, err := turns(b.times(15, 2), 1, ours, theirs)
	if err == nil {
		b.add(row("memory_snapshot_ready", oci.Runsc, "ms", a, "runsc checkpoint and fsync", c, goal{maxRatio: 1.15}))
	}
	return err
}

// syncAll makes the files in dir durable.
func syncAll(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		f, oerr := os.Open(filepath.Join(dir, e.Name()))
		if oerr == nil {
			oerr = errors.Join(f.Sync(), f.Close())
		}
		err = errors.Join(err, oerr)
	}
	return err
}

// image makes a memory image of x, and a snapshot of its disk.
func (x *box) image(ctx context.Context) (image, snap string, err error) {
	snap = record.NewSnapshotID(bareInstance)
	if image, err = x.checkpoint(ctx); err == nil {
		err = x.b.files.Snapshots.TakeSnapshot(ctx, snap, x.id)
	}
	return image, snap, err
}

// restore is the baseline of a sandbox that begins with memory: from the start of runsc restore
// to the first answer of the agent.
func (x *box) restore(ctx context.Context, image string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(x.b.bin, "runsc"), "--root="+filepath.Join(x.b.run, "runsc"), "--platform=systrap",
		"--network=sandbox", "--overlay2=none", "--host-uds=none", "--host-fifo=none", "--net-raw=false", "--iouring=false",
		"--ignore-cgroups", "--host-settings=ignore", "--allow-flag-override",
		"--sidecar-usage-policy=LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK",
		"restore", "--detach", "--image-path="+image, "--bundle="+x.b.bundle(x.id), x.id)
	cmd.Stdin = x.stdin
	if err := x.b.groups.Start(x.id, cmd); err != nil {
		return err
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("runsc restore: %w", err)
	}
	return x.agent.Ready(ctx)
}

// restores: from the request to the first answer of a sandbox that begins with the memory.
func restores(ctx context.Context, b *bench, id string, x *box) (err error) {
	s, err := memorySnapshot(ctx, b, id)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.cl.Snapshots().Remove(context.WithoutCancel(ctx), s.ID)) }()
	image, snap, err := x.image(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.b.files.Snapshots.DeleteSnapshot(context.WithoutCancel(ctx), snap)) }()
	ours := func() (float64, error) {
		start := time.Now()
		sb, err := b.createOf(ctx, wire.CreateRequest{SnapshotID: s.ID, Extensions: map[string]string{wire.ExtMemory: "true"}})
		took := ms(time.Since(start))
		return took, errors.Join(err, b.drop(ctx, sb.ID))
	}
	theirs := func() (float64, error) {
		y, err := x.b.prepareFrom(ctx, oci.Runsc, snap)
		if err != nil {
			return 0, err
		}
		start := time.Now()
		err = y.restore(ctx, image)
		took := ms(time.Since(start))
		return took, errors.Join(err, y.drop(ctx))
	}
	a, c, err := turns(b.times(15, 2), 1, ours, theirs)
	if err == nil {
		b.add(row("restore_to_first_answer", oci.Runsc, "ms", a, "runsc restore, to the agent's first answer", c, goal{maxRatio: 1.2}))
	}
	return err
}

// wakes: from an HTTP request to a sandbox that its idle policy has hibernated to the first byte of
// the answer.
func wakes(ctx context.Context, b *bench, _ string, x *box) (err error) {
	r := request(oci.Runsc)
	r.ResourceLimits = map[string]string{"memory": "512Mi"}
	r.Extensions[wire.ExtIdleAfter], r.Extensions[wire.ExtIdleAction] = "1s", string(record.IdleHibernate)
	sb, err := b.createOf(ctx, r)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.drop(context.WithoutCancel(ctx), sb.ID)) }()
	if _, err := b.exec(ctx, sb.ID, "sh", "-c", hold); err != nil {
		return err
	}
	image, snap, err := x.image(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.b.files.Snapshots.DeleteSnapshot(context.WithoutCancel(ctx), snap)) }()
	ours := func() (float64, error) {
		for { // the client has no call that waits for that
			now, err := b.cl.Get(ctx, sb.ID)
			if err != nil || now.Sandboxd.HibernatedBytes > 0 && now.Status.State == wire.Paused {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		start := time.Now()
		_, err := b.cl.Files(sb.ID).Stat(ctx, "/")
		return ms(time.Since(start)), err
	}
	theirs := func() (float64, error) {
		y, err := x.b.prepareFrom(ctx, oci.Runsc, snap)
		if err != nil {
			return 0, err
		}
		start := time.Now()
		err = y.restore(ctx, image)
		took := ms(time.Since(start))
		return took, errors.Join(err, y.drop(ctx))
	}
	a, c, err := turns(b.times(15, 2), 1, ours, theirs)
	if err == nil {
		b.add(row("wake_hibernated", oci.Runsc, "ms", a, "runsc restore, to the agent's first answer", c, goal{maxRatio: 1.3}))
	}
	return err
}

// copies is how many live forks are made at once.
const copies = 8

// forks: from the request to eight live forks that all answer.
func forks(ctx context.Context, b *bench, id string, x *box) error {
	ours := func() (float64, error) {
		start := time.Now()
		f, err := b.cl.Snapshots().Fork(ctx, id, wire.ForkRequest{Count: copies, Mode: wire.ForkMemory, Timeout: new(int64(3600))}, true)
		took := ms(time.Since(start))
		if err == nil && f.Status.State != wire.ForkReady {
			err = fmt.Errorf("fork %s is %s: %s", f.ID, f.Status.State, f.Status.Message)
		}
		var ids []string
		for _, c := range f.Sandboxes {
			ids = append(ids, c.ID)
		}
		return took, errors.Join(err, b.dropAll(ctx, ids))
	}
	a, c, err := turns(b.times(6, 1), 1, ours, func() (float64, error) { return x.forks(ctx) })
	if err == nil {
		b.add(row("fork_memory_8", oci.Runsc, "ms", a, "runsc checkpoint and 8 runsc restores at once", c, goal{maxRatio: 1.1}))
	}
	return err
}

func (x *box) forks(ctx context.Context) (took float64, err error) {
	first := time.Now()
	image, snap, err := x.image(ctx)
	spent := time.Since(first)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, x.b.files.Snapshots.DeleteSnapshot(context.WithoutCancel(ctx), snap)) }()
	var all []*box
	for range copies {
		y, err := x.b.prepareFrom(ctx, oci.Runsc, snap)
		if err != nil {
			return 0, err
		}
		all = append(all, y)
	}
	start := time.Now()
	failed := make([]error, len(all))
	var wg sync.WaitGroup
	for i, y := range all {
		wg.Go(func() { failed[i] = y.restore(ctx, image) })
	}
	wg.Wait()
	took = ms(spent + time.Since(start))
	for _, y := range all {
		failed = append(failed, y.drop(ctx))
	}
	return took, errors.Join(failed...)
}
