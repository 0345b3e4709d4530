package e2e_test

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/test/internet"
)

// vaultStories are what a vault does, beside putting one secret into one header (TestSecrets).
var vaultStories = []struct {
	name string
	tell func(*lab, *internet.Internet)
}{
	{"Places", (*lab).secretPlaces},
	{"Rotation", (*lab).secretRotates},
	{"Echo", (*lab).secretEchoed},
	{"Misplaced", (*lab).placeholderMisplaced},
	{"Environment", (*lab).placeholderInEnvironment},
	{"Nowhere", (*lab).secretIsNowhere},
	{"Fork", (*lab).secretForked},
}

// TestVault tells the stories of vaults.
func TestVault(t *testing.T) {
	in, h := secretsHost(t)
	daemontest.Image(t, h.Daemon, "python")
	for _, s := range vaultStories {
		for _, runtime := range runtimes {
			if !chosen(runtime, s.name) {
				continue
			}
			t.Run(s.name+"/"+runtime, func(t *testing.T) {
				l := &lab{host: h, T: t, runtime: runtime}
				defer h.deleteAll(t)
				in.Kept() // of the story before
				s.tell(l, in)
			})
		}
	}
	t.Run("Masked", func(t *testing.T) {
		h.setting(t, "egress", "mask_secrets = true")
		for _, runtime := range runtimes {
			if !chosen(runtime, "Masked") {
				continue
			}
			l := &lab{host: h, T: t, runtime: runtime}
			l.secretMasked(in)
			h.deleteAll(t)
		}
	})
}

// withVault makes a sandbox that reaches the hosts of the stories, and gives it secrets, by name.
func (l *lab) withVault(secrets ...string) (id string) {
	l.Helper()
	id = l.make("python", "--credential-proxy", "--allow", internet.VaultHost, "--allow", internet.ModelHost)
	for _, name := range secrets {
		l.setSecret(id, name, valueOf(name))
	}
	return id
}

func (l *lab) setSecret(id, name, value string, flags ...string) {
	l.Helper()
	args := append([]string{"secret", "set", id, name}, flags...)
	if r := l.feed(strings.NewReader(value), args...); r.code != 0 || strings.Contains(r.out+r.errout, value) {
		l.Fatalf("sandboxctl %q: %d, %q, %q", args, r.code, r.out, r.errout)
	}
}

// valueOf is the value of a secret of these stories.
func valueOf(name string) string { return internet.Secret + "-" + name }

// asks runs curl in a sandbox, which must succeed, and returns the request that came to VaultHost.
func (l *lab) asks(in *internet.Internet, id, path string, args ...string) internet.Kept {
	l.Helper()
	l.ok(slices.Concat([]string{"exec", id, "--", "curl", "-sSf", "-o", "/dev/null", "--max-time", "30"}, args,
		[]string{"https://" + internet.VaultHost + path})...)
	came := in.Kept()
	if len(came) != 1 {
		l.Fatalf("%s: %d requests came", path, len(came))
	}
	return came[0]
}

