package e2e_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/test/internet"
)

// installs are what developers install, each with the hosts that its policy names: those
// and no address. The scripts print internet.Word on their last line.
var installs = []struct {
	name, image string
	hosts       []string
	script      string
	all         bool // its image is large: make test-all only
}{
	{
		"pip", "python",
		[]string{internet.PythonIndex, internet.PythonFiles},
		`pip install --quiet --disable-pip-version-check --index-url https://` + internet.PythonIndex + `/simple ` + internet.Package + `
python3 -c 'import hello_story; print(hello_story.word)'`, false,
	},
	{
		"apt-http", "python", []string{internet.DebianHost}, aptGet("http"), false,
	},
	{
		"apt-https", "python", []string{internet.DebianHost}, aptGet("https"), true,
	},
	{
		"git", "python",
		[]string{internet.GitHost},
		`git clone --quiet https://` + internet.GitHost + `/` + internet.Package + `.git work && cat work/word`, false,
	},
	{
		"npm", "code-interpreter",
		[]string{internet.NodeHost},
		`npm install --silent --no-audit --no-fund --no-update-notifier --registry https://` + internet.NodeHost + ` ` + internet.Package + `
node -e 'console.log(require("` + internet.Package + `").trim())'`, true,
	},
	{
		"go", "code-interpreter",
		[]string{internet.GoHost},
		`export GOPROXY=https://` + internet.GoHost + ` GONOSUMDB='*' GOFLAGS=-mod=mod GOTOOLCHAIN=local HOME=/root
go mod init story && go get ` + internet.GoModule + ` && mkdir out && cat >main.go <<'END'
package main

import "` + internet.GoModule + `"

func main() { println(hello.Word) }
END
go run . 2>&1`, true,
	},
}

// aptGet installs by a scheme from the repository, and from no other.
func aptGet(scheme string) string {
	return `rm -rf /etc/apt/sources.list.d/* && echo 'deb [trusted=yes] ` + scheme + `://` + internet.DebianHost +
		`/debian stable main' >/etc/apt/sources.list
apt-get -qq update && apt-get -qq install -y ` + internet.Package + ` >/dev/null && ` + internet.Package
}

// trust makes the programs of an image trust the test's authority, as an operator does it
// for one of a company.
const trust = `set -e
cat /tmp/authority.crt >>/etc/ssl/certs/ca-certificates.crt
export NODE_EXTRA_CA_CERTS=/tmp/authority.crt PIP_CERT=/tmp/authority.crt
`

