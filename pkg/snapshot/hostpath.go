package snapshot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// CheckHostPath fails as AttachVolumes would if a path of the host may not or cannot be
// mounted. It makes the directories that are missing.
func (v *Volumes) CheckHostPath(m record.VolumeMount) error {
	f, err := v.openHost(&m)
	if err != nil {
		return err
	}
	return f.Close()
}

// openHost opens a directory or file of the host below one that the configuration
// allows. It makes the directories that are missing, as root's.
func (v *Volumes) openHost(m *record.VolumeMount) (*os.File, error) {
	allowed := ""
	for _, dir := range v.hostPaths {
		if record.Within(m.Source, dir) && len(dir) > len(allowed) {
			allowed = dir
		}
	}
	if allowed == "" && weak.Off(weak.HostPaths) {
		allowed = filepath.Dir(m.Source)
	}
	if allowed == "" {
		return nil, errs.Wire(errs.New(errs.Invalid, "host path %q is not in an allowed directory; the daemon's configuration lists the "+
			"allowed directories (storage.allowed_host_paths)", m.Source), "VOLUME::HOST_PATH_NOT_ALLOWED")
	}
	what := fmt.Sprintf("host path %q", filepath.Join(m.Source, m.Sub))
	top, err := openPath(allowed) // the operator's path: links in it are followed
	if err != nil {
		return nil, badPath(err, "VOLUME::HOST_PATH_NOT_FOUND", what)
	}
	defer top.Close()
	f := top
	if rel := strings.Trim(strings.TrimPrefix(filepath.Join(m.Source, m.Sub), allowed), "/"); rel != "" {
		f, err = tree.Descend(top, rel, tree.Steps{Make: true, Kind: unix.S_IFDIR})
	} else {
		f, err = tree.Dup(top)
	}
	if err != nil {
		code := "VOLUME::INVALID_HOST_PATH"
		if p, ok := errors.AsType[*os.PathError](err); ok && p.Op == "make" {
			code = "VOLUME::HOST_PATH_CREATE_FAILED"
		}
		return nil, badPath(err, code, what)
	}
	if err := v.checkHost(f, top, what); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// kernelFS are file systems that show the kernel's own state.
var kernelFS = []int64{
	unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC,
	unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC, unix.DEVPTS_SUPER_MAGIC, unix.NSFS_MAGIC, unix.EFIVARFS_MAGIC, unix.PSTOREFS_MAGIC,
}

// checkHost refuses what no guest may have, whatever the configuration allows: the
// daemon's own directories, the kernel's file systems, devices and sockets.
func (v *Volumes) checkHost(f, top *os.File, what string) error {
	refuse := func(why string) error {
		return errs.Wire(errs.New(errs.Invalid, "%s: %s", what, why), "VOLUME::INVALID_HOST_PATH")
	}
	if err := mountable(f, "VOLUME::INVALID_HOST_PATH", what); err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "statfs", Path: f.Name(), Err: err}
	}
	if slices.Contains(kernelFS, int64(st.Type)) {
		return refuse("it is on a kernel file system, such as proc or sysfs")
	}
	at, err := tree.NameOf(f)
	if err != nil {
		return err
	}
	above, err := tree.NameOf(top)
	if err != nil {
		return err
	}
	if !record.Within(at, above) && !weak.Off(weak.HostLinks) {
		return refuse("it was moved while it was checked")
	}
	for _, own := range []string{v.stateDir, v.runDir} {
		if own, err = filepath.EvalSymlinks(own); err != nil {
			return err
		}
		if record.Within(at, own) || record.Within(own, at) {
			return refuse("sandboxd keeps its own files there or below it")
		}
	}
	return nil
}

// mountable refuses devices, sockets and named pipes.
func mountable(f *os.File, wire, what string) error {
	kind, err := kindOf(f)
	if err == nil && kind != unix.S_IFDIR && kind != unix.S_IFREG {
		err = errs.Wire(errs.New(errs.Invalid, "%s: it is neither a directory nor a regular file", what), wire)
	}
	return err
}

func openPath(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return os.NewFile(uintptr(fd), dir), nil
}

func kindOf(f *os.File) (uint32, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: f.Name(), Err: err}
	}
	return st.Mode & unix.S_IFMT, nil
}

// sameKind refuses to mount a directory on a file, or the other way round.
func sameKind(f *os.File, want uint32) error {
	kind, err := kindOf(f)
	if err == nil && (kind == unix.S_IFDIR) != (want == unix.S_IFDIR) {
		err = unix.ENOTDIR
	}
	return err
}

// badPath makes an error for clients that says why a path cannot be mounted. wire is
// its code in the API.
func badPath(err error, wire, what string) error {
	if _, ok := errors.AsType[*errs.Error](err); ok {
		return err
	}
	why := "it cannot be opened; the daemon's log says why"
	switch {
	case errors.Is(err, unix.ELOOP):
		why = "it leads through a symbolic link, and links are not followed there"
	case errors.Is(err, unix.ENOTDIR):
		why = "a part of it is not a directory"
	case errors.Is(err, unix.EXDEV):
		why = "it leads into another file system"
	case errors.Is(err, unix.ENOENT):
		why = "there is no such file or directory"
	case errors.Is(err, unix.ENAMETOOLONG):
		why = "it, or a part of it, is too long"
	case errors.Is(err, unix.EROFS):
		why = "it does not exist and cannot be created: its file system is read-only"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errs.Wire(errs.Wrap(err, errs.Exhausted, "%s: it does not exist and cannot be created: its file system is full", what), wire)
	}
	return errs.Wire(errs.Wrap(err, errs.Invalid, "%s: %s", what, why), wire)
}
