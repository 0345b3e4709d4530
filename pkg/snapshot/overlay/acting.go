package overlay

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// overlayCaps are the capabilities that the creator of an overlay needs, for as long
// as it is mounted: with fewer, chown, chmod of others' files, setgid bits and file
// capabilities fail inside, the third without an error. It gets no more; CAP_MKNOD is
// left out, so no guest ever makes a device.
const overlayCaps = 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_CHOWN |
	1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID | 1<<unix.CAP_SETFCAP

// ActingAs runs f on a thread of its own that has the host id root as its file system
// ids, and only overlayCaps in effect. An overlay keeps the credentials of the thread
// that made it, and files made with these on an idmapped upper must belong to guest
// root. The thread ends with f, so nothing else runs with them.
func ActingAs(root int, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		done <- func() error {
			hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var caps [2]unix.CapUserData
			if err := unix.Capget(&hdr, &caps[0]); err != nil {
				return fmt.Errorf("read capabilities: %w", err)
			}
			// The group first: without CAP_SETGID in effect it is silently refused.
			if root != 0 {
				_, _ = unix.SetfsgidRetGid(root)
				_, _ = unix.SetfsuidRetUid(root)
				if gid, _ := unix.SetfsgidRetGid(-1); gid != root {
					return fmt.Errorf("setfsgid(%d) had no effect: CAP_SETGID is missing", root)
				}
				if uid, _ := unix.SetfsuidRetUid(-1); uid != root {
					return fmt.Errorf("setfsuid(%d) had no effect: CAP_SETUID is missing", root)
				}
			}
			was := caps
			caps[0].Effective, caps[1].Effective = overlayCaps, 0
			if err := unix.Capset(&hdr, &caps[0]); err != nil {
				return fmt.Errorf("set capabilities: %w", err)
			}
			err := f()
			// Go cannot end the first thread of a process, so that one must be as it
			// was.
			if cerr := unix.Capset(&hdr, &was[0]); cerr != nil {
				return errors.Join(err, fmt.Errorf("restore capabilities: %w", cerr))
			}
			_, _ = unix.SetfsuidRetUid(0)
			_, _ = unix.SetfsgidRetGid(0)
			return err
		}()
	}()
	return <-done
}
