package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/oci"
)

// furnish writes 1 GB in 20,000 files.
const furnish = `mkdir /srv/big && cd /srv/big && head -c 1073741824 /dev/urandom | split -b 53688 -a 5 -d - f && sync`

// snapshotEnded: a snapshot of a stopped sandbox with 1 GB in 20,000 files, against a copy
// of the files; a snapshot of a sandbox without them; and sandboxes created from the
// snapshot, against sandboxes created from the image.
func snapshotEnded(ctx context.Context, b *bench) error {
	for _, size := range []struct{ name, files string }{{"", furnish}, {"_empty", "true"}} {
		id, err := b.stopped(ctx, size.files)
		if err != nil {
			return err
		}
		err = b.snapshotOf(ctx, id, size.name)
		if err := errors.Join(err, b.drop(ctx, id)); err != nil {
			return err
		}
	}
	return nil
}

// stopped makes a sandbox, runs a script in it and stops it.
func (b *bench) stopped(ctx context.Context, script string) (string, error) {
	r := request(oci.Runc)
	delete(r.Extensions, wire.ExtOneShot)
	sb, err := b.cl.Create(ctx, r, true)
	if err != nil {
		return "", err
	}
	if _, err := b.exec(ctx, sb.ID, "sh", "-c", script); err != nil {
		return sb.ID, errors.Join(err, b.drop(ctx, sb.ID))
	}
	return sb.ID, b.cl.Stop(ctx, sb.ID, 0)
}

func (b *bench) snapshotOf(ctx context.Context, id, suffix string) error {
	ours := func() (float64, error) {
		start := time.Now()
		s, err := b.snapshot(ctx, id)
		took := ms(time.Since(start))
		return took, errors.Join(err, b.cl.Snapshots().Remove(ctx, s.ID))
	}
	pool := filepath.Join(inst.StateDir(), "pool")
	copied := filepath.Join(pool, "bench-copy")
	theirs := func() (float64, error) {
		start := time.Now()
		out, err := exec.CommandContext(ctx, "cp", "-a", "--reflink=never", filepath.Join(pool, id, "u"), copied).CombinedOutput()
		took := ms(time.Since(start))
		if err != nil {
			err = fmt.Errorf("cp -a: %w: %s", err, bytes.TrimSpace(out))
		}
		return took, errors.Join(err, os.RemoveAll(copied))
	}
	a, _, err := turns(b.times(30, 3), 2, ours, func() (float64, error) { return 0, nil })
	if err != nil {
		return err
	}
	_, c, err := turns(b.times(3, 1), 0, func() (float64, error) { return 0, nil }, theirs)
	if err != nil {
		return err
	}
	b.add(row("file_snapshot_ended"+suffix, "-", "ms", a, "cp -a within the pool", c, goal{maxP50: 10}))
	s, err := b.snapshot(ctx, id)
	if err != nil {
		return err
	}
	for _, rt := range runtimes {
		err = errors.Join(err, b.createFrom(ctx, s.ID, rt, suffix))
	}
	return errors.Join(err, b.cl.Snapshots().Remove(ctx, s.ID), cleaned(ctx))
}

func (b *bench) snapshot(ctx context.Context, id string) (wire.Snapshot, error) {
	s, err := b.cl.Snapshots().Create(ctx, id, "", true)
	if err == nil && s.Status.State != wire.SnapshotReady {
		err = fmt.Errorf("snapshot %s is %s: %s", s.ID, s.Status.State, s.Status.Message)
	}
	return s, err
}

// createFrom: the time until a sandbox runs, from a snapshot and from the image. It
// measures twice: once all created sandboxes stay, and once each is deleted before the
// next. The second is slower for large snapshots: because of qgroups the kernel goes
// through everything that a deleted disk shared, and commits wait for that.
func (b *bench) createFrom(ctx context.Context, snap, rt, suffix string) error {
	if err := cleaned(ctx); err != nil {
		return err
	}
	var made []string
	create := func(r wire.CreateRequest) (float64, error) {
		start := time.Now()
		sb, err := b.cl.Create(ctx, r, true)
		took := ms(time.Since(start))
		if err == nil && sb.Status.State != wire.Running {
			err = fmt.Errorf("sandbox %s is %s: %s", sb.ID, sb.Status.State, sb.Status.Message)
		}
		made = append(made, sb.ID)
		return took, err
	}
	from := request(rt)
	from.Image, from.SnapshotID = nil, snap
	for _, churn := range []bool{false, true} {
		after := func(took float64, err error) (float64, error) {
			if churn && err == nil {
				err = b.dropAll(ctx, made)
				made = nil
			}
			return took, err
		}
		a, c, err := turns(b.times(12, 3), 2,
			func() (float64, error) { return after(create(from)) },
			func() (float64, error) { return after(create(request(rt))) })
		if err := errors.Join(err, b.dropAll(ctx, made), cleaned(ctx)); err != nil {
			return err
		}
		made = nil
		name, g := "create_from_snapshot", goal{maxOver: 2}
		if churn {
			name, g = "create_from_snapshot_churn", goal{}
		}
		b.add(row(name+suffix, rt, "ms", a, "a cold create from the image", c, g))
	}
	return nil
}

