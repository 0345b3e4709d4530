package admission

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/durable"
)

// Drain is whether the host is being emptied: nothing new is created, what runs
// goes on. It is a file, so that a restart, which is what one drains for most
// often, does not forget it.
type Drain struct {
	path string

	mu    sync.Mutex
	since time.Time // zero: it is not; guarded by mu
}

// OpenDrain reads the file at path. Its age is since when the host drains.
func OpenDrain(path string) (*Drain, error) {
	d := &Drain{path: path}
	fi, err := os.Stat(path)
	switch {
	case err == nil:
		d.since = fi.ModTime().UTC()
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("see whether the host drains: %w", err)
	}
	return d, nil
}

// Since is since when the host drains; zero: it does not.
func (d *Drain) Since() time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.since
}

// Set has the host drain, or no longer. It is durable before it returns, and
// may be said twice.
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
	} else if err = os.Remove(d.path); errors.Is(err, fs.ErrNotExist) { // somebody helped
		err = nil
	}
	if err == nil {
		err = durable.SyncDir(filepath.Dir(d.path))
	}
	if err != nil {
		return fmt.Errorf("remember that the host drains, or does not: %w", err)
	}
	d.since = since
	return nil
}
