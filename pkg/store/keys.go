package store

import (
	"context"
	"encoding/json"
	"fmt"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Keys returns the API keys by name. An unreadable key opens nothing. It is listed by
// its name alone, so that it can be removed.
func (db *DB) Keys(context.Context) (all []record.Key, err error) {
	err = db.bolt.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketKeys).ForEach(func(name, v []byte) error {
			k, err := readKey(name, v)
			if err != nil {
				db.log.Error("the record of an API key cannot be read, so the key is refused; remove it and create another",
					"key", string(name), "err", err)
				k = record.Key{Name: string(name)}
			}
			all = append(all, k)
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list API keys: %w", err)
	}
	return all, nil
}

func readKey(name, b []byte) (k record.Key, err error) {
	if err = json.Unmarshal(b, &k); err == nil && k.Name != string(name) {
		err = fmt.Errorf("it contains the record of %q", k.Name)
	}
	return k, err
}

// maxKeys is how many API keys a host has. Each request compares its key with all of them, and more are
// not people and programs with a key each.
const maxKeys = 1000

// AddKey adds an API key. It fails with errs.Exists if the name is taken, and with errs.Exhausted beyond
// maxKeys; keys that have expired count.
func (db *DB) AddKey(ctx context.Context, k record.Key) error {
	b, err := json.Marshal(k)
	if err == nil {
		err = db.commit(ctx, func(tx *bbolt.Tx) error {
			if tx.Bucket(bucketKeys).Get([]byte(k.Name)) != nil {
				return refusal{errs.New(errs.Exists, "API key %q already exists; remove it first (`sandboxctl key rm %s`), or choose "+
					"another name", k.Name, k.Name)}
			}
			if n := tx.Bucket(bucketKeys).Stats().KeyN; n >= maxKeys {
				return refusal{errs.New(errs.Exhausted, "this host has its maximum of %s; remove some (`sandboxctl key ls`, `key rm`)",
					errs.Count(n, "API key", "API keys"))}
			}
			return tx.Bucket(bucketKeys).Put([]byte(k.Name), b)
		}, nil)
	}
	if err != nil {
		return fmt.Errorf("add API key %s: %w", k.Name, err)
	}
	return nil
}

// RemoveKey removes an API key, and the notes of requests that came with it. It fails
// with errs.NotFound if there is none.
func (db *DB) RemoveKey(ctx context.Context, name string) error {
	err := db.commit(ctx, func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketKeys).Get([]byte(name))
		if b == nil {
			return refusal{errs.New(errs.NotFound, "there is no API key %q; `sandboxctl key ls` lists them", name)}
		}
		if k, err := readKey([]byte(name), b); err == nil { // else nobody can use it, and its notes grow old
			old, err := notes(tx, func(m *record.Made) bool { return m.Holder == k.Holder() })
			if err == nil {
				err = deleteRequests(tx, old)
			}
			if err != nil {
				return err
			}
		}
		return tx.Bucket(bucketKeys).Delete([]byte(name))
	}, nil)
	if err != nil {
		return fmt.Errorf("remove API key %s: %w", name, err)
	}
	return nil
}
