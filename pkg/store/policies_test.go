package store

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// allows is a version of a policy that allows one address.
func allows(last int) record.PolicyVersion {
	return record.PolicyVersion{
		Made: past, NetworkPolicy: fmt.Appendf(nil, `{"egress":[{"action":"allow","target":"203.0.113.%d"}]}`, last),
		Network: record.Network{Mode: record.NetworkRules, Rules: []record.Rule{
			{Allow: true, Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(last)}), 32)},
		}},
	}
}

func mustPut(t *testing.T, db *DB, name string, v record.PolicyVersion) record.Policy {
	t.Helper()
	p, _, err := db.PutPolicy(t.Context(), name, false, v)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestPolicies: an edit adds a version, the newest ten are kept, a sandbox gets the one
// it names, and a policy in use stays. All of it is there after the file was opened anew.
func TestPolicies(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{Slots: 16})
	ctx := t.Context()
	want := func(err error, code errs.Code, text string) {
		t.Helper()
		if !errs.Is(err, code) || !strings.Contains(fmt.Sprint(err), text) {
			t.Errorf("%v; want %s, %q", err, code, text)
		}
	}
	add := func(id, policy string) (record.Record, error) {
		use, ok := record.ParsePolicyUse(policy)
		if !ok {
			t.Fatal(policy)
		}
		r := record.Record{ID: id, State: record.Creating, Created: time.Now().UTC(), Spec: record.Spec{Policy: use}}
		return r, db.Insert(ctx, &r)
	}
	first := mustPut(t, db, "build", allows(1))
	if again := mustPut(t, db, "build", allows(1)); !reflect.DeepEqual(first, again) || first.Newest().Number != 1 {
		t.Errorf("the same once more: %+v, was %+v", again, first)
	}
	follower, err := add("daaaaaaaaaaa", "build")
	if err != nil || follower.Spec.Policy.Version != 1 || !follower.Spec.Policy.Follows() ||
		!follower.Spec.Terms().SameNetwork(record.Terms{Network: allows(1).Network, NetworkPolicy: allows(1).NetworkPolicy}) {
		t.Errorf("%+v, %v", follower, err)
	}
	if r, ok, err := db.Get(ctx, follower.ID); err != nil || !ok || !reflect.DeepEqual(r.Spec, follower.Spec) {
		t.Errorf("kept is %+v, %v, %v", r, ok, err)
	}
	for n := 2; n <= 13; n++ {
		if p := mustPut(t, db, "build", allows(n)); p.Newest().Number != n || !p.Created.Equal(past) {
			t.Errorf("version %d: %+v", n, p)
		}
	}
	pinned, err := add("dbbbbbbbbbbb", "build@5")
	if err != nil || pinned.Spec.Policy.Version != 5 || !reflect.DeepEqual(pinned.Spec.Network, allows(5).Network) {
		t.Errorf("%+v, %v", pinned, err)
	}
	_, err = add("dccccccccccc", "build@3")
	want(err, errs.NotFound, "4 to 13 are kept")
	_, err = add("dccccccccccc", "build@14")
	want(err, errs.NotFound, "no version 14")
	_, err = add("dccccccccccc", "biuld")
	want(err, errs.NotFound, `no policy "biuld"`)

	closeTest(t, db)
	db = openTest(t, path, Options{Slots: 16})
	if p, ok, err := db.Policy(ctx, "build"); err != nil || !ok || len(p.Versions) != record.PolicyVersions ||
		p.Versions[0].Number != 4 || !reflect.DeepEqual(p.Newest().Network, allows(13).Network) {
		t.Errorf("after a restart %+v, %v, %v", p, ok, err)
	}

	// A user is one in any state, until it has a policy of its own or is being deleted.
	want(db.DeletePolicy(ctx, "build"), errs.WrongState, follower.ID+", "+pinned.ID)
	follower.State, follower.Spec.Policy.Left = record.Ended, true
	pinned.State = record.Deleting
	for _, r := range []record.Record{follower, pinned} {
		if err := db.Put(ctx, r); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.DeletePolicy(ctx, "build"); err != nil {
		t.Error(err)
	}
	want(db.DeletePolicy(ctx, "build"), errs.NotFound, "no policy")
	if _, ok, err := db.Policy(ctx, "build"); ok || err != nil {
		t.Errorf("deleted: %v, %v", ok, err)
	}
}

// TestUnreadablePolicy: a sandbox that uses it goes on, none gets it, and it can be
// deleted.
func TestUnreadablePolicy(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	ctx := t.Context()
	mustPut(t, db, "whole", allows(1))
	mustPut(t, db, "build", allows(1))
	mustPut(t, db, "build", allows(2))
	mustPut(t, db, "build", allows(3))
	user := record.Record{ID: "duuuuuuuuuuu", Spec: record.Spec{Policy: record.PolicyUse{Name: "build"}}}
	if err := db.Insert(ctx, &user); err != nil {
		t.Fatal(err)
	}
	closeTest(t, db)
	edit(t, path, func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketPolicies).Put([]byte("build"), []byte(`{"name":"build"}`))
	})
	if _, err := Examine(path); err == nil || !strings.Contains(err.Error(), "record build") {
		t.Errorf("examined: %v", err)
	}
	db = openTest(t, path, Options{})
	all, bad, err := db.Policies(ctx)
	if err != nil || len(all) != 1 || len(bad) != 1 || bad[0] != "build" {
		t.Errorf("%+v, %v, %v", all, bad, err)
	}
	r := record.Record{ID: "daaaaaaaaaaa", Spec: record.Spec{Policy: record.PolicyUse{Name: "build"}}}
	if err := db.Insert(ctx, &r); !errs.Is(err, errs.Internal) || !strings.Contains(err.Error(), "cannot be read") {
		t.Errorf("a new sandbox: %v", err)
	}
	if _, ok, err := db.Policy(ctx, "build"); ok || err != nil {
		t.Errorf("it is read: %v, %v", ok, err)
	}
	if p := mustPut(t, db, "build", allows(2)); p.Newest().Number != 4 { // none that a sandbox has is given again
		t.Errorf("set again: %+v", p)
	}
	if all, bad, _ := db.Policies(ctx); len(bad) > 0 || len(all) != 2 {
		t.Errorf("left %v and %v", all, bad)
	}
}