// secretPlaces: a secret stands where its binding puts it, in headers, path, query and body.
func (l *lab) secretPlaces(in *internet.Internet) {
	id := l.withVault("one", "two")
	bind := func(name, path string, args ...string) {
		l.ok(append([]string{"secret", "bind", id, name, "--host", internet.VaultHost, "--path", path}, args...)...)
	}
	bind("headers", "/headers", "--header", "X-One=one", "--header", "X-Two=two")
	for _, place := range []string{"path", "query", "header", "body"} {
		bind(place, "/"+place+"/*", "--credential", "one", "--substitute", place)
	}
	bind("several", "/several/*", "--credential", "two", "--substitute", "path,body", "--placeholder", "{two}")
	got := l.asks(in, id, "/headers", "-H", "X-Two: mine", "-H", "x_two: mine", "-H", "X-Other: __one__").Header
	if got.Get("X-One") != valueOf("one") || !slices.Equal(got["X-Two"], []string{valueOf("two")}) || got.Get("X_two") != "" ||
		got.Get("X-Other") != "__one__" {
		l.Errorf("headers: %v", got)
	}
	if got := l.asks(in, id, "/path/__one__/x?k=__one__"); got.Path != "/path/"+valueOf("one")+"/x" || got.Query != "k=__one__" {
		l.Errorf("path: %+v", got)
	}
	if got := l.asks(in, id, "/query/__one__?k=__one__&l=2"); got.Path != "/query/__one__" || got.Query != "k="+valueOf("one")+"&l=2" {
		l.Errorf("query: %+v", got)
	}
	if got := l.asks(in, id, "/header/x", "-H", "X-Any: <__one__>"); got.Header.Get("X-Any") != "<"+valueOf("one")+">" {
		l.Errorf("header: %v", got.Header)
	}
	if got := l.asks(in, id, "/body/x", "-d", "a=__one__&b=__one__"); got.Body != "a="+valueOf("one")+"&b="+valueOf("one") {
		l.Errorf("body: %q", got.Body)
	}
	if got := l.asks(in, id, "/several/{two}", "-g", "-d", "{two}"); got.Path != "/several/"+valueOf("two") ||
		got.Body != valueOf("two") {
		l.Errorf("several places: %+v", got)
	}
	if got := l.asks(in, id, "/elsewhere", "-H", "X-One: mine", "-d", "__one__"); got.Header.Get("X-One") != "mine" ||
		got.Body != "__one__" {
		l.Errorf("a path that no binding is for: %+v", got)
	}
}

// secretRotates: a value that the host keeps in a file, or that a command of the host makes, is read
// again when it is as old as it may be, without a change of the vault.
func (l *lab) secretRotates(in *internet.Internet) {
	file := filepath.Join(l.TempDir(), "value")
	write := func(value string) {
		l.Helper()
		next := file + ".next" // as services renew a file
		if err := errors.Join(os.WriteFile(next, []byte(value+"\n"), 0o600), os.Rename(next, file)); err != nil {
			l.Fatal(err)
		}
	}
	write(valueOf("first"))
	id := l.withVault()
	l.ok("secret", "set", id, "file", "--from-file", file, "--cache", "0s")
	l.ok("secret", "set", id, "command", "--from-command", "--cache", "0s", "--", "/bin/cat", file)
	l.ok("secret", "set", id, "day", "--from-file", file, "--cache", "24h")
	for _, name := range []string{"file", "command", "day"} {
		l.ok("secret", "bind", id, name, "--credential", name, "--host", internet.VaultHost, "--path", "/"+name)
	}
	wants := func(values ...string) {
		l.Helper()
		for i, name := range []string{"file", "command", "day"} {
			if got := l.asks(in, id, "/"+name).Header.Get("Authorization"); got != "Bearer "+valueOf(values[i]) {
				l.Errorf("%s: the server got %q, want %s", name, got, values[i])
			}
		}
	}
	wants("first", "first", "first")
	write(valueOf("second"))
	wants("second", "second", "first")
	if err := os.Remove(file); err != nil {
		l.Fatal(err)
	}
	r := l.ctl("exec", id, "--", "curl", "-sS", "https://"+internet.VaultHost+"/file")
	if came := in.Kept(); len(came) != 0 || !strings.Contains(r.out, "SANDBOX::") || strings.Contains(r.out, file) {
		l.Errorf("without the file: %q, %q; %d requests came", r.out, r.errout, len(came))
	}
	write(valueOf("third"))
	l.ok("secret", "set", id, "day", "--from-file", file, "--cache", "24h") // whoever cannot wait
	wants("third", "third", "third")
}

// tellsOf waits for an event of a sandbox.
func (l *lab) tellsOf(id, text string) {
	l.Helper()
	settles(l.T, func() error {
		if r := l.ctl("diagnostics", "events", id); !strings.Contains(r.out, text) {
			return fmt.Errorf("no event says %q: %.2000s", text, r.out)
		}
		return nil
	})
}

// secretEchoed: without masking, an answer that repeats a value is an event, which has no value.
func (l *lab) secretEchoed(*internet.Internet) {
	id := l.withVault("token")
	l.ok("secret", "bind", id, "echo", "--credential", "token", "--host", internet.VaultHost)
	out := l.ok("exec", id, "--", "curl", "-sSf", "https://"+internet.VaultHost+"/echo")
	if out != "you said Bearer "+valueOf("token")+"\n" {
		l.Errorf("the answer is %q", out)
	}
	l.tellsOf(id, "the value of token is in an answer of "+internet.VaultHost)
	if out := l.ok("diagnostics", "events", id); strings.Contains(out, valueOf("token")) {
		l.Errorf("an event has the value: %s", out)
	}
}

