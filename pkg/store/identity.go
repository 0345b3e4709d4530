package store

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.etcd.io/bbolt"
)

// keyBackups is in the bucket of meta, beside every schema: an earlier release ignores it.
var keyBackups = []byte("backups")

// A BackupIdentity says which backups on a target this state has written. The name of a host does not:
// a host that was installed again has the old name, and a copy of its disk has it, too.
type BackupIdentity struct {
	// ID is random. It is drawn with the state, and part of the names of its backups.
	ID string `json:"id"`
	// Machine is a hash of what tells this machine from others; empty: the state was on none yet.
	Machine string `json:"machine,omitempty"`
	// Earlier is true of a state that an earlier release made, until it is known which backups without
	// an ID it has written.
	Earlier bool `json:"earlier,omitempty"`
	// Adopted are the names of backups under other IDs, or none, that count as this state's.
	Adopted []string `json:"adopted,omitempty"`
	// Packs are the owners of packs that are this state's to use and to remove, beside its own.
	Packs []string `json:"packs,omitempty"`
}

// NewBackupIdentity draws an identity for a machine.
func NewBackupIdentity(machine string) BackupIdentity {
	b := make([]byte, 10)
	_, _ = rand.Read(b) // never fails since Go 1.24
	return BackupIdentity{ID: strings.ToLower(base32.StdEncoding.EncodeToString(b)), Machine: machine}
}

// putIdentity writes an identity.
func putIdentity(tx *bbolt.Tx, id BackupIdentity) error {
	b, err := json.Marshal(id)
	if err != nil {
		return err
	}
	return tx.Bucket(bucketMeta).Put(keyBackups, b)
}

// readIdentity reads the identity. ok is false if an earlier release wrote the file.
func readIdentity(tx *bbolt.Tx) (id BackupIdentity, ok bool, err error) {
	meta := tx.Bucket(bucketMeta)
	if meta == nil {
		return id, false, nil
	}
	b := meta.Get(keyBackups)
	if b == nil {
		return id, false, nil
	}
	if err := json.Unmarshal(b, &id); err != nil {
		return id, false, fmt.Errorf("read the identity of backups: %w", err)
	}
	return id, true, nil
}

// openIdentity reads the identity, or draws that of a state of an earlier release.
func openIdentity(tx *bbolt.Tx) (BackupIdentity, error) {
	id, ok, err := readIdentity(tx)
	if err != nil || ok {
		return id, err
	}
	id = NewBackupIdentity("")
	id.Earlier = true
	return id, putIdentity(tx, id)
}

// Backups says which backups are this state's.
func (db *DB) Backups() BackupIdentity {
	db.mu.RLock()
	defer db.mu.RUnlock()
	id := db.identity
	id.Adopted, id.Packs = slices.Clone(id.Adopted), slices.Clone(id.Packs)
	return id
}

// SetBackups changes which backups are this state's.
func (db *DB) SetBackups(ctx context.Context, id BackupIdentity) error {
	err := db.commit(ctx, func(tx *bbolt.Tx) error { return putIdentity(tx, id) }, func() { db.identity = id })
	if err != nil {
		return fmt.Errorf("save which backups are this state's: %w", err)
	}
	return nil
}

// BackupsOf reads the identity of a store that no daemon has open. ok is false if an earlier release
// wrote it. It changes nothing.
func BackupsOf(path string) (id BackupIdentity, ok bool, err error) {
	b, err := open(path, time.Second, true)
	if err != nil {
		return id, false, err
	}
	defer b.Close() //nolint:errcheck // read only
	err = b.View(func(tx *bbolt.Tx) error {
		id, ok, err = readIdentity(tx)
		return err
	})
	return id, ok, err
}
