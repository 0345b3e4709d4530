package admission

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/durable"
)

// Drain is whether the host drains: nothing new is created, running sandboxes go on. It
// is stored as a file, so that it survives a restart, the most common reason to drain.
type Drain struct {
	path string

	mu    sync.Mutex
	since time.Time // zero: it does not drain; guarded by mu
}

type trialKey struct{}

// Trial returns a context of the program that tries a new version of the daemon. The gate lets it create
// sandboxes while the host drains: it deletes them at once, and operators drain a host before they upgrade.
func Trial(ctx context.Context) context.Context { return context.WithValue(ctx, trialKey{}, true) }

func onTrial(ctx context.Context) bool { return ctx.Value(trialKey{}) != nil }

// OpenDrain reads the file at path. The file's age is the start of the drain.
func OpenDrain(path string) (*Drain, error) {
	d := &Drain{path: path}
	fi, err := os.Stat(path)
	switch {
	case err == nil:
		d.since = fi.ModTime().UTC()
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("check whether the host is draining: %w", err)
	}
	return d, nil
}

// Since is when the drain started; zero: the host does not drain.
func (d *Drain) Since() time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.since
}

// Set starts or ends the drain. It is durable before it returns. Setting the same state
// again does nothing.
func (d *Drain) Set(on bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if on == !d.since.IsZero() {
		return nil
	}
	var since time.Time
	var err error
	if on {
		since = time.Now().UTC()
		err = os.WriteFile(d.path, nil, 0o600)
	} else if err = os.Remove(d.path); errors.Is(err, fs.ErrNotExist) { // already removed
		err = nil
	}
	if err == nil {
		err = durable.SyncDir(filepath.Dir(d.path))
	}
	if err != nil {
		return fmt.Errorf("save whether the host is draining: %w", err)
	}
	d.since = since
	return nil
}
