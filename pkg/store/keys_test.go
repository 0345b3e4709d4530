package store

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func TestKeys(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	ctx := t.Context()
	k := record.Key{Name: "ci", Role: record.Operator, Sum: []byte{1, 2, 3}, Created: time.Unix(1, 0).UTC(), Expires: time.Unix(2, 0).UTC()}
	if err := db.AddKey(ctx, k); err != nil {
		t.Fatal(err)
	}
	if err := db.AddKey(ctx, record.Key{Name: "ci", Role: record.Admin}); !errs.Is(err, errs.Exists) {
		t.Errorf("twice: %v", err)
	}
	closeTest(t, db)
	edit(t, path, func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketKeys).Put([]byte("broken"), []byte(`{"name":"ci","role":"admin"}`))
	})
	db = openTest(t, path, Options{})
	want := []record.Key{{Name: "broken"}, k}
	if got, err := db.Keys(ctx); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	for _, name := range []string{"broken", "ci"} {
		if err := db.RemoveKey(ctx, name); err != nil {
			t.Error(err)
		}
	}
	if err := db.RemoveKey(ctx, "ci"); !errs.Is(err, errs.NotFound) {
		t.Errorf("what is gone: %v", err)
	}
	if got, err := db.Keys(ctx); err != nil || len(got) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestMostKeys: beyond the most keys another one is refused, and one that is removed makes room.
func TestMostKeys(t *testing.T) {
	path := newPath(t)
	db, ctx := openTest(t, path, Options{}), t.Context()
	closeTest(t, db)
	edit(t, path, func(tx *bbolt.Tx) error {
		for i := range maxKeys {
			name := fmt.Sprintf("k%d", i)
			if err := tx.Bucket(bucketKeys).Put([]byte(name), fmt.Appendf(nil, `{"name":%q,"role":"viewer"}`, name)); err != nil {
				return err
			}
		}
		return nil
	})
	db = openTest(t, path, Options{})
	more := record.Key{Name: "more", Role: record.Viewer}
	if err := db.AddKey(ctx, more); !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "1000 API keys") {
		t.Errorf("beyond the most: %v", err)
	}
	if err := db.RemoveKey(ctx, "k7"); err != nil {
		t.Fatal(err)
	}
	if err := db.AddKey(ctx, more); err != nil {
		t.Error(err)
	}
}
