package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// vaultDaemon plays a daemon with sandbox lab, whose vault is a real one (pkg/egress/vault).
type vaultDaemon struct {
	mu     sync.Mutex
	v      *vault.Vault
	asked  []string            // method and body of each change
	before func(*http.Request) // each answer, called without the lock; may be nil
}

func newVaultDaemon(t *testing.T) (*daemon, *vaultDaemon) {
	f := &vaultDaemon{}
	s := httptest.NewServer(f)
	t.Cleanup(s.Close)
	return &daemon{url: s.URL}, f
}

func (f *vaultDaemon) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	f.mu.Lock()
	before := f.before
	f.mu.Unlock()
	if before != nil {
		before(r)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	fail := func(status int, code, text string) {
		w.WriteHeader(status)
		json.NewEncoder(w).Encode(wire.Error{Code: code, Message: text}) //nolint:errcheck // the test sees what is missing
	}
	if r.URL.Path != "/v1/sandboxes/lab/credential-vault" {
		fail(http.StatusNotFound, "DOCKER::SANDBOX_NOT_FOUND", "Sandbox not found")
		return
	}
	if r.Method != http.MethodGet {
		f.asked = append(f.asked, strings.TrimSpace(r.Method+" "+string(body)))
	}
	if r.Method != http.MethodPost && f.v == nil {
		fail(http.StatusNotFound, wire.CodeNoVault, "no vault")
		return
	}
	next, err, status := f.v, error(nil), http.StatusOK
	switch r.Method {
	case http.MethodPost:
		if status = http.StatusCreated; f.v != nil {
			err = errs.New(errs.Exists, "there is one")
			break
		}
		next, err = vault.CreateTrusted(body)
	case http.MethodPatch:
		next, err = f.v.PatchTrusted(body)
	case http.MethodDelete:
		f.v = nil
		w.WriteHeader(http.StatusNoContent)
		return
	}
	switch {
	case errs.Is(err, errs.Exists):
		fail(http.StatusConflict, "SANDBOX::ALREADY_EXISTS", err.Error())
	case errs.Is(err, errs.WrongState):
		fail(http.StatusConflict, "SANDBOX::INVALID_STATE", err.Error())
	case err != nil:
		fail(http.StatusBadRequest, "SANDBOX::INVALID_PARAMETER", err.Error())
	default:
		f.v = next
		w.WriteHeader(status)
		st := f.v.State()
		for i, c := range st.Credentials {
			st.Credentials[i].Placeholder = "sbxph_of_" + c.Name
		}
		json.NewEncoder(w).Encode(spec.Vault(st, true)) //nolint:errcheck // the test sees what is missing
	}
}

