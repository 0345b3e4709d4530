package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/daemon"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/btrfs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

func poolCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "pool", Short: "Show, grow, check or move the storage pool",
		Example: `  sandboxd pool show
  sandboxd pool grow 40Gi`,
	}
	configured := configValue(cmd.PersistentFlags())
	verb := func(use, short, long, example string, args cobra.PositionalArgs,
		run func(p storagePool, ctx context.Context, args []string, out io.Writer) error,
	) {
		c := &cobra.Command{Use: use, Short: short, Long: long, Example: example, Args: args}
		name, _, _ := strings.Cut(use, " ")
		c.RunE = func(cmd *cobra.Command, args []string) error {
			p, err := poolOf(*configured)
			if err == nil {
				err = run(p, cmd.Context(), args, cmd.OutOrStdout())
			}
			if err != nil && !errors.As(err, new(usageError)) {
				return fmt.Errorf("pool %s: %w", name, err)
			}
			return err
		}
		cmd.AddCommand(c)
	}
	verb("show", "Say where the pool is and how large it is, or what the first start will make",
		`Say which kind of pool the configuration means, where it is, and how large. If there is none yet,
say how large the first start will make it, or fail if it cannot. It changes nothing.`,
		"  sandboxd pool show", cobra.NoArgs, storagePool.show)
	verb("grow [SIZE]", "Make the pool larger while sandboxes write to it",
		`Make the pool larger. Sandboxes go on meanwhile; the daemon may run or not.

A pool in a file (btrfs-loop) gets SIZE, such as 40Gi, or so much more, such as +10Gi. Without SIZE
it gets storage.pool_size of the configuration. storage.reserve stays free on its disk. If the
command is interrupted, give it again.

A pool on a device (btrfs) gets all of the device: make the partition or the logical volume larger
first, and give no SIZE. Pools of other kinds have what their file system has.`,
		"  sandboxd pool grow 40Gi\n  sandboxd pool grow +10Gi", cobra.MaximumNArgs(1), storagePool.grow)
	verb("check", "Look for damaged blocks in the pool; change nothing",
		`Compare all data of a btrfs pool with its checksums while sandboxes run ("btrfs scrub"), at the
lowest priority. If the daemon does not run, the pool is mounted for that. The exit status is 1 if
something is damaged.`,
		"  sandboxd pool check", cobra.NoArgs, storagePool.check)
	verb("move DIR", "Move the file of the pool to another directory; no sandbox may run",
		`Move the file of the pool (btrfs-loop) to DIR, best on another disk. No sandbox may run: pause is
not enough, stop them. Their disks, snapshots and volumes stay what they are.

The file is copied, and compared with the copy. Then pool.img in the state directory becomes a link
to DIR/`+pool.MovedImage+`, and the old file goes. Interrupted before that, the pool stays where it was.
To move it back, name the state directory.

If the disk of DIR is not mounted, the daemon refuses to start, and makes no new pool.`,
		`  sandboxctl stop $(sandboxctl ls -q)
  systemctl stop sandboxd.socket sandboxd
  sandboxd pool move /srv/pool
  systemctl start sandboxd.socket sandboxd`, cobra.ExactArgs(1), storagePool.move)
	return cmd
}

// A storagePool is the pool of a configuration.
type storagePool struct {
	cfg              *config.Config
	kind, dir, image string
	made, mounted    bool // made is about a file
}

func poolOf(path string) (p storagePool, err error) {
	if p.cfg, err = config.Load(path); err != nil {
		return p, err
	}
	p.dir, p.image = pool.Dir(p.cfg.StateDir), pool.Image(p.cfg.StateDir)
	if p.kind, err = pool.Kind(p.cfg.StateDir, p.cfg.Storage.Pool); err != nil {
		return p, err
	}
	if p.made, err = tree.Exists(p.image); err != nil {
		return p, err
	}
	if p.mounted, err = tree.IsMountPoint(p.dir); errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return p, err
}

func (p storagePool) loop() bool { return p.kind == pool.BtrfsLoop }

