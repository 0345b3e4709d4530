package snapshot

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// plain is a pool in a directory. It limits nothing.
type plain struct {
	image string // where a btrfs pool would lie
	dir   string
}

func (p *plain) kind() string { return PoolPlain }

func (p *plain) describe() string {
	return fmt.Sprintf("%s: %s, NO limit of disks: one sandbox can fill the host", PoolPlain, p.dir)
}

func (p *plain) open(_ context.Context, dir string) error {
	p.dir = dir
	mounted, err := tree.IsMountPoint(dir)
	if err != nil {
		return err
	}
	if _, err := os.Stat(p.image); err == nil || mounted {
		return errs.New(errs.WrongState, "the state directory holds a pool of kind %q: set pool = %q, or remove %s and the sandboxes on "+
			"it", PoolBtrfsLoop, PoolBtrfsLoop, p.image)
	}
	return os.Chmod(dir, 0o700)
}

func (p *plain) close() error { return nil }

func (p *plain) apart(string) error { return nil }

func (p *plain) create(path string, bytes int64) error {
	if bytes > 0 {
		return p.limit(path, bytes)
	}
	return os.Mkdir(path, 0o700)
}

func (p *plain) limit(_ string, bytes int64) error {
	return errs.New(errs.Unsupported, "a disk limit of %s needs a pool that can limit, and this host's is a plain directory: leave "+
		"--disk out, or set pool = %q in the daemon's configuration", record.Size(bytes), PoolBtrfsLoop)
}

func (p *plain) flush(context.Context) error { return nil } // copying reads what is in memory

func (p *plain) freeze(ctx context.Context, from, to string) error { return p.copy(ctx, from, to) }

// copy is copyTree as long as there is room: records and layers live of the
// same file system, and what copies took of it is taken.
func (p *plain) copy(ctx context.Context, from, to string) error {
	if err := p.room(); err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if err := p.room(); err != nil {
				stop(err)
				return
			}
		}
	}()
	return copyTree(ctx, from, to)
}

// reserved is what copies leave free of the file system, where records and layers
// are too: a 32nd part, at most 1 GiB. Imports of layers leave the same.
const reserved = 1 << 30

func (p *plain) room() error {
	var st unix.Statfs_t
	if err := unix.Statfs(p.dir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: p.dir, Err: err}
	}
	free, keep := int64(st.Bavail)*st.Bsize, min(int64(st.Blocks)*st.Bsize/32, reserved)
	if free < keep {
		return fmt.Errorf("%d MiB are left, and copies leave %d to everything else: %w", free>>20, keep>>20, unix.ENOSPC)
	}
	return nil
}

func (p *plain) settle(context.Context) error { return tree.WithDir(p.dir, unix.Syncfs) }

func (p *plain) branch(ctx context.Context, from, to string, bytes int64) error {
	if err := p.create(to, bytes); err != nil {
		return err
	}
	return p.copy(ctx, from, to)
}

func (p *plain) unfreeze(string) error { return nil }

// copyTree copies a disk by cp(1), which leaves out nothing of it: owners,
// modes, times, links, extended attributes with overlayfs' own, holes,
// whiteouts. Where the file system can share blocks, it does.
func copyTree(ctx context.Context, from, to string) error {
	if _, err := os.Lstat(from); err != nil {
		return err
	}
	return runCopy(ctx, copyCommand(ctx, from, to), from, to)
}

func copyCommand(ctx context.Context, from, to string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "cp", "-dR", "--preserve=mode,ownership,timestamps,links,xattr", "--sparse=auto", "--reflink=auto",
		"--no-target-directory", "--", from, to)
	cmd.Env = []string{"LC_ALL=C", "PATH=" + os.Getenv("PATH")}
	return cmd
}

// runCopy runs a command of copyCommand; from and to are for its error.
func runCopy(ctx context.Context, cmd *exec.Cmd, from, to string) error {
	out := &lastWords{}
	cmd.Stdout, cmd.Stderr = out, out
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case strings.Contains(out.String(), "No space left"):
		err = unix.ENOSPC
	case strings.Contains(out.String(), "Disk quota exceeded"):
		err = unix.EDQUOT
	}
	return fmt.Errorf("cp %s %s: %w: %s", from, to, err, out)
}

// lastWords keeps the end of what a program says about a guest's files.
type lastWords struct{ b []byte }

func (w *lastWords) Write(p []byte) (int, error) {
	w.b = append(w.b, p...)
	w.b = w.b[max(0, len(w.b)-2048):]
	return len(p), nil
}

func (w *lastWords) String() string { return strings.TrimSpace(string(w.b)) }

func (p *plain) destroy(path string) error { return tree.Remove(path) }

func (p *plain) usage(string) (used, limit int64, err error) {
	return 0, 0, errs.New(errs.Unsupported, "a pool that is a plain directory does not count: set pool = %q in the daemon's "+
		"configuration", PoolBtrfsLoop)
}

func (p *plain) sweep(context.Context) error { return nil }
