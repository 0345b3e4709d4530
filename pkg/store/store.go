// Package store keeps what sandboxd must not forget in one bbolt file: the
// records of sandboxes, their names, the queue of address slots, and images.
//
//	meta       schema, pool
//	sandboxes  id        -> record, JSON
//	names      name      -> id, of records that are not being deleted
//	slots      slot      -> id, the slots in use
//	free       sequence  -> slot, a queue: least recently used first
//	images     name:tag  -> image, JSON
//
// What surprises: reads never touch the file. All records are held in memory
// and change after their commit, so a list of 200 costs microseconds, and what
// Get returns is shared: replace its maps and slices, never write into them.
//
// Every commit is synced. It is tempting not to: a daemon that is killed loses
// nothing that it wrote, synced or not, and after a crash of the host every
// sandbox is dead anyway, so "running" would not need a sync. But bbolt orders
// data pages before the meta page by that very sync. An unsynced commit does
// not lose itself in a power cut, it loses the file, and with it the record of
// every ended sandbox that was to be kept. A synced commit takes 0.31 ms here,
// and commits that come while another one syncs share the next one (commit.go):
// 0.1 ms each for eight callers. The file is written full of zeros in advance,
// which is no faster, but lets a full disk meet other programs first.
package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Schema is the version of what is in the file. A file of a newer one is
// refused; one of an older one is brought forward by migrations.
const Schema = 1

// reserve is how much of the file is written in advance: about two thousand
// records of 2 KiB, twice, since bbolt copies what it changes.
const reserve = 8 << 20

var (
	bucketMeta   = []byte("meta")
	bucketBoxes  = []byte("sandboxes")
	bucketNames  = []byte("names")
	bucketSlots  = []byte("slots")
	bucketFree   = []byte("free")
	bucketImages = []byte("images")

	keySchema = []byte("schema")
	keyPool   = []byte("pool")
)

// Options are the choices of Open. The zero Options is what production uses.
type Options struct {
	Slots   int           // how many sandboxes there can be; instance.MaxSlots if zero
	Wait    time.Duration // for the lock of another process; 1 s if zero
	Reserve int64         // bytes to write in advance; 8 MiB if zero, none if negative
	Log     *slog.Logger  // slog.Default if nil
}

// DB is an open store. Its methods may be called concurrently.
type DB struct {
	bolt   *bbolt.DB
	path   string
	log    *slog.Logger
	poolID string

	queue  chan *change // to the committer
	closed chan struct{}
	done   chan struct{} // the committer has gone
	once   sync.Once

	mu    sync.RWMutex
	boxes map[string]record.Record // guarded by mu, as all below
	names map[string]string
	bad   map[string]error // records that can not be read, by id
}

// Open opens or makes the store at path. Its directory must exist. It fails
// when another process has it open, when a newer sandboxd wrote it, and when
// it is damaged; it never changes a file that it refuses.
func Open(path string, o Options) (db *DB, err error) {
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
	b, err := open(path, o.Wait)
	if err != nil {
		return nil, err
	}
	db = &DB{
		bolt:   b,
		path:   path,
		log:    o.Log,
		queue:  make(chan *change),
		closed: make(chan struct{}),
		done:   make(chan struct{}),
		boxes:  map[string]record.Record{},
		names:  map[string]string{},
		bad:    map[string]error{},
	}
	defer func() {
		if p := recover(); p != nil { // bbolt asserts what it reads
			err = damaged(path, fmt.Errorf("%v", p))
		}
		if err != nil {
			b.Close() //nolint:errcheck // the first error counts
		}
	}()
	if err := db.checkSchema(); err != nil {
		return nil, err
	}
	// Before bbolt grows the file itself, by a hole.
	if err := fill(path, o.Reserve); err != nil {
		o.Log.Warn("could not reserve room for the state file", "path", path, "err", err)
	}
	if err := db.prepare(o.Slots); err != nil {
		return nil, err
	}
	if err := db.load(); err != nil {
		return nil, err
	}
	go db.commitLoop()
	return db, nil
}

