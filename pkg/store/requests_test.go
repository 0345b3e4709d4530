package store

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestMadeIsThere: a record of which a request's key tells is there at once, while
// it is being added.
func TestMadeIsThere(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	ctx := t.Context()
	for i := range 100 {
		key := fmt.Sprint(i)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for {
					m, ok, err := db.Made(ctx, key)
					if err != nil {
						t.Error(err)
						return
					}
					if !ok {
						continue
					}
					if _, ok, err := db.Get(ctx, m.ID); !ok || err != nil {
						t.Errorf("%s was made by %s and is not there: %v", m.ID, key, err)
					}
					return
				}
			})
		}
		if err := db.Insert(ctx, asked(i, key, time.Now())); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
	}
}

func asked(i int, key string, at time.Time) *record.Record {
	return &record.Record{
		ID: fmt.Sprintf("uask%08d", i), State: record.Creating, Created: at,
		Spec: record.Spec{Request: record.Request{Key: key, Body: "body"}},
	}
}

// TestRequests: of many with one key one makes a record, which is known by it
// after the record and the daemon, until it is forgotten.
func TestRequests(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	ctx, at := t.Context(), time.Now()
	var wg sync.WaitGroup
	var made, refused atomic.Int32
	for i := range 16 {
		wg.Go(func() {
			err := db.Insert(ctx, asked(i, "one", at))
			switch {
			case err == nil:
				made.Add(1)
			case errs.Is(err, errs.Exists):
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	list, err := db.List(ctx)
	if err != nil || len(list) != 1 || made.Load() != 1 || refused.Load() != 15 {
		t.Fatalf("%d records, %d made, %d refused, %v", len(list), made.Load(), refused.Load(), err)
	}
	for range 2 { // before and after a restart, with the record and without
		m, ok, err := db.Made(ctx, "one")
		if err != nil || !ok || m.ID != list[0].ID || m.Body != "body" || !m.At.Equal(at) {
			t.Errorf("%+v, %v, %v", m, ok, err)
		}
		if err := db.Delete(ctx, list[0].ID); err != nil {
			t.Fatal(err)
		}
		closeTest(t, db)
		db = openTest(t, path, Options{})
	}
	if err := db.Insert(ctx, asked(20, "one", at)); !errs.Is(err, errs.Exists) {
		t.Errorf("of one that is gone: %v", err)
	}
	if err := db.Insert(ctx, asked(21, "young", at.Add(time.Hour))); err != nil {
		t.Fatal(err)
	}
	if err := db.ForgetRequests(ctx, at.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]bool{"one": false, "young": true, "none": false} {
		if _, ok, err := db.Made(ctx, key); ok != want || err != nil {
			t.Errorf("%s is known: %v, %v", key, ok, err)
		}
	}
	if err := db.Insert(ctx, asked(22, "one", at)); err != nil {
		t.Errorf("a key that was forgotten: %v", err)
	}
}

// TestRequestsOfKey: an API key that is removed takes its notes with it, and no others.
func TestRequestsOfKey(t *testing.T) {
	db, ctx := openTest(t, newPath(t), Options{}), t.Context()
	ci := record.Key{Name: "ci", Role: record.Operator, Sum: []byte{1}}
	if err := db.AddKey(ctx, ci); err != nil {
		t.Fatal(err)
	}
	for i, holder := range []string{ci.Holder(), "", record.Key{Sum: []byte{2}}.Holder(), ci.Holder()} {
		r := asked(i, fmt.Sprint("key ", i), time.Now())
		r.Spec.Request.Holder = holder
		if err := db.Insert(ctx, r); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.RemoveKey(ctx, "ci"); err != nil {
		t.Fatal(err)
	}
	for i, want := range []bool{false, true, true, false} {
		if _, ok, err := db.Made(ctx, fmt.Sprint("key ", i)); ok != want || err != nil {
			t.Errorf("note %d is known: %v, %v", i, ok, err)
		}
	}
}

// TestRequestOfRefused: an insert that is refused for something else ties
// nothing to its key.
func TestRequestOfRefused(t *testing.T) {
	db := openTest(t, newPath(t), Options{Slots: 1})
	if err := db.Insert(t.Context(), asked(1, "first", time.Now())); err != nil {
		t.Fatal(err)
	}
	if err := db.Insert(t.Context(), asked(2, "second", time.Now())); !errs.Is(err, errs.Exhausted) {
		t.Fatal(err)
	}
	if m, ok, err := db.Made(t.Context(), "second"); ok || err != nil {
		t.Errorf("%+v, %v", m, err)
	}
}

// TestMostRequests: beyond so many, the oldest are forgotten, also those that are young.
func TestMostRequests(t *testing.T) {
	db, ctx := openTest(t, newPath(t), Options{}), t.Context()
	at := time.Now()
	for i, minute := range []int{3, 1, 4, 2, 5} {
		if err := db.Insert(ctx, asked(i, fmt.Sprint("minute ", minute), at.Add(time.Duration(minute)*time.Minute))); err != nil {
			t.Fatal(err)
		}
	}
	for _, most := range []int{5, 3} {
		if err := db.forgetRequests(ctx, at, most); err != nil {
			t.Fatal(err)
		}
		for minute := 1; minute <= 5; minute++ {
			if _, ok, err := db.Made(ctx, fmt.Sprint("minute ", minute)); ok != (minute > 5-most) || err != nil {
				t.Errorf("of %d, that of minute %d is known: %v, %v", most, minute, ok, err)
			}
		}
	}
}