// TestInstall: what developers install comes into a sandbox whose policy names the hosts of
// it and nothing else. A name that is not in the policy stays out, though it is served on
// the same address.
func TestInstall(t *testing.T) {
	in := internet.New(t, daemontest.Instance.Pool()) // first: the daemon looks for uplinks when it starts
	h := newHost(t, daemontest.Options{Config: []string{"[network]", fmt.Sprintf("upstreams = [%q]", internet.DNS)}})
	authority := filepath.Join(t.TempDir(), "authority.crt")
	if err := os.WriteFile(authority, in.CA, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, i := range installs {
		h.withClient(t, i.name, i.image, i.all, func(l *lab) {
			args := []string{"--memory", "1Gi", i.image}
			for _, host := range i.hosts {
				args = append(args, "--allow", host)
			}
			id := l.make(args...)
			l.ok("cp", authority, id+":/tmp/authority.crt")
			l.clientWorks(id, trust+i.script)
			l.staysOut(id, in)
		})
	}
}

// withClient tells of one program of guests, on a chosen runtime; `make test-all` tells it on
// both. all: its image is large, so `make test-all` alone tells it.
func (h host) withClient(t *testing.T, name, image string, all bool, tell func(*lab)) {
	if all && !everything {
		return
	}
	daemontest.Image(t, h.Daemon, image)
	for _, runtime := range runtimes {
		if !chosen(runtime, name) {
			continue
		}
		t.Run(name+"/"+runtime, func(t *testing.T) {
			defer h.deleteAll(t)
			tell(&lab{host: h, T: t, runtime: runtime})
		})
	}
}

// clientWorks runs the script of a program, whose last line is internet.Word.
func (l *lab) clientWorks(id, script string) {
	l.Helper()
	r := l.ctl("exec", id, "--", "sh", "-c", script)
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	if r.code != 0 || lines[len(lines)-1] != internet.Word {
		l.Errorf("exit status %d, %.2000q and %.2000q", r.code, r.out, r.errout)
	}
}

// staysOut fails the test if a sandbox reaches a name that no rule has, in one of the ways
// in which one would try, or if nobody says why.
func (l *lab) staysOut(id string, in *internet.Internet) {
	l.Helper()
	const denied = "denied.example"
	for _, c := range []struct {
		argv []string
		code int    // of curl(1)
		says string // of curl
	}{
		{[]string{"https://" + denied}, 6, "resolve"},
		{[]string{"--resolve", denied + ":443:" + internet.Shared.String(), "https://" + denied}, 35, ""},
		{[]string{"--resolve", denied + ":80:" + internet.Shared.String(), "-f", "http://" + denied}, 22, "403"},
		{[]string{"-f", "http://" + internet.Other.String()}, 22, "403"},
	} {
		r := l.ctl(slices.Concat([]string{"exec", id, "--", "curl", "-sSk", "--max-time", "10"}, c.argv)...)
		if r.code != c.code || !strings.Contains(r.errout, c.says) {
			l.Errorf("curl %q: exit status %d with %q; want %d with %q", c.argv, r.code, r.errout, c.code, c.says)
		}
	}
	if got := in.Requests(denied); len(got) > 0 {
		l.Errorf("%s got %+v", denied, got)
	}
	if got := in.Queries(denied); len(got) > 0 {
		l.Errorf("the upstream was asked for %s: %+v", denied, got)
	}
	r := l.ctl("exec", id, "--", "curl", "-sS", "--resolve", denied+":80:"+internet.Shared.String(), "http://"+denied)
	if !strings.Contains(r.out, `"code"`) || !strings.Contains(r.out, denied) {
		l.Errorf("the answer to a denied request is %q: want JSON with a code and the name", r.out)
	}
}

// keepsNamed opens a flow to a name on the port of a server that speaks first, and flows of
// TLS and HTTP, which pass the proxy. When /tmp/go is there, it connects to the first again,
// by the address that DNS has answered before, says hello on the old flow, and asks again by
// the others.
const keepsNamed = `
import http.client, os, socket, ssl, sys, time
web = [http.client.HTTPSConnection(sys.argv[1], context=ssl._create_unverified_context(), timeout=60),
    http.client.HTTPConnection(sys.argv[1], timeout=60)]
def ask(c):
    c.request("GET", "/")
    c.getresponse().read()
    return c.sock
socks = [ask(c) for c in web]
c = socket.create_connection((sys.argv[1], int(sys.argv[2])), 8)
at = c.getpeername()
print(c.recv(100).decode().strip(), flush=True)
while not os.path.exists("/tmp/go"): time.sleep(0.01)
again = socket.create_connection(at, 8)
c.sendall(b"hello")
print(c.recv(5).decode(), [ask(c) for c in web] == socks and None not in socks, flush=True)
print(again.recv(100).decode().strip(), flush=True)
`

// TestNamesRestart kills the daemon: flows that names opened go on, also those through the
// proxy, and names resolve and connect again when the daemon is back. What DNS has answered
// before still counts.
func TestNamesRestart(t *testing.T) {
	in := internet.New(t, daemontest.Instance.Pool())
	h := newHost(t, daemontest.Options{Config: []string{"[network]", fmt.Sprintf("upstreams = [%q]", internet.DNS)}})
	daemontest.Image(t, h.Daemon, "python")
	for _, runtime := range runtimes {
		if !chosen(runtime, "names restart") {
			continue
		}
		t.Run(runtime, func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: runtime}
			defer h.deleteAll(t)
			id := l.make("python", "--allow", internet.GitHost)
			speaks := fmt.Sprint(internet.Speaks)
			cmd := strings.TrimSpace(l.ok("exec", "-d", id, "--", "python3", "-c", keepsNamed, internet.GitHost, speaks))
			said := func(want string) {
				t.Helper()
				eventually(t, patience, func() error {
					if out := l.ok("command", "logs", id, cmd); out != want {
						return fmt.Errorf("it said %q, not %q", out, want)
					}
					return nil
				})
			}
			said(internet.Banner)
			h.Kill()
			h.Start()
			l.ok("exec", id, "--", "touch", "/tmp/go")
			said(internet.Banner + "hello True\n" + internet.Banner)
			repository := "https://" + internet.GitHost + "/" + internet.Package + ".git"
			l.ok("exec", id, "--", "git", "-c", "http.sslVerify=false", "ls-remote", repository)
			l.staysOut(id, in)
		})
	}
}
