package versions

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// The prefixes of directories beside versions, which are no names of versions: of one that is being removed, and
// of one that an installation unpacks (internal/appliance) while it has the lock.
const (
	removing = ".removing-"
	staged   = ".staged-"
)

// Prune removes the versions that nothing needs, and returns them. The versions that the links name, that
// the package manager has installed, and that processes run from or have mounted, are needed; own is the
// one of this process. needed drops others from what it is given. While somebody changes the version,
// or a package manager replaces one, Prune does nothing.
func (r Root) Prune(own string, needed func(candidates []string) (rest []string, err error)) (removed []string, err error) {
	if busy, err := r.Packaging(); busy || err != nil {
		return nil, err
	}
	rest, err := r.unneeded(own, needed)
	cut, cutErr := r.cut()
	if err = errors.Join(err, cutErr); len(rest)+len(cut) == 0 || err != nil { // mostly so; the lock would be in the way of a trial
		return nil, err
	}
	lock, err := r.Lock()
	if errs.Is(err, errs.WrongState) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer lock.Unlock()
	cut, err = r.cut() // again: under the lock
	for _, dir := range cut {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	if err != nil {
		return nil, err
	}
	if rest, err = r.unneeded(own, needed); err != nil { // likewise
		return nil, err
	}
	for _, version := range rest {
		if busy, err := r.Packaging(); busy || err != nil {
			return removed, err
		}
		if err := r.remove(version); err != nil {
			return removed, fmt.Errorf("remove version %s: %w", version, err)
		}
		removed = append(removed, version)
	}
	return removed, nil
}

// unneeded lists the versions that nothing needs.
func (r Root) unneeded(own string, needed func(candidates []string) (rest []string, err error)) (rest []string, err error) {
	rest, err = r.spare(own)
	for _, drop := range []func([]string) ([]string, error){needed, r.notPackaged, r.notUsed} {
		if err != nil || len(rest) == 0 {
			break
		}
		rest, err = drop(rest)
	}
	if err != nil {
		return nil, fmt.Errorf("find versions that nothing needs: %w", err)
	}
	return rest, nil
}

// cut lists what a removal or an installation left that was cut short.
func (r Root) cut() (dirs []string, err error) {
	for _, prefix := range []string{removing, staged} {
		found, globErr := filepath.Glob(filepath.Join(string(r), "versions", prefix+"*"))
		dirs, err = append(dirs, found...), errors.Join(err, globErr)
	}
	return dirs, err
}

// spare lists the versions, the newest first, that are neither own nor named by a link or by a change that
// is under way.
func (r Root) spare(own string) (rest []string, err error) {
	all, err := r.List()
	if err != nil {
		return nil, err
	}
	j, err := r.Journal()
	if err != nil {
		return nil, err
	}
	keep := []string{own}
	if j.UnderWay() {
		keep = append(keep, j.From, j.To, j.Before)
	}
	for _, l := range []Link{Current, Previous, Undo} {
		named, err := r.Named(l)
		if err != nil {
			return nil, err
		}
		keep = append(keep, named)
	}
	for _, v := range all {
		if !slices.Contains(keep, v.Name) {
			rest = append(rest, v.Name)
		}
	}
	return rest, nil
}

// remove removes a version, so that at each moment it is whole or not there.
func (r Root) remove(version string) error {
	aside := filepath.Join(string(r), "versions", removing+version)
	if err := os.RemoveAll(aside); err != nil {
		return err
	}
	if err := durable.Rename(r.Dir(version), aside); err != nil {
		return err
	}
	return os.RemoveAll(aside)
}

// dpkgLists are the files in which dpkg keeps which files a package has (dpkg-query(1), --listfiles reads them).
var dpkgLists = []string{"/var/lib/dpkg/info/sandboxd.list", "/var/lib/dpkg/info/sandboxd:*.list"}

// notPackaged drops the versions that dpkg or rpm has installed: these remove them.
func (r Root) notPackaged(candidates []string) ([]string, error) {
	var files []byte
	for _, pattern := range dpkgLists {
		lists, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, list := range lists {
			b, err := os.ReadFile(list)
			if err != nil {
				return nil, err
			}
			files = append(files, b...)
		}
	}
	if program, err := exec.LookPath("rpm"); err == nil {
		out, err := exec.Command(program, "-ql", "sandboxd").Output()
		var exit *exec.ExitError
		if err != nil && !(errors.As(err, &exit) && bytes.Contains(out, []byte("is not installed"))) {
			return nil, fmt.Errorf("ask rpm for the files of the package sandboxd: %w", err)
		}
		files = append(files, out...)
	}
	return slices.DeleteFunc(candidates, func(version string) bool {
		return bytes.Contains(append([]byte{'\n'}, files...), []byte("\n"+r.Dir(version)+"/"))
	}), nil
}

// notUsed drops the versions that processes run from or have mounted, of whichever daemon they are.
func (r Root) notUsed(candidates []string) ([]string, error) {
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, dir := range processes {
		if len(candidates) == 0 {
			break
		}
		exe, _ := os.Readlink(filepath.Join(dir, "exe")) // of a thread of the kernel there is none
		mounts, err := os.ReadFile(filepath.Join(dir, "mountinfo"))
		if err != nil && !gone(err) {
			return nil, err
		}
		candidates = slices.DeleteFunc(candidates, func(version string) bool {
			// The root of a mount is a path on its file system, of which the end is the same.
			return strings.HasPrefix(exe, r.Dir(version)+"/") || bytes.Contains(mounts, []byte("/versions/"+version+"/"))
		})
	}
	return candidates, nil
}

// gone reports whether a process has ended, or is about to.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL)
}
