package btrfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// Check reads all data of the btrfs at dir and compares it with its checksums, while sandboxes write, and
// changes nothing. It fails if a block is damaged. (btrfs check is no use here: that of Debian 12 does not
// open a file system with simple quotas.)
func Check(ctx context.Context, dir string, out io.Writer) error {
	// -c 3: it reads when nobody else does.
	err := tool(ctx, out, "scrub", "start", "-B", "-r", "-c", "3", dir)
	if code := new(exec.ExitError); errors.As(err, &code) && code.ExitCode() == 3 {
		return errs.New(errs.WrongState, "blocks of the pool are damaged: dmesg names the files (/u/... and /d/... below a sandbox's or a "+
			"volume's id); copy out what is whole, restore the rest from a backup, and check the disk")
	}
	return err
}

// tool runs btrfs. A signal to this process ends it as one from a terminal would: a scrub then stops.
func tool(ctx context.Context, out io.Writer, args ...string) error {
	program, err := exec.LookPath("btrfs")
	if err != nil {
		return errs.Wrap(err, errs.Unsupported, "the program btrfs is missing: apt-get install btrfs-progs, or use a pool of kind "+
			"%q", pool.Plain)
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("btrfs %s: %w", args[0], err)
	}
	return nil
}
