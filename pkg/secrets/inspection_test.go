package secrets

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/egress/authority"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// start starts the sandbox, as far as its authority goes.
func (w *world) start() *authority.Authority {
	w.t.Helper()
	a, err := w.Authority(w.t.Context(), w.box, true)
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

func same(a, b *authority.Authority) bool { return string(a.Certificate()) == string(b.Certificate()) }

func TestAuthority(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	_, err := w.Authority(ctx, w.box, false)
	wants(t, "before a start", err, errs.NotFound, "it gets one when it starts")
	_, err = w.AuthorityEnd(ctx, w.box.ID)
	wants(t, "the end, before a start", err, errs.NotFound, "it gets one when it starts")
	first := w.start()
	if at, err := w.AuthorityEnd(ctx, w.box.ID); err != nil || !at.Equal(first.NotAfter()) {
		t.Errorf("it ends at %v (%v), not at %v", at, err, first.NotAfter())
	}
	w.restart() // also by a kill: it was durable when Authority returned
	if a := w.start(); !same(a, first) {
		t.Error("a start makes another authority")
	}
	w.later(200 * 24 * time.Hour) // more than half of its life
	if a, err := w.Authority(ctx, w.box, false); err != nil || !same(a, first) {
		t.Errorf("a running sandbox has another authority: %v", err)
	}
	second := w.start()
	if same(second, first) || second.Due(w.now()) {
		t.Error("an authority that is due is not renewed")
	}
	if a, err := w.Authority(ctx, w.box, false); err != nil || !same(a, second) {
		t.Errorf("it is not the one of the last start: %v", err)
	}
}

// TestAuthorityLost: an authority that does not open is replaced at a start, and no earlier.
func TestAuthorityLost(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	put := func(b []byte) {
		t.Helper()
		was, _, err := w.db.Secret(ctx, box, record.Authority)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.db.PutSecret(ctx, record.Secret{Sandbox: box, Kind: record.Authority, Sealed: b}, was); err != nil {
			t.Fatal(err)
		}
	}
	other := openKey(t, t.TempDir())
	for name, c := range map[string]struct {
		harm func()
		code errs.Code
		text string
	}{
		"damaged": {func() { put(make([]byte, 100)) }, errs.Internal, "restart the sandbox, which gives it a new one"},
		"no key": {
			func() { put(other.Seal(box+"/authority", []byte("x"))) }, errs.Unavailable, "the key that sealed it is missing; add the line",
		},
		"no PEM":     {func() { put(w.c.Key.Seal(box+"/authority", []byte("x"))) }, errs.Internal, "restart the sandbox"},
		"unreadable": {func() { w.scribble(box + "/authority") }, errs.Internal, "restart the sandbox"},
	} {
		before := w.start()
		c.harm()
		_, err := w.Authority(ctx, w.box, false)
		wants(t, name, err, c.code, c.text)
		i, err := w.Inspection(ctx, w.box)
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = i.Leaf("api.example.com")
		wants(t, name+", a leaf", err, c.code, c.text)
		after := w.start()
		if a, err := w.Authority(ctx, w.box, false); err != nil || same(after, before) || !same(a, after) {
			t.Errorf("%s: no new authority, %v", name, err)
		}
	}
	newer := w.c.Key.Seal(box+"/authority", []byte("x"))
	newer[0]++
	put(newer)
	_, err := w.Authority(ctx, w.box, true)
	wants(t, "newer", err, errs.Unavailable, "a newer sandboxd sealed it; start that one")
}

// scribble makes the record of a secret unreadable, and opens the store again.
func (w *world) scribble(name string) {
	w.t.Helper()
	if err := w.db.Close(); err != nil {
		w.t.Fatal(err)
	}
	b, err := bbolt.Open(filepath.Join(w.dir, "sandboxd.db"), 0o600, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	err = b.Update(func(tx *bbolt.Tx) error { return tx.Bucket([]byte("secrets")).Put([]byte(name), []byte("{")) })
	if err := errors.Join(err, b.Close()); err != nil {
		w.t.Fatal(err)
	}
	w.db = openStore(w.t, w.dir)
	w.open(func(*Config) {})
}

func TestInspection(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	w.open(func(c *Config) { c.Mask = true })
	i, err := w.Inspection(ctx, w.box)
	if err != nil || i.Vault != nil || i.Marks != nil || !i.Mask {
		t.Errorf("without a vault: %+v, %v", i, err)
	}
	if _, err := i.Value(ctx, "token"); err == nil {
		t.Error("a value of no vault")
	}
	a := w.start()
	w.create(body("api.example.com"))
	if i, err = w.Inspection(ctx, w.box); err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]bool{
		"https api.example.com": true, "http api.example.com": false, "https other.example.com": false,
	} {
		scheme, name, _ := strings.Cut(host, " ")
		if got := i.Marks(scheme, name); got != want {
			t.Errorf("%s is marked: %v", host, got)
		}
	}
	v, err := vault.Decode(i.Vault)
	if err != nil || v.Credential("token").Source.Value.Reveal() != value {
		t.Errorf("the child gets %v, %v", v, err)
	}
	if _, err := i.Value(ctx, "token"); err == nil || strings.Contains(err.Error(), value) {
		t.Errorf("an inline value is asked for: %v", err)
	}
	cert, _, err := i.Leaf("api.example.com")
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(cert)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	block, _ := pem.Decode(a.Certificate())
	roots.AddCert(must(x509.ParseCertificate(block.Bytes)))
	if _, err := leaf.Verify(x509.VerifyOptions{DNSName: "api.example.com", Roots: roots}); err != nil {
		t.Error(err)
	}
}

// TestEnvironment: the guest gets placeholders, where a client says so.
func TestEnvironment(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	if env, err := w.Environment(ctx, w.box); len(env) != 0 || err != nil {
		t.Errorf("%v, %v", env, err)
	}
	_, err := w.CreateTrusted(ctx, w.box, []byte(`{"credentials":[{"name":"a","env":"API_TOKEN","source":{"value":"x"}},
		{"name":"b","source":{"type":"file","path":"/etc/hostname"}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.PatchTrusted(ctx, w.box, []byte(`{"credentials":{"add":[{"name":"c","env":"OTHER","source":{"type":"command","argv":["/bin/true"]}}]}}`))
	if err != nil {
		t.Fatal(err)
	}
	p := map[string]string{}
	for _, c := range must(w.Get(ctx, w.box)).Credentials {
		p[c.Name] = c.Placeholder
	}
	env, err := w.Environment(ctx, w.box)
	if err != nil || len(env) != 2 || env["API_TOKEN"] != p["a"] || env["OTHER"] != p["c"] || p["a"] == "" || p["c"] == "" {
		t.Errorf("%v, %v", env, err)
	}
}

// TestLostKey: without the key, what needs it fails and says what to do, and the rest works.
func TestLostKey(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	w.start()
	w.create(body("api.example.com"))
	plain := w.insert("dcccccccccc2", false)
	bare := w.insert("dcccccccccc3", true)
	lose := func(c *Config) { c.Key, c.KeyErr = nil, &fs.PathError{Op: "open", Path: "/x", Err: fs.ErrNotExist} }
	refused := func(c *Config) { c.Key, c.KeyErr = nil, errors.New("key file /x can be read by others, mode 0644") }
	foreign := openKey(t, t.TempDir())
	for name, c := range map[string]struct {
		edit func(*Config)
		text string
	}{
		"no key":                      {lose, "sandboxd has no key for the secrets of sandboxes: add the line of that key"},
		"a file that others can read": {refused, "sandboxd refuses the key file of this host"},
		"another key":                 {func(c *Config) { c.Key = foreign }, "the key that sealed it is missing; add the line of that key"},
	} {
		w.open(c.edit)
		if ids := w.Keys(); ids == nil || w.c.Key == nil && len(ids) > 0 || w.c.Key != nil && !slices.Equal(ids, foreign.IDs()) {
			t.Errorf("%s: the keys are %q", name, ids)
		}
		fails := map[string]error{}
		_, fails["get"] = w.Get(ctx, w.box)
		_, fails["patch"] = w.Patch(ctx, w.box, []byte(`{}`))
		_, fails["inspection"] = w.Inspection(ctx, w.box)
		_, fails["authority"] = w.Authority(ctx, w.box, false)
		_, fails["environment"] = w.Environment(ctx, w.box)
		fails["policy"] = w.CheckPolicy(w.box, w.box.Spec.Network)
		if w.c.Key == nil {
			_, fails["start"] = w.Authority(ctx, w.box, true)
			_, fails["start of another"] = w.Authority(ctx, bare, true)
			_, fails["create"] = w.Create(ctx, bare, []byte(`{}`))
		}
		for what, err := range fails {
			wants(t, name+": "+what, err, errs.Unavailable, c.text)
		}
		for _, r := range []*record.Record{plain, bare} {
			if _, err := w.Inspection(ctx, r); err != nil {
				t.Errorf("%s: a sandbox without a vault: %v", name, err)
			}
			if err := w.CheckPolicy(r, network(t, record.NetworkNone)); err != nil {
				t.Errorf("%s: the policy of a sandbox without a vault: %v", name, err)
			}
			_, err := w.Get(ctx, r)
			wants(t, name, err, errs.NotFound, "has no credential vault")
		}
	}
	w.open(lose)
	if err := w.Delete(ctx, w.box); err != nil {
		t.Errorf("delete without the key: %v", err)
	}
	w.open(func(*Config) {})
	w.create(`{}`)
}

// TestDamaged: a vault that does not open is said to be so, and can be deleted and set again.
func TestDamaged(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	put := func(b []byte) {
		t.Helper()
		was, _, err := w.db.Secret(ctx, box, record.Vault)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.db.PutSecret(ctx, record.Secret{Sandbox: box, Kind: record.Vault, Sealed: b}, was); err != nil {
			t.Fatal(err)
		}
	}
	for name, harm := range map[string]func(){
		"damaged":    func() { put(make([]byte, 100)) },
		"moved":      func() { put(w.c.Key.Seal("dbbbbbbbbbbb/vault", []byte(`{}`))) },
		"no vault":   func() { put(w.c.Key.Seal(box+"/vault", []byte(value))) },
		"unreadable": func() { w.scribble(box + "/vault") },
	} {
		w.create(body("api.example.com"))
		harm()
		_, err := w.Get(ctx, w.box)
		wants(t, name, err, errs.Internal, "set it again")
		_, err = w.Patch(ctx, w.box, []byte(`{}`))
		wants(t, name, err, errs.Internal, "set it again")
		_, err = w.Create(ctx, w.box, []byte(`{}`))
		if err == nil {
			t.Errorf("%s: a vault that cannot be read is replaced", name)
		}
		if err := w.Delete(context.Background(), w.box); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
