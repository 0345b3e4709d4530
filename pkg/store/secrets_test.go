package store

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// vaultOf is a vault whose bytes no key has sealed: the store does not look at them.
func vaultOf(id, text string) record.Secret {
	return record.Secret{Sandbox: id, Kind: record.Vault, Sealed: []byte(text)}
}

func authorityOf(id, text string) record.Secret {
	return record.Secret{Sandbox: id, Kind: record.Authority, Sealed: []byte(text)}
}

func mustPutSecret(t *testing.T, db *DB, v, was record.Secret) {
	t.Helper()
	if err := db.PutSecret(t.Context(), v, was); err != nil {
		t.Fatal(err)
	}
}

// hasVault fails unless the vault of a sandbox is want, or none if want is the zero Vault.
func hasVault(t *testing.T, db *DB, id string, want record.Secret) {
	t.Helper()
	got, ok, err := db.Secret(t.Context(), id, record.Vault)
	if err != nil || ok != (want.Sandbox != "") || !reflect.DeepEqual(got, want) {
		t.Errorf("the vault of %s is %+v, %v, %v; want %+v", id, got, ok, err, want)
	}
}

// wants fails unless err has that code and text.
func wants(t *testing.T, err error, code errs.Code, text string) {
	t.Helper()
	if !errs.Is(err, code) || !strings.Contains(fmt.Sprint(err), text) {
		t.Errorf("%v; want %s, %q", err, code, text)
	}
}

// TestVaults: what is refused changes nothing, and what is written is there after the file
// was opened anew.
func TestVaults(t *testing.T) {
	path, ctx := newPath(t), t.Context()
	db := openTest(t, path, Options{Slots: 16})
	const a, b = "daaaaaaaaaaa", "dbbbbbbbbbbb"
	none := record.Secret{}
	for _, id := range []string{a, b} {
		insert(t, db, id, "")
		hasVault(t, db, id, none)
	}
	first, second, other := vaultOf(a, "first"), vaultOf(a, "second"), vaultOf(b, "other")
	wants(t, db.PutSecret(ctx, second, first), errs.NotFound, "has no vault")
	wants(t, db.DeleteSecret(ctx, a, record.Vault), errs.NotFound, "has no vault")
	mustPutSecret(t, db, first, none)
	mustPutSecret(t, db, other, none)
	wants(t, db.PutSecret(ctx, first, none), errs.Exists, "has its vault already")
	mustPutSecret(t, db, second, first)
	wants(t, db.PutSecret(ctx, second, first), errs.WrongState, "was changed meanwhile: read it again")
	anew := vaultOf(a, "sealed with a new key")
	mustPutSecret(t, db, anew, second)
	wants(t, db.PutSecret(ctx, second, second), errs.WrongState, "meanwhile") // the same secret, but sealed anew
	wants(t, db.PutSecret(ctx, vaultOf("dnnnnnnnnnnn", "x"), none), errs.NotFound, "no sandbox")
	// A caller that writes into what it gave changes nothing.
	anew.Sealed[0] = 'X'
	anew.Sealed = []byte("sealed with a new key")
	for range 2 {
		hasVault(t, db, a, anew)
		hasVault(t, db, b, other)
		if all, bad, err := db.Secrets(ctx); err != nil || len(bad) > 0 || !reflect.DeepEqual(all, []record.Secret{anew, other}) {
			t.Errorf("%+v, %v, %v", all, bad, err)
		}
		closeTest(t, db)
		db = openTest(t, path, Options{Slots: 16})
	}
	if err := db.DeleteSecret(ctx, a, record.Vault); err != nil {
		t.Fatal(err)
	}
	hasVault(t, db, a, none)
	mustPutSecret(t, db, first, none)
	closeTest(t, db)
	db = openTest(t, path, Options{Slots: 16})
	hasVault(t, db, a, first)
}

