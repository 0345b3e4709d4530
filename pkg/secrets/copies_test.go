package secrets

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const other = "dbbbbbbbbbbb"

// secret is the vault of a sandbox as the store has it.
func (w *world) secret(id string) (record.Secret, bool) {
	w.t.Helper()
	s, found, err := w.db.Secret(w.t.Context(), id, record.Vault)
	if err != nil {
		w.t.Fatal(err)
	}
	return s, found
}

// TestCopy: a copy has the values, variables, bindings and revision of its source, sealed for the copy,
// with placeholders of its own, and from then on each changes by itself.
func TestCopy(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	w.apply = func(_ context.Context, id string) error {
		if id == other {
			return errors.New("a copy is applied before it is registered")
		}
		return nil
	}
	_, err := w.CreateTrusted(ctx, w.box, []byte(`{"credentials":[{"name":"token","env":"API_TOKEN","source":{"value":"`+value+`"}},
		{"name":"file","source":{"type":"file","path":"/etc/hostname"}}],"bindings":[`+binding("b", "api.example.com")+`]}`))
	if err != nil {
		t.Fatal(err)
	}
	must(w.Patch(ctx, w.box, []byte(`{}`)))
	to := w.insert(other, true)
	if err := w.Copy(ctx, box, other); err != nil {
		t.Fatal(err)
	}
	source, copied := must(w.vault(ctx, box)), must(w.vault(ctx, other))
	if copied.Revision() != 2 || copied.Credential("token").Source.Value.Reveal() != value ||
		copied.Credential("file").Source.Path != "/etc/hostname" {
		t.Errorf("%+v", copied.State())
	}
	same := string(source.Encode())
	seen := map[string]bool{}
	for _, name := range []string{"token", "file"} {
		was, is := source.Credential(name).Placeholder, copied.Credential(name).Placeholder
		if was == is || seen[is] || !strings.HasPrefix(is, vault.PlaceholderPrefix) || len(is) != len(was) {
			t.Errorf("the placeholder of %s is %q, and that of the source %q", name, is, was)
		}
		seen[is] = true
		same = strings.Replace(same, was, is, 1)
	}
	if got := string(copied.Encode()); got != same {
		t.Errorf("beside the placeholders, the copy is\n%s\nwant\n%s", got, same)
	}
	if env, err := w.Environment(ctx, to); err != nil || len(env) != 1 || env["API_TOKEN"] != copied.Credential("token").Placeholder {
		t.Errorf("the environment of the copy is %v, %v", env, err)
	}
	if i, err := w.Inspection(ctx, to); err != nil || string(i.Vault) != same {
		t.Errorf("egress gets %v", err)
	}
	s, _ := w.secret(other)
	s.Sandbox = box
	if _, err := w.unseal(s); !errs.Is(err, errs.Internal) {
		t.Errorf("what is sealed for the copy opens as the source's: %v", err)
	}

	if err := w.Delete(ctx, w.box); err != nil {
		t.Fatal(err)
	}
	w.restart()
	if got := string(must(w.vault(ctx, other)).Encode()); got != same {
		t.Errorf("without its source's, the vault of the copy is %s", got)
	}
	if _, err := w.Get(ctx, w.box); !errs.Is(err, errs.NotFound) {
		t.Errorf("the source: %v", err)
	}
}

// TestCopyFails: a copy that cannot have the vault fails and says why, and nothing is left of it.
func TestCopyFails(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	w.insert(other, true)
	const gone = "credential vault of sandbox " + box + " was deleted, or the sandbox was"
	wants(t, "a source without a vault", w.Copy(ctx, box, other), errs.WrongState, gone)
	w.create(body("api.example.com"))
	wants(t, "no copy", w.Copy(ctx, box, "dnnnnnnnnnnn"), errs.NotFound, "no sandbox dnnnnnnnnnnn")
	w.open(func(c *Config) { c.Key, c.KeyErr = nil, errors.New("it is lost") })
	wants(t, "no key", w.Copy(ctx, box, other), errs.Unavailable, "no key for the secrets")
	w.open(func(*Config) {})
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	unlock := must(w.lock(ctx, other, record.Vault))
	if err := w.Copy(canceled, box, other); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	unlock()
	w.scribble(box + "/vault")
	wants(t, "a damaged vault", w.Copy(ctx, box, other), errs.Internal, "delete")
	if _, found := w.secret(other); found {
		t.Error("a copy that failed has a vault")
	}
	if err := w.Drop(ctx, other); err != nil {
		t.Errorf("drop nothing: %v", err)
	}
}