// TestPoliciesEnd: their number is bounded, and a refused one changes nothing.
func TestPoliciesEnd(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	for n := range record.MaxPolicies {
		mustPut(t, db, fmt.Sprintf("p%d", n), allows(1))
	}
	if _, _, err := db.PutPolicy(t.Context(), "more", false, allows(1)); !errs.Is(err, errs.Exhausted) {
		t.Errorf("one more: %v", err)
	}
	if p := mustPut(t, db, "p7", allows(2)); p.Newest().Number != 2 {
		t.Errorf("an edit at the bound: %+v", p)
	}
}

// TestPolicyBytes: what all policies take is bounded, kept versions included. At the bound
// an edit costs the policy its oldest versions, so it can be tightened whatever it takes.
// What does not fit alone is refused, and changes nothing.
func TestPolicyBytes(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	const mib = 1 << 20
	size := func(v any) int {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return len(b)
	}
	n := 0
	v := func(takes int) (v record.PolicyVersion) { // up to 4 bytes less: base64
		n++
		v = allows(n)
		v.Number, v.NetworkPolicy = 1, []byte("x")
		v.NetworkPolicy = bytes.Repeat([]byte("x"), (takes-size(v))/4*3)
		return v
	}
	has := func(name string, want ...int) {
		t.Helper()
		p, _, err := db.Policy(t.Context(), name)
		var got []int
		for _, v := range p.Versions {
			got = append(got, v.Number)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s has the versions %v, %v; want %v", name, got, err, want)
		}
	}
	refused := func(name string, takes int) {
		t.Helper()
		_, _, err := db.PutPolicy(t.Context(), name, false, v(takes))
		if !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "MiB; all policies of this host may take 64 MiB") {
			t.Errorf("%s: %v", name, err)
		}
	}
	one := mustPut(t, db, "one", v(32*mib)) // one version, which takes half of what there is
	mustPut(t, db, "many", v(1<<10))
	many := mustPut(t, db, "many", v(1<<10))
	mustPut(t, db, "many", v(record.MaxPolicyBytes-size(one)-size(many)-len(",")))
	has("many", 1, 2, 3)
	refused("new", 1<<10)
	refused("many", 33*mib)
	has("new")
	has("many", 1, 2, 3)
	mustPut(t, db, "many", v(3<<9)) // in the place of two
	has("many", 3, 4)
	mustPut(t, db, "one", v(3<<9)) // in the place of its only one, of which it is a fraction
	has("one", 2)
}

// TestUpgradePolicies: the state of the release before has no policies, and takes them.
func TestUpgradePolicies(t *testing.T) {
	path, _ := readRelease(t, "testdata/release-2")
	if f, err := Examine(path); err != nil || f.Schema != 3 {
		t.Fatalf("%+v, %v", f, err)
	}
	db := openTest(t, path, Options{})
	mustPut(t, db, "build", allows(1))
	closeTest(t, db)
	for file, schema := range map[string]int{path: Schema, path + ".v3": 3} {
		if f, err := Examine(file); err != nil || f.Schema != schema {
			t.Errorf("%s: %+v, %v", file, f, err)
		}
	}
}