// TestVaultStates: a sandbox that clients do not see takes no vault; others do.
func TestVaultStates(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	for i, state := range releaseStates {
		r := record.Record{ID: releaseID('a' + rune(i)), State: record.Creating}
		if state == record.Prepared {
			r.State = state
		}
		if err := db.Insert(t.Context(), &r); err != nil {
			t.Fatal(err)
		}
		r.State = state
		if err := db.Put(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		err := db.PutSecret(t.Context(), vaultOf(r.ID, "x"), record.Secret{})
		if seen := state != record.Deleting && state != record.Prepared; seen != (err == nil) || !seen && !errs.Is(err, errs.NotFound) {
			t.Errorf("%s: %v", state, err)
		}
	}
	edit := func(tx *bbolt.Tx) error { return tx.Bucket(bucketBoxes).Put([]byte("dbad"), []byte("{")) }
	if err := db.update(edit); err != nil {
		t.Fatal(err)
	}
	wants(t, db.PutSecret(t.Context(), vaultOf("dbad", "x"), record.Secret{}), errs.Internal, "it can only be deleted")
}

// TestSecretsGoWithSandbox: in the transaction that removes the record, whether it can be
// read or not. Those of other sandboxes stay, also where the name begins alike.
func TestSecretsGoWithSandbox(t *testing.T) {
	path, ctx := newPath(t), t.Context()
	db := openTest(t, path, Options{})
	ids := []string{"daaaaaaaaaaa", "dbbbbbbbbbbb", "daaaaaaaaaaaa"}
	for _, id := range ids {
		insert(t, db, id, "")
		mustPutSecret(t, db, vaultOf(id, id), record.Secret{})
		mustPutSecret(t, db, authorityOf(id, id), record.Secret{})
	}
	has := func(ids ...string) {
		t.Helper()
		var want []record.Secret
		for _, id := range ids {
			want = append(want, authorityOf(id, id), vaultOf(id, id))
		}
		if all, bad, err := db.Secrets(ctx); err != nil || len(bad) > 0 || !reflect.DeepEqual(all, want) {
			t.Errorf("%+v, %v, %v; want %+v", all, bad, err, want)
		}
	}
	if err := db.Delete(ctx, ids[0]); err != nil {
		t.Fatal(err)
	}
	has(ids[2], ids[1])
	closeTest(t, db)
	edit(t, path, func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketBoxes).Put([]byte(ids[1]), []byte("{"))
	})
	db = openTest(t, path, Options{})
	has(ids[2], ids[1]) // until somebody deletes the sandbox
	if err := db.Delete(ctx, ids[1]); err != nil {
		t.Fatal(err)
	}
	has(ids[2])
	closeTest(t, db)
	db = openTest(t, path, Options{})
	has(ids[2])
}

// TestKinds: the authority of a sandbox is there without a vault, and each is put, edited
// and deleted without the other.
func TestKinds(t *testing.T) {
	path, ctx := newPath(t), t.Context()
	db := openTest(t, path, Options{})
	const id = "daaaaaaaaaaa"
	insert(t, db, id, "")
	none, vault, authority := record.Secret{}, vaultOf(id, "vault"), authorityOf(id, "authority")
	has := func(wantAuthority, wantVault record.Secret) {
		t.Helper()
		for range 2 {
			hasVault(t, db, id, wantVault)
			got, ok, err := db.Secret(ctx, id, record.Authority)
			if err != nil || ok != (wantAuthority.Sandbox != "") || !reflect.DeepEqual(got, wantAuthority) {
				t.Errorf("the authority is %+v, %v, %v; want %+v", got, ok, err, wantAuthority)
			}
			closeTest(t, db)
			db = openTest(t, path, Options{})
		}
	}
	mustPutSecret(t, db, authority, none)
	has(authority, none)
	wants(t, db.PutSecret(ctx, authority, none), errs.Exists, "has its authority already")
	wants(t, db.PutSecret(ctx, vault, authority), errs.NotFound, "has no vault")
	mustPutSecret(t, db, vault, none)
	wants(t, db.PutSecret(ctx, vaultOf(id, "x"), authority), errs.WrongState, "the vault of")
	has(authority, vault)
	if err := db.DeleteSecret(ctx, id, record.Vault); err != nil {
		t.Fatal(err)
	}
	has(authority, none)
	wants(t, db.DeleteSecret(ctx, id, record.Vault), errs.NotFound, "has no vault")
	mustPutSecret(t, db, vault, none)
	if err := db.DeleteSecret(ctx, id, record.Authority); err != nil {
		t.Fatal(err)
	}
	has(none, vault)
	if vault.Same(authorityOf(id, "vault")) {
		t.Error("a vault is the same as an authority")
	}
}

