package upgrade

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// A rescue is a change away from a version that does not serve. Nothing can be compared with it, so
// the other version is good when it serves.

// unserved is why a daemon answers nothing, not even which version it is. An error of another question is none: a
// daemon that lives, on a busy host, is not to be left without a comparison.
type unserved struct{ error }

func (u *unserved) Unwrap() error { return u.error }

// rescue looks at a host whose daemon does not answer, for the reason given. It sets the schema of
// the journal to that of the state file: a version that does not start may not have brought it forward.
func (c *Change) rescue(ctx context.Context, j *versions.Journal, why error) (*view, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("nothing was changed: %w", context.Cause(ctx))
	}
	if errs.Is(why, errs.Denied) {
		return nil, fmt.Errorf("ask the daemon of sandboxd %s, which runs: %w; nothing was changed", j.From, why)
	}
	cfg, err := config.Load(c.Config)
	if err != nil {
		return nil, err
	}
	v := &view{dead: why, state: filepath.Join(cfg.StateDir, "sandboxd.db"), runtimes: []string{oci.Runsc, oci.Runc}}
	have, err := store.SchemaOf(v.state)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, store.ErrLocked): // the daemon hangs, with the state open
	case err != nil:
		return nil, fmt.Errorf("the daemon does not answer (%w), and its state cannot be read: %w; nothing was changed", why, err)
	default:
		j.FromSchema = have
	}
	kept := store.KeptName(v.state, j.ToSchema)
	if fi, err := os.Stat(kept); err == nil {
		v.kept, v.keptAt = kept, fi.ModTime()
	}
	fmt.Fprintf(c.Out, "sandboxd %s does not serve: %v\nso nothing can be compared with it, and %s is good when it serves\n", j.From,
		why, c.To)
	return v, nil
}

// checkDead is the rest of preflight if the version of before does not serve. What the other version
// lacks on this host is said, and refuses nothing: that version is tried.
func (c *Change) checkDead(ctx context.Context, from, program string) error {
	if err := c.examine(ctx, from); err != nil {
		fmt.Fprintf(c.Out, "warning: %v\n", err)
	}
	cfg, err := config.Load(c.Config)
	if err != nil {
		return err
	}
	saved, err := saveState(cfg, from)
	if errors.Is(err, store.ErrLocked) || errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintf(c.Out, "warning: the state was not tried: %v\n", err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("copy the state: %w", err)
	}
	defer saved.Close()
	return c.restores(ctx, program, func(_ context.Context, w io.Writer) error {
		_, err := io.Copy(w, saved)
		return err
	})
}

// saveState returns a backup of the state of a daemon that does not serve, in a file without a name.
func saveState(cfg *config.Config, version string) (_ *os.File, err error) {
	unnamed := func() (*os.File, error) { return os.OpenFile(cfg.StateDir, unix.O_TMPFILE|os.O_RDWR, 0o600) }
	state, err := unnamed()
	if err != nil {
		return nil, err
	}
	defer state.Close()
	if err := store.Copy(filepath.Join(cfg.StateDir, "sandboxd.db"), state); err != nil {
		return nil, err
	}
	facts, err := store.Examine(fmt.Sprintf("/proc/self/fd/%d", state.Fd()))
	if err == nil {
		_, err = state.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, err
	}
	out, err := unnamed()
	if err != nil {
		return nil, err
	}
	host, _ := os.Hostname()
	err = backup.Write(out, backup.Manifest{
		Version: version, Taken: time.Now().UTC().Truncate(time.Second), Host: host, Instance: cfg.Instance.String(),
		AddressPool: cfg.Network.Pool.String(), State: facts,
	}, state)
	if err == nil {
		_, err = out.Seek(0, io.SeekStart)
	}
	if err != nil {
		out.Close()
		return nil, err
	}
	return out, nil
}
