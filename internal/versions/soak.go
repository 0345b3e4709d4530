package versions

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Soaks reports whether the change is done and its soak lasts: until its end a crash of To goes back to From. A
// clock that was set back behind the change ends the soak. It is false for nil.
func (j *Journal) Soaks(now time.Time) bool {
	return j != nil && j.Step == Done && !now.Before(j.Ended) && now.Before(j.SoakUntil)
}

// A Mark is a file that says that a daemon of a version on trial or in its soak runs. The daemon has it locked, and
// removes it when it ends in order. A nil Mark is one that another daemon of the version has.
type Mark struct{ file *os.File }

// Mark makes the mark of this process.
func (r Root) Mark() (*Mark, error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(r.mark(), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("mark that this version runs: %w", err)
	}
	err = unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return nil, f.Close()
	}
	if err == nil {
		if err = f.Truncate(0); err == nil {
			_, err = f.WriteAt(boot, 0)
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("mark that this version runs: %w", err)
	}
	return &Mark{f}, nil
}

// Remove says that the daemon ends as it should.
func (m *Mark) Remove() error {
	if m == nil {
		return nil
	}
	if err := os.Remove(m.file.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return m.file.Close()
}

// Crashed reports whether the daemon that made the mark ended, since the host has booted, without having been asked
// to. A process that has a Mark must not ask.
func (r Root) Crashed() (bool, error) {
	f, err := os.OpenFile(r.mark(), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	l := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &l); err != nil || l.Type != unix.F_UNLCK {
		return false, err
	}
	had, err := io.ReadAll(io.LimitReader(f, 64))
	if err != nil {
		return false, err
	}
	boot, err := bootID()
	return string(had) == string(boot), err
}

// EndSoak ends the soak of the change with this nonce. If another one has begun, it does nothing.
func (r Root) EndSoak(nonce string) error {
	lock, err := r.Lock()
	if errs.Is(err, errs.WrongState) {
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Unlock()
	j, err := r.Journal()
	if err != nil || j == nil || j.Nonce != nonce || j.UnderWay() {
		return err
	}
	return r.Disarm()
}

// Disarm removes what only an undoing needs.
func (r Root) Disarm() error {
	err := os.Remove(r.mark())
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	replaced, replacedErr := r.Replaced()
	if replaced == "" && replacedErr == nil { // else the link is of a package manager, which has not ended
		err = errors.Join(err, r.Point(Undo, ""))
	}
	return errors.Join(err, replacedErr, r.Release())
}

func (r Root) mark() string { return filepath.Join(string(r), "upgrade.running") }

func bootID() ([]byte, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("read the boot id: %w", err)
	}
	return b, nil
}
