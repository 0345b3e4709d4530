package api

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// fakePolicies is what keeps policies. An edit moves users and fails for the one that is
// called "stuck".
type fakePolicies struct {
	mu    sync.Mutex
	all   []record.PolicyInfo
	users []record.PolicyUser // of each policy
}

func (f *fakePolicies) find(name string) (int, error) {
	at := slices.IndexFunc(f.all, func(i record.PolicyInfo) bool { return i.Name == name })
	if at < 0 {
		return at, errs.Wire(errs.New(errs.NotFound, "there is no policy"), "POLICY::NOT_FOUND")
	}
	return at, nil
}

func (f *fakePolicies) List(context.Context) ([]record.PolicyInfo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.all), nil
}

func (f *fakePolicies) Get(_ context.Context, name string) (record.PolicyInfo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, err := f.find(name)
	if err != nil {
		return record.PolicyInfo{}, err
	}
	return f.all[at], nil
}

func (f *fakePolicies) Put(_ context.Context, name string, v record.PolicyVersion) (e record.PolicyEdit, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, err := f.find(name)
	if e.Added = err != nil; e.Added {
		f.all = append(f.all, record.PolicyInfo{Policy: record.Policy{Name: name, Created: time.Now()}})
		at = len(f.all) - 1
	}
	i := &f.all[at]
	if i.Fixed {
		return e, errs.Wire(errs.New(errs.WrongState, "it is in the configuration"), "POLICY::FIXED")
	}
	v.Number, v.Made = len(i.Versions)+1, time.Now()
	i.Versions, i.UsedBy = append(slices.Clone(i.Versions), v), f.users
	e.PolicyInfo, e.Changed, e.Reasons = *i, true, map[string]error{}
	for _, u := range f.users {
		if u.Name == "stuck" {
			e.Failed, e.Reasons[u.ID] = append(e.Failed, u), fmt.Errorf("move it: %w", errs.New(errs.Unavailable, "no space is left"))
		} else {
			e.Moved = append(e.Moved, u)
		}
	}
	return e, nil
}

func (f *fakePolicies) Use(_ context.Context, id string, use record.PolicyUse) (r record.Record, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, err := f.find(use.Name)
	if err == nil {
		use.Version = f.all[at].Newest().Number
		r.ID, r.Spec.Policy = id, use
	}
	return r, err
}

func (f *fakePolicies) Delete(_ context.Context, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, err := f.find(name)
	if err == nil && len(f.all[at].UsedBy) > 0 {
		err = errs.Wire(errs.New(errs.WrongState, "in use by %s", f.all[at].UsedBy[0].ID), "POLICY::IN_USE")
	}
	if err == nil {
		f.all = slices.Delete(f.all, at, at+1)
	}
	return err
}