// cleaned waits until the kernel's cleaner has freed the deleted disks.
func cleaned(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, "btrfs", "subvolume", "sync", filepath.Join(inst.StateDir(), "pool")).CombinedOutput()
	if err != nil {
		return fmt.Errorf("wait for the cleaner of the pool: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// ticks writes the time to a file every millisecond for a second, with builtin commands of
// the shell only, and prints the longest gap in microseconds.
const ticks = `
mkfifo /srv/never 2>/dev/null; exec 9<>/srv/never
last=${EPOCHREALTIME/./}; max=0; n=0; end=$((last + 1000000))
while [ $last -lt $end ]; do
  read -t 0.001 -u 9
  now=${EPOCHREALTIME/./}
  echo $now >/srv/tick
  gap=$((now - last)); [ $gap -gt $max ] && max=$gap
  last=$now
done
echo $max`

// snapshotLive: a guest writes every millisecond; the row is its longest pause in a second
// with a snapshot, against a second without one.
func snapshotLive(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		sb, err := b.create(ctx, rt)
		if err != nil {
			return err
		}
		second := func(meanwhile func() error) (float64, error) {
			p, err := b.cl.Start(ctx, sb.ID, client.Command{Argv: []string{"bash", "-c", ticks}})
			if err != nil {
				return 0, err
			}
			time.Sleep(400 * time.Millisecond) // so that the snapshot falls into the second
			err = meanwhile()
			var out, words bytes.Buffer
			if exit, werr := p.Wait(&out, &words); werr != nil || exit.Code != 0 {
				return 0, errors.Join(err, fmt.Errorf("ticks: %w: %d: %s", werr, exit.Code, words.Bytes()))
			}
			us, perr := strconv.ParseFloat(strings.TrimSpace(out.String()), 64)
			return us / 1000, errors.Join(err, perr)
		}
		a, c, err := turns(b.times(20, 2), 1, func() (float64, error) {
			return second(func() error {
				s, err := b.snapshot(ctx, sb.ID)
				return errors.Join(err, b.cl.Snapshots().Remove(ctx, s.ID))
			})
		}, func() (float64, error) { return second(func() error { return nil }) })
		if err := errors.Join(err, b.drop(ctx, sb.ID)); err != nil {
			return err
		}
		b.add(row("file_snapshot_live", rt, "ms", a, "the longest gap without a snapshot", c, goal{maxP50: 20}))
	}
	return nil
}

// forkFiles: a fork of a sandbox with 1 GB in 20,000 files, against a cold create.
func forkFiles(ctx context.Context, b *bench) error {
	id, err := b.stopped(ctx, furnish)
	if err != nil {
		return err
	}
	var made []string
	ours := func() (float64, error) {
		start := time.Now()
		f, err := b.cl.Snapshots().Fork(ctx, id, wire.ForkRequest{Count: 1, Timeout: new(int64(3600))}, true)
		took := ms(time.Since(start))
		if err == nil && f.Status.State != wire.ForkReady {
			err = fmt.Errorf("fork %s is %s: %s", f.ID, f.Status.State, f.Status.Message)
		}
		for _, c := range f.Sandboxes {
			made = append(made, c.ID)
		}
		return took, err
	}
	theirs := func() (float64, error) {
		start := time.Now()
		sb, err := b.create(ctx, oci.Runc)
		made = append(made, sb.ID)
		return ms(time.Since(start)), err
	}
	a, c, err := turns(b.times(12, 3), 2, ours, theirs)
	if err := errors.Join(err, b.dropAll(ctx, made)); err != nil {
		return err
	}
	b.add(row("fork_files", oci.Runc, "ms", a, "a cold create from the image", c, goal{maxRatio: 1.1}))

	return errors.Join(b.drop(ctx, id), cleaned(ctx))
}
