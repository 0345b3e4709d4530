package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/internal/durable"
	"golang.org/x/sys/unix"
)

// A migration turns one schema into the next. It runs in the transaction that
// also writes the new number, so a file is always wholly of one schema.
type migration func(*bbolt.Tx) error

// migrations are all migrations: migrations[n] turns schema n into n+1. The migrations
// from every released schema stay for ever. Each release adds a file that it wrote to
// testdata, for TestUpgrade.
var migrations = []migration{
	0: func(tx *bbolt.Tx) error { // an empty file
		for _, b := range [][]byte{bucketMeta, bucketBoxes, bucketNames, bucketSlots, bucketFree, bucketImages} {
			if _, err := tx.CreateBucketIfNotExists(b); err != nil {
				return err
			}
		}
		return putIdentity(tx, NewBackupIdentity(""))
	},
	1: func(tx *bbolt.Tx) error { // a new number: a release without snapshots would remove the layers below them
		_, err := tx.CreateBucketIfNotExists(bucketSnapshots)
		return err
	},
	2: func(tx *bbolt.Tx) error { // a new number: a release without these would make a sandbox twice, and know no keys
		_, err := tx.CreateBucketIfNotExists(bucketRequests)
		_, err2 := tx.CreateBucketIfNotExists(bucketKeys)
		_, err3 := tx.CreateBucketIfNotExists(bucketVolumes)
		return errors.Join(err, err2, err3)
	},
	3: func(tx *bbolt.Tx) error { // a new number: a release without these would ignore rules by name, also those that deny
		_, err := tx.CreateBucketIfNotExists(bucketPolicies)
		return err
	},
	4: func(tx *bbolt.Tx) error { // a new number: a release without these would keep the secrets of sandboxes that it deletes
		_, err := tx.CreateBucketIfNotExists(bucketSecrets)
		return err
	},
	// a new number: a release without these would take a rule about some requests for one about all of them
	5: func(*bbolt.Tx) error { return nil },
}

// migrate brings the file to the newest schema. It keeps the old file beside the new
// one, as <path>.v<schema>: the previous release can be started on that.
func (db *DB) migrate() error {
	v, err := db.schema()
	if err != nil {
		return err
	}
	if v > 0 && v < len(db.steps) {
		kept := KeptName(db.path, v)
		if err := db.keep(kept); err != nil {
			return db.explain(fmt.Errorf("copy the state of schema %d to %s before the migration: %w", v, kept, err))
		}
		db.log.Info("migrating the state; a copy of the old state is kept", "from", v, "to", len(db.steps), "kept", kept)
	}
	for ; v < len(db.steps); v++ {
		err := db.update(func(tx *bbolt.Tx) error {
			if err := db.steps[v](tx); err != nil {
				return err
			}
			return tx.Bucket(bucketMeta).Put(keySchema, []byte(strconv.Itoa(v+1)))
		})
		if err != nil {
			return db.explain(fmt.Errorf("migrate from schema %d: %w", v, err))
		}
	}
	return nil
}

func (db *DB) schema() (v int, err error) {
	err = db.bolt.View(func(tx *bbolt.Tx) error {
		v, err = schema(tx)
		return err
	})
	return v, err
}

// keep copies the file to path, either all of it or nothing.
func (db *DB) keep(path string) error {
	// It does not try a copy that does not fit: other programs would fail on the full
	// disk.
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &st); err != nil {
		return &os.PathError{Op: "statfs", Path: filepath.Dir(path), Err: err}
	}
	fi, err := os.Stat(db.path)
	if err != nil {
		return err
	}
	if free := int64(st.Bavail) * st.Bsize; free < 2*fi.Size() {
		return fmt.Errorf("it needs twice its %d MiB, and %d MiB are free: %w", fi.Size()>>20, free>>20, unix.ENOSPC)
	}
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = db.Backup(f)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = durable.Rename(tmp, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return nil
}
