package store

import (
	"bytes"
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

// A vaultShelf keeps the vaults of sandboxes. It knows no key, and opens none. bbolt does
// not clear pages that it frees: a vault that was replaced or deleted may be in the file,
// in kept copies of it and in backups for long, as encrypted as it was.
type vaultShelf struct {
	w         *committer
	vaults    map[string]record.Vault // by ID of the sandbox; guarded by w.mu, as the next
	badVaults map[string]error
}

// PutVault writes the vault of a sandbox in the place of was, which is the zero Vault if
// there is none yet. It fails with errs.NotFound if there is no such sandbox, or it is
// being deleted, and if was is no longer there; with errs.Exists if there is one already;
// with errs.WrongState if was has been edited meanwhile; and with errs.Exhausted beyond
// record.MaxVaultBytes and MaxVaultsBytes. A failure changes nothing.
func (s *vaultShelf) PutVault(ctx context.Context, v, was record.Vault) error {
	v.Sealed = bytes.Clone(v.Sealed)
	err := s.w.commit(ctx, func(tx *bbolt.Tx) error {
		if err := mayHaveVault(tx, v.Sandbox); err != nil {
			return err
		}
		if err := unedited(tx, v.Sandbox, was); err != nil {
			return err
		}
		return putVault(tx, v)
	}, func() { s.vaults[v.Sandbox] = v })
	if err != nil {
		return fmt.Errorf("put the vault of sandbox %s: %w", v.Sandbox, err)
	}
	return nil
}

// DeleteVault removes the vault of a sandbox, which may be unreadable. It fails with
// errs.NotFound if there is none. Delete, which removes the record of a sandbox, removes
// its vault with it.
func (s *vaultShelf) DeleteVault(ctx context.Context, id string) error {
	err := s.w.commit(ctx, func(tx *bbolt.Tx) error {
		if tx.Bucket(bucketVaults).Get([]byte(id)) == nil {
			return noVault(id)
		}
		return eraseVault(tx, id)
	}, func() { s.forgetVault(id) })
	if err != nil {
		return fmt.Errorf("delete the vault of sandbox %s: %w", id, err)
	}
	return nil
}

// Vault returns the vault of a sandbox, by the sandbox's ID; false if it has none. It fails
// with errs.Internal if the record cannot be read.
func (s *vaultShelf) Vault(_ context.Context, id string) (v record.Vault, ok bool, err error) {
	s.w.mu.RLock()
	defer s.w.mu.RUnlock()
	if err := s.badVaults[id]; err != nil {
		return v, false, unreadableVault(id, err)
	}
	v, ok = s.vaults[id]
	return v, ok, nil
}

// Vaults returns all vaults, by ID of the sandbox, and the IDs of those whose record
// cannot be read. They are shared: never write into what is sealed.
func (s *vaultShelf) Vaults(context.Context) (all []record.Vault, unreadable []string, err error) {
	s.w.mu.RLock()
	defer s.w.mu.RUnlock()
	for _, id := range slices.Sorted(maps.Keys(s.vaults)) {
		all = append(all, s.vaults[id])
	}
	return all, slices.Sorted(maps.Keys(s.badVaults)), nil
}

// forgetVault drops a vault from memory.
// Preconditions: committer.mu is held.
func (s *vaultShelf) forgetVault(id string) {
	delete(s.vaults, id)
	delete(s.badVaults, id)
}

// mayHaveVault refuses a sandbox that is not there for clients.
func mayHaveVault(tx *bbolt.Tx, id string) error {
	b := tx.Bucket(bucketBoxes).Get([]byte(id))
	var r record.Record
	if b != nil {
		if err := json.Unmarshal(b, &r); err != nil {
			return refusal{errs.Wrap(err, errs.Internal, "the record of sandbox %s cannot be read; it can only be deleted", id)}
		}
	}
	if b == nil || r.State == record.Deleting || r.State == record.Prepared {
		return refusal{errs.New(errs.NotFound, "no sandbox %s", id)}
	}
	return nil
}

// unedited refuses a change of was, or of nothing, if the file has something else.
func unedited(tx *bbolt.Tx, id string, was record.Vault) error {
	b := tx.Bucket(bucketVaults).Get([]byte(id))
	var now record.Vault
	if b != nil {
		if err := readVault(id, b, &now); err != nil {
			return refusal{unreadableVault(id, err)}
		}
	}
	switch created := was.Sandbox == ""; {
	case b == nil && created:
		return nil
	case b == nil:
		return noVault(id)
	case created:
		return refusal{errs.New(errs.Exists, "sandbox %s has a vault, of revision %d; change that, or delete it first", id, now.Revision)}
	case !now.Same(was):
		return refusal{errs.New(errs.WrongState, "the vault of sandbox %s was changed meanwhile: it has revision %d, and this is a change "+
			"of revision %d; read it again, and repeat the change", id, now.Revision, was.Revision)}
	}
	return nil
}

func noVault(id string) error { return refusal{errs.New(errs.NotFound, "sandbox %s has no vault", id)} }

func unreadableVault(id string, err error) error {
	return errs.Wrap(err, errs.Internal, "the record of the vault of sandbox %s cannot be read; delete the vault, and set it again", id)
}

func readVault(id string, b []byte, v *record.Vault) error {
	err := json.Unmarshal(b, v)
	if err == nil && (v.Sandbox != id || v.Revision < 1) {
		err = fmt.Errorf("it contains revision %d of the vault of %q", v.Revision, v.Sandbox)
	}
	return err
}

// putVault writes a vault, unless it or all would then be too large.
func putVault(tx *bbolt.Tx, v record.Vault) error {
	if v.Revision < 1 {
		return refusal{fmt.Errorf("it has revision %d, and the first is 1", v.Revision)}
	}
	if len(v.Sealed) > record.MaxVaultBytes {
		return refusal{errs.New(errs.Exhausted, "the vault of sandbox %s takes %.1f MiB, and may take %d MiB: give it fewer or shorter "+
			"credentials", v.Sandbox, mebibytes(len(v.Sealed)), record.MaxVaultBytes>>20)}
	}
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	bucket, others := tx.Bucket(bucketVaults), 0
	err = bucket.ForEach(func(k, v2 []byte) error {
		if string(k) != v.Sandbox {
			others += len(v2)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if others+len(b) > record.MaxVaultsBytes {
		return refusal{errs.New(errs.Exhausted, "the vault of sandbox %s would take %.1f MiB, and others take %.1f MiB; all vaults of "+
			"this host may take %d MiB: delete sandboxes that have one, also those that have ended, or their vaults", v.Sandbox,
			mebibytes(len(b)), mebibytes(others), record.MaxVaultsBytes>>20)}
	}
	return bucket.Put([]byte(v.Sandbox), b)
}

// eraseVault removes the vault of a sandbox; absent is success. A file of an old schema,
// which MarkRestored writes to, has no bucket of them.
func eraseVault(tx *bbolt.Tx, id string) error {
	b := tx.Bucket(bucketVaults)
	if b == nil {
		return nil
	}
	return b.Delete([]byte(id))
}

// loadVaults reads every record. It reports and keeps one that cannot be read.
func (s *vaultShelf) loadVaults(tx *bbolt.Tx, log *slog.Logger) error {
	return tx.Bucket(bucketVaults).ForEach(func(k, b []byte) error {
		var v record.Vault
		id := string(k)
		if err := readVault(id, b, &v); err != nil {
			s.badVaults[id] = err
			log.Error("the record of a vault cannot be read; it is kept until the vault or its sandbox is deleted", "sandbox", id,
				"err", err)
			return nil
		}
		s.vaults[id] = v
		return nil
	})
}
