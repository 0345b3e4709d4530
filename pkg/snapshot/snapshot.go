// Package snapshot keeps the files of sandboxes on one host.
//
//	<state>/layers/<hex>     one image layer, named by the sha256 of its tar; never changes
//	<state>/layers/scaffold-*  topmost lower of every overlay: the mount points
//	<state>/pool.img         a btrfs, allocated in full, mounted by loop at ... (one kind of pool)
//	<state>/pool/<id>        ... a disk: the upper u and the work directory w
//	<state>/pool/snap-<id>   ... a snapshot: a disk that nobody changes
//	<state>/pool/memory/snap-<id>  ... its memory image, if it has one
//	<state>/pool/vol-<id>    ... a named volume, with its files in d
//	<state>/pool/id          random name of the pool; the store of records keeps it too
//	<state>/pool/lost+found  disks and snapshots without an owner, for 24 h
//	<state>/pool/.backup  what a backup is reading, or a restore writing
//	<run>/<id>/rootfs        disk and layers, mounted
//	<run>/volumes/<id>/<n>   what a sandbox mounts beside: volumes, directories of the host
//
// A [Store] has five parts on one pool. Its Layers come from images (package layer). Its Disks,
// Snapshots and Volumes are directories of the storage [Pool], whose kinds are in
// package pool. Its Mounts show a disk on top of layers as the root file system of a
// sandbox (package overlay).
//
// A disk is what one sandbox has written. A snapshot is a disk frozen at one moment,
// from which others begin. The word has no other meaning here; the package is named
// after the snapshotter of container runtimes.
//
// Files on disk carry guest ids, 0..65535, always, whichever sandbox and runtime has
// them (see package overlay).
//
// What surprises: two subvolumes of one btrfs must never meet in one overlay (see
// package btrfs). Therefore image layers are on the file system of the state directory
// and only uppers in the pool.
//
// The state directory must not be below the directory of a binary that libcontainer
// seals: its overlay would have overlapping lowers, and each start would copy the
// binary instead.
package snapshot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/snapshot/layer"
	"github.com/sandboxd/sandboxd/pkg/snapshot/overlay"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/btrfs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/plain"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/project"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

// Config says where files live.
type Config struct {
	Instance  instance.Instance
	StateDir  string // survives a reboot; 0700
	RunDir    string // <RunDir>/<id>/rootfs; every guest must be able to pass the directories above it
	Pool      string // a kind of pool; empty is pool.Auto
	PoolBytes int64  // size of a new pool file, 0: by what is free; an existing one keeps its size

	// PoolDevice is a block device for a pool of kind pool.Btrfs, which is formatted if it
	// is blank. Empty: the operator has mounted the pool.
	PoolDevice string

	// UserNS opens the user namespace of a sandbox that has its own users. The
	// caller of UserNS closes the file.
	UserNS func(id string) (*os.File, error)
	// IdentityUserNS maps 0..65535 to itself and nothing else. It idmaps the files of
	// sandboxes without own users: otherwise gVisor's guests could chown to ids that
	// no other mount can show.
	IdentityUserNS *os.File

	// HostPaths are the directories of the host that sandboxes may mount, with
	// everything below them.
	HostPaths []string

	// Down, if not nil, is for how long the host was down since a time. Strays do not age then.
	Down func(since time.Time) time.Duration

	// Patience is how long Close waits for the kernel: 5 s if zero.
	Patience time.Duration

	// AttachedClones forces overlays to be mounted the way Linux 6.1 needs it, for
	// tests. Otherwise Open tries which way works.
	AttachedClones bool
	// FullQgroups makes a new btrfs count as it must before Linux 6.7; for tests.
	FullQgroups bool
}

// Store keeps the files of one instance. Methods of its parts may run at the same time
// for different ids.
type Store struct {
	Layers    *layer.Store
	Pool      *Pool
	Disks     *Disks
	Snapshots *Snapshots
	Volumes   *Volumes
	Mounts    *Mounts

	layerDir string
	patience time.Duration // of Close
	diffs    chan struct{} // holds one for each comparison that goes on
	bg       sync.WaitGroup
}

// Open takes the pool and the directories into use. It makes them at first use,
// mounts the pool after a reboot, and finds it mounted after a restart. It removes
// what a killed import of a layer left.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.IdentityUserNS == nil || cfg.UserNS == nil {
		return nil, errors.New("open snapshot store: UserNS and IdentityUserNS must be set")
	}
	if cfg.Down == nil {
		cfg.Down = func(time.Time) time.Duration { return 0 }
	}
	s := &Store{
		layerDir: filepath.Join(cfg.StateDir, "layers"),
		patience: cmp.Or(cfg.Patience, closePatience),
		diffs:    make(chan struct{}, maxDiffs),
	}
	for _, d := range []struct {
		path string
		mode fs.FileMode
	}{
		{cfg.StateDir, 0o700},
		{pool.Dir(cfg.StateDir), 0o700},
		{s.layerDir, 0o700},
		{cfg.RunDir, 0o711},
		{filepath.Join(cfg.RunDir, VolumesDir), 0o700},
	} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return nil, fmt.Errorf("open snapshot store: %w", err)
		}
	}
	d, err := driver(cfg)
	if err != nil {
		return nil, err
	}
	if s.Pool, err = openPool(ctx, d, pool.Dir(cfg.StateDir), s.layerDir, &s.bg); err != nil {
		return nil, err
	}
	s.Pool.down = cfg.Down
	if err := s.prepare(cfg); err != nil {
		return nil, fmt.Errorf("open snapshot store %s: %w", cfg.StateDir, err)
	}
	return s, nil
}