func open(path string, wait time.Duration) (b *bbolt.DB, err error) {
	defer func() {
		if p := recover(); p != nil {
			b, err = nil, damaged(path, fmt.Errorf("%v", p))
		}
	}()
	b, err = bbolt.Open(path, 0o600, &bbolt.Options{
		Timeout: wait,
		// Room to grow without mapping anew; address space, not memory.
		InitialMmapSize: reserve,
		FreelistType:    bbolt.FreelistMapType,
		NoStatistics:    true,
	})
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, fmt.Errorf("another sandboxd runs on this state directory (%s): %s is locked; stop it, or give this one its own instance", holder(path), path)
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrChecksum), errors.Is(err, berrors.ErrVersionMismatch):
		return nil, damaged(path, err)
	case err != nil:
		return nil, fmt.Errorf("open state file %s: %w", path, err)
	}
	return b, nil
}

func damaged(path string, err error) error {
	return fmt.Errorf("state file %s is damaged: %w; move it away to start with an empty one (disks are then moved to lost+found, not deleted), or bring back a copy", path, err)
}

// fill writes zeros from the end of the file up to size. bbolt takes the room
// as its own when it needs it.
func fill(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // synced below
	fi, err := f.Stat()
	if err != nil || fi.Size() >= size {
		return err
	}
	if _, err := f.WriteAt(make([]byte, size-fi.Size()), fi.Size()); err != nil {
		return errors.Join(err, f.Truncate(fi.Size()))
	}
	return f.Sync()
}

// load reads every record. One that can not be read is reported and kept; it
// holds its slot, and Unreadable names it.
func (db *DB) load() error {
	return db.bolt.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketBoxes).ForEach(func(k, v []byte) error {
			var r record.Record
			id := string(k)
			err := json.Unmarshal(v, &r)
			if err == nil && r.ID != id {
				err = fmt.Errorf("it says it is %q", r.ID)
			}
			if err != nil {
				db.bad[id] = err
				db.log.Error("a record can not be read; what it holds on the host is left alone until it is deleted", "sandbox", id, "err", err)
				return nil
			}
			db.remember(r)
			return nil
		})
	})
}

// remember takes over a committed record.
// Preconditions: mu is held, or nobody else knows db.
func (db *DB) remember(r record.Record) {
	db.boxes[r.ID] = r
	if name := r.Spec.Name; name != "" {
		if r.State != record.Deleting {
			db.names[name] = r.ID
		} else if db.names[name] == r.ID {
			delete(db.names, name)
		}
	}
}

// Close waits for what is being written and closes the file. What is asked of
// db afterwards fails.
func (db *DB) Close() error {
	db.once.Do(func() { close(db.closed) })
	<-db.done
	return db.bolt.Close()
}

// PoolID is the random id of the storage pool that this store belongs to, or
// empty. If the pool has another one, nothing must be swept.
func (db *DB) PoolID() string { return db.poolID }

// SetPoolID ties this store to a storage pool. It must run before other calls.
func (db *DB) SetPoolID(ctx context.Context, id string) error {
	err := db.commit(ctx, func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketMeta).Put(keyPool, []byte(id))
	}, nil)
	if err != nil {
		return fmt.Errorf("remember storage pool %s: %w", id, err)
	}
	db.poolID = id
	return nil
}

// Unreadable lists the ids of records that are in the file and can not be
// read. Nothing of theirs may be taken for a stray.
func (db *DB) Unreadable(context.Context) ([]string, error) {
	db.mu.RLock()
	defer db.mu.RUnlock()
	return slices.Sorted(maps.Keys(db.bad)), nil
}

// Get returns a record by its id or, if there is none, by its name.
func (db *DB) Get(_ context.Context, idOrName string) (r record.Record, ok bool, err error) {
	db.mu.RLock()
	defer db.mu.RUnlock()
	if r, ok = db.boxes[idOrName]; ok {
		return r, true, nil
	}
	r, ok = db.boxes[db.names[idOrName]]
	return r, ok, nil
}

// List returns all records, in no order.
func (db *DB) List(context.Context) ([]record.Record, error) {
	db.mu.RLock()
	defer db.mu.RUnlock()
	list := make([]record.Record, 0, len(db.boxes))
	for _, r := range db.boxes {
		list = append(list, r)
	}
	return list, nil
}
