package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// TestSecretsKey: the doctor finds a key that is missing, is another one, or is not for root alone,
// and says what to do. It makes none and changes none.
func TestSecretsKey(t *testing.T) {
	t.Setenv("CREDENTIALS_DIRECTORY", "")
	h := newTree(t, nil)
	h.cfg.StateDir = t.TempDir()
	h.cfg.Instance = 'z' // of which no daemon runs
	file := filepath.Join(h.cfg.StateDir, sealed.Credential)
	wants := func(what string, status Status, says ...string) {
		t.Helper()
		f := find(t, "secrets-key").ask(t.Context(), h)
		for _, s := range says {
			if !strings.Contains(f.Detail+"\n"+f.Mend, s) {
				t.Errorf("%s: %+v has no %q", what, f, s)
			}
		}
		if f.Status != status || (status == Fail) != (f.Mend != "") || f.Fixable() {
			t.Errorf("%s: %+v, want %s", what, f, status)
		}
	}
	wants("before the first start", OK, "there is none yet")
	if _, err := os.Stat(file); err == nil {
		t.Error("the doctor has made a key")
	}
	key, err := sealed.Open("", file, true)
	if err != nil {
		t.Fatal(err)
	}
	wants("no secret", OK, file, "all 0 secrets")

	db, err := store.Open(filepath.Join(h.cfg.StateDir, "sandboxd.db"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	r := &record.Record{ID: "zaaaaaaaaaaa", State: record.Creating}
	s := record.Secret{Sandbox: r.ID, Kind: record.Vault}
	s.Sealed = key.Seal(s.Name(), []byte("{}"))
	if err := db.Insert(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if err := db.PutSecret(t.Context(), s, record.Secret{}); err != nil {
		t.Fatal(err)
	}
	wants("a state that somebody has open", Skipped, "is locked")
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	wants("one secret", OK, "all 1 secret")

	if err := os.Chmod(file, 0o644); err != nil {
		t.Fatal(err)
	}
	wants("a key that others read", Fail, "can be read by others", "chmod 0600 "+file)
	if err := os.Chmod(file, 0o600); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(file, 12345, 0); err != nil {
			t.Fatal(err)
		}
		wants("a key of another user", Fail, "belongs to user 12345", "chown root:root "+file)
		if err := os.Chown(file, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	own := filepath.Join(t.TempDir(), "copy")
	if err := os.Rename(file, own); err != nil {
		t.Fatal(err)
	}
	wants("no key", Fail, file+" is missing", "the state has 1 secret", "put back your copy")
	if _, err := sealed.Open("", file, true); err != nil {
		t.Fatal(err)
	}
	wants("another key", Fail, "has no key "+key.ID(), "add the line of that key")
	if err := os.WriteFile(file, []byte("hunter2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	wants("no key in the file", Fail, "line 1")
	if f := find(t, "secrets-key").ask(t.Context(), h); strings.Contains(f.Detail+f.Mend, "hunter2") {
		t.Errorf("%+v quotes the file", f)
	}

	// A credential of the service comes first.
	dir := t.TempDir()
	if err := os.Rename(own, filepath.Join(dir, sealed.Credential)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CREDENTIALS_DIRECTORY", dir)
	wants("a credential", OK, dir, "all 1 secret")
}
