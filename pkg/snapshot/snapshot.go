// Package snapshot keeps the files of sandboxes: image layers, and for every
// sandbox a disk, the writable upper of an overlay over those layers.
//
//	<state>/layers/<hex>     one image layer, named by the sha256 of its tar; never changes
//	<state>/layers/scaffold-*  topmost lower of every overlay: the mount points
//	<state>/pool.img         a btrfs, allocated in full, mounted by loop at ... (one kind of pool)
//	<state>/pool/<id>        ... a disk: a subvolume with the upper u and the work directory w
//	<state>/pool/snap-<id>   ... a snapshot: a disk that nobody changes
//	<state>/pool/vol-<id>    ... a named volume: a subvolume with its files in d
//	<state>/pool/id          random name of the pool; the store of records keeps it too
//	<state>/pool/lost+found  disks and snapshots nobody owns, for 24 h
//	<run>/<id>/rootfs        disk and layers, mounted
//	<run>/volumes/<id>/<n>   what a sandbox mounts beside: volumes, directories of the host
//
// Files on disk carry guest ids, 0..65535, always. Upper and lowers reach the
// overlay as idmapped clones, so a layer depends on neither slot nor runtime
// and a disk moves between them.
//
// What surprises: two subvolumes of one btrfs must never meet in one overlay.
// Both count inodes from 256, overlayfs shows both under one st_dev, and who
// goes by (dev, ino), as gVisor does, opens the wrong file. Therefore image
// layers lie on the file system of the state directory and only uppers in the
// pool.
//
// The state directory must not lie below the directory of a binary that
// libcontainer seals: its overlay would have overlapping lowers, and each start
// would copy the binary instead.
package snapshot

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/internal/keylock"
	"github.com/sandboxd/sandboxd/pkg/snapshot/layer"
	"github.com/sandboxd/sandboxd/pkg/snapshot/overlay"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/btrfs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/plain"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/project"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Config says where files live.
type Config struct {
	Instance  instance.Instance
	StateDir  string // survives a reboot; 0700
	RunDir    string // <RunDir>/<id>/rootfs; all above it must be traversable by every guest
	Pool      string // a kind of pool; empty is pool.Auto
	PoolBytes int64  // size of a new pool file; an existing one keeps its size

	// UserNS opens the user namespace of a sandbox that has its own users. The
	// caller of UserNS closes the file.
	UserNS func(id string) (*os.File, error)
	// IdentityUserNS maps 0..65535 to itself and nothing else: what idmaps the
	// files of sandboxes without own users. Without it gVisor's guests could
	// chown to ids that no other mount can show.
	IdentityUserNS *os.File

	// HostPaths are the directories of the host that sandboxes may mount, with all
	// that is below them.
	HostPaths []string

	// Patience is how long Close waits for the kernel: 5 s if zero.
	Patience time.Duration

	// AttachedClones mounts the way Linux 6.1 needs it. It is found out by
	// trying; tests force it.
	AttachedClones bool
	// FullQgroups has a new btrfs count as it must before Linux 6.7; for tests.
	FullQgroups bool
}

// Store keeps layers, disks and mounts of one instance. Its methods may be
// called at the same time for different ids.
type Store struct {
	cfg      Config
	pool     pool.Driver
	poolDir  string
	layerDir string
	scaffold string // the directory of the layer with all mount points
	poolID   string
	attached bool // mount as Linux 6.1 needs it

	Layers *layer.Store

	mu        sync.Mutex
	releasing map[string][]chan struct{} // detached overlays the kernel still writes back

	making keylock.Set // volumes, by id

	trash chan struct{} // held by who empties the trash
	diffs chan struct{} // one for each that is being made
	bg    sync.WaitGroup
}

// Open makes the pool and the directories usable, making them at first use,
// mounting the pool after a reboot, and finding it mounted after a restart.
// It clears away what a killed import left.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.IdentityUserNS == nil || cfg.UserNS == nil {
		return nil, errors.New("open snapshot store: UserNS and IdentityUserNS must be set")
	}
	s := &Store{
		cfg:       cfg,
		poolDir:   pool.Dir(cfg.StateDir),
		layerDir:  filepath.Join(cfg.StateDir, "layers"),
		releasing: map[string][]chan struct{}{},
		trash:     make(chan struct{}, 1),
		diffs:     make(chan struct{}, maxDiffs),
	}
	for _, d := range []struct {
		path string
		mode fs.FileMode
	}{{cfg.StateDir, 0o700}, {s.poolDir, 0o700}, {s.layerDir, 0o700}, {cfg.RunDir, 0o711}, {filepath.Join(cfg.RunDir, VolumesDir), 0o700}} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return nil, fmt.Errorf("open snapshot store: %w", err)
		}
	}
	var err error
	if s.pool, err = driver(cfg); err != nil {
		return nil, err
	}
	if err := s.pool.Open(ctx, s.poolDir); err != nil {
		return nil, fmt.Errorf("open storage pool %s: %w", s.poolDir, err)
	}
	if err := s.pool.CheckLayers(s.layerDir); err != nil {
		return nil, fmt.Errorf("open storage pool %s: %w", s.poolDir, err)
	}
	if err := s.prepare(); err != nil {
		return nil, fmt.Errorf("open snapshot store %s: %w", cfg.StateDir, err)
	}
	return s, nil
}

