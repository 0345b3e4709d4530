package backup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// A host is a state directory: a store and a key file.
type host struct {
	dir string
	db  *store.DB
	key *sealed.Key
}

func (h *host) file(name string) string { return filepath.Join(h.dir, name) }

// newHost starts on a directory, as a daemon does: a nil state is an empty one.
func newHost(t *testing.T, state []byte) *host {
	t.Helper()
	h := &host{dir: filepath.Join(t.TempDir(), "state")}
	if err := os.Mkdir(h.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if state != nil {
		if err := os.WriteFile(h.file("sandboxd.db"), state, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := store.MarkRestored(h.file("sandboxd.db"), "a backup"); err != nil {
			t.Fatal(err)
		}
	}
	h.start(t)
	return h
}

// start opens both files, which a host that has started before closes first. The key is nil
// if the store has secrets and there is no key file.
func (h *host) start(t *testing.T) {
	t.Helper()
	if h.db != nil {
		h.db.Close()
	}
	var err error
	if h.db, err = store.Open(h.file("sandboxd.db"), store.Options{Reserve: -1}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.db.Close() })
	all, bad, err := h.db.Secrets(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	none := len(all)+len(bad) == 0
	if h.key, err = sealed.Open("", h.file("sandboxd.key"), none); err != nil && (none || !errors.Is(err, fs.ErrNotExist)) {
		t.Fatal(err)
	}
}

// put gives a new sandbox a vault with that secret.
func (h *host) put(t *testing.T, id, secret string) {
	t.Helper()
	r := record.Record{ID: id, State: record.Creating}
	if err := h.db.Insert(t.Context(), &r); err != nil {
		t.Fatal(err)
	}
	h.putSecret(t, id, record.Vault, secret)
}

// putSecret gives a sandbox its first secret of a kind.
func (h *host) putSecret(t *testing.T, id string, kind record.SecretKind, text string) {
	t.Helper()
	s := record.Secret{Sandbox: id, Kind: kind}
	s.Sealed = h.key.Seal(s.Name(), []byte(text))
	if err := h.db.PutSecret(t.Context(), s, record.Secret{}); err != nil {
		t.Fatal(err)
	}
}

// secret is what is in the vault of a sandbox.
func (h *host) secret(t *testing.T, id string) (string, error) {
	t.Helper()
	v, ok, err := h.db.Secret(t.Context(), id, record.Vault)
	if err != nil || !ok {
		t.Fatalf("the vault of %s: %v, %v", id, ok, err)
	}
	b, err := h.key.Unseal(v.Name(), v.Sealed)
	return string(b), err
}

func (h *host) check(t *testing.T) Secrets {
	t.Helper()
	v, err := CheckSecrets(t.Context(), h.db, h.key)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (h *host) secrets(t *testing.T) []record.Secret {
	t.Helper()
	all, bad, err := h.db.Secrets(t.Context())
	if err != nil || len(bad) > 0 {
		t.Fatalf("unreadable %v, %v", bad, err)
	}
	return all
}

// backedUp is a backup of h, the store in it and what that says of itself.
func (h *host) backedUp(t *testing.T) (file, state []byte, facts store.Facts) {
	t.Helper()
	var copied, archive, out bytes.Buffer
	if _, err := h.db.Backup(&copied); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "copy.db")
	if err := os.WriteFile(path, copied.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	facts, err := store.Examine(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := Write(&archive, Manifest{State: facts}, bytes.NewReader(copied.Bytes())); err != nil {
		t.Fatal(err)
	}
	file = bytes.Clone(archive.Bytes())
	m, err := Read(&archive, &out)
	if err != nil || !reflect.DeepEqual(m.State, facts) {
		t.Fatalf("the manifest says %+v, %v; want %+v", m.State, err, facts)
	}
	return file, out.Bytes(), m.State
}

// TestSecretsElsewhere restores a backup on another host: the secrets are there and closed,
// and open when its operator has brought the key. Nothing else is in their way.
func TestSecretsElsewhere(t *testing.T) {
	const a, b, c = "daaaaaaaaaaa", "dbbbbbbbbbbb", "dccccccccccc"
	from := newHost(t, nil)
	from.put(t, a, "sk-live-of-a")
	from.put(t, b, "sk-live-of-b")
	from.putSecret(t, b, record.Authority, "sk-live-of-the-authority")
	file, state, facts := from.backedUp(t)
	text, err := os.ReadFile(from.file("sandboxd.key"))
	if err != nil {
		t.Fatal(err)
	}
	key := strings.Fields(string(text))[1]
	for what, bytes := range map[string][]byte{"backup": file, "state": state} {
		for _, secret := range []string{"sk-live", key, key[:16]} {
			if strings.Contains(string(bytes), secret) {
				t.Errorf("the %s has %q", what, secret)
			}
		}
	}

	to := newHost(t, state)
	if !reflect.DeepEqual(to.secrets(t), from.secrets(t)) {
		t.Errorf("restored %+v; want %+v", to.secrets(t), from.secrets(t))
	}
	if to.key != nil {
		t.Fatalf("a host with secrets and without a key file made key %s", to.key.ID())
	}
	// What the error of Open says: an operator makes a new key, so that life goes on.
	if err := os.WriteFile(to.file("sandboxd.key"), []byte(strings.Repeat("0f", 32)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	to.start(t)
	want := Secrets{Foreign: map[string][]string{from.key.ID(): {a + "/vault", b + "/authority", b + "/vault"}}}
	if got := to.check(t); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v; want %+v", got, want)
	}
	lines := to.check(t).Problems(to.key)
	says := []string{
		"3 secrets of sandboxes (" + a + "/vault, " + b + "/authority, " + b + "/vault)", "stay as they are", "key " + from.key.ID(),
		"at the end of " + to.key.From(),
	}
	if len(lines) != 1 {
		t.Fatalf("%d lines: %q", len(lines), lines)
	}
	note := NeedsKeys(facts, to.key)
	for _, s := range says {
		if !strings.Contains(lines[0], s) {
			t.Errorf("%s\nwant %q in it", lines[0], s)
		}
	}
	for _, s := range []string{"3 encrypted secrets", "key " + from.key.ID(), to.key.From()} {
		if !strings.Contains(note, s) {
			t.Errorf("%s\nwant %q in it", note, s)
		}
	}
	if note := NeedsKeys(facts, from.key); note != "" {
		t.Errorf("on the host with the key: %s", note)
	}
	if note := NeedsKeys(facts, nil); !strings.Contains(note, from.key.ID()) {
		t.Errorf("on a host without a key: %q", note)
	}
	if _, err := to.secret(t, a); !errors.Is(err, sealed.ErrOtherKey) {
		t.Errorf("without the key: %v", err)
	}
	// Life goes on: others get vaults, and a sandbox whose vault is closed can go.
	to.put(t, c, "sk-live-of-c")
	if n, left, err := Reseal(t.Context(), to.db, to.key); n != 0 || left != 3 || err != nil {
		t.Errorf("sealed anew: %d of %d, %v", n, left, err)
	}
	if err := to.db.Delete(t.Context(), b); err != nil {
		t.Fatal(err)
	}

	// As the line says: the line of the key, at the end.
	mine := to.key.ID()
	f, err := os.OpenFile(to.file("sandboxd.key"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(text); err != nil {
		t.Fatal(err)
	}
	f.Close()
	to.start(t)
	want = Secrets{Open: []string{a + "/vault", c + "/vault"}, Foreign: map[string][]string{}}
	if got := to.check(t); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v; want %+v", got, want)
	}
	if lines := to.check(t).Problems(to.key); len(lines) > 0 {
		t.Errorf("%q", lines)
	}
	if got, err := to.secret(t, a); err != nil || got != "sk-live-of-a" {
		t.Errorf("%q, %v", got, err)
	}
	if to.key.ID() != mine {
		t.Errorf("%s seals; want %s", to.key.ID(), mine)
	}
}

// TestRotated seals everything with a new key; the line of the old one then may go.
func TestRotated(t *testing.T) {
	h := newHost(t, nil)
	for i := range 20 {
		h.put(t, fmt.Sprintf("d%011d", i), fmt.Sprint("secret of ", i))
	}
	h.putSecret(t, "d00000000007", record.Authority, "an authority")
	if err := sealed.Rotate(h.file("sandboxd.key")); err != nil {
		t.Fatal(err)
	}
	h.start(t)
	h.put(t, "dnew", "new")
	before := h.secrets(t)
	if n, left, err := Reseal(t.Context(), h.db, h.key); n != 21 || left != 0 || err != nil {
		t.Fatalf("sealed anew: %d of %d, %v", n, left, err)
	}
	if n, left, err := Reseal(t.Context(), h.db, h.key); n != 0 || left != 0 || err != nil {
		t.Fatalf("once more: %d of %d, %v", n, left, err)
	}
	text, err := os.ReadFile(h.file("sandboxd.key"))
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(text), "\n")
	if err := os.WriteFile(h.file("sandboxd.key"), []byte(first+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.start(t)
	for i, v := range h.secrets(t) {
		if v.Name() != before[i].Name() {
			t.Errorf("%+v", v)
		}
	}
	if got := h.check(t); len(got.Open) != len(before) || len(got.Foreign) > 0 || len(got.Damaged) > 0 {
		t.Errorf("%+v", got)
	}
	for i := range 20 {
		if got, err := h.secret(t, fmt.Sprintf("d%011d", i)); err != nil || got != fmt.Sprint("secret of ", i) {
			t.Errorf("%d: %q, %v", i, got, err)
		}
	}
	canceled, stop := context.WithCancel(t.Context())
	stop()
	if _, err := CheckSecrets(canceled, h.db, h.key); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

// TestSecretsBroken: each cause is told by itself, and nothing is changed.
func TestSecretsBroken(t *testing.T) {
	h := newHost(t, nil)
	edit := func(id string, f func(b []byte) []byte) {
		h.put(t, id, "a secret")
		was, _, err := h.db.Secret(t.Context(), id, record.Vault)
		if err != nil {
			t.Fatal(err)
		}
		v := was
		v.Sealed = f(bytes.Clone(was.Sealed))
		if err := h.db.PutSecret(t.Context(), v, was); err != nil {
			t.Fatal(err)
		}
	}
	same := func(b []byte) []byte { return b }
	edit("dgood", same)
	edit("dcut", func(b []byte) []byte { return b[:20] })
	edit("dempty", func([]byte) []byte { return nil })
	edit("dchanged", func(b []byte) []byte { b[len(b)-1]++; return b })
	edit("dforeign", func(b []byte) []byte { b[3]++; return b })
	edit("dnewer", func(b []byte) []byte { b[0]++; return b })
	other, _, _ := h.db.Secret(t.Context(), "dgood", record.Vault)
	edit("dswapped", func([]byte) []byte { return other.Sealed })                              // the vault of another sandbox
	authority := record.Secret{Sandbox: "dgood", Kind: record.Authority, Sealed: other.Sealed} // the vault of the same sandbox
	if err := h.db.PutSecret(t.Context(), authority, record.Secret{}); err != nil {
		t.Fatal(err)
	}
	var far []string
	for i := range 12 {
		id := fmt.Sprintf("dfar%02d", i)
		edit(id, func(b []byte) []byte { b[8]++; return b })
		far = append(far, id+"/vault")
	}
	before := h.secrets(t)
	v := h.check(t)
	var foreign [][]string
	for _, ids := range v.Foreign {
		foreign = append(foreign, ids)
	}
	slices.SortFunc(foreign, func(a, b []string) int { return len(a) - len(b) })
	if !reflect.DeepEqual(foreign, [][]string{{"dforeign/vault"}, far}) || !slices.Equal(v.Open, []string{"dgood/vault"}) ||
		!slices.Equal(v.Newer, []string{"dnewer/vault"}) ||
		!slices.Equal(v.Damaged, []string{"dchanged/vault", "dcut/vault", "dempty/vault", "dgood/authority", "dswapped/vault"}) {
		t.Errorf("%+v", v)
	}
	text := strings.Join(v.Problems(h.key), "\n")
	for _, want := range []string{
		"1 secret of sandboxes (dforeign/vault)", "12 secrets of sandboxes (dfar00/vault, ", "dfar09/vault and 2 more)",
		"1 secret of sandboxes (dnewer/vault) cannot be opened, and stay as they are: a newer",
		"5 secrets of sandboxes (dchanged/vault, dcut/vault, dempty/vault, dgood/authority, dswapped/vault)",
		"at the end of " + h.key.From(),
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	if n := strings.Count(text, "\n"); n != 3 {
		t.Errorf("%d lines\n%s", n+1, text)
	}
	if n, left, err := Reseal(t.Context(), h.db, h.key); n != 0 || left != 19 || err != nil { // the newer one is among them
		t.Errorf("sealed anew: %d of %d, %v", n, left, err)
	}
	// A host without a key: what can be opened is told like what cannot, by the key it needs.
	none, err := CheckSecrets(t.Context(), h.db, nil)
	here := []string{"dchanged/vault", "dgood/authority", "dgood/vault", "dswapped/vault"}
	if err != nil || len(none.Open) > 0 || !slices.Equal(none.Foreign[h.key.ID()], here) {
		t.Errorf("%+v, %v", none, err)
	}
	if !reflect.DeepEqual(before, h.secrets(t)) {
		t.Error("something was changed")
	}
	h.backedUp(t) // whatever is in them is no reason to have no backup
}
