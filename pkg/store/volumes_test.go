package store

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func volumes(t *testing.T, db *DB) map[string]record.Volume {
	t.Helper()
	all, _, err := db.Volumes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]record.Volume{}
	for _, v := range all {
		m[v.Name] = v
	}
	return m
}

func TestVolumes(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{Slots: 3})
	ctx := t.Context()
	want := func(err error, code errs.Code, text string) {
		t.Helper()
		if !errs.Is(err, code) || !strings.Contains(err.Error(), text) {
			t.Errorf("%v; want %s, %q", err, code, text)
		}
	}
	add := func(id string, all ...record.VolumeMount) record.Record {
		t.Helper()
		r := record.Record{ID: id, State: record.Creating, Created: time.Now().UTC(), Spec: record.Spec{Volumes: all}}
		if err := db.Insert(ctx, &r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	kept := record.Volume{ID: "vol-daaaaaaaaaaa", Name: "kept", State: record.VolumeReady, Bytes: 7, Created: time.Now().Round(0).UTC()}
	if err := db.AddVolume(ctx, kept); err != nil {
		t.Fatal(err)
	}
	want(db.AddVolume(ctx, record.Volume{ID: "vol-dzzzzzzzzzzz", Name: "kept"}), errs.Exists, "already")

	// A sandbox gets those that there are, and makes others with itself.
	a := add("daaaaaaaaaaa",
		record.VolumeMount{Claim: "kept", Volume: "vol-dnnnnnnnnnnn", Create: true, Owned: true},
		record.VolumeMount{Claim: "mine", Volume: "vol-dmmmmmmmmmmm", Create: true, Owned: true, Bytes: 9},
		record.VolumeMount{Claim: "mine", Volume: "vol-dooooooooooo", Create: true, Owned: true, Bytes: 9, Sub: "x"},
		record.VolumeMount{Source: "/srv"})
	if v := a.Spec.Volumes; v[0].Volume != kept.ID || v[0].Owned || v[0].Bytes != 7 || v[1].Volume != "vol-dmmmmmmmmmmm" ||
		v[2].Volume != v[1].Volume || !v[1].Owned || !v[2].Owned || v[3].Volume != "" {
		t.Errorf("it has %+v", v)
	}
	if v := volumes(t, db)["mine"]; v.Owner != a.ID || v.Bytes != 9 || v.ID != "vol-dmmmmmmmmmmm" || v.State != record.VolumeReady {
		t.Errorf("made with it was %+v", v)
	}
	r := record.Record{ID: "dbbbbbbbbbbb", Spec: record.Spec{Volumes: []record.VolumeMount{{
		Claim: "new", Volume: "vol-dqqqqqqqqqqq",
		Create: true,
	}, {Claim: "none", Volume: "vol-drrrrrrrrrrr"}}}}
	want(db.Insert(ctx, &r), errs.NotFound, "no volume")
	if n := len(volumes(t, db)); n != 2 {
		t.Errorf("of a sandbox that was refused there are volumes: %d", n)
	}

	for range 2 {
		if err := db.VolumeMade(ctx, "mine", "vol-dmmmmmmmmmmm"); err != nil {
			t.Fatal(err)
		}
	}
	want(db.VolumeMade(ctx, "mine", "vol-dooooooooooo"), errs.NotFound, "no volume")
	want(db.VolumeMade(ctx, "none", "vol-dooooooooooo"), errs.NotFound, "no volume")

	// Nothing is taken from who uses it, in whatever state.
	a.State = record.Ended
	if err := db.Put(ctx, a); err != nil {
		t.Fatal(err)
	}
	_, err := db.CondemnVolume(ctx, "kept")
	want(err, errs.WrongState, "in use by daaaaaaaaaaa")
	if v := volumes(t, db)["kept"]; !reflect.DeepEqual(v, kept) {
		t.Errorf("the refusal changed it: %+v", v)
	}
	add("dccccccccccc", record.VolumeMount{Claim: "mine", Volume: "vol-dttttttttttt", Create: true})
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path, Options{Slots: 3})
	if err := db.Delete(ctx, a.ID); err != nil {
		t.Fatal(err)
	}
	if v := volumes(t, db)["mine"]; v.Owner != "" || v.State != record.VolumeReady || !v.Made {
		t.Errorf("another one has it, and it is %+v", v)
	}
	v, err := db.CondemnVolume(ctx, "kept")
	if err != nil || v.State != record.VolumeDeleting || volumes(t, db)["kept"].State != record.VolumeDeleting {
		t.Errorf("%+v, %v", v, err)
	}
	want(db.Insert(ctx, &record.Record{
		ID:   "dddddddddddd",
		Spec: record.Spec{Volumes: []record.VolumeMount{{Claim: "kept", Create: true, Volume: "vol-dvvvvvvvvvvv"}}},
	}), errs.Unavailable,
		"being deleted")
	for _, id := range []string{"vol-dzzzzzzzzzzz", kept.ID, kept.ID} {
		if err := db.ForgetVolume(ctx, "kept", id); err != nil {
			t.Fatal(err)
		}
		if _, there := volumes(t, db)["kept"]; there != (id != kept.ID) {
			t.Errorf("after forgetting %s: %v", id, there)
		}
	}
	_, err = db.CondemnVolume(ctx, "kept")
	want(err, errs.NotFound, "no volume")

	// What goes with a sandbox is condemned with it. Nobody gets it after the sandbox is.
	e := add("deeeeeeeeeee", record.VolumeMount{Claim: "gone", Volume: "vol-dggggggggggg", Create: true, Owned: true})
	e.State = record.Deleting
	if err := db.Put(ctx, e); err != nil {
		t.Fatal(err)
	}
	want(db.Insert(ctx, &record.Record{
		ID:   "dffffffffffb",
		Spec: record.Spec{Volumes: []record.VolumeMount{{Claim: "gone", Create: true, Owned: true, Volume: "vol-dhhhhhhhhhhh"}}},
	}), errs.Unavailable, "being deleted")
	if err := db.Delete(ctx, "deeeeeeeeeee"); err != nil {
		t.Fatal(err)
	}
	if v := volumes(t, db)["gone"]; v.State != record.VolumeDeleting {
		t.Errorf("it is %+v", v)
	}
}