func (p storagePool) show(_ context.Context, _ []string, out io.Writer) error {
	if p.loop() && !p.made {
		bytes, why := int64(p.cfg.Storage.PoolSize), "storage.pool_size"
		dir := existing(p.cfg.StateDir)
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			return &os.PathError{Op: "statfs", Path: dir, Err: err}
		}
		free := int64(st.Bavail) * st.Bsize
		if bytes == 0 {
			var err error
			if bytes, err = btrfs.SizeFor(dir); err != nil {
				return err
			}
			why = "as storage.pool_size is 0: 20Gi, or three quarters of what is free if that is less"
		}
		if free < bytes {
			return errs.Wrap(unix.ENOSPC, errs.Exhausted, "%s has %d MiB free, and storage.pool_size needs %d MiB: set it to less, "+
				"or to \"0\" "+
				"(by what is free), or free space", dir, free>>20, bytes>>20)
		}
		_, err := fmt.Fprintf(out, "%s: the first start makes %s with %d MiB (%s); its disk has %d MiB free\n", p.kind, p.image, bytes>>20,
			why, free>>20)
		return err
	}
	where := p.dir
	if p.loop() {
		if file, err := filepath.EvalSymlinks(p.image); err != nil {
			return fmt.Errorf("find the pool: %w; mount its disk", err)
		} else if fi, err := os.Stat(file); err == nil {
			where = fmt.Sprintf("%s, %d MiB", file, fi.Size()>>20)
		}
	}
	if !p.mounted && p.kind != pool.Plain && p.kind != pool.Project {
		_, err := fmt.Fprintf(out, "%s: %s, not mounted; the daemon mounts it\n", p.kind, where)
		return err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(existing(p.dir), &st); err != nil {
		return &os.PathError{Op: "statfs", Path: p.dir, Err: err}
	}
	fmt.Fprintf(out, "%s: %s; the file system has %d MiB, of which %d MiB are free\n", p.kind, where, int64(st.Blocks)*st.Bsize>>20,
		int64(st.Bavail)*st.Bsize>>20)
	return p.lags(out)
}

// lags says that the file system, or the file, is smaller than it could be.
func (p storagePool) lags(out io.Writer) error {
	if st := new(unix.Statfs_t); unix.Statfs(p.dir, st) != nil || st.Type != unix.BTRFS_SUPER_MAGIC {
		return nil
	}
	system, devices, err := btrfs.Sizes(p.dir)
	if err == nil && p.loop() {
		var fi os.FileInfo
		if fi, err = os.Stat(p.image); err == nil {
			devices = fi.Size()
		}
	}
	switch configured := int64(p.cfg.Storage.PoolSize); {
	case err != nil:
		return err
	case devices-system >= 1<<20:
		fmt.Fprintf(out, "its devices have %d MiB more: sandboxd pool grow takes them\n", (devices-system)>>20)
	case p.loop() && configured > devices:
		fmt.Fprintf(out, "storage.pool_size is %d MiB: sandboxd pool grow makes it so large\n", configured>>20)
	}
	return nil
}

func (p storagePool) grow(ctx context.Context, args []string, out io.Writer) (err error) {
	var bytes int64
	switch {
	case p.kind == pool.Btrfs && len(args) > 0:
		return usageError{errors.New("pool grow: a pool on a device gets all of the device: make the device larger, and give no SIZE")}
	case p.kind != pool.Btrfs && !p.loop():
		return errs.New(errs.Unsupported, "a pool of kind %q has what the file system of %s has: grow that", p.kind, existing(p.dir))
	case p.loop() && !p.made:
		return errs.New(errs.WrongState, "there is no pool yet: set storage.pool_size, and start sandboxd")
	case p.loop():
		if bytes, err = p.wanted(args); err != nil {
			return err
		}
	}
	return p.withMount(ctx, func() error { return p.grown(ctx, bytes, out) })
}

// withMount calls f while the pool is mounted. If it is not, no daemon starts meanwhile.
func (p storagePool) withMount(ctx context.Context, f func() error) error {
	if p.mounted {
		return f()
	}
	if !p.loop() && p.cfg.Storage.Device == "" {
		return errs.New(errs.WrongState, "no file system is mounted at %s: mount the pool", p.dir)
	}
	return p.alone(func() error {
		var d pool.Driver = btrfs.NewLoop(p.image, 0, false)
		if !p.loop() {
			d = btrfs.NewDisk(p.cfg.Storage.Device, false)
		}
		if err := d.Open(ctx, p.dir); err != nil {
			return err
		}
		return errors.Join(f(), d.Close())
	})
}

