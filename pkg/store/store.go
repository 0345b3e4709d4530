// Package store keeps what sandboxd must not forget in one bbolt file: the
// records of sandboxes, their names, the queue of address slots, images, the
// records of snapshots, what requests have made, API keys, named volumes, policies and
// the secrets of sandboxes.
//
//	meta       schema, pool, restored, whose backups are whose
//	sandboxes  id        -> record, JSON
//	names      name      -> id, of records that are not being deleted
//	slots      slot      -> id, the slots in use
//	free       sequence  -> slot, a queue: least recently used first
//	images     name:tag  -> image, JSON
//	snapshots  id        -> record, JSON
//	requests   key       -> what that request made, JSON
//	keys       name      -> API key, JSON: a digest, never the key
//	volumes    name      -> volume, JSON
//	policies   name      -> named network policy with its versions, JSON
//	secrets    id/kind   -> secret of that sandbox, JSON: its value is encrypted
//
// What surprises: reads never touch the file. All records are held in memory and change
// after their commit, so a list of 200 costs microseconds. The result of Get is shared:
// replace its maps and slices, never write into them.
//
// Every commit is synced. It is tempting not to: a killed daemon loses nothing that it
// wrote, synced or not, and after a crash of the host every sandbox is dead anyway, so
// "running" would not need a sync. But bbolt orders data pages before the meta page by
// that very sync. In a power cut an unsynced commit loses the whole file, and with it
// the record of every ended sandbox that was to be kept. A synced commit takes 0.31 ms
// here, and commits that come while another one syncs share the next one (commit.go):
// 0.1 ms each for eight callers. The file is filled with zeros in advance, which is no
// faster, but makes a full disk stop other programs first.
package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Schema is the version of the file's content. A file with a newer one is refused;
// migrations bring one with an older one forward (migrate.go).
const Schema = 6

// reserve is the room that a start makes in the file in advance: for about two thousand
// records of 2 KiB, twice, since bbolt copies what it changes.
const reserve = 8 << 20

var (
	bucketMeta   = []byte("meta")
	bucketBoxes  = []byte("sandboxes")
	bucketNames  = []byte("names")
	bucketSlots  = []byte("slots")
	bucketFree   = []byte("free")
	bucketImages = []byte("images")

	bucketSnapshots = []byte("snapshots") // since schema 2
	bucketRequests  = []byte("requests")  // since schema 3, as the next
	bucketKeys      = []byte("keys")
	bucketVolumes   = []byte("volumes")
	bucketPolicies  = []byte("policies") // since schema 4
	bucketSecrets   = []byte("secrets")  // since schema 5
	bucketPools     = []byte("pools")    // beside every schema: a release without it keeps no members

	keySchema   = []byte("schema")
	keyPool     = []byte("pool")
	keyRestored = []byte("restored")
)

// Options are the choices of Open. The zero Options is what production uses.
type Options struct {
	Slots   int           // how many sandboxes there can be; instance.MaxSlots if zero
	Wait    time.Duration // for the lock of another process; 1 s if zero
	Reserve int64         // bytes of room to make in advance; 8 MiB if zero, none if negative
	Log     *slog.Logger  // slog.Default if nil
}

// DB is an open store. Its methods may be called concurrently.
type DB struct {
	committer
	log      *slog.Logger
	steps    []migration
	poolID   string
	restored string

	index                  // guarded by mu, as are all below
	bad   map[string]error // records that cannot be read, by id

	volumes    map[string]record.Volume // by name
	badVolumes map[string]error

	snapshotShelf
	policyShelf
	secretShelf
	poolShelf

	identity BackupIdentity
}

// Open opens or makes the store at path. Its directory must exist. It fails when
// another process has it open, when a newer sandboxd wrote it, and when it is damaged.
// It never changes a file that it refuses.
func Open(path string, o Options) (*DB, error) { return openWith(path, o, migrations) }

