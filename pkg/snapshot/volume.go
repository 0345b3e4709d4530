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

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/overlay"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Parts of the directory of a volume.
const (
	volumeFiles = "d"     // what sandboxes mount
	volumeDraft = "d.new" // that, while it is not whole
)

// A Seed is a directory that a new volume begins as: Path in the mounted root
// file system of a sandbox that nothing runs in.
type Seed struct {
	ID       string // of the sandbox; empty: the volume begins empty
	Path     string
	OwnUsers bool // as in its Mount
	UIDBase  uint32
}

func (s *Store) volumeDir(vol string) (string, error) {
	if !record.IsVolumeID(vol) {
		return "", fmt.Errorf("volume %q: not an id", vol)
	}
	return filepath.Join(s.poolDir, vol), nil
}

// MakeVolume makes the volume vol, which holds at most bytes, metadata included;
// 0 is no limit. It begins as seed, with its owner and mode. One that is there
// stays as it is; what a killed daemon left of one is made anew.
func (s *Store) MakeVolume(ctx context.Context, vol string, bytes int64, seed Seed) error {
	dir, err := s.volumeDir(vol)
	if err != nil {
		return err
	}
	unlock, err := s.making.Lock(ctx, vol)
	if err != nil {
		return fmt.Errorf("make volume %s: another sandbox is at it: %w", vol, err)
	}
	defer unlock()
	if there, err := tree.Exists(filepath.Join(dir, volumeFiles)); err != nil || there {
		return err
	}
	if err := s.makeVolume(ctx, dir, bytes, seed); err != nil {
		err = errors.Join(err, s.pool.Destroy(dir))
		switch {
		case errors.Is(err, unix.EDQUOT):
			return errs.Wrap(err, errs.Exhausted, "what the image has at %s does not fit into a volume of %s: make a larger one "+
				"(`sandboxctl volume create --size`)", seed.Path, record.Size(bytes))
		default:
			return s.poolFull(fmt.Errorf("make volume %s: %w", vol, err))
		}
	}
	return nil
}

func (s *Store) makeVolume(ctx context.Context, dir string, bytes int64, seed Seed) error {
	if err := s.pool.Destroy(dir); err != nil {
		return err
	}
	if err := s.pool.Create(dir, bytes); err != nil {
		return err
	}
	draft := filepath.Join(dir, volumeDraft)
	if err := errors.Join(os.Mkdir(draft, 0o755), os.Chmod(draft, 0o755)); err != nil {
		return err
	}
	if seed.ID != "" {
		copied, err := s.sow(ctx, draft, seed)
		if err == nil && copied { // what is not on disk must not look whole after a power cut
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

// sow gives draft what a seed has. No such directory is fine: there is nothing to
// begin with.
func (s *Store) sow(ctx context.Context, draft string, seed Seed) (copied bool, err error) {
	root, err := unix.Open(s.RootfsDir(seed.ID), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, &os.PathError{Op: "open", Path: s.RootfsDir(seed.ID), Err: err}
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
	// On disk lie guest ids, and the root file system shows those of its users.
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
	return true, s.copySeed(ctx, from, draft, seed)
}

// copySeed copies a directory that a guest may have filled. cp(1) does it in a user
// namespace of the guest's ids, in which it may do what guest root may.
func (s *Store) copySeed(ctx context.Context, from *os.File, draft string, seed Seed) error {
	users := s.cfg.IdentityUserNS
	if seed.OwnUsers {
		var err error
		if users, err = s.cfg.UserNS(seed.ID); err != nil {
			return err
		}
		defer users.Close()
	}
	fd, err := overlay.Clone(draft, int(users.Fd()))
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

// DeleteVolume removes a volume with all that is in it, also half of one; absent
// is fine. The space comes back soon after.
func (s *Store) DeleteVolume(_ context.Context, vol string) error {
	dir, err := s.volumeDir(vol)
	if err != nil {
		return err
	}
	if err := s.throwAway(dir, os.Rename(dir, filepath.Join(s.poolDir, pool.TrashDir, vol))); err != nil {
		return fmt.Errorf("delete volume %s: %w", vol, err)
	}
	return nil
}

// ListVolumes returns the ids that have a directory on the pool.
func (s *Store) ListVolumes(context.Context) (ids []string, err error) {
	entries, err := os.ReadDir(s.poolDir)
	if err != nil {
		return nil, fmt.Errorf("list volumes: %w", err)
	}
	for _, e := range entries {
		if record.IsVolumeID(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// VolumeUsage returns the bytes that a volume holds, 0 of one that nobody has
// mounted yet. It fails with errs.Unsupported on a plain pool.
func (s *Store) VolumeUsage(vol string) (used int64, err error) {
	dir, err := s.volumeDir(vol)
	if err != nil {
		return 0, err
	}
	used, limit, err := s.pool.Usage(dir)
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

// openVolume opens what of a volume is to be mounted. A directory below it that
// there is none of is made: nothing else could, in a new one.
func (s *Store) openVolume(m *record.VolumeMount) (*os.File, error) {
	dir, err := s.volumeDir(m.Volume)
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
