package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/sandboxd/sandboxd/internal/keylock"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/overlay"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Parts of the directory of a volume.
const (
	volumeFiles = "d"     // what sandboxes mount
	volumeDraft = "d.new" // that, while it is not whole
)

// A Seed is a directory whose files a new volume begins with: Path in the mounted root
// file system of a sandbox in which nothing runs.
type Seed struct {
	ID       string // of the sandbox; empty: the volume begins empty
	Path     string
	OwnUsers bool // as in its Mount
	UIDBase  uint32
}

// Volumes are named volumes, and the directories of the host that sandboxes may mount.
type Volumes struct {
	pool      *Pool
	stateDir  string
	runDir    string                 // <runDir>/volumes/<id>/<n>
	hostPaths []string               // directories of the host that may be mounted
	rootfs    func(id string) string // where the root file system of a sandbox is mounted
	users     users
	making    keylock.Set // by id of the volume
}

// volumeDir is the directory of a volume, whether it is there or not.
func (p *Pool) volumeDir(vol string) (string, error) {
	if !record.IsVolumeID(vol) {
		return "", fmt.Errorf("volume %q: not an id", vol)
	}
	return filepath.Join(p.dir, vol), nil
}

// MakeVolume makes the volume vol, which holds at most bytes, metadata included; 0 is
// no limit. It begins with the files, owner and mode of seed. A volume that exists
// stays as it is; half of one, left by a killed daemon, is made anew.
func (v *Volumes) MakeVolume(ctx context.Context, vol string, bytes int64, seed Seed) error {
	dir, err := v.pool.volumeDir(vol)
	if err != nil {
		return err
	}
	unlock, err := v.making.Lock(ctx, vol)
	if err != nil {
		return fmt.Errorf("create volume %s: another sandbox is still creating it: %w", vol, err)
	}
	defer unlock()
	if there, err := tree.Exists(filepath.Join(dir, volumeFiles)); err != nil || there {
		return err
	}
	if err := v.makeVolume(ctx, dir, bytes, seed); err != nil {
		err = errors.Join(err, v.pool.driver.Destroy(dir))
		switch {
		case errors.Is(err, unix.EDQUOT):
			return errs.Wrap(err, errs.Exhausted, "the files of the image at %s do not fit into a volume of %s: create a larger volume "+
				"(`sandboxctl volume create --size`)", seed.Path, record.Size(bytes))
		default:
			return poolFull(fmt.Errorf("create volume %s: %w", vol, err))
		}
	}
	return nil
}

func (v *Volumes) makeVolume(ctx context.Context, dir string, bytes int64, seed Seed) error {
	if err := v.pool.driver.Destroy(dir); err != nil {
		return err
	}
	if err := v.pool.driver.Create(dir, bytes); err != nil {
		return err
	}
	draft := filepath.Join(dir, volumeDraft)
	if err := errors.Join(os.Mkdir(draft, 0o755), os.Chmod(draft, 0o755)); err != nil {
		return err
	}
	if seed.ID != "" {
		copied, err := v.fill(ctx, draft, seed)
		if err == nil && copied { // after a power cut, half a copy must not look whole
			err = tree.WithDir(dir, unix.Syncfs)
		}
		if err != nil {
			return err
		}
	}
	if err := os.Rename(draft, filepath.Join(dir, volumeFiles)); err != nil {
		return err
	}
	return tree.WithDir(dir, unix.Fsync)
}

// fill copies a seed into draft, with its owner and mode. If there is no such
// directory, the volume begins empty.
func (v *Volumes) fill(ctx context.Context, draft string, seed Seed) (copied bool, err error) {
	root, err := unix.Open(v.rootfs(seed.ID), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, &os.PathError{Op: "open", Path: v.rootfs(seed.ID), Err: err}
	}
	defer unix.Close(root)
	fd, err := tree.OpenInRoot(root, seed.Path, unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	from := os.NewFile(uintptr(fd), seed.Path)
	defer from.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, &os.PathError{Op: "stat", Path: seed.Path, Err: err}
	}
	// The disk has guest ids, and the root file system shows them as the host's.
	uid, gid := int64(st.Uid), int64(st.Gid)
	if seed.OwnUsers {
		uid, gid = uid-int64(seed.UIDBase), gid-int64(seed.UIDBase)
	}
	if uid >= 0 && uid < 65536 && gid >= 0 && gid < 65536 {
		err = os.Chown(draft, int(uid), int(gid))
	}
	if err = errors.Join(err, unix.Chmod(draft, st.Mode&0o7777)); err != nil {
		return false, err
	}
	if _, err := from.Readdirnames(1); errors.Is(err, io.EOF) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	return true, v.copySeed(ctx, from, draft, seed)
}

