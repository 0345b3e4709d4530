package e2e_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/test/internet"
)

// secretClients are programs that need a secret and are given none: the daemon puts it into
// their requests. Their scripts print internet.Word on the last line.
var secretClients = []struct {
	name, image, host string
	auth              []string // of `secret bind`
	script            string
	all               bool // its image is large: make test-all only
}{
	{"bearer", "python", internet.ModelHost, []string{"--bearer"}, askModel("/v1/chat/completions"), false},
	{"api-key", "python", internet.ModelHost, []string{"--header", "x-api-key"}, askModel("/v1/messages"), false},
	{
		"git-push", "python", internet.PushHost,
		[]string{"--basic"},
		`d=$(mktemp -d) && git clone --quiet https://` + internet.PushHost + `/` + internet.Package + `.git $d && cd $d &&
git -c user.name=agent -c user.email=agent@example.org commit --quiet --allow-empty -m more &&
git push --quiet origin HEAD:refs/heads/$(hostname)-$$ && cat word`, false,
	},
	{
		"pip", "python", internet.PrivateHost,
		[]string{"--basic"},
		// Where the files are, nothing is decrypted, and the guest knows no authority of it.
		`d=$(mktemp -d) && pip install --quiet --disable-pip-version-check --trusted-host ` + internet.PythonFiles +
			` --target $d --index-url https://` + internet.PrivateHost + `/simple ` + internet.Package + ` &&
PYTHONPATH=$d python3 -c 'import hello_story; print(hello_story.word)'`, false,
	},
	{
		"npm-publish", "code-interpreter", internet.PublishHost,
		[]string{"--bearer"},
		`d=$(mktemp -d) && cd $d && printf '{"name":"mine","version":"1.0.0"}' >package.json &&
echo '//` + internet.PublishHost + `/:_authToken=held-by-nobody' >.npmrc &&
npm publish --silent --registry https://` + internet.PublishHost + ` >&2 && echo ` + internet.Word, true,
	},
}

// askModel asks as the clients of models do, and joins the pieces of the answer.
func askModel(path string) string {
	return `python3 - <<'END'
import json, urllib.request
ask = json.dumps({"stream": True, "messages": [{"role": "user", "content": "` + internet.Word + `"}]}).encode()
r = urllib.request.Request("https://` + internet.ModelHost + path + `", ask, {"Content-Type": "application/json"})
said = [line[6:].strip() for line in urllib.request.urlopen(r, timeout=30) if line.startswith(b"data: ")]
assert said.pop() == b"[DONE]", said
print(*(json.loads(s)["delta"] for s in said))
END`
}

// secretsHost is a daemon whose sandboxes reach the Internet of a test, whose servers it
// trusts.
func secretsHost(t *testing.T) (*internet.Internet, host) {
	t.Helper()
	in := internet.New(t, daemontest.Instance.Pool()) // first: the daemon looks for uplinks when it starts
	roots := filepath.Join(t.TempDir(), "roots.pem")
	if err := os.WriteFile(roots, in.CA, 0o644); err != nil {
		t.Fatal(err)
	}
	return in, newHost(t, daemontest.Options{Config: []string{
		"[network]", fmt.Sprintf("upstreams = [%q]", internet.DNS), fmt.Sprintf("roots = %q", roots), "[egress]", "",
	}})
}

// bind gives a sandbox the secret of the test, for a host.
func (l *lab) bind(id, name, host string, auth ...string) {
	l.Helper()
	value := internet.Secret
	if auth[0] == "--basic" {
		value = internet.Basic
	}
	if r := l.feed(strings.NewReader(value+"\n"), "secret", "set", id, name); r.code != 0 || strings.Contains(r.out+r.errout, value) {
		l.Fatalf("secret set: %d, %q, %q", r.code, r.out, r.errout)
	}
	l.ok(append([]string{"secret", "bind", id, name, "--credential", name, "--host", host}, auth...)...)
}

