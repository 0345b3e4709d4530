package secrets

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// maxBad is how long an error of a source is kept, also if values are not: a guest that asks again
// at once starts no command for it.
const maxBad = time.Second

// A hostValue is a credential whose value a file or a command of the host has, with what was last
// read of it. All but the first two is guarded by the lock of the credential in Keeper.runs.
type hostValue struct {
	name   string
	source vault.Source
	since  time.Time // when that reading began, or failed; zero: never
	value  []byte
	err    error
}

// fresh reports whether what is kept answers a request of then. One that waited while it was
// read asked before that began, so it is fresh for it whatever the bound.
func (h *hostValue) fresh(then time.Time) bool {
	bound := h.source.Cache
	if h.err != nil {
		bound = maxBad
	}
	return !h.since.IsZero() && then.Sub(h.since) < bound
}

// values is Inspection.Value for the credentials of a vault. It keeps the values that it has read.
// A change of the vault or the policy makes a new Inspection, which reads them again.
func (k *Keeper) values(id string, all []*vault.Credential) func(context.Context, string) ([]byte, error) {
	m := map[string]*hostValue{}
	for _, c := range all {
		if c.Source.Type == vault.File || c.Source.Type == vault.Command {
			m[c.Name] = &hostValue{name: c.Name, source: c.Source}
		}
	}
	return func(ctx context.Context, credential string) ([]byte, error) {
		h := m[credential]
		if h == nil {
			return nil, fmt.Errorf("sandbox %s has no credential %q that a file or a command gives", id, credential)
		}
		return k.value(ctx, id, h)
	}
}

// value returns the value of a credential. One reading of a credential runs at a time, and goes on
// when the one that asked goes away: a guest that hangs up again and again starts no more
// than one command at a time.
func (k *Keeper) value(ctx context.Context, id string, h *hostValue) ([]byte, error) {
	asked := k.now()
	unlock, err := k.runs.Lock(ctx, id+"/"+h.name)
	if err != nil {
		return nil, fmt.Errorf("wait for the value of credential %q: %w", h.name, err)
	}
	if h.fresh(asked) {
		defer unlock()
		return slices.Clone(h.value), h.err
	}
	done := make(chan struct{})
	var value []byte
	go func() {
		defer close(done)
		defer unlock()
		h.since = k.now()
		if h.value, h.err = k.read(id, h); h.err != nil {
			h.since = k.now() // it may have taken longer than maxBad
		}
		value, err = slices.Clone(h.value), h.err
	}()
	select {
	case <-done:
		return value, err
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the value of credential %q: %w", h.name, context.Cause(ctx))
	}
}

// read reads a value anew, and checks it. Its caller logs the error, as often as its guest may
// cause lines of the log.
func (k *Keeper) read(id string, h *hostValue) (value []byte, err error) {
	if h.source.Type == vault.Command {
		value, err = command(h.source.Argv, k.limit, k.grace)
	} else {
		value, err = file(h.source.Path)
	}
	if err == nil {
		value = trimLine(value)
		err = vault.CheckValue(vault.NewSecret(string(value)))
	}
	if err != nil {
		clear(value)
		return nil, fmt.Errorf("credential %q of sandbox %s: %w", h.name, id, err)
	}
	return value, nil
}
