package store

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Made returns what the request with that key has made, unless there was none or it was
// forgotten. If the record was not deleted, Get finds it then.
func (db *DB) Made(_ context.Context, key string) (m record.Made, ok bool, err error) {
	err = db.bolt.View(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketRequests).Get([]byte(key))
		if ok = b != nil; !ok {
			return nil
		}
		return json.Unmarshal(b, &m)
	})
	if err != nil {
		return m, false, fmt.Errorf("look up a request by its key: %w", err)
	}
	if ok {
		db.mu.RLock()
		_, there := db.boxes[m.ID]
		db.mu.RUnlock()
		if !there { // it was deleted, or is in the file and not in memory yet
			db.settle()
		}
	}
	return m, ok, nil
}

// fresh refuses a request if its key has made something already.
func fresh(tx *bbolt.Tx, r *record.Record) error {
	if key := r.Spec.Request.Key; key == "" || tx.Bucket(bucketRequests).Get([]byte(key)) == nil {
		return nil
	}
	return refusal{errs.Wire(errs.New(errs.Exists, "another request with this Idempotency-Key was faster; send this request again"),
		record.CodeRequestRace)}
}

// noteRequest notes the request of a record, in the transaction that makes the record.
func noteRequest(tx *bbolt.Tx, r *record.Record) error {
	if r.Spec.Request.Key == "" {
		return nil
	}
	b, err := json.Marshal(record.Made{ID: r.ID, Body: r.Spec.Request.Body, At: r.Created, Holder: r.Spec.Request.Holder})
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	return tx.Bucket(bucketRequests).Put([]byte(r.Spec.Request.Key), b)
}

// mostRequests is how many requests are remembered: some 20 MiB of the file. A host that makes one
// sandbox a second reaches it in 18 hours.
const mostRequests = 1 << 16

// ForgetRequests forgets requests from before a time, and of the others the oldest beyond
// mostRequests; their keys then make something anew.
func (db *DB) ForgetRequests(ctx context.Context, before time.Time) error {
	return db.forgetRequests(ctx, before, mostRequests)
}

func (db *DB) forgetRequests(ctx context.Context, before time.Time, most int) error {
	type note struct {
		key []byte
		at  time.Time
	}
	var old [][]byte
	err := db.bolt.View(func(tx *bbolt.Tx) error {
		var young []note
		err := tx.Bucket(bucketRequests).ForEach(func(k, v []byte) error {
			var m record.Made
			if json.Unmarshal(v, &m) != nil || m.At.Before(before) {
				old = append(old, slices.Clone(k))
			} else {
				young = append(young, note{slices.Clone(k), m.At})
			}
			return nil
		})
		if len(young) > most {
			slices.SortFunc(young, func(a, b note) int { return a.at.Compare(b.at) })
			for _, n := range young[:len(young)-most] {
				old = append(old, n.key)
			}
		}
		return err
	})
	if err == nil && len(old) > 0 {
		err = db.commit(ctx, func(tx *bbolt.Tx) error { return deleteRequests(tx, old) }, nil)
	}
	if err != nil {
		return fmt.Errorf("forget old requests: %w", err)
	}
	return nil
}

// notes returns the keys of the notes that are, and of those that cannot be read and
// so are useless.
func notes(tx *bbolt.Tx, are func(*record.Made) bool) (keys [][]byte, err error) {
	err = tx.Bucket(bucketRequests).ForEach(func(k, v []byte) error {
		var m record.Made
		if json.Unmarshal(v, &m) != nil || are(&m) {
			keys = append(keys, slices.Clone(k))
		}
		return nil
	})
	return keys, err
}

func deleteRequests(tx *bbolt.Tx, keys [][]byte) error {
	for _, k := range keys {
		if err := tx.Bucket(bucketRequests).Delete(k); err != nil {
			return err
		}
	}
	return nil
}