// TestVaultUnreadable: a record that a disk has changed is kept, told and can be deleted;
// the others are as before.
func TestVaultUnreadable(t *testing.T) {
	path, ctx := newPath(t), t.Context()
	db := openTest(t, path, Options{})
	good := vaultOf("daaaaaaaaaaa", "good")
	insert(t, db, good.Sandbox, "")
	mustPutSecret(t, db, good, record.Secret{})
	closeTest(t, db)
	other, _ := json.Marshal(good)
	texts := map[string]string{
		"dbbbbbbbbbbb": "{", "dccccccccccc": string(other),
		"ddddddddddd2": `{"sandbox":"ddddddddddd2","kind":"vault","sealed":"!"}`,
		"deeeeeeeeeee": `{"sandbox":"deeeeeeeeeee","kind":"authority","sealed":""}`,
	}
	for id, text := range texts {
		db = openTest(t, path, Options{})
		insert(t, db, id, "")
		closeTest(t, db)
		edit(t, path, func(tx *bbolt.Tx) error { return tx.Bucket(bucketSecrets).Put([]byte(id+"/vault"), []byte(text)) })
	}
	var told bytes.Buffer
	db = openTest(t, path, Options{Log: slog.New(slog.NewTextHandler(&told, nil))})
	if _, bad, err := db.Secrets(ctx); err != nil || len(bad) != len(texts) {
		t.Fatalf("unreadable: %v, %v", bad, err)
	}
	for id := range texts {
		_, ok, err := db.Secret(ctx, id, record.Vault)
		if ok || !strings.Contains(told.String(), "secret="+id+"/vault") {
			t.Errorf("%s: %v; the log has\n%s", id, ok, told.String())
		}
		wants(t, err, errs.Internal, "delete the vault, and set it again")
		wants(t, db.PutSecret(ctx, vaultOf(id, "x"), record.Secret{}), errs.Internal, "cannot be read")
		if err := db.DeleteSecret(ctx, id, record.Vault); err != nil {
			t.Fatal(err)
		}
		mustPutSecret(t, db, vaultOf(id, "x"), record.Secret{})
	}
	hasVault(t, db, good.Sandbox, good)
	// No client deletes an authority. One that is unreadable is no harm to a good vault; as
	// with every record, a copy of the file is no backup then, and the error says why.
	closeTest(t, db)
	edit(t, path, func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketSecrets).Put([]byte(good.Sandbox+"/authority"), []byte("{"))
	})
	if _, err := Examine(path); err == nil || !strings.Contains(err.Error(), "restart the sandbox, which gives it a new one") {
		t.Errorf("examined: %v", err)
	}
	db = openTest(t, path, Options{})
	hasVault(t, db, good.Sandbox, good)
	_, _, err := db.Secret(ctx, good.Sandbox, record.Authority)
	wants(t, err, errs.Internal, "restart the sandbox, which gives it a new one")
	if err := db.Delete(ctx, good.Sandbox); err != nil {
		t.Fatal(err)
	}
	if _, bad, err := db.Secrets(ctx); err != nil || len(bad) > 0 {
		t.Errorf("unreadable after the deletion: %v, %v", bad, err)
	}
}

// TestVaultBytes: one is bounded, and so are all; what does not fit changes nothing.
func TestVaultBytes(t *testing.T) {
	ctx := t.Context()
	db := openTest(t, filepath.Join(fast(t), "sandboxd.db"), Options{Reserve: -1})
	put := func(n, size int) error {
		id := fmt.Sprintf("d%011d", n)
		if _, ok, _ := db.Get(ctx, id); !ok {
			insert(t, db, id, "")
		}
		was, _, _ := db.Secret(ctx, id, record.Vault)
		return db.PutSecret(ctx, record.Secret{Sandbox: id, Kind: record.Vault, Sealed: append(make([]byte, size-1), byte(size))}, was)
	}
	wants(t, put(0, record.MaxSecretBytes+1), errs.Invalid, "takes 1048577 bytes, sealed, and may take 1048576") // a retry is of no use
	hasVault(t, db, "d00000000000", record.Secret{})
	n := 0
	for ; n < 100; n++ {
		if err := put(n, record.MaxSecretBytes); err != nil {
			wants(t, err, errs.Exhausted, "all secrets of this host may take 64 MiB")
			break
		}
	}
	if n != 47 { // of 4/3 MiB each
		t.Errorf("%d vaults of the largest size fit", n)
	}
	for _, err := range []error{put(0, record.MaxSecretBytes), put(1, 10), put(n, 1<<10)} { // a large one may be replaced
		if err != nil {
			t.Error(err)
		}
	}
}

