package backup

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// Secrets is what a key opens of the secrets of a store. They are listed by name
// (record.Secret), in order. What does not open stays as it is.
type Secrets struct {
	Open    []string            // secrets that open
	Foreign map[string][]string // secrets, by ID of the key that is missing
	Newer   []string            // secrets that a newer sandboxd has sealed
	Damaged []string            // secrets that no key opens
}

// CheckSecrets tries to open every secret of a store: after a restore, and each time a
// daemon starts. A nil key opens none. It changes nothing, and keeps no secret. It reads
// record.MaxSecretsBytes at most, some 0.1 s at the 700 MB/s of sealed's benchmark.
func CheckSecrets(ctx context.Context, db *store.DB, key *sealed.Key) (s Secrets, err error) {
	all, unreadable, err := db.Secrets(ctx)
	if err != nil {
		return s, fmt.Errorf("check the secrets: %w", err)
	}
	s.Foreign, s.Damaged = map[string][]string{}, unreadable
	for _, secret := range all {
		if err := ctx.Err(); err != nil {
			return s, fmt.Errorf("check the secrets: %w", context.Cause(ctx))
		}
		s.add(secret, key)
	}
	slices.Sort(s.Damaged)
	return s, nil
}

func (s *Secrets) add(secret record.Secret, key *sealed.Key) {
	id, err := sealed.KeyID(secret.Sealed)
	if err == nil && key == nil {
		err = sealed.ErrOtherKey
	}
	if err == nil {
		var text []byte
		text, err = key.Unseal(secret.Name(), secret.Sealed)
		clear(text)
	}
	switch {
	case err == nil:
		s.Open = append(s.Open, secret.Name())
	case errors.Is(err, sealed.ErrOtherKey):
		s.Foreign[id] = append(s.Foreign[id], secret.Name())
	case errors.Is(err, sealed.ErrNewer):
		s.Newer = append(s.Newer, secret.Name())
	default:
		s.Damaged = append(s.Damaged, secret.Name())
	}
}

// Problems says, a line for each cause, which secrets do not open with key and what to do.
// It is empty if all open.
func (s Secrets) Problems(key *sealed.Key) (lines []string) {
	add := func(names []string, why string) {
		if len(names) == 0 {
			return
		}
		text := strings.Join(names[:min(named, len(names))], ", ")
		if len(names) > named {
			text += fmt.Sprintf(" and %d more", len(names)-named)
		}
		lines = append(lines, fmt.Sprintf("%s of sandboxes (%s) cannot be opened, and stay as they are: %s",
			errs.Count(len(names), "secret", "secrets"), text, why))
	}
	for _, id := range slices.Sorted(maps.Keys(s.Foreign)) {
		add(s.Foreign[id], fmt.Sprintf("key %s, which sealed them, is missing; %s", id, key.Bring()))
	}
	add(s.Newer, "a newer sandboxd sealed them; start that one")
	add(s.Damaged, "they are damaged; delete a vault and set it again, restart a sandbox to give it a new authority, or restore an older "+
		"backup")
	return lines
}

// named is how many secrets a line of Problems lists.
const named = 10

// NeedsKeys says which keys the secrets of a backup need that this host does not have, for
// the one who restores it; empty if there are none. If key is nil, no key of this host is
// known, and all are named.
func NeedsKeys(f store.Facts, key *sealed.Key) string {
	missing := slices.Clone(f.SecretKeys)
	if key != nil {
		missing = slices.DeleteFunc(missing, func(id string) bool { return slices.Contains(key.IDs(), id) })
	}
	if len(missing) == 0 {
		return ""
	}
	return fmt.Sprintf("the backup has %s, but no keys, and this host does not have key %s; they are kept, and open once it does: %s",
		errs.Count(f.Secrets, "encrypted secret", "encrypted secrets"), strings.Join(missing, ", key "), key.Bring())
}

// Reseal seals anew, with the first key, what older ones have sealed, and returns how many
// secrets that were. left is how many stay as they are, as they do not open or their
// record cannot be read; CheckSecrets says why. If left is 0, no secret of the store needs
// the older keys; backups of before still do. One that is edited or deleted at the same
// time does not count: an edit seals with the first key. On an error the older keys are
// needed.
func Reseal(ctx context.Context, db *store.DB, key *sealed.Key) (n, left int, err error) {
	all, unreadable, err := db.Secrets(ctx)
	if err != nil {
		return 0, 0, fmt.Errorf("seal the secrets anew: %w", err)
	}
	left = len(unreadable)
	for _, was := range all {
		s, changed := was, false
		if s.Sealed, changed, err = key.Reseal(was.Name(), was.Sealed); err != nil {
			left++
		}
		if !changed {
			continue
		}
		switch err := db.PutSecret(ctx, s, was); {
		case err == nil:
			n++
		case !errs.Is(err, errs.WrongState) && !errs.Is(err, errs.NotFound):
			return n, left, fmt.Errorf("seal the secrets anew: %w", err)
		}
	}
	return n, left, nil
}
