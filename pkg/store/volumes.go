package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// AddVolume adds the record of a volume. It fails with errs.Exists if the name is
// taken.
func (db *DB) AddVolume(ctx context.Context, v record.Volume) error {
	err := db.commit(ctx, func(tx *bbolt.Tx) error {
		if tx.Bucket(bucketVolumes).Get([]byte(v.Name)) != nil {
			return refusal{errs.New(errs.Exists, "volume %q already exists; use it, or choose another name", v.Name)}
		}
		return putVolumes(tx, []record.Volume{v})
	}, func() { db.rememberVolumes([]record.Volume{v}) })
	if err != nil {
		return fmt.Errorf("add volume %s: %w", v.Name, err)
	}
	return nil
}

// VolumeMade notes that the files of a volume are on the pool.
func (db *DB) VolumeMade(ctx context.Context, name, id string) error {
	_, err := db.changeVolume(ctx, name, func(_ *bbolt.Tx, v *record.Volume) error {
		if v.ID != id {
			return noVolume(name)
		}
		v.Made = true
		return nil
	})
	if err != nil {
		return fmt.Errorf("record that volume %s was created: %w", name, err)
	}
	return nil
}

// CondemnVolume makes the end of a volume durable. It fails with errs.NotFound if there
// is none, and with errs.WrongState while a sandbox has it mounted, whatever the
// sandbox's state. A record that cannot be read is an error: it does not say which
// directory on the pool is the volume's (see ForgetVolume).
func (db *DB) CondemnVolume(ctx context.Context, name string) (record.Volume, error) {
	v, err := db.changeVolume(ctx, name, func(tx *bbolt.Tx, v *record.Volume) error {
		used, err := usersOf(tx, v.ID, "")
		if err != nil {
			return err
		}
		if len(used) > 0 {
			return refusal{errs.Wire(errs.New(errs.WrongState, "volume %s is in use by %s; remove these sandboxes first, also if they "+
				"have ended; for one that is removed already, wait until the kernel is done with it (`sandboxctl system df`)",
				name, clipped(used)), "VOLUME::IN_USE")}
		}
		v.State = record.VolumeDeleting
		return nil
	})
	if err != nil {
		return v, fmt.Errorf("delete volume %s: %w", name, err)
	}
	return v, nil
}

// ForgetVolume removes the record of the volume with that name and ID, or an unreadable
// record with that name. A missing record is no error.
func (db *DB) ForgetVolume(ctx context.Context, name, id string) error {
	gone := false
	err := db.commit(ctx, func(tx *bbolt.Tx) error {
		v, ok, err := getVolume(tx, name)
		if gone = err != nil || ok && v.ID == id; gone {
			return tx.Bucket(bucketVolumes).Delete([]byte(name))
		}
		return nil
	}, func() {
		if gone {
			delete(db.volumes, name)
			delete(db.badVolumes, name)
		}
	})
	if err != nil {
		return fmt.Errorf("delete the record of volume %s: %w", name, err)
	}
	return nil
}

// Volumes returns the records of all volumes, in no order, and the names of those that
// cannot be read.
func (db *DB) Volumes(context.Context) (all []record.Volume, unreadable []string, err error) {
	db.mu.RLock()
	defer db.mu.RUnlock()
	return slices.Collect(maps.Values(db.volumes)), slices.Sorted(maps.Keys(db.badVolumes)), nil
}

// changeVolume changes one record in a transaction.
func (db *DB) changeVolume(ctx context.Context, name string, f func(*bbolt.Tx, *record.Volume) error) (v record.Volume, err error) {
	err = db.commit(ctx, func(tx *bbolt.Tx) error {
		var ok bool
		if v, ok, err = getVolume(tx, name); err != nil {
			return refusal{err}
		}
		if !ok {
			return noVolume(name)
		}
		if err := f(tx, &v); err != nil {
			return err
		}
		return putVolumes(tx, []record.Volume{v})
	}, func() { db.rememberVolumes([]record.Volume{v}) })
	return v, err
}

func noVolume(name string) error {
	return refusal{errs.Wire(errs.New(errs.NotFound, "no volume %q; `sandboxctl volume ls` lists the volumes of this host", name),
		"VOLUME::PVC_NOT_FOUND")}
}

// claimVolumes gives each mount of r the volume of its name, and returns the volumes
// that do not exist yet: they are to be added with r. It writes nothing.
func claimVolumes(tx *bbolt.Tx, r *record.Record) (made []record.Volume, err error) {
	for i := range r.Spec.Volumes {
		m := &r.Spec.Volumes[i]
		if m.Claim == "" {
			continue
		}
		v, ok, err := getVolume(tx, m.Claim)
		if err != nil {
			return nil, refusal{err}
		}
		if at := slices.IndexFunc(made, func(o record.Volume) bool { return o.Name == m.Claim }); at >= 0 {
			v, ok = made[at], true // mounted twice
		}
		switch {
		case ok && (v.State == record.VolumeDeleting || v.Owner != r.ID && goes(tx, &v)):
			return nil, refusal{errs.New(errs.Unavailable, "volume %s is being deleted; try again in a moment", m.Claim)}
		case ok:
			m.Volume, m.Bytes, m.Owned = v.ID, v.Bytes, v.Owner == r.ID
			continue
		case !m.Create:
			return nil, noVolume(m.Claim)
		}
		v = record.Volume{ID: m.Volume, Name: m.Claim, State: record.VolumeReady, Bytes: m.Bytes, Created: r.Created}
		if m.Owned {
			v.Owner = r.ID
		}
		made = append(made, v)
	}
	return made, nil
}

