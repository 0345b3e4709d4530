package store

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A secretShelf keeps the secrets of sandboxes. It knows no key, and opens none. bbolt does
// not clear pages that it frees: a secret that was replaced or deleted may be in the file,
// in kept copies of it and in backups for long, as encrypted as it was.
type secretShelf struct {
	w          *committer
	secrets    map[string]record.Secret // by name; guarded by w.mu, as the next
	badSecrets map[string]error
}

// PutSecret writes a secret of a sandbox in the place of was, which is the zero Secret if
// there is none of that kind yet. It fails with errs.NotFound if there is no such sandbox,
// or it is being deleted, and if was is no longer there; with errs.Exists if there is one
// already; with errs.WrongState if was has been edited meanwhile; with errs.Invalid beyond
// record.MaxSecretBytes, and with errs.Exhausted beyond record.MaxSecretsBytes. A failure
// changes nothing.
func (s *secretShelf) PutSecret(ctx context.Context, v, was record.Secret) error {
	v.Sealed = bytes.Clone(v.Sealed)
	err := s.w.commit(ctx, func(tx *bbolt.Tx) error {
		if err := mayHaveSecret(tx, v.Sandbox); err != nil {
			return err
		}
		if err := unedited(tx, v, was); err != nil {
			return err
		}
		return putSecret(tx, v)
	}, func() { s.secrets[v.Name()] = v })
	if err != nil {
		return fmt.Errorf("put the %s of sandbox %s: %w", v.Kind, v.Sandbox, err)
	}
	return nil
}

// DeleteSecret removes a secret, which may be unreadable, and leaves those of other kinds.
// It fails with errs.NotFound if there is none. Delete, which removes the record of a
// sandbox, removes all its secrets with it.
func (s *secretShelf) DeleteSecret(ctx context.Context, id string, kind record.SecretKind) error {
	name := record.Secret{Sandbox: id, Kind: kind}.Name()
	err := s.w.commit(ctx, func(tx *bbolt.Tx) error {
		bucket := tx.Bucket(bucketSecrets)
		if bucket.Get([]byte(name)) == nil {
			return noSecret(id, kind)
		}
		return bucket.Delete([]byte(name))
	}, func() {
		delete(s.secrets, name)
		delete(s.badSecrets, name)
	})
	if err != nil {
		return fmt.Errorf("delete the %s of sandbox %s: %w", kind, id, err)
	}
	return nil
}

// Secret returns a secret of a sandbox, by the sandbox's ID; false if it has none of that
// kind. It fails with errs.Internal if the record cannot be read.
func (s *secretShelf) Secret(_ context.Context, id string, kind record.SecretKind) (v record.Secret, ok bool, err error) {
	name := record.Secret{Sandbox: id, Kind: kind}.Name()
	s.w.mu.RLock()
	defer s.w.mu.RUnlock()
	if err := s.badSecrets[name]; err != nil {
		return v, false, errs.Wrap(err, errs.Internal, "%s", unreadableSecret(name))
	}
	v, ok = s.secrets[name]
	return v, ok, nil
}

// Secrets returns all secrets, in order of their names, and the names of those whose
// record cannot be read. They are shared: never write into what is sealed.
func (s *secretShelf) Secrets(context.Context) (all []record.Secret, unreadable []string, err error) {
	s.w.mu.RLock()
	defer s.w.mu.RUnlock()
	for _, name := range slices.Sorted(maps.Keys(s.secrets)) {
		all = append(all, s.secrets[name])
	}
	return all, slices.Sorted(maps.Keys(s.badSecrets)), nil
}

// forgetSecrets drops all secrets of a sandbox from memory. It looks at those of all
// sandboxes, some ten thousand at most in a tenth of a millisecond.
// Preconditions: committer.mu is held.
func (s *secretShelf) forgetSecrets(id string) {
	maps.DeleteFunc(s.secrets, func(name string, _ record.Secret) bool { return strings.HasPrefix(name, id+"/") })
	maps.DeleteFunc(s.badSecrets, func(name string, _ error) bool { return strings.HasPrefix(name, id+"/") })
}

