package secrets

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/egress/authority"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Inspection returns what egress needs of the secrets of a sandbox: nil if it was made without
// inspection. It takes no lock, so Config.Apply may call it. It fails as Get does, but not if there
// is no vault. Leaf reads the authority of the moment: it may be called when the sandbox has one, and
// no earlier.
//
// Whoever calls Inspection and registers what it returns does both under one lock of the
// sandbox: else an old vault could be registered after a new one.
func (k *Keeper) Inspection(ctx context.Context, r *record.Record) (*egress.Inspection, error) {
	if !r.Spec.Inspect {
		return nil, nil
	}
	id := r.ID
	i := &egress.Inspection{
		Mask: k.c.Mask,
		Leaf: func(name string) (cert, key []byte, err error) {
			a, err := k.authority(context.Background(), id)
			if err != nil {
				return nil, nil, err
			}
			return a.Leaf(name, k.now())
		},
	}
	v, err := k.vault(ctx, id)
	switch {
	case errs.Is(err, errs.NotFound):
		i.Value = k.values(id, nil)
		return i, nil
	case err != nil:
		return nil, err
	}
	bindings := v.Bindings() // they have no values
	i.Vault = v.Encode()
	if len(bindings) > 0 {
		i.Marks = func(scheme, host string) bool {
			return slices.ContainsFunc(bindings, func(b *vault.Binding) bool {
				return slices.Contains(b.Match.Schemes, scheme) && b.MatchesHost(host)
			})
		}
	}
	i.Value = k.values(id, v.Credentials())
	return i, nil
}

// Authority returns the certificate authority of a sandbox. At its start it is made if there is
// none, made anew if it is Due, or if the one there is does not open: nobody but the guest trusts
// it, and the guest learns of the new one at this very start. It is durable when Authority
// returns. At other times a missing one is errs.NotFound, and nothing is made.
func (k *Keeper) Authority(ctx context.Context, r *record.Record, start bool) (*authority.Authority, error) {
	if !r.Spec.Inspect {
		return nil, errs.Wrap(ErrOff, errs.WrongState, "sandbox %s has no certificate authority: it was made without inspection", r.ID)
	}
	if !start {
		return k.authority(ctx, r.ID)
	}
	if k.c.Key == nil {
		return nil, k.noKey()
	}
	unlock, err := k.lock(ctx, r.ID, record.Authority)
	if err != nil {
		return nil, err
	}
	defer unlock()
	a, err := k.started(ctx, r.ID)
	if errs.Is(err, errs.WrongState) { // a key rotation has sealed it anew
		a, err = k.started(ctx, r.ID)
	}
	return a, err
}

// AuthorityEnd is when the certificate authority of a sandbox ends. It fails with errs.NotFound if
// the sandbox has none.
func (k *Keeper) AuthorityEnd(ctx context.Context, id string) (time.Time, error) {
	a, err := k.authority(ctx, id)
	if err != nil {
		return time.Time{}, err
	}
	return a.NotAfter(), nil
}

// started is Authority at a start.
func (k *Keeper) started(ctx context.Context, id string) (*authority.Authority, error) {
	was, found, err := k.c.Store.Secret(ctx, id, record.Authority)
	if errs.Is(err, errs.Internal) { // the record cannot be read, and so not be replaced
		k.log.Warn("the certificate authority of a sandbox cannot be read; it gets a new one", "sandbox", id, "err", err)
		err = k.c.Store.DeleteSecret(ctx, id, record.Authority)
	}
	if err != nil {
		return nil, err
	}
	if found {
		a, err := k.openAuthority(was)
		switch {
		case err == nil && !a.Due(k.now()):
			return a, nil
		case errors.Is(err, sealed.ErrNewer):
			return nil, err
		case err != nil:
			k.log.Warn("the certificate authority of a sandbox cannot be opened; it gets a new one", "sandbox", id, "err", err)
		}
	}
	a, err := authority.New(id, k.now())
	if err != nil {
		return nil, err
	}
	text, err := a.Encode()
	if err != nil {
		return nil, err
	}
	v := record.Secret{Sandbox: id, Kind: record.Authority}
	v.Sealed = k.c.Key.Seal(v.Name(), text)
	clear(text)
	if err := k.c.Store.PutSecret(ctx, v, was); err != nil {
		return nil, err
	}
	return a, nil
}

// authority is the authority that there is.
func (k *Keeper) authority(ctx context.Context, id string) (*authority.Authority, error) {
	s, found, err := k.c.Store.Secret(ctx, id, record.Authority)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, errs.New(errs.NotFound, "sandbox %s has no certificate authority; it gets one when it starts", id)
	}
	return k.openAuthority(s)
}

func (k *Keeper) openAuthority(s record.Secret) (*authority.Authority, error) {
	text, err := k.unseal(s)
	if err != nil {
		return nil, err
	}
	defer clear(text)
	a, err := authority.Decode(text)
	if err != nil {
		return nil, errs.Wrap(err, errs.Internal, "the certificate authority of sandbox %s cannot be read; restart the sandbox, which "+
			"gives it a new one", s.Sandbox)
	}
	return a, nil
}
