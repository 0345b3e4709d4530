// Package pools keeps the pools of ready sandboxes of a host: those of the configuration,
// and those that clients make.
//
//	configuration ─▶ Configure ─┐
//	clients ─▶ Create, Update, Delete ─▶ the store ─▶ sandbox.Stock makes and releases members
//
// The surprise: it makes no member. Whoever changes a pool tells the Stock, which looks at
// all pools when it has the time.
package pools

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Store persists pools. (store)
type Store interface {
	AddPool(ctx context.Context, p record.Pool) error
	PutPool(ctx context.Context, p record.Pool) error
	DeletePool(ctx context.Context, name string) error
	Pools(ctx context.Context) ([]record.Pool, error)
}

// Stock makes members. (sandbox)
type Stock interface {
	Pools(ctx context.Context) ([]record.PoolInfo, error)
	Changed(pool string)
}

// Keeper keeps the pools. Its methods may be called concurrently.
type Keeper struct {
	Store Store
	Stock Stock
	// Check fails if no member can be made from a pool: its image is not on this host, say.
	Check func(ctx context.Context, p record.Pool) error
}

// Configure makes the pools of the configuration those of the store. One that was in the
// configuration and is no longer goes.
func (k *Keeper) Configure(ctx context.Context, fixed []record.Pool) error {
	all, err := k.Store.Pools(ctx)
	if err != nil {
		return fmt.Errorf("configure pools: %w", err)
	}
	var errz []error
	for _, p := range all {
		if p.Fixed && !slices.ContainsFunc(fixed, func(f record.Pool) bool { return f.Name == p.Name }) {
			errz = append(errz, k.Store.DeletePool(ctx, p.Name))
		}
	}
	for _, f := range fixed {
		f.Fixed, f.Created = true, now()
		if at := slices.IndexFunc(all, func(p record.Pool) bool { return p.Name == f.Name }); at >= 0 {
			f.Created = all[at].Created
			if same(f, all[at]) {
				continue
			}
		}
		errz = append(errz, k.Store.PutPool(ctx, f))
	}
	return errors.Join(errz...)
}

func same(a, b record.Pool) bool {
	return a.Fixed == b.Fixed && string(a.Template) == string(b.Template) && a.Warm == b.Warm && a.Ready == b.Ready &&
		a.MaxAge == b.MaxAge && a.Capacity == b.Capacity
}

func now() time.Time { return time.Now().Round(0).UTC() }

// List returns all pools, by name.
func (k *Keeper) List(ctx context.Context) ([]record.PoolInfo, error) { return k.Stock.Pools(ctx) }

// Get returns a pool. If there is none of that name, the error is errs.NotFound.
func (k *Keeper) Get(ctx context.Context, name string) (record.PoolInfo, error) {
	all, err := k.Stock.Pools(ctx)
	if err != nil {
		return record.PoolInfo{}, err
	}
	if at := slices.IndexFunc(all, func(p record.PoolInfo) bool { return p.Name == name }); at >= 0 {
		return all[at], nil
	}
	return record.PoolInfo{}, record.NoPool(name)
}

// Create makes a pool. It fails with errs.Exists if there is one of that name.
func (k *Keeper) Create(ctx context.Context, p record.Pool) (record.PoolInfo, error) {
	if err := k.Check(ctx, p); err != nil {
		return record.PoolInfo{}, err
	}
	p.Created = now()
	if err := k.Store.AddPool(ctx, p); err != nil {
		return record.PoolInfo{}, err
	}
	k.Stock.Changed(p.Name)
	return k.Get(ctx, p.Name)
}

// Update changes a pool that is not in the configuration. change gets the pool as it is.
func (k *Keeper) Update(ctx context.Context, name string, change func(*record.Pool) error) (record.PoolInfo, error) {
	was, err := k.own(ctx, name)
	if err != nil {
		return record.PoolInfo{}, err
	}
	p := was.Pool
	if err := change(&p); err != nil {
		return record.PoolInfo{}, err
	}
	if err := k.Check(ctx, p); err != nil {
		return record.PoolInfo{}, err
	}
	p.Name, p.Created, p.Fixed = was.Name, was.Created, false
	if err := k.Store.PutPool(ctx, p); err != nil {
		return record.PoolInfo{}, err
	}
	k.Stock.Changed(name)
	return k.Get(ctx, name)
}

// Delete removes a pool that is not in the configuration. Its members are released soon
// after; its sandboxes stay.
func (k *Keeper) Delete(ctx context.Context, name string) error {
	if _, err := k.own(ctx, name); err != nil {
		return err
	}
	if err := k.Store.DeletePool(ctx, name); err != nil {
		return err
	}
	k.Stock.Changed(name)
	return nil
}

// own is Get of a pool that clients may change.
func (k *Keeper) own(ctx context.Context, name string) (record.PoolInfo, error) {
	p, err := k.Get(ctx, name)
	if err == nil && p.Fixed {
		err = errs.Wire(errs.New(errs.WrongState, "pool %s is in the configuration of the daemon, and is only changed there", name),
			"POOL::FIXED")
	}
	return p, err
}