// secretMasked: with masking, the guest does not see a value in an answer.
func (l *lab) secretMasked(in *internet.Internet) {
	id := l.withVault("token")
	l.ok("secret", "bind", id, "echo", "--credential", "token", "--host", internet.VaultHost)
	out := l.ok("exec", id, "--", "curl", "-sSf", "https://"+internet.VaultHost+"/echo")
	if !strings.HasPrefix(out, "you said Bearer ") || strings.Contains(out, valueOf("token")) || len(in.Kept()) == 0 {
		l.Errorf("the answer is %q", out)
	}
	l.tellsOf(id, "the value of token is in an answer of "+internet.VaultHost)
}

// placeholders are those of a sandbox, by the name of the secret.
func (l *lab) placeholders(id string) map[string]string {
	l.Helper()
	v, err := l.api.Vault(id).Get(l.Context())
	if err != nil {
		l.Fatal(err)
	}
	all := map[string]string{}
	for _, c := range v.Credentials {
		all[c.Name] = c.Placeholder
	}
	return all
}

// placeholderMisplaced: a placeholder to a host, or in a place, to which its secret is not bound is
// denied, and the event says which.
func (l *lab) placeholderMisplaced(in *internet.Internet) {
	id := l.withVault("token", "other")
	l.ok("secret", "bind", id, "api", "--credential", "token", "--host", internet.VaultHost)
	l.ok("secret", "bind", id, "model", "--credential", "other", "--host", internet.ModelHost)
	token := l.placeholders(id)["token"]
	before := len(in.Requests(internet.ModelHost))
	for _, c := range []struct {
		event string
		args  []string
	}{
		{
			"the placeholder of token was sent to " + internet.ModelHost + ", where it is not bound",
			[]string{"-H", "Authorization: Bearer " + token, "https://" + internet.ModelHost + "/v1/messages"},
		},
		{
			"the placeholder of token is in the query of a request to " + internet.VaultHost + ", where it is not bound",
			[]string{"https://" + internet.VaultHost + "/?key=" + token},
		},
		{
			"the placeholder of token is in the body of a request to " + internet.VaultHost + ", where it is not bound",
			[]string{"-d", "key=" + token, "https://" + internet.VaultHost + "/"},
		},
		{"a placeholder that is none of this sandbox was sent to " + internet.VaultHost, []string{
			"-H", "X-Key: sbxph_ABCDEFGHIJKLMNOPQRSTUVWXYZ", "https://" + internet.VaultHost + "/",
		}},
	} {
		r := l.ctl(append([]string{"exec", id, "--", "curl", "-sS", "-w", "%{http_code}"}, c.args...)...)
		if !strings.HasSuffix(r.out, "403") || !strings.Contains(r.out, "SANDBOX::") || strings.Contains(r.out, valueOf("token")) {
			l.Errorf("curl %q: %q, %q", c.args, r.out, r.errout)
		}
		l.tellsOf(id, c.event)
	}
	if came, more := in.Kept(), len(in.Requests(internet.ModelHost))-before; len(came) != 0 || more != 0 {
		l.Errorf("%d requests came to %s and %d to %s", len(came), internet.VaultHost, more, internet.ModelHost)
	}
	if got := l.asks(in, id, "/", "-H", "Authorization: Bearer "+token).Header.Get("Authorization"); got != "Bearer "+valueOf("token") {
		l.Errorf("in its place, the server got %q", got)
	}
}