// prepare makes the parts of a store whose pool is open.
func (s *Store) prepare(cfg Config) (err error) {
	if err := s.Pool.prepare(); err != nil {
		return err
	}
	if s.Layers, err = layer.Open(s.layerDir); err != nil {
		return err
	}
	scaffold, err := makeScaffold(s.Layers)
	if err != nil {
		return fmt.Errorf("make scaffold layer: %w", err)
	}
	users := users{sandbox: cfg.UserNS, identity: cfg.IdentityUserNS}
	s.Disks = &Disks{pool: s.Pool}
	s.Snapshots = &Snapshots{pool: s.Pool}
	s.Mounts = &Mounts{
		runDir: cfg.RunDir, pool: s.Pool, layers: s.Layers, scaffold: scaffold, users: users,
		attached: cfg.AttachedClones || !detachedClonesWork(s.Layers, cfg.IdentityUserNS, s.bg.Go),
		bg:       &s.bg, releasing: map[string][]chan struct{}{},
	}
	s.Volumes = &Volumes{
		pool: s.Pool, stateDir: cfg.StateDir, runDir: cfg.RunDir, hostPaths: cfg.HostPaths,
		rootfs: s.Mounts.RootfsDir, users: users,
	}
	s.bg.Go(s.Pool.emptyTrash)
	return nil
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
		if cfg.PoolDevice != "" {
			return btrfs.NewDisk(cfg.PoolDevice, cfg.FullQgroups), nil
		}
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

// detachedClonesWork tries which kind of overlays this kernel mounts.
func detachedClonesWork(layers *layer.Store, users *os.File, later func(func())) bool {
	dir, err := layers.TempDir()
	if err != nil {
		return false
	}
	defer tree.Remove(dir) //nolint:errcheck // cleared at the next Open
	return overlay.DetachedWorks(dir, users, later)
}

// Describe says in one line, for people, where files live and how overlays are
// mounted.
func (s *Store) Describe() string {
	how := "detached clones"
	if s.Mounts.attached {
		how = "attached clones (kernel before 6.15)"
	}
	return s.Pool.driver.Describe() + "; overlays of " + how
}

// closePatience is how long Close waits for the kernel, by default.
const closePatience = 5 * time.Second

// Close waits for work in the background. It gives up waiting when the kernel takes
// long to write files back, which goes on without this process. Pool and root file
// systems stay mounted: sandboxes outlive the daemon.
func (s *Store) Close() error {
	done := make(chan struct{})
	go func() {
		s.bg.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-time.After(s.patience):
		return fmt.Errorf("close the snapshot store: the kernel has not released all overlays or disks after %v; it continues without "+
			"sandboxd", s.patience)
	}
}

// UnmountPool is Close that never gives up, and takes the pool out of use: for the end
// of a development daemon, and for tests. It fails with EBUSY while a root file system
// is mounted.
func (s *Store) UnmountPool() error {
	s.bg.Wait()
	if err := s.Pool.driver.Close(); err != nil {
		return fmt.Errorf("unmount storage pool %s: %w", s.Pool.dir, err)
	}
	return nil
}

// UnmountLost unmounts the pool of a state directory that somebody removed: `rm -rf` stops
// at the mount. Its loop device frees itself. It leaves a mount that no Open made. device is
// Config.PoolDevice.
func UnmountLost(stateDir, device string) error {
	dir, err := filepath.EvalSymlinks(pool.Dir(stateDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	source, err := mountedAt(dir)
	if err != nil || source == "" {
		return err
	}
	if device != "" { // the kernel may know it by another name
		if device, err = filepath.EvalSymlinks(device); err != nil {
			return fmt.Errorf("find the device of the storage pool: %w", err)
		}
		if same, err := filepath.EvalSymlinks(source); err == nil {
			source = same
		}
	}
	// The kernel adds " (deleted)" to the name of a file that is.
	file, _ := os.ReadFile("/sys/block/" + filepath.Base(source) + "/loop/backing_file")
	image, _ := strings.CutSuffix(strings.TrimSpace(string(file)), " (deleted)")
	if image != pool.Image(filepath.Dir(dir)) && filepath.Base(image) != pool.MovedImage && source != device {
		return nil
	}
	if err := btrfs.Unmount(dir); err != nil {
		return fmt.Errorf("unmount storage pool %s, of which the state is lost: %w; end what uses it", dir, err)
	}
	if err := os.Remove(dir); err != nil { // as it was to be
		return fmt.Errorf("remove the mount point of the storage pool: %w", err)
	}
	return nil
}