// TestVaultRace: of editors that all have read the same, one changes it.
func TestVaultRace(t *testing.T) {
	db := openTest(t, newPath(t), Options{})
	insert(t, db, "daaaaaaaaaaa", "")
	was := vaultOf("daaaaaaaaaaa", "first")
	mustPutSecret(t, db, was, record.Secret{})
	var (
		wg   sync.WaitGroup
		errs [8]error
	)
	for i := range errs {
		wg.Go(func() { errs[i] = db.PutSecret(t.Context(), vaultOf("daaaaaaaaaaa", fmt.Sprint(i)), was) })
	}
	wg.Wait()
	won := slices.Index(errs[:], nil)
	if won < 0 {
		t.Fatalf("all failed: %v", errs[0])
	}
	hasVault(t, db, "daaaaaaaaaaa", vaultOf("daaaaaaaaaaa", fmt.Sprint(won)))
	for i, err := range errs {
		if i != won && (err == nil || !strings.Contains(err.Error(), "changed meanwhile")) {
			t.Errorf("editor %d: %v, and %d has changed it", i, err, won)
		}
	}
}

// TestUpgradeVaults: the states of releases before have no vaults, and take them.
func TestUpgradeVaults(t *testing.T) {
	for _, release := range []string{"release-0", "release-1", "release-2"} {
		path, want := readRelease(t, "testdata/"+release)
		db := openTest(t, path, Options{})
		mustPutSecret(t, db, vaultOf(want.Records[0].ID, "x"), record.Secret{})
		closeTest(t, db)
		if f, err := Examine(path); err != nil || f.Schema != Schema || f.Secrets != 1 {
			t.Errorf("%s: %+v, %v", release, f, err)
		}
	}
}

// TestUpgradeOfPolicies: so does the state of a sandboxd of schema 4, which then refuses
// the file, but not the copy that is kept.
func TestUpgradeOfPolicies(t *testing.T) {
	path, _ := readRelease(t, "testdata/release-2")
	before := func(path string) (*DB, error) { return openWith(path, Options{}, migrations[:4]) }
	edit(t, path, func(tx *bbolt.Tx) error { // as the fourth migration
		prepared := record.Record{ID: "dppppppppppp", State: record.Prepared}
		return errors.Join(migrations[3](tx), tx.Bucket(bucketMeta).Put(keySchema, []byte("4")), write(tx, prepared))
	})
	if err := MarkRestored(path, "a backup"); err != nil { // which releases prepared slots, without a bucket of vaults
		t.Fatal(err)
	}
	db := openTest(t, path, Options{})
	insert(t, db, "daaaaaaaaaaa", "")
	mustPutSecret(t, db, vaultOf("daaaaaaaaaaa", "x"), record.Secret{})
	closeTest(t, db)
	if _, err := before(path); err == nil || !strings.Contains(err.Error(), "newer sandboxd") {
		t.Errorf("the sandboxd of before: %v", err)
	}
	if f, err := Examine(path + ".v4"); err != nil || f.Schema != 4 || f.Secrets != 0 {
		t.Errorf("kept: %+v, %v", f, err)
	}
}