// placeholderInEnvironment: commands have a placeholder in a variable, from the next one on, so a
// program that takes its key from there sends it, and the server gets the secret.
func (l *lab) placeholderInEnvironment(in *internet.Internet) {
	id := l.withVault()
	env := func() string {
		l.Helper()
		return strings.TrimSpace(l.ok("exec", id, "--", "sh", "-c", "echo ${API_TOKEN-none}"))
	}
	if got := env(); got != "none" {
		l.Errorf("before, the variable is %q", got)
	}
	l.setSecret(id, "token", valueOf("first"), "--env", "API_TOKEN")
	l.ok("secret", "bind", id, "api", "--credential", "token", "--host", internet.VaultHost)
	placeholder := l.placeholders(id)["token"]
	sends := func(value string) {
		l.Helper()
		if got := env(); got != placeholder {
			l.Errorf("the variable is %q, and the placeholder %q", got, placeholder)
		}
		l.ok("exec", id, "--", "sh", "-c", `curl -sSf -o /dev/null -H "Authorization: Bearer $API_TOKEN" https://`+internet.VaultHost)
		if came := in.Kept(); len(came) != 1 || came[0].Header.Get("Authorization") != "Bearer "+valueOf(value) {
			l.Errorf("the server got %+v, want %s", came, value)
		}
	}
	sends("first")
	l.setSecret(id, "token", valueOf("second")) // which says nothing of the variable
	sends("second")
	l.ok("pause", id)
	l.setSecret(id, "token", valueOf("third"), "--env", "OTHER_TOKEN") // a guest that hangs keeps nobody waiting
	l.ok("resume", id)
	if got := env(); got != "none" {
		l.Errorf("a variable that was renamed is %q", got)
	}
	l.setSecret(id, "token", valueOf("third"), "--env", "API_TOKEN")
	l.Kill()
	l.Start()
	sends("third")
	l.ok("stop", id)
	l.ok("start", id)
	sends("third")
	l.wants(l.feed(strings.NewReader("x"), "secret", "set", id, "token", "--env", "MY TOKEN"), 125, "no name of a variable")
	l.wants(l.feed(strings.NewReader("x"), "secret", "set", id, "more", "--env", "API_TOKEN"), 125, "same env")
	sends("third")
	l.setSecret(id, "token", valueOf("third"), "--env", "")
	if got := env(); got != "none" {
		l.Errorf("a variable that was removed is %q", got)
	}
}

// secretForked: a copy uses the secrets of its source by placeholders of its own, also when the source has
// lost them, and no longer by those of the source. A policy that takes a bound host from it is refused.
func (l *lab) secretForked(in *internet.Internet) {
	id := l.withVault()
	l.setSecret(id, "token", valueOf("token"), "--env", "API_TOKEN")
	l.ok("secret", "bind", id, "api", "--credential", "token", "--host", internet.VaultHost)
	denies := []byte(`{"defaultAction":"deny","egress":[{"action":"allow","target":"` + internet.ModelHost + `"}]}`)
	if _, err := l.api.Policies().Put(l.Context(), "denies", denies); err != nil {
		l.Fatal(err)
	}
	defer l.ok("policy", "rm", "denies")
	for _, over := range []*wire.ForkOverrides{
		{NetworkPolicy: denies}, {Extensions: map[string]string{wire.ExtPolicy: "denies"}},
	} {
		r := wire.ForkRequest{Count: 1, Mode: forkModes[l.runtime], Timeout: new(int64(600)), Overrides: over}
		_, err := l.api.Snapshots().Fork(l.Context(), id, r, true)
		if says := "does not allow " + internet.VaultHost + `:443 of binding "api"`; !errs.Is(err, errs.Invalid) ||
			!strings.Contains(fmt.Sprint(err), says) {
			l.Errorf("a policy that denies a bound host, %+v: %v", over, err)
		}
	}
	if all, err := l.api.Snapshots().List(l.Context(), id); len(all) > 0 || err != nil {
		l.Errorf("a refused fork has left %+v, %v", all, err)
	}
	was, to := l.placeholders(id)["token"], l.fork(l.T, id, 1, forkModes[l.runtime]).Sandboxes[0].ID
	is := l.placeholders(to)["token"]
	if is == was || is == "" {
		l.Errorf("the copy has the placeholder %q, and the source %q", is, was)
	}
	l.ok("secret", "rm", "--all", id)
	sent := l.ok("exec", to, "--", "sh", "-c", `curl -sSf -o /dev/null -H "Authorization: Bearer $API_TOKEN" https://`+
		internet.VaultHost+` && echo $API_TOKEN`)
	if came := in.Kept(); len(came) != 1 || came[0].Header.Get("Authorization") != "Bearer "+valueOf("token") ||
		strings.TrimSpace(sent) != is {
		l.Errorf("the copy sent %q, and the server got %+v", sent, came)
	}
	said := l.ctl("exec", to, "--", "curl", "-sS", "-w", "%{http_code}", "-H", "Authorization: Bearer "+was, "https://"+internet.VaultHost)
	if !strings.HasSuffix(said.out, "403") || !strings.Contains(said.out, "SANDBOX::") || len(in.Kept()) != 0 {
		l.Errorf("the placeholder of the source: %q, %q", said.out, said.errout)
	}
	l.tellsOf(to, "a placeholder that is none of this sandbox was sent to "+internet.VaultHost)
}