// copySeed copies a directory that a guest may have filled. It runs cp(1) in a user
// namespace with the guest's ids, so cp may do no more than guest root.
func (v *Volumes) copySeed(ctx context.Context, from *os.File, draft string, seed Seed) error {
	ns, done, err := v.users.open(seed.ID, seed.OwnUsers)
	if err != nil {
		return err
	}
	defer done()
	fd, err := overlay.Clone(draft, int(ns.Fd()))
	if err != nil {
		return err
	}
	to := os.NewFile(uintptr(fd), draft)
	defer to.Close()
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(seed.UIDBase), Size: 65536}}
	if !seed.OwnUsers {
		ids[0].HostID = 0
	}
	cmd := tree.CopyCommand(ctx, "/proc/self/fd/3/.", "/proc/self/fd/4/.")
	cmd.ExtraFiles = []*os.File{from, to}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{},
	}
	return tree.RunCopy(ctx, cmd, seed.Path, draft)
}

// ReadVolume calls f with a directory that has the files of a volume: on btrfs those of one moment, on
// other pools those that sandboxes go on to change.
func (v *Volumes) ReadVolume(ctx context.Context, vol string, f func(dir string) error) error {
	dir, err := v.pool.volumeDir(vol)
	if err != nil {
		return err
	}
	return v.pool.still(ctx, dir, func(dir string) error { return f(filepath.Join(dir, volumeFiles)) })
}

// RestoreVolume makes the volume vol as MakeVolume does, with the files that fill puts into a
// directory. It fails with fs.ErrExist if the volume is there.
func (v *Volumes) RestoreVolume(vol string, bytes int64, fill func(dir string) error) error {
	dir, err := v.pool.volumeDir(vol)
	if err != nil {
		return err
	}
	if there, err := tree.Exists(filepath.Join(dir, volumeFiles)); err != nil || there {
		return errors.Join(err, fs.ErrExist)
	}
	err = v.pool.driver.Destroy(dir)
	if err == nil {
		err = v.pool.driver.Create(dir, bytes)
	}
	if err != nil {
		return err
	}
	draft := filepath.Join(dir, volumeDraft)
	err = os.Mkdir(draft, 0o700)
	if err == nil {
		err = fill(draft)
	}
	if err == nil {
		err = tree.WithDir(dir, unix.Syncfs)
	}
	if err == nil {
		err = errors.Join(os.Rename(draft, filepath.Join(dir, volumeFiles)), tree.WithDir(dir, unix.Fsync))
	}
	if err != nil {
		return errors.Join(poolFull(err), v.pool.driver.Destroy(dir))
	}
	return nil
}

// DeleteVolume removes a volume with everything in it, also half of one; absent is
// fine. The space comes back soon after.
func (v *Volumes) DeleteVolume(_ context.Context, vol string) error {
	dir, err := v.pool.volumeDir(vol)
	if err != nil {
		return err
	}
	if err := v.pool.destroyLater(dir, os.Rename(dir, v.pool.trashPath(vol))); err != nil {
		return fmt.Errorf("delete volume %s: %w", vol, err)
	}
	return nil
}

// ListVolumes returns the ids that have a directory on the pool.
func (v *Volumes) ListVolumes(context.Context) (ids []string, err error) {
	if ids, err = v.pool.ids(record.IsVolumeID); err != nil {
		return nil, fmt.Errorf("list volumes: %w", err)
	}
	return ids, nil
}

// VolumeUsage returns the bytes that a volume is charged with, 0 if nobody has mounted
// it yet. It fails with errs.Unsupported on a plain pool.
func (v *Volumes) VolumeUsage(vol string) (used int64, err error) {
	dir, err := v.pool.volumeDir(vol)
	if err != nil {
		return 0, err
	}
	used, limit, err := v.pool.driver.Usage(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("usage of volume %s: %w", vol, err)
	case limit > 0:
		used = min(used, limit)
	}
	return used, nil
}

// openVolume opens the directory of a volume that m mounts. A subdirectory that is
// missing is made: nothing else could make it in a new volume.
func (v *Volumes) openVolume(m *record.VolumeMount) (*os.File, error) {
	dir, err := v.pool.volumeDir(m.Volume)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, volumeFiles)
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, errs.Wrap(err, errs.NotFound, "the files of volume %s are not on the storage pool any more", m.Claim)
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	top := os.NewFile(uintptr(fd), path)
	if m.Sub == "" {
		return top, nil
	}
	defer top.Close()
	what := fmt.Sprintf("subPath %q of volume %s", m.Sub, m.Claim)
	f, err := tree.Descend(top, m.Sub, tree.Steps{Make: true, Kind: unix.S_IFDIR, SameMount: true})
	if err != nil {
		return nil, badPath(err, "VOLUME::INVALID_SUB_PATH", what)
	}
	if err := mountable(f, "VOLUME::INVALID_SUB_PATH", what); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
