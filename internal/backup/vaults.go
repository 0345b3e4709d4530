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

// Vaults is what a key opens of the vaults of a store. Sandboxes are named by ID, in order.
// What does not open stays as it is.
type Vaults struct {
	Open    []string            // sandboxes whose vaults open
	Foreign map[string][]string // sandboxes, by ID of the key that is missing
	Newer   []string            // sandboxes whose vaults a newer sandboxd has sealed
	Damaged []string            // sandboxes whose vaults no key opens
}

// CheckVaults tries to open every vault of a store: after a restore, and each time a
// daemon starts. A nil key opens none. It changes nothing, and keeps no secret. It reads
// record.MaxVaultsBytes at most, some 0.1 s at the 700 MB/s of sealed's benchmark.
func CheckVaults(ctx context.Context, db *store.DB, key *sealed.Key) (v Vaults, err error) {
	all, unreadable, err := db.Vaults(ctx)
	if err != nil {
		return v, fmt.Errorf("check the vaults: %w", err)
	}
	v.Foreign, v.Damaged = map[string][]string{}, unreadable
	for _, vault := range all {
		if err := ctx.Err(); err != nil {
			return v, fmt.Errorf("check the vaults: %w", context.Cause(ctx))
		}
		v.add(vault, key)
	}
	slices.Sort(v.Damaged)
	return v, nil
}

func (v *Vaults) add(vault record.Vault, key *sealed.Key) {
	id, err := sealed.KeyID(vault.Sealed)
	if err == nil && key == nil {
		err = sealed.ErrOtherKey
	}
	if err == nil {
		var secret []byte
		secret, err = key.Unseal(vault.Purpose(), vault.Sealed)
		clear(secret)
	}
	switch {
	case err == nil:
		v.Open = append(v.Open, vault.Sandbox)
	case errors.Is(err, sealed.ErrOtherKey):
		v.Foreign[id] = append(v.Foreign[id], vault.Sandbox)
	case errors.Is(err, sealed.ErrNewer):
		v.Newer = append(v.Newer, vault.Sandbox)
	default:
		v.Damaged = append(v.Damaged, vault.Sandbox)
	}
}

// Problems says, a line for each cause, which vaults do not open with key and what to do.
// It is empty if all open.
func (v Vaults) Problems(key *sealed.Key) (lines []string) {
	add := func(ids []string, why string) {
		if len(ids) == 0 {
			return
		}
		text := strings.Join(ids[:min(named, len(ids))], ", ")
		if len(ids) > named {
			text += fmt.Sprintf(" and %d more", len(ids)-named)
		}
		lines = append(lines, fmt.Sprintf("the vaults of %s (%s) are kept and cannot be opened: %s",
			errs.Count(len(ids), "sandbox", "sandboxes"), text, why))
	}
	for _, id := range slices.Sorted(maps.Keys(v.Foreign)) {
		add(v.Foreign[id], fmt.Sprintf("key %s, which sealed them, is missing; %s", id, key.Bring()))
	}
	add(v.Newer, "a newer sandboxd sealed them; start that one")
	add(v.Damaged, "they are damaged; delete and set them again, or restore an older backup")
	return lines
}

// named is how many sandboxes a line of Problems lists.
const named = 10

// NeedsKeys says which keys the vaults of a backup need that this host does not have, for
// the one who restores it; empty if there are none. If key is nil, no key of this host is
// known, and all are named.
func NeedsKeys(f store.Facts, key *sealed.Key) string {
	missing := slices.Clone(f.VaultKeys)
	if key != nil {
		missing = slices.DeleteFunc(missing, func(id string) bool { return slices.Contains(key.IDs(), id) })
	}
	if len(missing) == 0 {
		return ""
	}
	return fmt.Sprintf("the backup has %s, but no keys, and this host does not have key %s; the vaults are kept, and open once it does: %s",
		errs.Count(f.Vaults, "encrypted vault", "encrypted vaults"), strings.Join(missing, ", key "), key.Bring())
}

// Reseal seals anew, with the first key, what older ones have sealed, and returns how many
// vaults that were. If it does not fail, no vault needs the older keys; backups of before
// still do. Vaults that do not open stay as they are, as do those that are edited or
// deleted at the same time: an edit seals with the first key.
func Reseal(ctx context.Context, db *store.DB, key *sealed.Key) (n int, err error) {
	all, _, err := db.Vaults(ctx)
	if err != nil {
		return 0, fmt.Errorf("seal the vaults anew: %w", err)
	}
	for _, was := range all {
		v, changed := was, false
		if v.Sealed, changed, err = key.Reseal(was.Purpose(), was.Sealed); err != nil || !changed {
			continue
		}
		switch err := db.PutVault(ctx, v, was); {
		case err == nil:
			n++
		case !errs.Is(err, errs.WrongState) && !errs.Is(err, errs.NotFound):
			return n, fmt.Errorf("seal the vaults anew: %w", err)
		}
	}
	return n, nil
}