// locked calls do while no request is answered.
func (f *vaultDaemon) locked(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

// value is that of a credential.
func (f *vaultDaemon) value(name string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.v == nil || f.v.Credential(name) == nil {
		return ""
	}
	return f.v.Credential(name).Source.Value.Reveal()
}

// runWith runs sandboxctl with this standard input.
func (d *daemon) runWith(t *testing.T, stdin string, args ...string) result {
	t.Helper()
	c := d.cmd(args...)
	var out, errout bytes.Buffer
	c.Stdout, c.Stderr, c.Stdin = &out, &errout, strings.NewReader(stdin)
	err := c.Run()
	if err != nil && c.ProcessState == nil {
		t.Fatal(err)
	}
	return result{c.ProcessState.ExitCode(), out.String(), errout.String()}
}

// TestSecret: the first secret makes the vault, another value replaces the first, bindings are
// added and replaced, and no output has a value.
func TestSecret(t *testing.T) {
	d, f := newVaultDaemon(t)
	ok := func(stdin, want string, args ...string) {
		t.Helper()
		r := d.runWith(t, stdin, append([]string{"secret"}, args...)...)
		if r.code != 0 || r.out != want || strings.Contains(r.out+r.errout, "s3cr3t") {
			t.Fatalf("%q: %+v, want %q", args, r, want)
		}
	}
	ok("", "SECRET   SOURCE   REVISION   ENV   PLACEHOLDER\n", "ls", "lab")
	ok("", "", "ls", "-q", "lab")
	ok("s3cr3t-one\n", "token\n", "set", "lab", "token")
	if got := f.value("token"); got != "s3cr3t-one" {
		t.Errorf("the value is %q: one line end is left out", got)
	}
	env := func() (name string) {
		f.locked(func() { name = f.v.Credential("token").Env })
		return name
	}
	ok("s3cr3t-one\n", "token\n", "set", "--env", "API_TOKEN", "lab", "token")
	if env() != "API_TOKEN" {
		t.Errorf("the variable is %q", env())
	}
	ok("s3cr3t\r\ntwo\r\n", "token\n", "set", "--file", "-", "lab", "token")
	if env() != "API_TOKEN" {
		t.Errorf("after another value, the variable is %q", env())
	}
	if got := f.value("token"); got != "s3cr3t\r\ntwo" {
		t.Errorf("replaced: %q", got)
	}
	file := filepath.Join(t.TempDir(), "value")
	if err := os.WriteFile(file, []byte("s3cr3t-three"), 0o600); err != nil {
		t.Fatal(err)
	}
	ok("not this", "token\n", "set", "--file", file, "lab", "token")
	if got := f.value("token"); got != "s3cr3t-three" {
		t.Errorf("of a file: %q", got)
	}
	ok("s3cr3t-three", "token\n", "set", "--env=", "lab", "token")
	if env() != "" {
		t.Errorf("a variable that was removed is %q", env())
	}
	ok("", "key\n", "set", "--from-file", "/etc/key", "--env", "MAPS_KEY", "lab", "key")
	ok("", "made\n", "set", "lab", "made", "--from-command", "--cache", "5m", "--", "/bin/new", "--for", "lab")
	var now *vault.Vault // it never changes: a change makes another
	f.locked(func() { now = f.v })
	if s := now.Credential("made").Source; s.Type != vault.Command || !slices.Equal(s.Argv, []string{"/bin/new", "--for", "lab"}) ||
		s.Cache.String() != "5m0s" {
		t.Errorf("of a command: %+v", s)
	}
	ok("", "api\n", "bind", "lab", "api", "--credential", "token", "--host", "api.example.com")
	ok("", "api\n", "bind", "lab", "api", "--credential", "token", "--host", "*.example.com,api.example.org", "--method", "GET",
		"--path", "/v1/*", "--header", "X-Key")
	ok("", "maps\n", "bind", "lab", "maps", "--credential", "key", "--host", "maps.example.net", "--scheme", "http", "--substitute",
		"query,path")
	ok("", "basic\n", "bind", "lab", "basic", "--credential", "made", "--host", "basic.example.net", "--basic")
	ok("", "two\n", "bind", "lab", "two", "--host", "two.example.net", "--header", "X-Key-Id=key", "--header", "x-key=made")
	ok("", "one\n", "bind", "lab", "one", "--host", "one.example.net", "--header", "X-Key", "--header", "X-Made=made",
		"--credential", "key")
	f.locked(func() { now = f.v })
	for i, want := range []string{"[{X-Key key} {X-Made made}]", "[{X-Key-Id key} {X-Key made}]"} {
		if got := fmt.Sprint(now.Bindings()[3+i].Auth.Headers); got != want {
			t.Errorf("headers %s, want %s", got, want)
		}
	}
	ok("", "one\ntwo\n", "unbind", "lab", "one", "two")
	ok("", strings.Join([]string{
		"SECRET   SOURCE    REVISION   ENV        PLACEHOLDER",
		"key      file      6          MAPS_KEY   sbxph_of_key",
		"made     command   7                     sbxph_of_made",
		"token    inline    5                     sbxph_of_token",
		"",
		"BINDING   SCHEMES   HOSTS                           METHODS                     PATHS   AUTH",
		"api       https     *.example.com,api.example.org   GET                         /v1/*   apiKey X-Key",
		"basic     https     basic.example.net               GET,POST,PUT,PATCH,DELETE   /*      basic",
		"maps      http      maps.example.net                GET,POST,PUT,PATCH,DELETE   /*      passthrough", "",
	}, "\n"), "ls", "lab")
	f.locked(func() { now = f.v })
	if s := now.Bindings()[2].Auth.Substitutions; len(s) != 1 || s[0].Placeholder != "__key__" || len(s[0].In) != 2 {
		t.Errorf("substitutions %+v", s)
	}
	ok("", "key\nmade\ntoken\n", "ls", "-q", "lab")
	if r := d.run(t, "secret", "ls", "-o", "json", "lab"); !strings.Contains(r.out, `"placeholder": "sbxph_of_key"`) ||
		!strings.Contains(r.out, `"bindings": [`) {
		t.Errorf("as JSON: %+v", r)
	}
	if r := d.run(t, "secret", "rm", "lab", "token"); r.code != 125 || !strings.Contains(r.errout, "change the binding first") {
		t.Errorf("rm of one that is bound: %+v", r)
	}
	if r := d.run(t, "secret", "unbind", "lab", "nope", "api"); r.code != 125 || r.out != "api\n" || !strings.Contains(r.errout, "nope") {
		t.Errorf("unbind: %+v", r)
	}
	ok("", "token\n", "rm", "lab", "token")
	ok("", "lab\n", "rm", "--all", "lab")
	if f.locked(func() { now = f.v }); now != nil {
		t.Error("there is a vault yet")
	}
	if r := d.run(t, "secret", "ls", "other"); r.code != 125 || !strings.Contains(r.errout, "Sandbox not found") {
		t.Errorf("no such sandbox: %+v", r)
	}
}

// TestSecretRace: somebody else makes the vault, and then changes it, at the worst moments.
func TestSecretRace(t *testing.T) {
	d, f := newVaultDaemon(t)
	other := func(text string) {
		f.mu.Lock()
		defer f.mu.Unlock()
		var err error
		if f.v == nil {
			f.v, err = vault.Create([]byte(text))
		} else {
			f.v, err = f.v.Patch([]byte(text))
		}
		if err != nil {
			t.Error(err)
		}
	}
	once := map[string]func(){
		"POST":  func() { other(`{"credentials":[{"name":"theirs","source":{"value":"x"}}]}`) },
		"PATCH": func() { other(`{"credentials":{"add":[{"name":"token","source":{"value":"x"}}]}}`) },
	}
	before := func(g func(*http.Request)) { f.locked(func() { f.before = g }) }
	before(func(r *http.Request) {
		var do func()
		f.locked(func() { do = once[r.Method]; delete(once, r.Method) })
		if do != nil {
			do()
		}
	})
	if r := d.runWith(t, "mine", "secret", "set", "lab", "token"); r.code != 0 || f.value("token") != "mine" || f.value("theirs") != "x" {
		t.Errorf("%+v; the value is %q", r, f.value("token"))
	}
	f.locked(func() {
		if len(once) != 0 || len(f.asked) != 3 || !strings.Contains(f.asked[2], `"replace"`) {
			t.Errorf("asked %q", f.asked)
		}
	})
	before(func(r *http.Request) { // and somebody who never stops
		if r.Method == http.MethodPatch {
			other(`{}`)
		}
	})
	if r := d.runWith(t, "mine", "secret", "set", "lab", "token"); r.code != 125 || !strings.Contains(r.errout, "read it again") {
		t.Errorf("%+v", r)
	}
}

// TestBadSecrets: what cannot work is refused before the daemon is asked, and no message repeats
// what may be a value.
func TestBadSecrets(t *testing.T) {
	d, f := newVaultDaemon(t)
	var asked atomic.Bool
	f.locked(func() { f.before = func(*http.Request) { asked.Store(true) } })
	file := filepath.Join(t.TempDir(), "large")
	if err := os.WriteFile(file, bytes.Repeat([]byte("s"), 64<<10+3), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, says := range map[string]string{
		"set lab token s3cr3t":                                              "not given as an argument",
		"set lab token -- s3cr3t":                                           "not given as an argument",
		"set lab":                                                           "usage",
		"set lab token --file ./none":                                       "./none",
		"set lab token --file " + file:                                      "64KiB",
		"set lab token --file /dev/null":                                    "is empty",
		"set lab token --file /bin/sh":                                      "64KiB",
		"set lab token --file x --from-file /y":                             "exclude each other",
		"set lab token --from-command":                                      "needs a command",
		"set lab token --cache 5m":                                          "--cache is for",
		"set lab token --from-file /y --cache 1.5s":                         "whole seconds",
		"bind lab api --host a.example.com":                                 "--credential is missing",
		"bind lab api --host a.example.com --header X --header Y=t":         "--credential is missing",
		"bind lab api --host a.example.com --header X=t --credential t":     "--credential has no use",
		"bind lab api --credential token":                                   "--host is missing",
		"bind lab api --credential t --host a.example.com --bearer --basic": "exclude each other",
		"bind lab api --credential t --host a.example.com --placeholder x":  "--placeholder is for",
		"bind lab": "usage", "rm lab": "usage", "rm --all lab token": "usage", "unbind lab": "usage", "ls": "usage",
	} {
		r := d.run(t, append([]string{"secret"}, strings.Fields(args)...)...)
		if r.code != 125 || !strings.Contains(r.errout, says) || strings.Contains(r.errout, "s3cr3t") || r.out != "" {
			t.Errorf("%s: %+v, want %q", args, r, says)
		}
	}
	if r := d.runWith(t, "\xff\xfe", "secret", "set", "lab", "token"); r.code != 125 || !strings.Contains(r.errout, "not UTF-8") {
		t.Errorf("binary: %+v", r)
	}
	if r := d.runWith(t, "\n", "secret", "set", "lab", "token"); r.code != 125 || !strings.Contains(r.errout, "is empty") {
		t.Errorf("a line end alone: %+v", r)
	}
	if asked.Load() {
		t.Error("the daemon was asked")
	}
}

// TestCompleteSecrets completes secrets and bindings of the sandbox that stands before.
func TestCompleteSecrets(t *testing.T) {
	t.Setenv("COMPLETION_LIMIT", "30s")
	d, f := newVaultDaemon(t)
	v, err := vault.Create([]byte(`{"credentials":[{"name":"token","source":{"value":"x"}}],` +
		`"bindings":[{"name":"api","match":{"hosts":["a.example.com"]},"auth":{"type":"bearer","credential":"token"}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	f.locked(func() { f.v = v })
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"secret", "rm", "lab", "t"}, []string{"token"}},
		{[]string{"secret", "set", "lab", ""}, []string{"token"}},
		{[]string{"secret", "unbind", "lab", ""}, []string{"api"}},
		{[]string{"secret", "unbind", "other", ""}, nil},
		{[]string{"secret", "rm", "lab", "token", ""}, nil},
	} {
		if got, directive := d.complete(t, c.args...); !slices.Equal(got, c.want) || directive != ":4" {
			t.Errorf("%q: %q (%s), want %q", c.args, got, directive, c.want)
		}
	}
}

// TestCredentialProxy: create asks for it, and else does not name it.
func TestCredentialProxy(t *testing.T) {
	d := newDaemon(t)
	for args, want := range map[string]bool{"create --credential-proxy python": true, "create python": false} {
		d.create = wire.CreateRequest{}
		if r := d.run(t, strings.Fields(args)...); r.code != 0 {
			t.Fatalf("%s: %+v", args, r)
		}
		if got := d.create.CredentialProxy; (got != nil) != want || want && !got.Enabled {
			t.Errorf("%s: %+v", args, got)
		}
	}
}
