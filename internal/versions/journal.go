package versions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Step is how far a change of the version is.
type Step string

const (
	// Trial: To may run, and nobody has found it good. Without a holder of the lock it is undone.
	Trial Step = "trial"
	// Undoing: From is to run again.
	Undoing Step = "undoing"
	Undone  Step = "undone"
	Done    Step = "done"
)

// Journal is the last change of the version. It is on disk before anything changes.
type Journal struct {
	Step Step   `json:"step"`
	From string `json:"from"` // versions
	To   string `json:"to"`
	// Before is what Previous named.
	Before string `json:"before,omitempty"`
	// The newest schemas of the state that both read.
	FromSchema int `json:"from_schema"`
	ToSchema   int `json:"to_schema"`
	// Nonce is in the header Sandboxd-Trial of requests that the daemon on trial serves, though they
	// change the state.
	Nonce string `json:"nonce"`
	// Units is the directory of unit files that follow the version; "": none do.
	Units   string    `json:"units,omitempty"`
	Started time.Time `json:"started"`
	Ended   time.Time `json:"ended,omitzero"`
	Reason  string    `json:"reason,omitempty"` // why it is undone
	// SoakUntil: To was found good, and until then a crash of it still goes back to From.
	SoakUntil time.Time `json:"soak_until,omitzero"`
}

// UnderWay reports whether the change has begun and not ended. It is false for nil.
func (j *Journal) UnderWay() bool { return j != nil && (j.Step == Trial || j.Step == Undoing) }

// Holds reports whether requests that change the state must wait for the end of the trial: an undo
// would put the state of before in place, which knows nothing of them.
func (j *Journal) Holds() bool { return j != nil && j.Step == Trial && j.FromSchema != j.ToSchema }

// Journal returns the last change; nil: there was none.
func (r Root) Journal() (*Journal, error) {
	b, err := os.ReadFile(r.journal())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the journal of upgrades: %w", err)
	}
	var j Journal
	if err := json.Unmarshal(b, &j); err != nil || !Valid(j.From) || !Valid(j.To) {
		return nil, errs.Wrap(err, errs.Internal, "the journal of upgrades, %s, is damaged: see which version %s names, remove the "+
			"journal, and restart sandboxd", r.journal(), r.link(Current))
	}
	return &j, nil
}

// Note writes the journal; when it returns, it is on disk.
func (r Root) Note(j *Journal) error {
	b, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return err
	}
	if err := durable.Write(r.journal(), append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write the journal of upgrades: %w", err)
	}
	return nil
}

func (r Root) journal() string { return filepath.Join(string(r), "upgrade.json") }

// Lock is held while a program changes the version. It ends with the process.
type Lock struct {
	file *os.File
	free func()
}

// here has a mutex for each Root of which this process wants the lock: a lock of fcntl(2) keeps out no other part of
// the process, and ends when any of them closes the file.
var here sync.Map

// Lock takes the lock. It fails at once if another process holds it, and waits while another part of this one does.
// A process that holds it must not call Wait or Held.
func (r Root) Lock() (_ *Lock, err error) {
	value, _ := here.LoadOrStore(r, &sync.Mutex{})
	mu := value.(*sync.Mutex)
	mu.Lock()
	defer func() {
		if err != nil {
			mu.Unlock()
		}
	}()
	f, err := r.openLock()
	if err != nil {
		return nil, err
	}
	if err := unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		holder := unix.Flock_t{Type: unix.F_WRLCK}
		_ = unix.FcntlFlock(f.Fd(), unix.F_GETLK, &holder)
		f.Close()
		return nil, errs.New(errs.WrongState, "another program (pid %d) changes the version of sandboxd: wait until it ends", holder.Pid)
	}
	return &Lock{f, sync.OnceFunc(mu.Unlock)}, nil
}

// Unlock releases the lock. A second call does nothing.
func (l *Lock) Unlock() {
	if l != nil {
		l.file.Close()
		l.free()
	}
}

// Wait returns when nobody holds the lock. It cannot be interrupted: call it in a goroutine of its
// own, in a process that does not hold the lock.
func (r Root) Wait() error {
	f, err := r.openLock()
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		err := unix.FcntlFlock(f.Fd(), unix.F_SETLKW, &unix.Flock_t{Type: unix.F_WRLCK})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// WaitFor is Wait until ctx ends, at the latest after limit. After an error the process must not take the lock.
func (r Root) WaitFor(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errs.New(errs.WrongState, "another program changes the version of "+
		"sandboxd, and has not ended within %s: wait until it ends", limit))
	defer cancel()
	free := make(chan error, 1)
	go func() { free <- r.Wait() }()
	select {
	case err := <-free:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Held reports whether another process holds the lock.
func (r Root) Held() (bool, error) {
	f, err := r.openLock()
	if err != nil {
		return false, err
	}
	defer f.Close()
	l := unix.Flock_t{Type: unix.F_WRLCK}
	err = unix.FcntlFlock(f.Fd(), unix.F_GETLK, &l)
	return l.Type != unix.F_UNLCK, err
}

func (r Root) openLock() (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(string(r), "upgrade.lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock of upgrades: %w", err)
	}
	return f, nil
}
