package tree

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"
)

// Copy copies a tree by cp(1), which keeps all of it: owners, modes, times, links,
// extended attributes with those of overlayfs, holes, whiteouts. Blocks are shared
// where the file system can. A full disk is ENOSPC or EDQUOT.
func Copy(ctx context.Context, from, to string) error {
	if _, err := os.Lstat(from); err != nil {
		return err
	}
	return RunCopy(ctx, CopyCommand(ctx, from, to), from, to)
}

// CopyCommand is the command of Copy, for callers that run it in a namespace.
func CopyCommand(ctx context.Context, from, to string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "cp", "-dR", "--preserve=mode,ownership,timestamps,links,xattr", "--sparse=auto", "--reflink=auto",
		"--no-target-directory", "--", from, to)
	cmd.Env = []string{"LC_ALL=C", "PATH=" + os.Getenv("PATH")}
	return cmd
}

// RunCopy runs a command of CopyCommand; from and to are for its error.
func RunCopy(ctx context.Context, cmd *exec.Cmd, from, to string) error {
	out := &tail{}
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

// tail keeps the end of what a program prints. A guest chose the names in it.
type tail struct{ b []byte }

func (w *tail) Write(p []byte) (int, error) {
	w.b = append(w.b, p...)
	w.b = w.b[max(0, len(w.b)-2048):]
	return len(p), nil
}

func (w *tail) String() string { return strings.TrimSpace(string(w.b)) }