// secretIsNowhere: what leaves the host for others, or stays on its disk, has no value, and neither
// the daemon nor the child that has values of the sandbox can leave them in a core dump.
func (l *lab) secretIsNowhere(in *internet.Internet) {
	value := valueOf("token")
	id := l.withVault("token")
	l.ok("secret", "bind", id, "api", "--credential", "token", "--host", internet.VaultHost)
	l.asks(in, id, "/") // the child has it now
	l.ok("exec", id, "--", "sh", "-c", "curl -sS https://"+internet.VaultHost+"/nope >/root/answer")
	has := func(what string, text []byte) {
		l.Helper()
		for _, form := range []string{value, base64.StdEncoding.EncodeToString([]byte("Bearer " + value)), "s3cr3t-of-the-test"} {
			if strings.Contains(string(text), form) {
				l.Errorf("%s has the value", what)
			}
		}
	}
	bundle := filepath.Join(l.TempDir(), "bundle.tar.gz")
	if out, err := exec.CommandContext(l.Context(), daemontest.Bin("sandboxd"), "support-bundle", "--config", l.Config,
		"-o", bundle).CombinedOutput(); err != nil {
		l.Fatalf("%v\n%s", err, out)
	}
	for what, file := range map[string]string{"a support bundle": bundle, "a backup": l.backup(l.T)} {
		text, err := exec.CommandContext(l.Context(), "tar", "-xzOf", file).Output()
		if err != nil || len(text) == 0 {
			l.Fatalf("%s: %d bytes, %v", what, len(text), err)
		}
		has(what, text)
		if file == bundle && !strings.Contains(string(text), "it has the keys of all ") { // of the doctor
			l.Errorf("the doctor does not find the key of the secrets: %.5000s", text)
		}
	}
	snapshot := strings.TrimSpace(l.ok("snapshot", "create", id))
	of := l.make("--from", snapshot, "--credential-proxy", "--allow", internet.VaultHost)
	if v, err := l.api.Vault(of).Get(l.Context()); !client.NoVault(err) {
		l.Errorf("a sandbox of a snapshot has the vault %+v, %v", v, err)
	}
	has("a sandbox of a snapshot", []byte(l.ok("exec", of, "--", "sh", "-c",
		"cat /root/answer; env; find /root /tmp /etc /opt /var/lib/opensandbox /run -xdev -type f -exec cat {} + 2>/dev/null || true")))
	l.ok("rm", "-f", of)
	l.ok("snapshot", "rm", snapshot)
	// Its files, but for those of images, and for the one that holds the pool.
	out, err := exec.CommandContext(l.Context(), "grep", "-rlaFs", "--exclude=*.img", "--exclude-dir=layers", value, l.StateDir,
		l.Instance.RunDir()).Output()
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() > 2 || len(out) > 0 {
		l.Errorf("files with the value: %s, %v", out, err)
	}
	has("the log", []byte(l.Daemon.Log()))
	l.leaveNoCore()
}

// leaveNoCore looks at the limits of the daemon and of its children.
func (l *lab) leaveNoCore() {
	l.Helper()
	pids := map[int]string{l.Pid(): "the daemon"}
	settles(l.T, func() error {
		for _, pid := range l.decrypting() {
			pids[pid] = "a child that decrypts"
		}
		if len(pids) == 1 {
			return errors.New("no child of the daemon decrypts")
		}
		return nil
	})
	for pid, what := range pids {
		var core unix.Rlimit
		if err := unix.Prlimit(pid, unix.RLIMIT_CORE, nil, &core); err != nil || core != (unix.Rlimit{Cur: 1, Max: 1}) {
			l.Errorf("%s may leave a core of %+v, %v; at 1 byte there is neither a file nor a handler", what, core, err)
		}
	}
}
