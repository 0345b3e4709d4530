package store

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/bbolt"
)

// checkSchema refuses a file of a newer schema, and one that bbolt cannot read: it
// visits every key. It only reads: a refused file stays the same to the byte.
func (db *DB) checkSchema() error {
	var lost error
	err := db.bolt.View(func(tx *bbolt.Tx) error {
		v, err := schema(tx)
		if err == nil {
			err = tooNew(v, len(db.steps))
		}
		if err != nil {
			return err
		}
		lost = inOrder(tx)
		return nil
	})
	switch {
	case err != nil:
		return fmt.Errorf("state file %s: %w", db.path, err)
	case lost != nil:
		return damaged(db.path, lost)
	}
	return nil
}

// inOrder fails unless the keys of every bucket ascend. bbolt relies on that and does
// not check it. If a disk lost a key, its record would not be found, and the sweep
// would remove what its sandbox holds.
func inOrder(tx *bbolt.Tx) error {
	return tx.ForEach(func(name []byte, b *bbolt.Bucket) error {
		var last []byte
		return b.ForEach(func(k, _ []byte) error {
			if last != nil && bytes.Compare(last, k) >= 0 {
				return fmt.Errorf("in bucket %s, key %q comes after %q", name, k, last)
			}
			last = k
			return nil
		})
	})
}

// tooNew is the refusal of a file that a newer sandboxd wrote.
func tooNew(v, newest int) error {
	if v <= newest {
		return nil
	}
	return fmt.Errorf("a newer sandboxd wrote it: it has schema %d, and this sandboxd knows schemas up to %d; start the newer sandboxd, "+
		"or move the file away", v, newest)
}

// prepare makes the queue of free slots fit the present number of slots, and reads what
// the file says about itself.
func (db *DB) prepare(slots int) error {
	err := db.bolt.Update(func(tx *bbolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		db.poolID, db.restored = string(meta.Get(keyPool)), string(meta.Get(keyRestored))
		// Files of schema 3 without volumes were written by no release.
		if _, err := tx.CreateBucketIfNotExists(bucketVolumes); err != nil {
			return err
		}
		if _, err := tx.CreateBucketIfNotExists(bucketPools); err != nil {
			return err
		}
		var err error
		if db.identity, err = openIdentity(tx); err != nil {
			return err
		}
		return queueSlots(tx, slots)
	})
	if err != nil {
		return db.explain(fmt.Errorf("prepare: %w", err))
	}
	return nil
}

func schema(tx *bbolt.Tx) (int, error) {
	meta := tx.Bucket(bucketMeta)
	if meta == nil {
		return 0, nil
	}
	v := meta.Get(keySchema)
	if v == nil {
		return 0, nil
	}
	n, err := strconv.Atoi(string(v))
	if err != nil {
		return 0, fmt.Errorf("its schema is %q, not a number", v)
	}
	return n, nil
}

// queueSlots makes every slot below n either in use or queued, once, and removes the
// slots from n on from the queue.
func queueSlots(tx *bbolt.Tx, n int) error {
	known := map[int]bool{}
	c := tx.Bucket(bucketSlots).Cursor()
	for k, _ := c.First(); k != nil; k, _ = c.Next() {
		known[int(binary.BigEndian.Uint16(k))] = true
	}
	var drop [][]byte
	c = tx.Bucket(bucketFree).Cursor()
	for k, v := c.First(); k != nil; k, v = c.Next() {
		slot := int(binary.BigEndian.Uint16(v))
		if known[slot] || slot >= n {
			drop = append(drop, append([]byte(nil), k...))
		}
		known[slot] = true
	}
	for _, k := range drop {
		if err := tx.Bucket(bucketFree).Delete(k); err != nil {
			return err
		}
	}
	for slot := range n {
		if known[slot] {
			continue
		}
		if err := enqueue(tx, binary.BigEndian.AppendUint16(nil, uint16(slot))); err != nil {
			return err
		}
	}
	return nil
}

// holder says which process has the file locked. It looks for the lock beside the
// process's descriptor (proc_pid_fdinfo(5)): /proc/locks names files by the device of the
// file system, which on btrfs and overlayfs is another one than stat(2) returns.
func holder(path string) string {
	fi, err := os.Stat(path)
	if err != nil {
		return "pid unknown"
	}
	all, _ := filepath.Glob("/proc/[0-9]*/fdinfo/*")
	for _, name := range all {
		info, err := os.ReadFile(name)
		if err != nil || !strings.Contains(string(info), "\nlock:") { // it may be gone
			continue
		}
		part := strings.Split(name, "/") // "", proc, PID, fdinfo, N
		if other, err := os.Stat(filepath.Join("/proc", part[2], "fd", part[4])); err == nil && os.SameFile(fi, other) {
			return "pid " + part[2]
		}
	}
	return "pid unknown"
}

// SchemaOf returns the schema of the file at path, which no daemon may have open. It changes nothing.
func SchemaOf(path string) (n int, err error) {
	b, err := open(path, time.Second, true)
	if err != nil {
		return 0, err
	}
	defer b.Close() //nolint:errcheck // read only
	err = b.View(func(tx *bbolt.Tx) error {
		n, err = schema(tx)
		return err
	})
	if err != nil {
		return 0, damaged(path, err)
	}
	return n, nil
}

// KeptName is the copy of the state file that a release keeps when it brings the state of a schema
// forward.
func KeptName(path string, schema int) string { return fmt.Sprintf("%s.v%d", path, schema) }