// goes reports whether a volume goes with a sandbox that is being deleted.
func goes(tx *bbolt.Tx, v *record.Volume) bool {
	var owner record.Record
	if v.Owner == "" || json.Unmarshal(tx.Bucket(bucketBoxes).Get([]byte(v.Owner)), &owner) != nil || owner.State != record.Deleting {
		return false
	}
	others, err := usersOf(tx, v.ID, v.Owner)
	return err == nil && len(others) == 0
}

// leaveVolumes returns, changed, the volumes that go with a sandbox that is about to be
// erased. It writes nothing.
func leaveVolumes(tx *bbolt.Tx, id string) (left []record.Volume, err error) {
	var r record.Record
	if json.Unmarshal(tx.Bucket(bucketBoxes).Get([]byte(id)), &r) != nil {
		return nil, nil // an unreadable record does not name its volumes: they stay
	}
	for _, m := range r.Spec.Volumes {
		if !m.Owned || slices.ContainsFunc(left, func(v record.Volume) bool { return v.Name == m.Claim }) {
			continue
		}
		v, ok, err := getVolume(tx, m.Claim)
		if err != nil || !ok || v.ID != m.Volume || v.Owner != id {
			continue //nolint:nilerr // an unreadable record stays
		}
		used, err := usersOf(tx, v.ID, id)
		if err != nil {
			return nil, err
		}
		if len(used) > 0 {
			v.Owner = ""
		} else {
			v.State = record.VolumeDeleting
		}
		left = append(left, v)
	}
	return left, nil
}

// usersOf lists the sandboxes that have a volume mounted, or will have. An unreadable
// record that names the volume counts.
func usersOf(tx *bbolt.Tx, volume, but string) (ids []string, err error) {
	needle := []byte(`"` + volume + `"`)
	err = tx.Bucket(bucketBoxes).ForEach(func(k, b []byte) error {
		if string(k) == but || !bytes.Contains(b, needle) {
			return nil
		}
		var r record.Record
		if err := json.Unmarshal(b, &r); err != nil ||
			slices.ContainsFunc(r.Spec.Volumes, func(m record.VolumeMount) bool { return m.Volume == volume }) {
			ids = append(ids, string(k))
		}
		return nil
	})
	return ids, err
}

func clipped(ids []string) string {
	const most = 5
	if n := len(ids) - most; n > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(ids[:most], ", "), n)
	}
	return strings.Join(ids, ", ")
}

func getVolume(tx *bbolt.Tx, name string) (v record.Volume, ok bool, err error) {
	b := tx.Bucket(bucketVolumes).Get([]byte(name))
	if b == nil {
		return v, false, nil
	}
	if err := readVolume(name, b, &v); err != nil {
		return v, true, errs.Wrap(err, errs.Internal, "the record of volume %s cannot be read; its files are still on the pool", name)
	}
	return v, true, nil
}

func readVolume(name string, b []byte, v *record.Volume) error {
	err := json.Unmarshal(b, v)
	if err == nil && (v.Name != name || !record.IsVolumeID(v.ID)) {
		err = fmt.Errorf("it contains the record of volume %q with the id %q", v.Name, v.ID)
	}
	return err
}

func putVolumes(tx *bbolt.Tx, all []record.Volume) (err error) {
	for _, v := range all {
		b, merr := json.Marshal(v)
		if merr == nil {
			merr = tx.Bucket(bucketVolumes).Put([]byte(v.Name), b)
		}
		err = errors.Join(err, merr)
	}
	return err
}

// rememberVolumes takes over committed records.
// Preconditions: as of remember.
func (db *DB) rememberVolumes(all []record.Volume) {
	for _, v := range all {
		db.volumes[v.Name] = v
	}
}

// loadVolumes reads every record. It reports and keeps one that cannot be read.
func (db *DB) loadVolumes(tx *bbolt.Tx) error {
	return tx.Bucket(bucketVolumes).ForEach(func(k, b []byte) error {
		var v record.Volume
		name := string(k)
		if err := readVolume(name, b, &v); err != nil {
			db.badVolumes[name] = err
			db.log.Error("the record of a volume cannot be read; the volume cannot be mounted, and its files are left alone",
				"volume", name, "err", err)
			return nil
		}
		db.volumes[name] = v
		return nil
	})
}