// TestDrop: what a copy was given goes, twice, and the source keeps what it has.
func TestDrop(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	w.create(body("api.example.com"))
	w.insert(other, true)
	if err := w.Copy(ctx, box, other); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := w.Drop(ctx, other); err != nil {
			t.Fatal(err)
		}
		if _, found := w.secret(other); found {
			t.Fatal("it is there")
		}
	}
	if got := w.revision(); got != 1 {
		t.Errorf("the source is at revision %d", got)
	}
	if err := w.Copy(ctx, box, other); err != nil {
		t.Fatal(err)
	}
	if err := w.db.Delete(ctx, other); err != nil {
		t.Fatal(err)
	}
	if _, found := w.secret(other); found {
		t.Error("the vault outlives its copy")
	}
}

// TestCopyKeeps: a vault that a client gave to a copy that waited for its turn stays.
func TestCopyKeeps(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	w.create(body("api.example.com"))
	to := w.insert(other, true)
	own := must(w.Create(ctx, to, []byte(`{"credentials":[{"name":"mine","source":{"value":"x"}}]}`)))
	if err := w.Copy(ctx, box, other); err != nil {
		t.Fatal(err)
	}
	if got := must(w.Get(ctx, to)); len(got.Credentials) != 1 || got.Credentials[0] != own.Credentials[0] {
		t.Errorf("%+v, not %+v", got, own)
	}
}

// TestCheckCopy: a policy that takes a bound host from a copy is refused, and one that the source has
// no longer itself is not.
func TestCheckCopy(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	none := network(t, record.NetworkNone)
	if has, err := w.CheckCopy(ctx, w.box, none); has || err != nil {
		t.Errorf("without a vault: %v, %v", has, err)
	}
	w.create(body("api.example.com"))
	for _, n := range []record.Network{w.box.Spec.Network, network(t, record.NetworkOpen)} {
		if has, err := w.CheckCopy(ctx, w.box, n); !has || err != nil {
			t.Errorf("%+v: %v, %v", n, has, err)
		}
	}
	for _, n := range []record.Network{none, network(t, record.NetworkRules, "api.example.com:80")} {
		has, err := w.CheckCopy(ctx, w.box, n)
		wants(t, "a denied host", err, errs.Invalid, `credential vault: the network policy does not allow api.example.com:443 of binding "b"; `+
			"allow it in the policy of the copies, or remove it from the vault of sandbox "+box+" first")
		if has {
			t.Error("it has")
		}
	}
	w.box.Spec.Network = none // as by a rule of the host
	if has, err := w.CheckCopy(ctx, w.box, none); !has || err != nil {
		t.Errorf("denied already: %v, %v", has, err)
	}
	w.scribble(box + "/vault")
	_, err := w.CheckCopy(ctx, w.box, none)
	wants(t, "a damaged vault", err, errs.Internal, "delete")
}

// TestCopyOfFile: a copy has a credential of a file whoever makes it, and who may not bind it at the
// source may not at the copy either.
func TestCopyOfFile(t *testing.T) {
	w, ctx := newWorld(t), t.Context()
	path := write(t, filepath.Join(w.dir, "value"), value+"\n", 0o600)
	_, err := w.CreateTrusted(ctx, w.box, []byte(`{"credentials":[{"name":"token","source":{"type":"file","path":"`+path+`"}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	to := w.insert(other, true)
	if err := w.Copy(ctx, box, other); err != nil {
		t.Fatal(err)
	}
	i, err := w.Inspection(ctx, to)
	if err != nil {
		t.Fatal(err)
	}
	gives(t, func(ctx context.Context) ([]byte, error) { return i.Value(ctx, "token") }, value)
	for _, r := range []*record.Record{w.box, to} {
		_, err := w.Patch(ctx, r, []byte(`{"bindings":{"add":[`+binding("b", "api.example.com")+`]}}`))
		wants(t, r.ID, err, errs.Denied, "only the administrator of the host may bind it")
	}
}