func openWith(path string, o Options, steps []migration) (db *DB, err error) {
	if o.Slots == 0 {
		o.Slots = instance.MaxSlots
	}
	if o.Wait == 0 {
		o.Wait = time.Second
	}
	if o.Reserve == 0 {
		o.Reserve = reserve
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if err := makeFile(path); err != nil {
		return nil, err
	}
	b, err := open(path, o.Wait, false)
	if err != nil {
		return nil, err
	}
	db = &DB{
		committer: committer{
			bolt:   b,
			path:   path,
			queue:  make(chan *change),
			closed: make(chan struct{}),
			done:   make(chan struct{}),
		},
		log:   o.Log,
		steps: steps,
		index: index{boxes: map[string]*record.Record{}, names: map[string]string{}},
		bad:   map[string]error{},

		volumes:    map[string]record.Volume{},
		badVolumes: map[string]error{},
	}
	db.snapshotShelf = snapshotShelf{w: &db.committer, snapshots: map[string]record.Snapshot{}, badSnapshots: map[string]error{}}
	db.policyShelf = policyShelf{w: &db.committer, policies: map[string]record.Policy{}, badPolicies: map[string]error{}}
	db.poolShelf = poolShelf{w: &db.committer, pools: map[string]record.Pool{}, badPools: map[string]error{}}
	db.secretShelf = secretShelf{w: &db.committer, secrets: map[string]record.Secret{}, badSecrets: map[string]error{}}
	// bbolt panics on damaged pages, and a page beyond the end of a file that was cut
	// short faults.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	opening := db
	defer func() {
		if p := recover(); p != nil {
			err = damaged(path, fmt.Errorf("%v", p))
		}
		if err != nil {
			opening.bolt.Close() //nolint:errcheck // the first error counts
		}
	}()
	if err := db.checkSchema(); err != nil {
		return nil, err
	}
	// Before a migration, which needs room for a copy.
	if b, err = (&compaction{bolt: b, path: path, o: o}).run(); err != nil {
		return nil, err
	}
	db.bolt = b
	if err := fill(b, o.Reserve); err != nil {
		o.Log.Warn("could not reserve room for the state file", "path", path, "err", err)
	}
	if err := db.migrate(); err != nil {
		return nil, err
	}
	if err := db.prepare(o.Slots); err != nil {
		return nil, err
	}
	if err := db.load(); err != nil {
		return nil, err
	}
	go db.loop()
	return db, nil
}

// ErrLocked is in the error of a file that another process has open.
var ErrLocked = errors.New("is locked")

// open opens and locks the file that has the name path once the lock is held: while open
// waited, the process that held it may have put another file in its place (compact).
func open(path string, wait time.Duration, readOnly bool) (*bbolt.DB, error) {
	for {
		b, file, err := openOnce(path, wait, readOnly)
		if err != nil {
			return nil, err
		}
		opened, err := file.Stat()
		now, err2 := os.Stat(path)
		if err = errors.Join(err, err2); err == nil && os.SameFile(opened, now) {
			return b, nil
		}
		if err = errors.Join(err, b.Close()); err != nil {
			return nil, fmt.Errorf("open state file %s: %w", path, err)
		}
	}
}

func openOnce(path string, wait time.Duration, readOnly bool) (b *bbolt.DB, file *os.File, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			b, err = nil, damaged(path, fmt.Errorf("%v", p))
			// The mapping of the file is lost to us and would keep the lock.
			_ = errors.Join(unix.Flock(int(file.Fd()), unix.LOCK_UN), file.Close())
		}
	}()
	b, err = bbolt.Open(path, 0o600, &bbolt.Options{
		Timeout:  wait,
		ReadOnly: readOnly,
		OpenFile: func(name string, flag int, mode os.FileMode) (_ *os.File, err error) {
			file, err = os.OpenFile(name, flag, mode)
			return file, err
		},
		// Room to grow without mapping anew; address space, not memory.
		InitialMmapSize: reserve,
		FreelistType:    bbolt.FreelistMapType,
		NoStatistics:    true,
	})
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, nil, fmt.Errorf("another sandboxd runs on this state directory (%s): %s %w; stop it, or give this one its own "+
			"instance", holder(path), path, ErrLocked)
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrChecksum), errors.Is(err, berrors.ErrVersionMismatch),
		err != nil && strings.Contains(err.Error(), "file size too small"):
		return nil, nil, damaged(path, err)
	case err != nil:
		return nil, nil, fmt.Errorf("open state file %s: %w", path, err)
	}
	if err := isWhole(b); err != nil {
		b.Close() //nolint:errcheck // the first error counts
		return nil, nil, damaged(path, err)
	}
	return b, file, nil
}

// isWhole fails if the file ends before its last page.
func isWhole(b *bbolt.DB) error {
	fi, err := os.Stat(b.Path())
	if err != nil {
		return err
	}
	return b.View(func(tx *bbolt.Tx) error {
		if tx.Size() > fi.Size() {
			return fmt.Errorf("it has %d bytes and should have %d", fi.Size(), tx.Size())
		}
		return nil
	})
}

// makeFile makes an empty store if there is none. It writes it beside first: after a
// power cut there must be no half file under the name.
func makeFile(path string) error {
	fi, err := os.Stat(path)
	if err == nil && fi.Size() == 0 { // bbolt would begin anew without an error
		return damaged(path, errors.New("it is empty"))
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	tmp := path + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("make state file: %w", err)
	}
	b, err := open(tmp, time.Second, false)
	if err != nil {
		return err
	}
	if err := b.Close(); err != nil { // bbolt has synced what is in it
		return fmt.Errorf("make state file %s: %w", path, err)
	}
	return durable.Rename(tmp, path)
}

func damaged(path string, err error) error {
	return fmt.Errorf("state file %s is damaged: %w; move it away to start with an empty one (disks are then moved to lost+found, not "+
		"deleted), or restore a copy", path, err)
}