// TestSecrets: programs of a guest use secrets that the guest does not have, unmodified, on
// the hosts that these are bound to; also after the daemon was killed, and after the sandbox
// was stopped and started.
func TestSecrets(t *testing.T) {
	in, h := secretsHost(t)
	for _, c := range secretClients {
		if c.all && !everything {
			continue
		}
		daemontest.Image(t, h.Daemon, c.image)
		for _, runtime := range runtimes {
			if !chosen(runtime, c.name) {
				continue
			}
			t.Run(c.name+"/"+runtime, func(t *testing.T) {
				l := &lab{host: h, T: t, runtime: runtime}
				defer h.deleteAll(t)
				id := l.make(c.image, "--memory", "1Gi", "--credential-proxy", "--allow", c.host, "--allow", internet.PythonFiles,
					"--allow", internet.GitHost)
				l.bind(id, c.name, c.host, c.auth...)
				l.clientWorks(id, c.script)
			})
		}
	}
	for _, runtime := range runtimes {
		t.Run("life/"+runtime, func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: runtime}
			defer h.deleteAll(t)
			l.secretLives(in)
		})
	}
}

func (l *lab) clientWorks(id, script string) {
	l.Helper()
	r := l.ctl("exec", id, "--", "sh", "-c", script)
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	if r.code != 0 || lines[len(lines)-1] != internet.Word {
		l.Errorf("exit status %d, %.2000q and %.2000q", r.code, r.out, r.errout)
	}
}

// secretLives follows one secret through the life of its sandbox.
func (l *lab) secretLives(in *internet.Internet) {
	id := l.make("python", "--credential-proxy", "--allow", internet.ModelHost, "--allow", internet.GitHost)
	l.bind(id, "model", internet.ModelHost, "--bearer")
	script := askModel("/v1/chat/completions")
	l.clientWorks(id, script)
	l.Kill()
	l.Start()
	l.clientWorks(id, script)
	l.ok("stop", id)
	l.ok("start", id)
	l.clientWorks(id, script)

	// A host that is not bound stays encrypted: its own certificate arrives, which the guest does not trust.
	l.wants(l.ctl("exec", id, "--", "curl", "-sS", "https://"+internet.GitHost), 60)
	// A server that the daemon cannot verify, or a destination that is not the host's, gets nothing.
	before := len(in.Requests(internet.ModelHost))
	elsewhere := internet.ModelHost + ":443:" + internet.Other.String()
	r := l.ctl("exec", id, "--", "curl", "-sS", "--resolve", elsewhere, "https://"+internet.ModelHost)
	if got := in.Requests(internet.ModelHost); len(got) != before {
		l.Errorf("an address that is not %s's got %+v; curl said %q, %q", internet.ModelHost, got[before:], r.out, r.errout)
	}

	l.holdsNoSecret(id)
	l.phantom(id, in)

	l.ok("secret", "unbind", id, "model")
	r = l.ctl("exec", id, "--", "sh", "-c", script)
	if r.code == 0 || !strings.Contains(r.errout, "401") && !strings.Contains(r.errout, "CERTIFICATE_VERIFY_FAILED") {
		l.Errorf("without a binding: %d, %q, %q", r.code, r.out, r.errout)
	}
}

// holdsNoSecret looks for the secret where it must not be.
func (l *lab) holdsNoSecret(id string) {
	l.Helper()
	for _, args := range [][]string{
		{"exec", id, "--", "sh", "-c", "env; cat /proc/[0-9]*/environ /proc/1/cmdline; find /root /tmp /etc /opt -type f -exec cat {} +"},
		{"inspect", id},
		{"secret", "ls", id},
		{"diagnostics", "events", id},
		{"egress", "get", id},
	} {
		if r := l.ctl(args...); strings.Contains(r.out+r.errout, internet.Secret) {
			l.Errorf("sandboxctl %q says the secret", args)
		}
	}
	if strings.Contains(l.Daemon.Log(), internet.Secret) {
		l.Error("the log of the daemon has the secret")
	}
	state, err := os.ReadFile(filepath.Join(l.StateDir, "sandboxd.db"))
	if err != nil || bytes.Contains(state, []byte(internet.Secret)) {
		l.Errorf("the state file has the secret, or cannot be read: %v", err)
	}
	if changed := l.ok("diff", id); strings.Contains(changed, "ca-certificates") || strings.Contains(changed, "mitmproxy") {
		l.Errorf("what makes the guest trust shows in its diff: %s", changed)
	}
}

