package files

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// attributes are resolved owner, group and mode; -1 leaves as is.
type attributes struct{ uid, gid, mode int }

// attributes resolves m with the guest's own accounts.
func (f *Files) attributes(m agent.FileMode) (attributes, error) {
	a := attributes{-1, -1, -1}
	if m.Owner != "" {
		uid, err := f.Accounts.UID(m.Owner)
		if err != nil {
			return a, reply.Fail(http.StatusInternalServerError, reply.Failed, "owner: %v", err)
		}
		a.uid = int(uid)
	}
	if m.Group != "" {
		gid, err := f.Accounts.GID(m.Group)
		if err != nil {
			return a, reply.Fail(http.StatusInternalServerError, reply.Failed, "group: %v", err)
		}
		a.gid = int(gid)
	}
	if m.Mode != 0 {
		mode, err := fromDigits(m.Mode)
		if err != nil {
			return a, reply.BadRequest("%v", err)
		}
		a.mode = int(mode)
	}
	return a, nil
}

// or fills what a leaves open from b.
func (a attributes) or(b attributes) attributes {
	if a.uid < 0 {
		a.uid = b.uid
	}
	if a.gid < 0 {
		a.gid = b.gid
	}
	if a.mode < 0 {
		a.mode = b.mode
	}
	return a
}

// apply sets a on path; links are followed. The owner comes first, because
// changing it clears setuid.
func (a attributes) apply(path string) error {
	if a.uid >= 0 || a.gid >= 0 {
		if err := os.Chown(path, a.uid, a.gid); err != nil {
			return a.unowned(err)
		}
	}
	if a.mode >= 0 {
		return os.NewSyscallError("chmod", unix.Chmod(path, uint32(a.mode)))
	}
	if a.uid < 0 && a.gid < 0 {
		_, err := os.Stat(path) // nothing to set, but the file must be there
		return err
	}
	return nil
}

// ownerOfNew is whom new files belong to.
func (f *Files) ownerOfNew() attributes {
	return attributes{uid: int(f.User.UID), gid: int(f.User.GID), mode: -1}
}

// chown gives path to uid and gid, unless they are this process's own, as which
// it was made.
func (a attributes) chown(path string) error {
	if a.uid == os.Geteuid() && a.gid == os.Getegid() {
		return nil
	}
	return a.unowned(os.Lchown(path, a.uid, a.gid))
}

// applyTo is apply of an open file.
func (a attributes) applyTo(f *os.File) error {
	fd := int(f.Fd())
	if a.uid >= 0 || a.gid >= 0 {
		if err := unix.Fchown(fd, a.uid, a.gid); err != nil {
			return a.unowned(&fs.PathError{Op: "chown", Path: f.Name(), Err: err})
		}
	}
	if a.mode >= 0 {
		if err := unix.Fchmod(fd, uint32(a.mode)); err != nil {
			return &fs.PathError{Op: "chmod", Path: f.Name(), Err: err}
		}
	}
	return nil
}

// unowned adds to the error of a chown that no file of a sandbox can have the owner.
func (a attributes) unowned(err error) error {
	if max(a.uid, a.gid) > proc.MaxID && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOVERFLOW)) {
		return fmt.Errorf("%w: files of a sandbox belong to the ids 0 to %d, and not to %d:%d", err, proc.MaxID, a.uid, a.gid)
	}
	return err
}

// digits writes the octal permission as a decimal number: 0644 is 644.
func digits(mode uint32) int {
	mode &= 0o7777
	return int(mode>>9&7)*1000 + int(mode>>6&7)*100 + int(mode>>3&7)*10 + int(mode&7)
}

// fromDigits is digits backwards.
func fromDigits(n int) (uint32, error) {
	if n < 0 || n > 7777 {
		return 0, fmt.Errorf("mode %d: not an octal permission such as 644 or 4755", n)
	}
	mode, shift := uint32(0), 0
	for m := n; m > 0; m /= 10 {
		if m%10 > 7 {
			return 0, fmt.Errorf("mode %d: not an octal permission such as 644 or 4755", n)
		}
		mode |= uint32(m%10) << shift
		shift += 3
	}
	return mode, nil
}
