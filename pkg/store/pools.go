package store

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A poolShelf keeps pools of ready sandboxes. A record that cannot be read is reported,
// and is no pool until somebody puts or deletes it.
type poolShelf struct {
	w        *committer
	pools    map[string]record.Pool // by name; guarded by w.mu, as the next
	badPools map[string]error
}

// AddPool makes a pool. It fails with errs.Exists if there is one of that name, and with
// errs.Exhausted beyond record.MaxPools.
func (s *poolShelf) AddPool(ctx context.Context, p record.Pool) error {
	return s.put(ctx, p, func(tx *bbolt.Tx) error {
		pools := tx.Bucket(bucketPools)
		if pools.Get([]byte(p.Name)) != nil {
			return refusal{errs.Wire(errs.New(errs.Exists, "pool %s exists; change it, or choose another name", p.Name), "POOL::EXISTS")}
		}
		if n := pools.Stats().KeyN; n >= record.MaxPools {
			return refusal{errs.New(errs.Exhausted, "this host has its maximum of %s; delete some (`sandboxctl pool rm`)",
				errs.Count(n, "pool", "pools"))}
		}
		return nil
	})
}

// PutPool makes a pool, or replaces one of that name.
func (s *poolShelf) PutPool(ctx context.Context, p record.Pool) error {
	return s.put(ctx, p, func(*bbolt.Tx) error { return nil })
}

func (s *poolShelf) put(ctx context.Context, p record.Pool, check func(*bbolt.Tx) error) error {
	p.Template = slices.Clone(p.Template)
	err := s.w.commit(ctx, func(tx *bbolt.Tx) error {
		if err := check(tx); err != nil {
			return err
		}
		b, err := json.Marshal(p)
		if err != nil {
			return fmt.Errorf("encode: %w", err)
		}
		return tx.Bucket(bucketPools).Put([]byte(p.Name), b)
	}, func() {
		s.pools[p.Name] = p
		delete(s.badPools, p.Name)
	})
	if err != nil {
		return fmt.Errorf("put pool %s: %w", p.Name, err)
	}
	return nil
}

// DeletePool removes a pool, whose record may be unreadable. It fails with errs.NotFound
// if there is none. Sandboxes of the pool stay.
func (s *poolShelf) DeletePool(ctx context.Context, name string) error {
	err := s.w.commit(ctx, func(tx *bbolt.Tx) error {
		if tx.Bucket(bucketPools).Get([]byte(name)) == nil {
			return refusal{record.NoPool(name)}
		}
		return tx.Bucket(bucketPools).Delete([]byte(name))
	}, func() {
		delete(s.pools, name)
		delete(s.badPools, name)
	})
	if err != nil {
		return fmt.Errorf("delete pool %s: %w", name, err)
	}
	return nil
}

// Pools returns all pools that can be read, by name. They are shared and never change.
func (s *poolShelf) Pools(context.Context) (all []record.Pool, err error) {
	s.w.mu.RLock()
	defer s.w.mu.RUnlock()
	for _, name := range slices.Sorted(maps.Keys(s.pools)) {
		all = append(all, s.pools[name])
	}
	return all, nil
}

// UnreadablePools returns the names of those that cannot be read.
func (s *poolShelf) UnreadablePools(context.Context) ([]string, error) {
	s.w.mu.RLock()
	defer s.w.mu.RUnlock()
	return slices.Sorted(maps.Keys(s.badPools)), nil
}

// loadPools reads every record, and reports one that cannot be read.
func (s *poolShelf) loadPools(tx *bbolt.Tx, log *slog.Logger) error {
	return tx.Bucket(bucketPools).ForEach(func(k, b []byte) error {
		var p record.Pool
		name := string(k)
		if err := readPool(name, b, &p); err != nil {
			log.Error("the record of a pool cannot be read; it has no members until it is set again", "pool", name, "err", err)
			s.badPools[name] = err
			return nil
		}
		s.pools[name] = p
		return nil
	})
}

func readPool(name string, b []byte, p *record.Pool) error {
	err := json.Unmarshal(b, p)
	if err == nil && p.Name != name {
		err = fmt.Errorf("it contains the record of pool %q", p.Name)
	}
	return err
}