// phantom sends what the guest may hold in the place of the secret.
func (l *lab) phantom(id string, in *internet.Internet) {
	l.Helper()
	var all struct {
		Credentials []struct{ Name, Placeholder string }
	}
	if err := json.Unmarshal([]byte(l.ok("secret", "ls", id, "-o", "json")), &all); err != nil || len(all.Credentials) != 1 ||
		all.Credentials[0].Placeholder == "" {
		l.Fatalf("secret ls -o json: %v, %+v", err, all)
	}
	placeholder := all.Credentials[0].Placeholder
	ask := func(host string) result {
		return l.ctl("exec", id, "--", "curl", "-sS", "-k", "-d", `{"messages":[{"content":"x"}]}`, "-H", "Authorization: Bearer "+placeholder,
			"https://"+host+"/v1/chat/completions")
	}
	if r := ask(internet.ModelHost); r.code != 0 || !strings.Contains(r.out, "[DONE]") {
		l.Errorf("a placeholder to its host: %d, %q, %q", r.code, r.out, r.errout)
	}
	other := l.make("python", "--credential-proxy", "--allow", internet.ModelHost)
	l.bind(other, "model", internet.ModelHost, "--bearer")
	r := l.ctl("exec", other, "--", "curl", "-sS", "-d", "{}", "-H", "Authorization: Bearer "+placeholder,
		"https://"+internet.ModelHost+"/v1/chat/completions")
	if !strings.Contains(r.out, "SANDBOX::") {
		l.Errorf("the placeholder of another sandbox: %d, %q, %q; want a refusal", r.code, r.out, r.errout)
	}
	for _, got := range in.Requests(internet.ModelHost) {
		if strings.Contains(got.Authorization, placeholder) {
			l.Errorf("the server got a placeholder: %+v", got)
		}
	}
	settles(l.T, func() error {
		if r := l.ctl("diagnostics", "events", other); !strings.Contains(r.out, "placeholder") {
			return fmt.Errorf("no event says it: %.1000s", r.out)
		}
		return nil
	})
}

// TestRequestRules: rules by method and path hold inside of TLS, and say what is allowed.
func TestRequestRules(t *testing.T) {
	in, h := secretsHost(t)
	daemontest.Image(t, h.Daemon, "python")
	policy := filepath.Join(t.TempDir(), "policy.json")
	rules := `{"defaultAction":"deny","egress":[{"action":"allow","target":"` + internet.GitHost +
		`","http":{"methods":["GET"],"paths":["/` + internet.Package + `.git/*"]}}]}`
	if err := os.WriteFile(policy, []byte(rules), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: runtime}
			defer h.deleteAll(t)
			id := l.make("python", "--policy", policy)
			url := "https://" + internet.GitHost
			l.ok("exec", id, "--", "curl", "-sSf", "-o", "/dev/null", url+"/"+internet.Package+".git/HEAD")
			for _, argv := range [][]string{
				{"-X", "POST", url + "/" + internet.Package + ".git/git-receive-pack"},
				{url + "/other.git/info/refs"},
				{"--path-as-is", url + "/" + internet.Package + ".git/../other.git/info/refs"},
			} {
				before := len(in.Requests(internet.GitHost))
				r := l.ctl(append([]string{"exec", id, "--", "curl", "-sS", "-w", "%{http_code}"}, argv...)...)
				if !strings.HasSuffix(r.out, "403") || !strings.Contains(r.out, "GET") || len(in.Requests(internet.GitHost)) != before {
					t.Errorf("curl %q: %q, %q; the server got %d requests, and had %d", argv, r.out, r.errout,
						len(in.Requests(internet.GitHost)), before)
				}
			}
		})
	}
}
