package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"slices"
	"time"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Backup writes the file as it is at one moment and returns its bytes. Writers go on
// meanwhile, but the file grows while w is slow: w should be fast.
func (db *DB) Backup(w io.Writer) (n int64, err error) {
	err = db.bolt.View(func(tx *bbolt.Tx) error {
		n, err = tx.WriteTo(w)
		return err
	})
	if err != nil {
		return n, fmt.Errorf("copy %s: %w", db.path, err)
	}
	return n, nil
}

// Copy writes a file that no daemon has open, as it is at one moment. It fails with ErrLocked if one has.
func Copy(path string, w io.Writer) error {
	b, err := open(path, time.Second, true)
	if err != nil {
		return err
	}
	defer b.Close() //nolint:errcheck // read only
	err = b.View(func(tx *bbolt.Tx) error {
		_, err := tx.WriteTo(w)
		return err
	})
	if err != nil {
		return fmt.Errorf("copy %s: %w", path, err)
	}
	return nil
}

// Facts are what a file that is not open says about itself.
type Facts struct {
	Schema    int    `json:"schema"`
	PoolID    string `json:"pool"`
	Sandboxes int    `json:"sandboxes"`
	Images    int    `json:"images"`
	// Secrets is how many secrets sandboxes have, such as vaults, and SecretKeys are the IDs
	// of the keys that sealed them (sealed.KeyID), sorted. The file has no key.
	Secrets    int      `json:"secrets,omitempty"`
	SecretKeys []string `json:"secretKeys,omitempty"`
}

// Examine reads all of a store that nobody has open. It checks that bbolt finds every
// page in order, that every record can be decoded, and that this program knows the
// schema. It changes nothing.
func Examine(path string) (f Facts, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil { // bbolt panics on damaged pages
			err = fmt.Errorf("%s is damaged: %v", path, p)
		}
	}()
	b, err := open(path, time.Second, true)
	if err != nil {
		return f, err
	}
	defer b.Close() //nolint:errcheck // nothing written
	err = b.View(func(tx *bbolt.Tx) error {
		for e := range tx.Check() { // read to its end: a goroutine sends
			err = errors.Join(err, e)
		}
		if err != nil {
			return err
		}
		if f.Schema, err = schema(tx); err != nil {
			return err
		}
		if err := tooNew(f.Schema, Schema); err != nil {
			return err
		}
		if f.Schema < 1 {
			return errors.New("it is empty")
		}
		f.PoolID = string(tx.Bucket(bucketMeta).Get(keyPool))
		return errors.Join(
			each(tx, bucketImages, func(k, v []byte) error {
				f.Images++
				_, err := readImage(k, v)
				return err
			}),
			each(tx, bucketSnapshots, func(_, v []byte) error { return json.Unmarshal(v, &record.Snapshot{}) }),
			each(tx, bucketRequests, func(_, v []byte) error { return json.Unmarshal(v, &record.Made{}) }),
			each(tx, bucketKeys, func(k, v []byte) error {
				_, err := readKey(k, v)
				return err
			}),
			each(tx, bucketVolumes, func(k, v []byte) error { return readVolume(string(k), v, &record.Volume{}) }),
			each(tx, bucketPolicies, func(k, v []byte) error { return readPolicy(string(k), v, &record.Policy{}) }),
			each(tx, bucketPools, func(k, v []byte) error { return readPool(string(k), v, &record.Pool{}) }),
			each(tx, bucketSecrets, f.addSecret),
			each(tx, bucketBoxes, func(_, v []byte) error {
				var r record.Record
				err := json.Unmarshal(v, &r)
				if err == nil && r.State != record.Prepared {
					f.Sandboxes++
				}
				return err
			}))
	})
	if err != nil {
		return f, fmt.Errorf("%s cannot be used: %w", path, err)
	}
	return f, nil
}

// addSecret counts a secret. The sealed bytes need not open: a backup takes them as they
// are. The record around them must be readable, like every other record.
func (f *Facts) addSecret(k, b []byte) error {
	var v record.Secret
	if err := readSecret(string(k), b, &v); err != nil {
		return fmt.Errorf("%s: %w", unreadableSecret(string(k)), err)
	}
	f.Secrets++
	id, err := sealed.KeyID(v.Sealed)
	if at, found := slices.BinarySearch(f.SecretKeys, id); err == nil && !found {
		f.SecretKeys = slices.Insert(f.SecretKeys, at, id)
	}
	return nil
}