// One that is damaged is nobody's, and can be removed by its name.
func TestDamagedVolumes(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	ctx := t.Context()
	if err := db.bolt.Update(func(tx *bbolt.Tx) error {
		for name, v := range map[string]string{
			"broken": "{", "liar": `{"name":"other","id":"vol-daaaaaaaaaaa"}`,
			"path": `{"name":"path","id":"../../etc"}`,
		} {
			if err := tx.Bucket(bucketVolumes).Put([]byte(name), []byte(v)); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path, Options{})
	all, bad, err := db.Volumes(ctx)
	if err != nil || len(all) > 0 || !slices.Equal(bad, []string{"broken", "liar", "path"}) {
		t.Fatalf("%v, %v, %v", all, bad, err)
	}
	if _, err := db.CondemnVolume(ctx, "broken"); !errs.Is(err, errs.Internal) {
		t.Errorf("condemned: %v", err)
	}
	if err := db.Insert(ctx, &record.Record{
		ID:   "daaaaaaaaaaa",
		Spec: record.Spec{Volumes: []record.VolumeMount{{Claim: "liar", Create: true, Volume: "vol-dbbbbbbbbbbb"}}},
	}); !errs.Is(err,
		errs.Internal) {
		t.Errorf("mounted: %v", err)
	}
	for _, name := range bad {
		if err := db.ForgetVolume(ctx, name, ""); err != nil {
			t.Fatal(err)
		}
	}
	if _, bad, _ = db.Volumes(ctx); len(bad) > 0 {
		t.Errorf("still %v", bad)
	}
}

// A file of this schema that was written before there were volumes gets them.
func TestBeforeVolumes(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	if err := db.bolt.Update(func(tx *bbolt.Tx) error { return tx.DeleteBucket(bucketVolumes) }); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	db = openTest(t, path, Options{})
	if err := db.AddVolume(t.Context(), record.Volume{ID: "vol-daaaaaaaaaaa", Name: "v"}); err != nil {
		t.Fatal(err)
	}
}
