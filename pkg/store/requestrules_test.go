package store

import (
	"reflect"
	"strings"
	"testing"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// about is a version of a policy with a rule about requests.
func about(path string) record.PolicyVersion {
	return record.PolicyVersion{Made: past, Network: record.Network{Mode: record.NetworkRules, Rules: []record.Rule{
		{Allow: true, Name: "api.example.com", Requests: &record.Requests{Methods: []string{"GET"}, Paths: []string{path}}},
	}}}
}

// TestRulesAboutRequests: what is stored shares nothing with what a caller has, and a sandbox
// that is made with such a policy is one that may be inspected.
func TestRulesAboutRequests(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	ctx := t.Context()
	want, mine := about("/v1/*"), about("/v1/*")
	spoil := func(n record.Network) { n.Rules[0].Requests.Methods[0], n.Rules[0].Requests.Paths[0] = "DELETE", "/*" }

	r := record.Record{ID: "daaaaaaaaaaa", State: record.Creating, Spec: record.Spec{Network: mine.Network, Inspect: true}}
	if err := db.Insert(ctx, &r); err != nil {
		t.Fatal(err)
	}
	spoil(mine.Network)
	if got, _, err := db.Get(ctx, r.ID); err != nil || !reflect.DeepEqual(got.Spec.Network, want.Network) {
		t.Errorf("inserted: %v, %v", got.Spec.Network.Rules, err)
	}
	mine = about("/v1/*")
	r.Spec.Network = mine.Network
	if err := db.Put(ctx, r); err != nil {
		t.Fatal(err)
	}
	spoil(mine.Network)
	if got, _, err := db.Get(ctx, r.ID); err != nil || !reflect.DeepEqual(got.Spec.Network, want.Network) {
		t.Errorf("put: %v, %v", got.Spec.Network.Rules, err)
	}
	mine = about("/v1/*")
	mustPut(t, db, "api", mine)
	mustPut(t, db, "web", allows(1))
	spoil(mine.Network)
	if p, _, err := db.Policy(ctx, "api"); err != nil || !p.Newest().Same(want) {
		t.Errorf("policy: %v, %v", p.Newest().Network.Rules, err)
	}
	for policy, inspect := range map[string]bool{"api": true, "web": false} {
		r := record.Record{
			ID: "db" + strings.Repeat(policy[:1], 10), State: record.Creating, Spec: record.Spec{Policy: record.PolicyUse{Name: policy}},
		}
		if err := db.Insert(ctx, &r); err != nil || r.Spec.Inspect != inspect {
			t.Errorf("created with policy %s: %v, %v", policy, r.Spec.Inspect, err)
		}
		if got, _, err := db.Get(ctx, r.ID); err != nil || got.Spec.Inspect != inspect {
			t.Errorf("stored with policy %s: %v, %v", policy, got.Spec.Inspect, err)
		}
	}
}

// TestUpgradeOfSecrets: a sandboxd of schema 5, which would take a rule about some requests for
// one about all of them, refuses the file, but not the copy that is kept.
func TestUpgradeOfSecrets(t *testing.T) {
	path := newPath(t)
	before := func(path string) (*DB, error) { return openWith(path, Options{}, migrations[:5]) }
	old, err := before(path)
	if err != nil {
		t.Fatal(err)
	}
	insert(t, old, "daaaaaaaaaaa", "lab")
	closeTest(t, old)
	db := openTest(t, path, Options{})
	mustPut(t, db, "api", about("/v1/*"))
	closeTest(t, db)
	if _, err := before(path); err == nil || !strings.Contains(err.Error(), "newer sandboxd") {
		t.Errorf("the sandboxd of before: %v", err)
	}
	if old, err = before(path + ".v5"); err != nil {
		t.Fatal("on what was kept:", err)
	}
	if err := old.bolt.View(func(tx *bbolt.Tx) error {
		if tx.Bucket(bucketPolicies).Stats().KeyN != 0 || tx.Bucket(bucketBoxes).Stats().KeyN != 1 {
			t.Error("what was kept is not the file of before")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	closeTest(t, old)
}
