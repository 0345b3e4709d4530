package secrets

import (
	"context"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// CheckCopy reports whether a sandbox has a vault that a copy of the sandbox would get. It fails with
// errs.Invalid if the network policy n of the copy would not allow a host of the vault that the
// policy of source allows, and otherwise as Get does. Afterwards either may change: then the policy
// of the copy holds, and the binding does nothing.
func (k *Keeper) CheckCopy(ctx context.Context, source *record.Record, n record.Network) (has bool, err error) {
	v, err := k.vault(ctx, source.ID)
	if errs.Is(err, errs.NotFound) {
		return false, nil
	}
	var missing []vault.Uncovered
	if err == nil {
		missing, err = k.lost(v, source.Spec.Network, n)
	}
	if err != nil {
		return false, err
	}
	err = uncovered(missing, "allow it in the policy of the copies, or remove it from the vault of sandbox "+source.ID+" first")
	return err == nil, err
}

// Copy gives the sandbox to the vault that the sandbox source has at this moment, sealed anew: the
// same credentials and bindings at the same revision, and placeholders of its own. It does not apply
// it: to is not registered yet. A vault that a client has given it already stays. If source has
// none, or is gone, Copy fails with errs.WrongState, as a copy without its secrets is not what was
// asked for. errs.Unavailable: the key is missing.
func (k *Keeper) Copy(ctx context.Context, source, to string) error {
	if k.c.Key == nil {
		return k.noKey()
	}
	unlock, err := k.lock(ctx, to, record.Vault)
	if err != nil {
		return err
	}
	defer unlock()
	v, err := k.vault(ctx, source)
	if errs.Is(err, errs.NotFound) {
		return errs.New(errs.WrongState, "the credential vault of sandbox %s was deleted, or the sandbox was, before this copy of it "+
			"could get it; fork again", source)
	}
	if err != nil {
		return err
	}
	s := record.Secret{Sandbox: to, Kind: record.Vault}
	text := v.Copy().Encode()
	s.Sealed = k.c.Key.Seal(s.Name(), text)
	clear(text)
	err = k.c.Store.PutSecret(ctx, s, record.Secret{})
	if errs.Is(err, errs.Exists) {
		return nil
	}
	return err
}

// Drop deletes the vault of a sandbox that does not run and will not. Absent is success. It needs no
// key.
func (k *Keeper) Drop(ctx context.Context, id string) error {
	unlock, err := k.lock(ctx, id, record.Vault)
	if err != nil {
		return err
	}
	defer unlock()
	err = k.c.Store.DeleteSecret(ctx, id, record.Vault)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	return err
}