// wanted is the size that the arguments, or the configuration, want for the file.
func (p storagePool) wanted(args []string) (int64, error) {
	fi, err := os.Stat(p.image)
	if err != nil {
		return 0, fmt.Errorf("find the pool: %w; mount its disk", err)
	}
	if len(args) == 0 {
		if p.cfg.Storage.PoolSize == 0 {
			return 0, usageError{errors.New("pool grow: want SIZE, such as 40Gi or +10Gi, because storage.pool_size is not set")}
		}
		return max(int64(p.cfg.Storage.PoolSize), fi.Size()), nil
	}
	var s config.Size
	text, more := strings.CutPrefix(args[0], "+")
	if err := s.UnmarshalText([]byte(text)); err != nil {
		return 0, usageError{fmt.Errorf("pool grow: %w", err)}
	}
	if more {
		s += config.Size(fi.Size())
	}
	return int64(s) &^ 4095, nil
}

func (p storagePool) grown(ctx context.Context, bytes int64, out io.Writer) error {
	var err error
	if p.loop() {
		err = btrfs.GrowLoop(ctx, p.image, p.dir, bytes, int64(p.cfg.Storage.Reserve))
	} else {
		err = btrfs.GrowMounted(p.dir)
	}
	if err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(p.dir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: p.dir, Err: err}
	}
	_, err = fmt.Fprintf(out, "the pool has %d MiB, of which %d MiB are "+
		"free\n", int64(st.Blocks)*st.Bsize>>20, int64(st.Bavail)*st.Bsize>>20)
	if conf := int64(p.cfg.Storage.PoolSize); p.loop() && conf != 0 && conf < bytes {
		_, err = fmt.Fprintf(out, "storage.pool_size still says %s: set it to %s, for a pool that is made anew\n", record.Size(conf),
			record.Size(bytes))
	}
	return err
}

func (p storagePool) check(ctx context.Context, _ []string, out io.Writer) error {
	switch {
	case p.kind != pool.Btrfs && !p.loop():
		return errs.New(errs.Unsupported, "a pool of kind %q has no checksums: check the file system of %s with its own tools", p.kind,
			existing(p.dir))
	case p.loop() && !p.made:
		return errs.New(errs.WrongState, "there is no pool yet; sandboxd pool show says what the first start makes")
	}
	return p.withMount(ctx, func() error { return btrfs.Check(ctx, p.dir, out) })
}

func (p storagePool) move(ctx context.Context, args []string, out io.Writer) error {
	switch {
	case !p.loop():
		return errs.New(errs.Unsupported, "only a pool in a file can be moved, and this one is of kind %q: move what is mounted at "+
			"%s with the "+
			"tools of its file system", p.kind, p.dir)
	case !p.made:
		return errs.New(errs.WrongState, "there is no pool yet: give the pool its place (storage.device, or a mount at %s), and start "+
			"sandboxd", p.dir)
	}
	return p.alone(func() error {
		// The files of sandboxes that run are mounts of their own, which this leaves.
		if p.mounted {
			if err := btrfs.Unmount(p.dir); err != nil {
				return fmt.Errorf("unmount %s: %w; end what uses it", p.dir, err)
			}
		}
		shown := int64(-1)
		file, err := btrfs.MoveLoop(ctx, p.image, args[0], func(done, all int64) {
			if now := done * 10 / max(all, 1); now > shown {
				shown = now
				fmt.Fprintf(out, "%d %% of %d MiB\n", now*10, all>>20)
			}
		})
		if err != nil && p.mounted { // as it was
			return errors.Join(err, btrfs.NewLoop(p.image, 0, false).Open(context.WithoutCancel(ctx), p.dir))
		}
		if err == nil {
			_, err = fmt.Fprintf(out, "the pool is %s; start sandboxd\n", file)
		}
		return err
	})
}

// alone calls f while no daemon of the instance runs, or starts.
func (p storagePool) alone(f func() error) error {
	release, err := daemon.Alone(p.cfg)
	if err != nil {
		return err
	}
	defer release()
	return f()
}

// existing is dir, or the nearest directory above it that is there.
func existing(dir string) string {
	for dir != "/" {
		if _, err := os.Stat(dir); err == nil {
			break
		}
		dir = filepath.Dir(dir)
	}
	return dir
}