func TestPolicyRoutes(t *testing.T) {
	w := newWorld(t)
	want := func(method, path, body string, status int, says ...string) {
		t.Helper()
		a := w.do(method, path, body)
		for _, s := range says {
			if !strings.Contains(string(a.body), s) {
				t.Errorf("%s %s %s: %s, want %q", method, path, body, a.body, s)
			}
		}
		if a.StatusCode != status {
			t.Errorf("%s %s %s: %d %s, want %d", method, path, body, a.StatusCode, a.body, status)
		}
	}
	const one = `{"egress":[{"action":"allow","target":"203.0.113.0/24","ports":[443]}]}`
	want("GET", "/v1/policies", "", 200, `{"items":[]}`)
	want("PUT", "/v1/policies/build", one, 201, `"name":"build","version":1,"source":"store"`, `"moved":[],"pending":[],"failed":[]`,
		`"networkPolicy":{"defaultAction":"deny","egress":[{"action":"allow","target":"203.0.113.0/24","ports":[443]}]}`)
	w.policies.users = []record.PolicyUser{
		{ID: "taaaaaaaaaaa", Name: "lab", Use: record.PolicyUse{Name: "build", Version: 2}},
		{ID: "tbbbbbbbbbbb", Name: "stuck", Use: record.PolicyUse{Name: "build", Version: 1}},
	}
	want("PUT", "/v1/policies/build", `{"defaultAction":"allow"}`, 200, `"version":2`, `"changed":true`,
		`"moved":[{"id":"taaaaaaaaaaa","name":"lab","version":2,"pinned":false}]`,
		`"failed":[{"id":"tbbbbbbbbbbb","name":"stuck","version":1,"pinned":false,"message":"no space is left"}]`)
	want("GET", "/v1/policies/build", "", 200, `"version":2`, `"defaultAction":"allow"`, `"versions":[{"version":1,`)
	want("GET", "/v1/policies/build@1", "", 200, `"version":1`, `"defaultAction":"deny"`)
	want("GET", "/v1/policies/build@3", "", 404, "POLICY::NOT_FOUND", "versions 1 to 2")
	want("GET", "/v1/policies/build@x", "", 400, "POLICY::INVALID_NAME", "NAME@VERSION")
	want("GET", "/v1/policies/none", "", 404, "POLICY::NOT_FOUND")
	want("GET", "/v1/policies", "", 200, `"name":"build","version":2,"defaultAction":"allow","rules":0,"source":"store"`, `"usedBy":[`)
	if a := w.do("GET", "/v1/policies", ""); strings.Contains(string(a.body), "networkPolicy") {
		t.Errorf("the list has rules: %s", a.body)
	}
	at := "/v1/sandboxes/" + w.create().ID + "/policy"
	want("PUT", at, `{"name":"build"}`, 200, `{"name":"build","version":2,"pinned":false,"changed":false}`)
	want("PUT", at, `{"name":"none"}`, 404, "POLICY::NOT_FOUND")
	want("PUT", at, `{"name":"a.b"}`, 400, "POLICY::INVALID_NAME")
	want("PUT", at, `{}`, 400, "POLICY::INVALID_NAME")
	want("DELETE", "/v1/policies/build", "", 409, "POLICY::IN_USE", "taaaaaaaaaaa")
	want("DELETE", "/v1/policies/"+strings.Repeat("x", 5000), "", 404, "POLICY::NOT_FOUND")
	w.policies.all[0].Fixed = true
	want("PUT", "/v1/policies/build", one, 409, "POLICY::FIXED")
	want("GET", "/v1/policies/build", "", 200, `"source":"configuration"`)
	w.policies.all[0].UsedBy = nil
	want("DELETE", "/v1/policies/build", "", 204)
	want("POST", "/v1/policies/build", one, 405, "GET, PUT, DELETE")
	for body, says := range map[string]string{
		"": "the body is empty", "[]": "JSON object", `{"egress":[{"action":"allow","target":"1.2.3"}]}`: "1.2.3",
		`{"egress":[{"action":"allow","target":"192.0.2.99"}]}`: "never reaches its host", `{"egres":[]}`: "egres",
	} {
		want("PUT", "/v1/policies/other", body, 400, says)
	}
	for _, name := range []string{"a.b", "build@1", "-x", "a%2Fb", strings.Repeat("x", 64)} {
		want("PUT", "/v1/policies/"+name, one, 400, "POLICY::INVALID_NAME")
	}
	if n := len(w.policies.all); n != 0 {
		t.Errorf("%d policies after what was refused", n)
	}
}

// TestPolicyOfACreation: a creation names a policy or has rules, and says afterwards which
// one it was, and whether it still follows it.
func TestPolicyOfACreation(t *testing.T) {
	w := newWorld(t)
	with := func(ext, more string) string {
		return `{"image":{"uri":"python"},"entrypoint":["x"],"extensions":{` + ext + `}` + more + `}`
	}
	for value, use := range map[string]record.PolicyUse{
		"build": {Name: "build"}, "build@7": {Name: "build", Version: 7, Pinned: true},
	} {
		sb := w.do("POST", "/v1/sandboxes", with(`"sandboxd.policy":"`+value+`"`, "")).sandbox(t)
		if got := w.recs[sb.ID].Spec.Policy; got != use {
			t.Errorf("%s: %+v", value, got)
		}
		w.set(sb.ID, func(r *record.Record) { r.Spec.Policy.Version, r.Spec.Policy.Left = 7, true })
		sb = w.do("GET", "/v1/sandboxes/"+sb.ID, "").sandbox(t)
		if p := sb.Sandboxd.Policy; p == nil || *p != (wire.SandboxPolicy{Name: "build", Version: 7, Pinned: use.Pinned, Changed: true}) ||
			!strings.Contains(strings.Join(sb.Sandboxd.Notes, "\n"), "no longer follows") {
			t.Errorf("%s: shown as %+v, %q", value, p, sb.Sandboxd.Notes)
		}
	}
	for body, says := range map[string]string{
		with(`"sandboxd.policy":"a.b"`, ""):                                 "POLICY::INVALID_NAME",
		with(`"sandboxd.policy":"a@0"`, ""):                                 "NAME@VERSION",
		with(`"sandboxd.policy":"a","sandboxd.network":"open"`, ""):         "use one of them",
		with(`"sandboxd.policy":"a","sandboxd.allow":"203.0.113.0/24"`, ""): "use one of them",
		with(`"sandboxd.policy":"a"`, `,"networkPolicy":{"egress":[]}`):     "use one of them",
	} {
		if a := w.do("POST", "/v1/sandboxes", body); a.StatusCode != http.StatusBadRequest || !strings.Contains(string(a.body), says) {
			t.Errorf("%s: %d %s, want %q", body, a.StatusCode, a.body, says)
		}
	}
}
