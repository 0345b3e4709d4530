package store

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Insert adds a new record and sets r.Slot to the slot that has been free for longest,
// in one transaction. It fails with errs.Exists when the id or the name is taken or its
// request has made another already, with errs.Exhausted when every slot is in use, and
// with errs.Unavailable when its image was removed since it was looked up. It does not
// look the image up if the sandbox begins as a snapshot, or if the image has no digest
// because it is yet to be pulled. If the record asks for it, Insert adds the volumes it
// names that do not exist. If it names a policy, Insert gives it the newest version of
// that, or the one it is pinned to, and sets Inspect if that has rules about requests.
//
// A new record that is Creating and says Prepared takes the prepared slot of its ID and
// keeps the slot of that. With a MemberToken it takes the member of a pool that has this
// token. Insert fails with errs.NotFound if there is none of its runtime.
func (db *DB) Insert(ctx context.Context, r *record.Record) error {
	n := own(*r)
	var made []record.Volume
	err := db.commit(ctx, func(tx *bbolt.Tx) (err error) {
		boxes, names := tx.Bucket(bucketBoxes), tx.Bucket(bucketNames)
		was, err := vacant(boxes, &n)
		if err != nil {
			return err
		}
		if id := names.Get([]byte(n.Spec.Name)); id != nil {
			return taken(n.Spec.Name, id)
		}
		if n.Spec.Snapshot == "" && n.Spec.Image.Digest != "" {
			if err := hasImage(tx, n.Spec.Image); err != nil {
				return err
			}
		}
		if err := fresh(tx, &n); err != nil {
			return err
		}
		if made, err = claimVolumes(tx, &n); err != nil {
			return err
		}
		if err := claimPolicy(tx, &n); err != nil {
			return err
		}
		if was != nil {
			n.Slot = was.Slot
		} else if n.Slot, err = takeSlot(tx, n.ID); err != nil {
			return err
		}
		return errors.Join(write(tx, n), noteRequest(tx, &n), putVolumes(tx, made))
	}, func() {
		db.remember(n)
		db.rememberVolumes(made)
	})
	if err != nil {
		return fmt.Errorf("insert sandbox %s: %w", r.ID, err)
	}
	r.Slot, r.Spec.Volumes = n.Slot, n.Spec.Volumes
	r.Spec.Policy, r.Spec.Network, r.Spec.NetworkPolicy = n.Spec.Policy, n.Spec.Network, n.Spec.NetworkPolicy
	r.Spec.Inspect = n.Spec.Inspect
	return nil
}

// vacant returns the prepared slot that n takes, or nil if it takes none. It refuses an
// ID that another record has, and a prepared slot that is not there.
func vacant(boxes *bbolt.Bucket, n *record.Record) (*record.Record, error) {
	v := boxes.Get([]byte(n.ID))
	takes := n.Prepared && n.State == record.Creating
	switch {
	case v == nil && !takes:
		return nil, nil
	case !takes:
		return nil, refusal{errs.New(errs.Exists, "sandbox %s already exists", n.ID)}
	}
	var was record.Record
	if v == nil || json.Unmarshal(v, &was) != nil || was.State != record.Prepared || was.Spec.Runtime != n.Spec.Runtime {
		return nil, refusal{errs.New(errs.NotFound, "no prepared slot %s for %s", n.ID, n.Spec.Runtime)}
	}
	if (was.Pool.Name != "") != (n.MemberToken != "") || was.Pool.Name != "" && was.Token != n.MemberToken {
		return nil, refusal{errs.New(errs.NotFound, "prepared slot %s is a member of another kind", n.ID)}
	}
	return &was, nil
}

// taken refuses a name that sandbox id has.
func taken(name string, id []byte) error {
	return refusal{errs.New(errs.Exists, "the name %q belongs to sandbox %s; delete that sandbox, or choose another name", name, id)}
}

// Put replaces the record r.ID. Its slot never changes. If it has another name than
// before, the old name is free, and Put fails with errs.Exists if the new one is taken.
// The name of a record that is being deleted is free at once; its slot only after
// Delete. If the record waited for its image and now has it, Put fails like Insert when
// that image was removed since. More records are put in the same transaction; each of them may
// have a name that another one had.
func (db *DB) Put(ctx context.Context, r record.Record, more ...record.Record) error {
	all := []record.Record{own(r)}
	for _, r := range more {
		all = append(all, own(r))
	}
	err := db.commit(ctx, func(tx *bbolt.Tx) error {
		if len(all) > 1 {
			for _, r := range all {
				if err := dropAll(tx.Bucket(bucketNames), r.ID); err != nil {
					return err
				}
			}
		}
		for _, r := range all {
			if err := put(tx, r); err != nil {
				return err
			}
		}
		return nil
	}, func() {
		for _, r := range all {
			db.remember(r)
		}
	})
	if err != nil {
		return fmt.Errorf("put sandbox %s as %s: %w", r.ID, r.State, err)
	}
	return nil
}

func put(tx *bbolt.Tx, r record.Record) error {
	was := tx.Bucket(bucketBoxes).Get([]byte(r.ID))
	if was == nil {
		return refusal{errs.New(errs.NotFound, "no sandbox %s", r.ID)}
	}
	if r.State == record.Creating && r.Spec.Snapshot == "" && r.Spec.Image.Digest != "" {
		var before record.Record
		if err := json.Unmarshal(was, &before); err == nil && before.Spec.Image.Digest == "" {
			if err := hasImage(tx, r.Spec.Image); err != nil {
				return err
			}
		}
	}
	if err := rename(tx, r); err != nil {
		return err
	}
	return write(tx, r)
}