// fill makes room on the disk for so many bytes more than are in use: free pages, and zeros
// after the last page. There bbolt makes a hole when it grows the file, and a write into a
// hole fails on a full disk, also the one that deletes a record.
func fill(b *bbolt.DB, room int64) error {
	_, used, err := sizes(b)
	if err != nil {
		return err
	}
	var end int64 // of the last page
	if err := b.View(func(tx *bbolt.Tx) error { end = tx.Size(); return nil }); err != nil {
		return err
	}
	f, err := os.OpenFile(b.Path(), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // synced below
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	from := fi.Size()
	if from > end {
		if from, err = f.Seek(end, unix.SEEK_HOLE); err != nil { // the size, if there is none
			return err
		}
	}
	to := used + room
	if from >= to {
		return nil
	}
	if _, err := f.WriteAt(make([]byte, to-from), from); err != nil {
		return errors.Join(err, f.Truncate(from), f.Truncate(fi.Size()))
	}
	return f.Sync()
}

// load reads every record. It reports and keeps one that cannot be read: that holds its
// slot, and Unreadable names it.
func (db *DB) load() error {
	return db.bolt.View(func(tx *bbolt.Tx) error {
		err := errors.Join(db.loadSnapshots(tx, db.log), db.loadVolumes(tx), db.loadPolicies(tx, db.log),
			db.loadPools(tx, db.log), db.loadSecrets(tx, db.log),
			db.lookAtImages(tx))
		if err != nil {
			return err
		}
		return tx.Bucket(bucketBoxes).ForEach(func(k, v []byte) error {
			var r record.Record
			id := string(k)
			err := json.Unmarshal(v, &r)
			if err == nil && r.ID != id {
				err = fmt.Errorf("it contains the record of %q", r.ID)
			}
			if err != nil {
				db.bad[id] = err
				db.log.Error("the record of a sandbox cannot be read; its host resources are left alone until it is deleted",
					"sandbox", id, "err", err)
				return nil
			}
			db.remember(r)
			return nil
		})
	})
}

// An index holds the records of sandboxes in memory, by ID, by name and by age. Records
// in it are replaced, never written into.
type index struct {
	boxes map[string]*record.Record
	order []*record.Record // the same, newest first
	names map[string]string
}

// remember takes over a committed record.
// Preconditions: committer.mu is held, or nobody else has x yet.
func (x *index) remember(r record.Record) {
	if was := x.boxes[r.ID]; was != nil && was.Spec.Name != r.Spec.Name && x.names[was.Spec.Name] == r.ID {
		delete(x.names, was.Spec.Name)
	}
	x.forget(r.ID)
	x.boxes[r.ID] = &r
	at, _ := slices.BinarySearchFunc(x.order, &r, newestFirst)
	x.order = slices.Insert(x.order, at, &r)
	if name := r.Spec.Name; name != "" {
		if r.State != record.Deleting {
			x.names[name] = r.ID
		} else if x.names[name] == r.ID {
			delete(x.names, name)
		}
	}
}

// forget drops a record, but not its name.
// Preconditions: as of remember.
func (x *index) forget(id string) {
	if r := x.boxes[id]; r != nil {
		delete(x.boxes, id)
		if at, ok := slices.BinarySearchFunc(x.order, r, newestFirst); ok {
			x.order = slices.Delete(x.order, at, at+1)
		}
	}
}

// newestFirst orders by the wall clock only: records read from the file have no other
// time.
func newestFirst(a, b *record.Record) int {
	return cmp.Or(cmp.Compare(b.Created.UnixNano(), a.Created.UnixNano()), strings.Compare(a.ID, b.ID))
}

// Close waits for writes in progress and closes the file. Later calls fail.
func (db *DB) Close() error {
	db.once.Do(func() { close(db.closed) })
	<-db.done
	return db.bolt.Close()
}

// PoolID is the random id of the storage pool that this store belongs to, or empty. If
// the pool has another id, nothing may be swept.
func (db *DB) PoolID() string { return db.poolID }

// SetPoolID binds this store to a storage pool. It must run before other calls.
func (db *DB) SetPoolID(ctx context.Context, id string) error {
	err := db.commit(ctx, func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketMeta).Put(keyPool, []byte(id))
	}, nil)
	if err != nil {
		return fmt.Errorf("save the id of storage pool %s: %w", id, err)
	}
	db.poolID = id
	return nil
}

// Unreadable lists the ids of records that are in the file and cannot be read. What
// they hold is no stray.
func (db *DB) Unreadable(context.Context) ([]string, error) {
	db.mu.RLock()
	defer db.mu.RUnlock()
	return slices.Sorted(maps.Keys(db.bad)), nil
}

// Get returns a record by its id or, if there is none, by its name.
func (db *DB) Get(_ context.Context, idOrName string) (r record.Record, ok bool, err error) {
	db.mu.RLock()
	defer db.mu.RUnlock()
	found := db.boxes[idOrName]
	if found == nil {
		found = db.boxes[db.names[idOrName]]
	}
	if found == nil {
		return r, false, nil
	}
	return *found, true, nil
}

// List returns all records, newest first. They are shared and never change:
// copy one to change it.
func (db *DB) List(context.Context) ([]*record.Record, error) {
	db.mu.RLock()
	defer db.mu.RUnlock()
	return slices.Clone(db.order), nil
}