// each calls f for every record in a bucket, which a file of an old schema may lack.
func each(tx *bbolt.Tx, bucket []byte, f func(k, v []byte) error) error {
	b := tx.Bucket(bucket)
	if b == nil {
		return nil
	}
	return b.ForEach(func(k, v []byte) error {
		if err := f(k, v); err != nil {
			return fmt.Errorf("record %s: %w", k, err)
		}
		return nil
	})
}

// MarkRestored prepares a store that nobody has open to replace a later one. Restored
// returns what until AcceptRestored is called. MarkRestored marks sandboxes that were
// being created as running. They may run by now, and the recovery of a creation that was
// cut short would end them; it ends dead ones either way.
//
// MarkRestored forgets snapshots that were being taken. They may be whole by now, and
// the recovery of one that was cut short would destroy them; files on the pool without
// a record are kept for a while. It forgets prepared slots, too: sandboxes may have taken
// them since, and would be released as empty.
func MarkRestored(path, what string) error {
	b, err := open(path, time.Second, false)
	if err != nil {
		return err
	}
	err = b.Update(func(tx *bbolt.Tx) error {
		if err := tx.Bucket(bucketMeta).Put(keyRestored, []byte(what)); err != nil {
			return err
		}
		born := map[string][]byte{}
		var prepared []string
		boxes := tx.Bucket(bucketBoxes)
		err := boxes.ForEach(func(k, v []byte) error {
			var r record.Record
			err := json.Unmarshal(v, &r)
			if err == nil && r.State == record.Prepared {
				prepared = append(prepared, string(k))
			}
			if err != nil || r.State != record.Creating {
				return err
			}
			r.State = record.Running
			born[string(k)], err = json.Marshal(r)
			return err
		})
		for k, v := range born {
			err = errors.Join(err, boxes.Put([]byte(k), v))
		}
		for _, id := range prepared {
			err = errors.Join(err, erase(tx, id))
		}
		return errors.Join(err, forgetUntaken(tx.Bucket(bucketSnapshots)))
	})
	if err = errors.Join(err, b.Close()); err != nil {
		return fmt.Errorf("mark %s as restored: %w", path, err)
	}
	return nil
}

// forgetUntaken deletes the records of snapshots that were being taken.
func forgetUntaken(snapshots *bbolt.Bucket) error {
	if snapshots == nil { // an old release wrote it
		return nil
	}
	var untaken []string
	err := snapshots.ForEach(func(k, v []byte) error {
		var s record.Snapshot
		if json.Unmarshal(v, &s) == nil && s.State == record.SnapshotCreating {
			untaken = append(untaken, string(k))
		}
		return nil
	})
	for _, k := range untaken {
		err = errors.Join(err, snapshots.Delete([]byte(k)))
	}
	return err
}

// Restored says what this store was restored from, or is empty. Until AcceptRestored
// nothing may be swept: resources on the host may belong to records of a later store.
func (db *DB) Restored() string { return db.restored }

// AcceptRestored ends the marks of a restored store. It must run before other calls.
func (db *DB) AcceptRestored(ctx context.Context) error {
	err := db.commit(ctx, func(tx *bbolt.Tx) error { return tx.Bucket(bucketMeta).Delete(keyRestored) }, nil)
	if err != nil {
		return fmt.Errorf("accept the restored state: %w", err)
	}
	db.restored = ""
	return nil
}

// Records reads the records of a store that nobody writes to, without the images. It
// leaves out records that cannot be read.
func Records(path string) (all []record.Record, err error) {
	b, err := open(path, time.Second, true)
	if err != nil {
		return nil, err
	}
	defer b.Close() //nolint:errcheck // nothing written
	err = b.View(func(tx *bbolt.Tx) error {
		boxes := tx.Bucket(bucketBoxes)
		if boxes == nil {
			return nil
		}
		return boxes.ForEach(func(_, v []byte) error {
			var r record.Record
			if json.Unmarshal(v, &r) == nil {
				all = append(all, r)
			}
			return nil
		})
	})
	return all, err
}