// Delete removes the record id, which may be unreadable, with the secrets of that sandbox,
// and puts its slot at the end of the queue. It is no error if there is none. It condemns
// the volumes that go with the sandbox, except those that other sandboxes have mounted.
func (db *DB) Delete(ctx context.Context, id string) error {
	var left []record.Volume
	err := db.commit(ctx, func(tx *bbolt.Tx) (err error) {
		if left, err = leaveVolumes(tx, id); err != nil {
			return err
		}
		return errors.Join(erase(tx, id), putVolumes(tx, left))
	}, func() {
		db.rememberVolumes(left)
		if r, ok := db.boxes[id]; ok && db.names[r.Spec.Name] == id {
			delete(db.names, r.Spec.Name)
		}
		db.forget(id)
		db.forgetSecrets(id)
		delete(db.bad, id)
	})
	if err != nil {
		return fmt.Errorf("delete record of sandbox %s: %w", id, err)
	}
	return nil
}

// own copies the parts of a record that a caller might still write into.
func own(r record.Record) record.Record {
	r.Spec.Labels = maps.Clone(r.Spec.Labels)
	r.Spec.Env = maps.Clone(r.Spec.Env)
	r.Spec.Network = r.Spec.Network.Clone()
	r.Spec.Volumes = slices.Clone(r.Spec.Volumes)
	return r
}

func write(tx *bbolt.Tx, r record.Record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	if err := tx.Bucket(bucketBoxes).Put([]byte(r.ID), b); err != nil || r.Spec.Name == "" {
		return err
	}
	names, name := tx.Bucket(bucketNames), []byte(r.Spec.Name)
	if r.State != record.Deleting {
		return names.Put(name, []byte(r.ID))
	}
	return dropName(names, name, r.ID)
}

// rename frees the names of a record that is about to be written under another one.
func rename(tx *bbolt.Tx, r record.Record) error {
	if r.Spec.Name == "" || r.State == record.Deleting {
		return nil
	}
	names := tx.Bucket(bucketNames)
	switch id := names.Get([]byte(r.Spec.Name)); {
	case id == nil:
		return dropAll(names, r.ID)
	case string(id) != r.ID:
		return taken(r.Spec.Name, id)
	}
	return nil
}

// dropName frees a name unless another record has it by now.
func dropName(names *bbolt.Bucket, name []byte, id string) error {
	if string(names.Get(name)) != id {
		return nil
	}
	return names.Delete(name)
}

// erase removes a record and what goes with it.
func erase(tx *bbolt.Tx, id string) error {
	if err := eraseSecrets(tx, id); err != nil {
		return err
	}
	boxes := tx.Bucket(bucketBoxes)
	v := boxes.Get([]byte(id))
	if v == nil {
		return nil
	}
	var r record.Record
	if err := json.Unmarshal(v, &r); err == nil && r.ID == id {
		if r.Spec.Name != "" {
			if err := dropName(tx.Bucket(bucketNames), []byte(r.Spec.Name), id); err != nil {
				return err
			}
		}
	} else if err := dropAll(tx.Bucket(bucketNames), id); err != nil {
		return err
	}
	if err := freeSlots(tx, id); err != nil {
		return err
	}
	return boxes.Delete([]byte(id))
}

// dropAll frees the name of a record that is not known. It searches all names for the id.
func dropAll(names *bbolt.Bucket, id string) error {
	c := names.Cursor()
	for k, v := c.First(); k != nil; k, v = c.Next() {
		if string(v) == id {
			return c.Delete()
		}
	}
	return nil
}

// takeSlot moves the head of the queue to id.
func takeSlot(tx *bbolt.Tx, id string) (int, error) {
	free, slots := tx.Bucket(bucketFree), tx.Bucket(bucketSlots)
	k, slot := free.Cursor().First()
	if k == nil {
		return 0, refusal{errs.New(errs.Exhausted, "all address slots of this host are in use; delete a sandbox (sandboxctl ps) and try "+
			"again")}
	}
	// bbolt's keys and values are valid only until the next write.
	k, slot = slices.Clone(k), slices.Clone(slot)
	if err := free.Delete(k); err != nil {
		return 0, err
	}
	return int(binary.BigEndian.Uint16(slot)), slots.Put(slot, []byte(id))
}

// freeSlots puts the slots of id at the end of the queue. There is one slot, but an
// unreadable record does not say which.
func freeSlots(tx *bbolt.Tx, id string) error {
	c := tx.Bucket(bucketSlots).Cursor()
	var mine [][]byte
	for k, v := c.First(); k != nil; k, v = c.Next() {
		if string(v) == id {
			mine = append(mine, slices.Clone(k))
		}
	}
	for _, slot := range mine {
		if err := tx.Bucket(bucketSlots).Delete(slot); err != nil {
			return err
		}
		if err := enqueue(tx, slot); err != nil {
			return err
		}
	}
	return nil
}

// enqueue puts a slot at the end of the queue of free ones.
func enqueue(tx *bbolt.Tx, slot []byte) error {
	free := tx.Bucket(bucketFree)
	seq, err := free.NextSequence()
	if err != nil {
		return err
	}
	return free.Put(binary.BigEndian.AppendUint64(nil, seq), slot)
}
