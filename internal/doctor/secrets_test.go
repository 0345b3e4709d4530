package doctor

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
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
		if f.Status != status || (status == Fail || status == Warn) != (f.Mend != "") || f.Fixable() {
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
	// It may be the credential of a service that does not run.
	wants("no key", Warn, file+" is missing", "the state has 1 secret", "if the service has the key", "put back your copy")
	t.Setenv("CREDENTIALS_DIRECTORY", t.TempDir())
	wants("no key, as a service", Fail, file+" is missing", "the state has 1 secret", "put back your copy")
	t.Setenv("CREDENTIALS_DIRECTORY", "")
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

	state := filepath.Join(h.cfg.StateDir, "sandboxd.db")
	b, err := os.ReadFile(state)
	if err == nil {
		err = os.WriteFile(state, bytes.ReplaceAll(b, []byte(`"kind":"vault"`), []byte(`"kind":"VAULT"`)), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	wants("a record that cannot be read", Fail, "the record of the vault of sandbox "+r.ID+" cannot be read", "what the error says")
}

// TestSecretsKeyBesideDaemon: a daemon that runs has read the key when it started. What it says of
// its state and its keys counts.
func TestSecretsKeyBesideDaemon(t *testing.T) {
	h := newTree(t, nil)
	h.cfg.StateDir = t.TempDir()
	h.cfg.Listen.Socket = filepath.Join(h.cfg.StateDir, "socket")
	key, err := sealed.Open("", filepath.Join(h.cfg.StateDir, sealed.Credential), true)
	if err != nil {
		t.Fatal(err)
	}
	facts := store.Facts{Secrets: 1, SecretKeys: key.IDs()}
	var keys []string
	var failed error
	ln, err := net.Listen("unix", h.cfg.Listen.Socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var err error
		switch {
		case strings.HasSuffix(r.URL.Path, "/system/info"):
			err = json.NewEncoder(w).Encode(wire.SystemInfo{SecretKeys: keys})
		case failed != nil:
			status, body := httperr.Body(failed, "the-request")
			w.WriteHeader(status)
			err = json.NewEncoder(w).Encode(body)
		default:
			err = backup.Write(w, backup.Manifest{State: facts}, strings.NewReader("state"))
		}
		if err != nil {
			t.Error(err)
		}
	})}
	go srv.Serve(ln) //nolint:errcheck // ends with the test
	wants := func(what string, status Status, says ...string) {
		t.Helper()
		f := h.secretsKey(t.Context(), os.Getpid())
		for _, s := range says {
			if !strings.Contains(f.Detail+"\n"+f.Mend, s) {
				t.Errorf("%s: %+v has no %q", what, f, s)
			}
		}
		if f.Status != status || (status == Fail) != (f.Mend != "") {
			t.Errorf("%s: %+v, want %s", what, f, status)
		}
	}
	wants("a daemon of an older release", OK, "all 1 secret")
	keys = key.IDs()
	wants("a daemon with the key", OK, "all 1 secret")
	keys = []string{"0123456789abcdef"}
	wants("a daemon with another key", Fail, "started without them", "restart sandboxd")
	keys = []string{}
	wants("a daemon without a key", Fail, "started without them", "restart sandboxd")
	facts = store.Facts{}
	wants("a daemon without a key, and no secret", Fail, "started without them", "restart sandboxd")
	failed = errors.New("a record cannot be read")
	wants("a record that cannot be read", Fail, "ask the daemon", "the log of sandboxd")
	failed = errs.New(errs.Unavailable, "no space is left")
	wants("a full disk", Skipped, "no space is left")
	srv.Close()
	wants("a daemon that does not answer", Skipped, "ask the daemon")
}
