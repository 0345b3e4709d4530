package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// benchImage has the servers and databases that are measured.
const benchImage = "bench"

// A place runs programs of the image: a sandbox, or the host. In both /mnt is a directory
// in which they may write, and /mnt/guest the program of the bench.
type place struct {
	// run runs a program to its end and returns what it printed.
	run func(ctx context.Context, argv ...string) (string, error)
	// start starts a program that runs until stop.
	start func(ctx context.Context, argv ...string) (stop func() error, err error)
}

// roomy makes a sandbox with the host's CPUs, as the programs on the host have them. It is
// not one-shot: those make nothing durable.
func (b *bench) roomy(ctx context.Context, rt string) (id string, err error) {
	if err := b.ensureImage(ctx, benchImage); err != nil {
		return "", err
	}
	r := request(rt)
	r.Image.URI = benchImage
	delete(r.Extensions, wire.ExtOneShot)
	r.ResourceLimits = map[string]string{"cpu": strconv.Itoa(runtime.NumCPU()), "memory": "1Gi"}
	sb, err := b.createOf(ctx, r)
	if err != nil {
		return "", err
	}
	return sb.ID, b.putGuest(ctx, sb.ID, "/mnt/guest")
}

// inside is a sandbox as a place.
func (b *bench) inside(id string) place {
	return place{
		run: func(ctx context.Context, argv ...string) (string, error) {
			p, err := b.cl.Start(ctx, id, client.Command{Argv: argv})
			if err != nil {
				return "", err
			}
			var out, words bytes.Buffer
			exit, err := p.Wait(&out, &words)
			if err == nil && exit.Code != 0 {
				err = fmt.Errorf("%q: exit status %d: %s", argv, exit.Code, words.Bytes())
			}
			return out.String(), err
		},
		start: func(ctx context.Context, argv ...string) (func() error, error) {
			p, err := b.cl.Start(ctx, id, client.Command{Argv: argv})
			if err != nil {
				return nil, err
			}
			return func() error {
				err := p.Signal(context.WithoutCancel(ctx), "SIGINT")
				_, waitErr := p.Wait(io.Discard, io.Discard)
				return errors.Join(err, waitErr)
			}, nil
		},
	}
}

// enter, a script, runs a program of a layer on the host, in a mount namespace with the
// layer read-only at its root. It keeps no other mount: a program that outlives the bench
// does not hold the pool. Its arguments are the layer, an empty directory, and what is at
// /mnt.
const enter = `mount --bind "$1" "$2"
mount --bind "$3" "$2/mnt"
mount --rbind /proc "$2/proc"
mount --rbind /dev "$2/dev"
mount -t tmpfs tmpfs "$2/tmp"
mount -o remount,bind,ro "$2"
cd "$2"
mkdir tmp/host
pivot_root . tmp/host
shift 3
exec chroot . sh -ec 'umount --lazy /tmp/host; exec "$@"' sh "$@"`

// outside is the host as a place: the same programs from the same layer. Its /mnt lies
// beside the state directory's other files, on the same file system. The caller calls end.
func (b *bench) outside(ctx context.Context, id string) (p place, end func() error, err error) {
	in, err := b.cl.Inspect(ctx, id)
	if err != nil {
		return p, nil, err
	}
	layer := filepath.Join(inst.StateDir(), "layers", in.Layers[0][len("sha256:"):])
	dir, err := os.MkdirTemp(inst.StateDir(), "bench-outside-")
	if err != nil {
		return p, nil, err
	}
	root, disk := filepath.Join(dir, "root"), filepath.Join(dir, "disk")
	if err := errors.Join(os.Mkdir(root, 0o755), os.Mkdir(disk, 0o755)); err != nil {
		return p, nil, err
	}
	if out, err := exec.CommandContext(ctx, "cp", b.guest(), filepath.Join(disk, "guest")).CombinedOutput(); err != nil {
		return p, nil, fmt.Errorf("copy the guest: %w: %s", err, out)
	}
	command := func(ctx context.Context, argv []string) *exec.Cmd {
		return exec.CommandContext(ctx, "unshare", append([]string{"--mount", "sh", "-ec", enter, "sh", layer, root, disk}, argv...)...)
	}
	p.run = func(ctx context.Context, argv ...string) (string, error) {
		var words bytes.Buffer
		cmd := command(ctx, argv)
		cmd.Stderr = &words
		out, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("%q on the host: %w: %s", argv, err, words.Bytes())
		}
		return string(out), err
	}
	p.start = func(ctx context.Context, argv ...string) (func() error, error) {
		cmd := command(ctx, argv)
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		return func() error {
			err := cmd.Process.Signal(syscall.SIGINT)
			cmd.Wait() //nolint:errcheck // of the signal
			return err
		}, nil
	}
	return p, func() error { return os.RemoveAll(dir) }, nil
}
