package snapshottest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
)

// Instance is the instance of all tests here.
var Instance, _ = hosttest.Instances()

// slot says which host ids a guest has.
type slot struct {
	own  bool
	base uint32
}

var (
	first    = slot{true, Instance.UIDBase(1)}
	second   = slot{true, Instance.UIDBase(2)}
	third    = slot{true, Instance.UIDBase(3)}
	identity = slot{}
)

// Env is a store on directories of its own.
type Env struct {
	*snapshot.Store
	Config snapshot.Config
	Layer  string // digest of Lower
	users  map[string]slot
	down   time.Duration // for how long the host was down, since whenever
}

// New opens a store in a directory below /var/tmp, with Lower as its only
// layer. When t ends all is taken away, and what then still stands on the host
// fails t. change, if not nil, edits the configuration before it is used.
func New(t testing.TB, pool string, change func(*snapshot.Config)) *Env {
	t.Helper()
	hosttest.Root(t)
	hosttest.Leaks(t, Instance)
	dir, err := os.MkdirTemp("/var/tmp", "sandboxd-s-")
	must(t, err)
	must(t, os.Chmod(dir, 0o711))
	same, err := UserNS(0)
	must(t, err)
	e := &Env{users: map[string]slot{}}
	e.Config = snapshot.Config{
		Instance: Instance, StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"),
		Pool: pool, PoolBytes: 512 << 20, IdentityUserNS: same,
		Patience:  time.Hour, // by Close tests wait for the background: for a sync of all that others have on that disk
		HostPaths: []string{filepath.Join(dir, "lent")},
		UserNS:    func(id string) (*os.File, error) { return UserNS(e.users[id].base) },
		Down:      func(time.Time) time.Duration { return e.down },
	}
	must(t, os.Mkdir(e.Config.HostPaths[0], 0o755))
	if change != nil {
		change(&e.Config)
	}
	t.Cleanup(func() { e.takeDown(t, dir) })
	e.Open(t)
	e.Layer, _, err = e.Layers.Import(t.Context(), bytes.NewReader(Lower()), nil)
	must(t, err)
	return e
}

// Open opens the store again, as a new daemon does.
func (e *Env) Open(t testing.TB) {
	t.Helper()
	var err error
	e.Store, err = snapshot.Open(t.Context(), e.Config)
	must(t, err)
}

func (e *Env) takeDown(t testing.TB, dir string) {
	ctx := context.Background()
	if e.Store != nil {
		mounts, err := e.Mounts.ListMounts(ctx)
		check(t, err)
		for _, id := range mounts {
			check(t, e.Mounts.Unmount(ctx, id))
		}
		check(t, e.UnmountPool())
	}
	check(t, e.Config.IdentityUserNS.Close())
	b, err := os.ReadFile("/proc/self/mountinfo")
	check(t, err)
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, dir) {
			t.Errorf("left mounted: %s", line)
		}
	}
	check(t, StuckLoops(dir))
	check(t, os.RemoveAll(dir))
}

// StuckLoops fails if a loop device of a file below dir will not free itself.
// It may not be free yet: a mount namespace that another program makes meanwhile, as
// package builds do, holds a copy of each mount until it ends.
func StuckLoops(dir string) error {
	found, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, p := range found {
		file, rerr := os.ReadFile(p)
		auto, aerr := os.ReadFile(filepath.Join(filepath.Dir(p), "autoclear"))
		if rerr == nil && aerr == nil && strings.HasPrefix(string(file), dir+"/") && strings.TrimSpace(string(auto)) != "1" {
			err = errors.Join(err, fmt.Errorf("%s stays attached to %s", p, file))
		}
	}
	return err
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// Disk makes a disk of a new id; bytes count only where the pool can limit.
func (e *Env) Disk(t testing.TB, bytes int64) string {
	t.Helper()
	id := record.NewID(Instance)
	if !e.Pool.Limits() {
		bytes = 0
	}
	must(t, e.Disks.CreateDisk(t.Context(), id, "", bytes))
	return id
}

func (e *Env) mount(t testing.TB, id string, s slot, volatile bool) string {
	t.Helper()
	e.users[id] = s
	must(t, e.Mounts.Mount(t.Context(), id, snapshot.Mount{
		Layers: []string{e.Layer}, OwnUsers: s.own, UIDBase: s.base,
		Volatile: volatile,
	}))
	return e.Mounts.RootfsDir(id)
}

// in mounts the disk of id for a slot, does verb there and unmounts.
func (e *Env) in(t testing.TB, id string, s slot, verb string) string {
	t.Helper()
	root := e.mount(t, id, s, false)
	out, err := as(verb, root, s)
	must(t, err)
	must(t, e.Mounts.Unmount(t.Context(), id))
	return out
}