// TestVaultsOfBackup: a copy of the file has the vaults, and says which keys open them.
func TestVaultsOfBackup(t *testing.T) {
	dir := t.TempDir()
	keys := []*sealed.Key{keyFile(t), keyFile(t)}
	db := openTest(t, newPath(t), Options{})
	for i, id := range []string{"daaaaaaaaaaa", "dbbbbbbbbbbb", "dccccccccccc"} {
		insert(t, db, id, "")
		v := record.Secret{Sandbox: id, Kind: record.Vault}
		v.Sealed = keys[i%2].Seal(v.Name(), []byte("a secret"))
		mustPutSecret(t, db, v, record.Secret{})
	}
	insert(t, db, "dddddddddddd", "")
	mustPutSecret(t, db, vaultOf("dddddddddddd", "no key has sealed this"), record.Secret{})
	path := filepath.Join(dir, "copy.db")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Backup(f); err != nil {
		t.Fatal(err)
	}
	f.Close()
	want := []string{keys[0].ID(), keys[1].ID()}
	slices.Sort(want)
	if f, err := Examine(path); err != nil || f.Secrets != 4 || !slices.Equal(f.SecretKeys, want) {
		t.Errorf("%+v, %v; want keys %v", f, err, want)
	}
	if err := MarkRestored(path, "a backup"); err != nil {
		t.Fatal(err)
	}
	restored := openTest(t, path, Options{})
	all, _, _ := db.Secrets(t.Context())
	if got, bad, err := restored.Secrets(t.Context()); err != nil || len(bad) > 0 || len(got) != 4 || !reflect.DeepEqual(got, all) {
		t.Errorf("restored %+v, %v, %v", got, bad, err)
	}
}

func keyFile(t *testing.T) *sealed.Key {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	k, err := sealed.Open("", filepath.Join(dir, "sandboxd.key"), true)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestNoPlaintext writes, edits and deletes vaults, and looks for what was in them in all
// bytes of the file, of a backup and of a compacted copy. What is sealed is found, also
// where it was deleted: so what is not found is not there.
func TestNoPlaintext(t *testing.T) {
	path, key := newPath(t), keyFile(t)
	db := openTest(t, path, Options{})
	const id = "daaaaaaaaaaa"
	insert(t, db, id, "")
	var secrets []string
	var was record.Secret
	put := func(v record.Secret) {
		mustPutSecret(t, db, v, was)
		was = v
	}
	for n := range 20 { // of some pages each, so that pages become free
		secret := fmt.Sprintf("sk-live-%d-", n) + strings.Repeat(fmt.Sprintf("%07d", n*7919), 1000)
		secrets = append(secrets, secret)
		v := record.Secret{Sandbox: id, Kind: record.Vault}
		v.Sealed = key.Seal(v.Name(), []byte(secret))
		put(v)
	}
	last := was.Sealed
	if err := db.DeleteSecret(t.Context(), id, record.Vault); err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(t.TempDir(), "backup")
	f, err := os.Create(copied)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Backup(f); err != nil {
		t.Fatal(err)
	}
	f.Close()
	compact := filepath.Join(t.TempDir(), "compact")
	dst, err := bbolt.Open(compact, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(bbolt.Compact(dst, db.bolt, 0), dst.Close()); err != nil {
		t.Fatal(err)
	}
	closeTest(t, db)
	for _, file := range []string{path, copied, compact} {
		text, err := os.ReadFile(file)
		if err != nil || len(text) == 0 {
			t.Fatal(err)
		}
		for _, secret := range secrets {
			if form := foundIn(text, secret[:24]); form != "" {
				t.Errorf("%s has a secret, %s", filepath.Base(file), form)
			}
		}
		if file == path && foundIn(text, string(last[100:124])) == "" {
			t.Error("what is sealed of the deleted vault is not found: then a secret would not be, either")
		}
	}
	// The search finds a secret that is not sealed.
	db = openTest(t, path, Options{})
	insert(t, db, "dbbbbbbbbbbb", "")
	mustPutSecret(t, db, vaultOf("dbbbbbbbbbbb", secrets[3]), record.Secret{})
	closeTest(t, db)
	if text, err := os.ReadFile(path); err != nil || foundIn(text, secrets[3][:24]) == "" {
		t.Errorf("a secret that is not sealed is not found: %v", err)
	}
}

// foundIn says in which form text has a secret; "": in none.
func foundIn(text []byte, secret string) string {
	forms := map[string]string{"as it is": secret, "in hex": hex.EncodeToString([]byte(secret))}
	for skip := range 3 { // base64 has three forms, by where it begins
		whole := base64.RawStdEncoding.EncodeToString([]byte(strings.Repeat("\x00", skip) + secret))
		forms[fmt.Sprintf("in base64, %d", skip)] = whole[4 : len(whole)-4]
	}
	for how, form := range forms {
		if bytes.Contains(text, []byte(form)) {
			return how
		}
	}
	return ""
}