// driver is the driver for the kind of pool that the configuration names.
func driver(cfg Config) (pool.Driver, error) {
	kind, err := pool.Kind(cfg.StateDir, cfg.Pool)
	if err != nil {
		return nil, err
	}
	image := pool.Image(cfg.StateDir)
	switch kind {
	case pool.Btrfs:
		return btrfs.New(cfg.FullQgroups), nil
	case pool.BtrfsLoop:
		return btrfs.NewLoop(image, cfg.PoolBytes, cfg.FullQgroups), nil
	case pool.Project:
		return project.New(image), nil
	case pool.Plain:
		return plain.New(image), nil
	}
	return nil, fmt.Errorf("pool %q: want %s, %s, %s, %s or %s", kind, pool.Auto, pool.Btrfs, pool.BtrfsLoop, pool.Project, pool.Plain)
}

// prepare makes what a pool and a layer directory hold beside disks and layers.
func (s *Store) prepare() error {
	for _, d := range []string{pool.LostDir, pool.TrashDir} {
		if err := os.Mkdir(filepath.Join(s.poolDir, d), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	var err error
	if s.poolID, err = readOrMakeID(s.poolDir); err != nil {
		return err
	}
	if s.Layers, err = layer.Open(s.layerDir); err != nil {
		return err
	}
	if s.scaffold, err = makeScaffold(s.Layers); err != nil {
		return fmt.Errorf("make scaffold layer: %w", err)
	}
	s.attached = s.cfg.AttachedClones || !detachedClonesWork(s.Layers, s.cfg.IdentityUserNS, s.bg.Go)
	s.bg.Go(s.emptyTrash)
	return nil
}

// detachedClonesWork tries which kind of overlays this kernel mounts.
func detachedClonesWork(layers *layer.Store, users *os.File, later func(func())) bool {
	dir, err := layers.TempDir()
	if err != nil {
		return false
	}
	defer tree.Remove(dir) //nolint:errcheck // cleared at the next Open
	return overlay.DetachedWorks(dir, users, later)
}

// readOrMakeID returns the random name of the pool, drawing it at first use.
func readOrMakeID(dir string) (string, error) {
	path := filepath.Join(dir, pool.IDFile)
	b, err := os.ReadFile(path)
	if err == nil {
		return strings.TrimSpace(string(b)), nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	var r [16]byte
	_, _ = rand.Read(r[:]) // never fails since Go 1.24
	id := hex.EncodeToString(r[:])
	if err := durable.Write(path, []byte(id+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("name the pool: %w", err)
	}
	return id, nil
}

// PoolID is the random name of the pool. A store of records that remembers
// another one belongs to other disks: then nothing may be swept.
func (s *Store) PoolID() string { return s.poolID }

// Limits reports whether the pool can limit the bytes of a disk.
func (s *Store) Limits() bool { return s.pool.Kind() != pool.Plain }

// Describe says in one line, for people, where files live and how overlays are
// mounted.
func (s *Store) Describe() string {
	how := "detached clones"
	if s.attached {
		how = "attached clones (kernel before 6.15)"
	}
	return s.pool.Describe() + "; overlays of " + how
}

// PoolSpace returns the free and the total bytes of the pool.
func (s *Store) PoolSpace() (free, total int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(s.poolDir, &st); err != nil {
		return 0, 0, fmt.Errorf("statfs %s: %w", s.poolDir, err)
	}
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize, nil
}

// closePatience is how long Close waits for the kernel, by default.
const closePatience = 5 * time.Second

// Close waits for work in the background, and gives up on what the kernel takes
// long to write back: it goes on without us. Pool and root file systems stay
// mounted: sandboxes outlive the daemon.
func (s *Store) Close() error {
	patience := cmp.Or(s.cfg.Patience, closePatience)
	done := make(chan struct{})
	go func() {
		s.bg.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-time.After(patience):
		return fmt.Errorf("close the snapshot store: the kernel has not let go of all overlays or disks after %v; it goes on by itself",
			patience)
	}
}

// UnmountPool is Close, and takes the pool out of use: for the end of a
// development daemon, and for tests. It fails with EBUSY while a root file
// system is mounted.
func (s *Store) UnmountPool() error {
	s.bg.Wait()
	if err := s.pool.Close(); err != nil {
		return fmt.Errorf("unmount storage pool %s: %w", s.poolDir, err)
	}
	return nil
}