// mayHaveSecret refuses a sandbox that is not there for clients.
func mayHaveSecret(tx *bbolt.Tx, id string) error {
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

// unedited refuses to put v in the place of was, or of nothing, if the file has something
// else.
func unedited(tx *bbolt.Tx, v, was record.Secret) error {
	b := tx.Bucket(bucketSecrets).Get([]byte(v.Name()))
	var now record.Secret
	if b != nil {
		if err := readSecret(v.Name(), b, &now); err != nil {
			return refusal{errs.Wrap(err, errs.Internal, "%s", unreadableSecret(v.Name()))}
		}
	}
	switch created := was.Sandbox == ""; {
	case b == nil && created:
		return nil
	case b == nil:
		return noSecret(v.Sandbox, v.Kind)
	case created:
		return refusal{errs.New(errs.Exists, "sandbox %s has its %s already; change that, or delete it first", v.Sandbox, v.Kind)}
	case !now.Same(was):
		return refusal{errs.New(errs.WrongState, "the %s of sandbox %s was changed meanwhile: read it again, and repeat the change",
			v.Kind, v.Sandbox)}
	}
	return nil
}

func noSecret(id string, kind record.SecretKind) error {
	return refusal{errs.New(errs.NotFound, "sandbox %s has no %s", id, kind)}
}

// unreadableSecret says what to do about a record that a disk or a person has changed.
func unreadableSecret(name string) string {
	id, kind, _ := strings.Cut(name, "/")
	text := fmt.Sprintf("the record of the %s of sandbox %s cannot be read: ", kind, id)
	if kind == string(record.Authority) {
		return text + "restart the sandbox, which gives it a new one"
	}
	return text + "delete the " + kind + ", and set it again"
}

func readSecret(name string, b []byte, v *record.Secret) error {
	err := json.Unmarshal(b, v)
	if err == nil && v.Name() != name {
		err = fmt.Errorf("it contains %q", v.Name())
	}
	return err
}

// putSecret writes a secret, unless it or all would then be too large.
func putSecret(tx *bbolt.Tx, v record.Secret) error {
	if len(v.Sealed) > record.MaxSecretBytes {
		return refusal{errs.New(errs.Invalid, "the %s of sandbox %s takes %d bytes, sealed, and may take %d: put less in it", v.Kind,
			v.Sandbox, len(v.Sealed), record.MaxSecretBytes)}
	}
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	bucket, others := tx.Bucket(bucketSecrets), 0
	err = bucket.ForEach(func(k, v2 []byte) error {
		if string(k) != v.Name() {
			others += len(v2)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if others+len(b) > record.MaxSecretsBytes {
		return refusal{errs.New(errs.Exhausted, "the %s of sandbox %s would take %.1f MiB, and others take %.1f MiB; all secrets of "+
			"this host may take %d MiB: delete vaults, or sandboxes that have one, also those that have ended", v.Kind, v.Sandbox,
			mebibytes(len(b)), mebibytes(others), record.MaxSecretsBytes>>20)}
	}
	return bucket.Put([]byte(v.Name()), b)
}

// eraseSecrets removes all secrets of a sandbox; absent is success. A file of an old
// schema, which MarkRestored writes to, has no bucket of them.
func eraseSecrets(tx *bbolt.Tx, id string) error {
	bucket := tx.Bucket(bucketSecrets)
	if bucket == nil {
		return nil
	}
	var names [][]byte // a cursor that deletes skips what comes next
	c, prefix := bucket.Cursor(), []byte(id+"/")
	for k, _ := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, _ = c.Next() {
		names = append(names, bytes.Clone(k))
	}
	for _, name := range names {
		if err := bucket.Delete(name); err != nil {
			return err
		}
	}
	return nil
}

// loadSecrets reads every record. It reports and keeps one that cannot be read.
func (s *secretShelf) loadSecrets(tx *bbolt.Tx, log *slog.Logger) error {
	return tx.Bucket(bucketSecrets).ForEach(func(k, b []byte) error {
		var v record.Secret
		name := string(k)
		if err := readSecret(name, b, &v); err != nil {
			s.badSecrets[name] = err
			log.Error("the record of a secret cannot be read; it is kept until it or its sandbox is deleted", "secret", name, "err", err)
			return nil
		}
		s.secrets[name] = v
		return nil
	})
}
