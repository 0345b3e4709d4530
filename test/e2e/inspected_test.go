package e2e_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/test/internet"
	"github.com/sandboxd/sandboxd/test/official"
)

// An inspection is where stories of decrypted connections are told.
type inspection struct {
	*lab
	in    *internet.Internet
	guest string // the program test/e2e/guest
	dir   string // for files of all stories
}

// inspections are the stories. `make test-all` tells each on both runtimes.
var inspections = []struct {
	name string
	tell func(*inspection)
}{
	{"protocols", tellProtocols},
	{"large-bodies", tellLargeBodies},
	{"cannot", tellCannot},
	{"images", tellForeign},
	{"read-only", tellTrustReadOnly},
	{"snapshot", tellTrustSnapshot},
}

// TestInspected: what programs of a guest say to a host that is decrypted for it, and whom
// they trust for that.
func TestInspected(t *testing.T) {
	in, h := secretsHost(t)
	dir := t.TempDir()
	guest := filepath.Join(dir, "guest")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", guest, "./guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	tell := func(name string, f func(*inspection)) {
		for _, runtime := range runtimes {
			if !chosen(runtime, name) {
				continue
			}
			t.Run(name+"/"+runtime, func(t *testing.T) {
				defer h.deleteAll(t)
				f(&inspection{&lab{host: h, T: t, runtime: runtime}, in, guest, dir})
			})
		}
	}
	for _, s := range inspections {
		tell(s.name, s.tell)
	}
	for _, c := range trusting {
		if c.all && !everything {
			continue
		}
		daemontest.Image(t, h.Daemon, c.image)
		tell(c.name, func(i *inspection) { i.trusts(c.image, c.bring, c.script) })
	}
}

// echoURL is where the guest speaks.
const echoURL = "https://" + internet.EchoHost

// bound makes a sandbox in which hosts have a credential, that of EchoHost.
func (i *inspection) bound(args ...string) string {
	i.Helper()
	id := i.make(append(args, "--credential-proxy", "--allow", internet.EchoHost, "--allow", internet.MutualHost,
		"--allow", internet.StrangerHost, "--allow", internet.GitHost)...)
	i.bind(id, "echo", internet.EchoHost, "--bearer")
	return id
}

// speaker is bound, with the program guest at /opt/guest.
func (i *inspection) speaker() string {
	i.Helper()
	id := i.bound("base")
	i.ok("cp", i.guest, id+":/opt/guest")
	return id
}

// reached returns what reached EchoHost while f ran. Each request must have had the secret.
func (i *inspection) reached(f func()) []internet.Request {
	i.Helper()
	before := len(i.in.Requests(internet.EchoHost))
	f()
	got := i.in.Requests(internet.EchoHost)[before:]
	for _, r := range got {
		if r.Authorization != "Bearer "+internet.Secret {
			i.Errorf("%s came without the secret: %+v", internet.EchoHost, r)
		}
	}
	return got
}

// explained waits for an event of the sandbox that says why something failed.
func (i *inspection) explained(id, text string) {
	i.Helper()
	settles(i.T, func() error {
		if r := i.ctl("diagnostics", "events", id); !strings.Contains(r.out, text) {
			return fmt.Errorf("no event says %q: %.2000s", text, r.out)
		}
		return nil
	})
}

// tellProtocols: each protocol passes as it is, once, and with the secret.
func tellProtocols(i *inspection) {
	id := i.speaker()
	var r result
	got := i.reached(func() { r = i.ctl("exec", id, "--", "/opt/guest", "speak", echoURL) })
	if r.code != 0 {
		i.Fatalf("the guest says %s%s", r.out, r.errout)
	}
	if said := strings.Count(r.out, ": ok\n"); said < 15 || len(got) != said {
		i.Errorf("%s got %d requests of a guest that said %d things: %s", internet.EchoHost, len(got), said, r.out)
	}
	for _, proto := range []string{"HTTP/1.1", "HTTP/2.0"} {
		if !slices.ContainsFunc(got, func(r internet.Request) bool { return r.Proto == proto }) {
			i.Errorf("nothing came by %s", proto)
		}
	}
	got = i.reached(func() { r = i.ctl("exec", id, "--", "sh", "-ec", byCurl) })
	if r.code != 0 || r.out != curled || len(got) != 8 {
		i.Errorf("curl: %d, %q, %q, and %d requests", r.code, r.out, r.errout, len(got))
	}
}

// byCurl has curl get an answer, send a form that waits for the answer 100, and send a body
// whose length it does not know, by both versions of HTTP.
const byCurl = `
for v in --http1.1 --http2; do curl -sSf $v ` + echoURL + `/hello; done
for v in --http1.1 --http2; do
	curl -sSf $v -H 'Expect: 100-continue' -d words ` + echoURL + `/echo; echo
	curl -sS $v -H 'Expect: 100-continue' -d words -w '%{http_code}\n' ` + echoURL + `/refuse
	head -c 3000000 /dev/zero | curl -sSf $v -T - ` + echoURL + `/echo | wc -c
done`

const curled = "HTTP/1.1 GET\nHTTP/2.0 GET\nwords\nnot expected\n417\n3000000\nwords\nnot expected\n417\n3000000\n"

// tellLargeBodies: the child that decrypts needs no more memory for a body than for a word.
func tellLargeBodies(i *inspection) {
	size, limit := int64(64<<20), 32<<10 // KiB
	if everything {
		size = 1 << 30
	}
	id := i.speaker()
	i.ok("exec", id, "--", "/opt/guest", "get", echoURL+"/hello")
	child := i.child()
	for _, version := range []string{"1", "2"} {
		for _, way := range []string{"up", "down"} {
			idle := memoryOf(i.T, child, "VmRSS")
			if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", child), []byte("5"), 0); err != nil { // VmHWM begins anew
				i.Fatal(err)
			}
			start := time.Now()
			ctx, cancel := context.WithTimeout(i.Context(), hosttest.Patient(10*time.Minute))
			out, err := i.command(ctx, "exec", id, "--", "/opt/guest", "bulk", version, way, fmt.Sprint(size), echoURL).CombinedOutput()
			if cancel(); err != nil {
				i.Fatalf("%s by HTTP/%s: %v: %s", way, version, err, out)
			}
			most := memoryOf(i.T, child, "VmHWM")
			i.Logf("%d MiB %s by HTTP/%s: %v; %d KiB, at most %d KiB more", size>>20, way, version,
				time.Since(start).Round(time.Millisecond), idle, most-idle)
			if most-idle > limit {
				i.Errorf("%d MiB %s by HTTP/%s: the child had %d KiB, and then up to %d KiB", size>>20, way, version, idle, most)
			}
		}
	}
	if now := i.child(); now != child {
		i.Errorf("another child decrypts: %d, and %d before", now, child)
	}
}

// child is the process that decrypts for the only sandbox which has one.
func (i *inspection) child() (pid int) {
	i.Helper()
	settles(i.T, func() error {
		all := i.decrypting()
		if len(all) != 1 {
			return fmt.Errorf("%d children decrypt: %v", len(all), all)
		}
		pid = all[0]
		return nil
	})
	return pid
}

// decrypting are the daemon's children that decrypt.
func (l *lab) decrypting() (all []int) {
	l.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		l.Fatal(err)
	}
	for _, stat := range stats {
		b, _ := os.ReadFile(stat) // it may have ended
		argv, _ := os.ReadFile(filepath.Join(filepath.Dir(stat), "cmdline"))
		_, rest, _ := strings.Cut(string(b), ") ")
		f := strings.Fields(rest)
		if len(f) > 1 && f[1] == strconv.Itoa(l.Pid()) && slices.Contains(strings.Split(string(argv), "\x00"), "terminate") {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(stat)))
			all = append(all, pid)
		}
	}
	return all
}

// memoryOf is a size of /proc/PID/status, in KiB.
func memoryOf(t *testing.T, pid int, field string) (kib int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			if _, err := fmt.Sscan(rest, &kib); err != nil {
				t.Fatal(err)
			}
			return kib
		}
	}
	t.Fatalf("process %d has no %s: %s", pid, field, b)
	return 0
}

// tellCannot: a program that expects one certificate, a server that wants a certificate of its
// client, and one that cannot be verified. None of it works, and the user reads why.
func tellCannot(i *inspection) {
	id := i.speaker()
	roots := filepath.Join(i.dir, "roots-"+i.runtime+".pem")
	if err := os.WriteFile(roots, i.in.CA, 0o644); err != nil {
		i.Fatal(err)
	}
	i.ok("cp", roots, id+":/opt/roots.pem")

	got := i.reached(func() {
		for _, c := range []struct {
			argv []string
			code int
			says string // the program
			why  string // an event
		}{
			{
				[]string{"/opt/guest", "get-pinned", "the authority of a test", echoURL + "/hello"},
				1, "the certificate is pinned", "does not trust the authority of this sandbox, so it does not reach " + internet.EchoHost,
			},
			{
				[]string{"curl", "-sS", "--pinnedpubkey", i.in.Pin(), echoURL + "/hello"},
				90, "pinned public key", "certificate of this sandbox's authority for " + internet.EchoHost + ", and sent no request",
			},
		} {
			i.wants(i.ctl(append([]string{"exec", id, "--"}, c.argv...)...), c.code, c.says)
			i.explained(id, c.why)
		}
	})
	if len(got) > 0 {
		i.Errorf("%s got %+v of programs that expect another certificate", internet.EchoHost, got)
	}

	// As long as nothing is bound to the host, a program with a certificate reaches it.
	asClient := []string{"exec", id, "--", "/opt/guest", "get-as-client", "/opt/roots.pem", "https://" + internet.MutualHost}
	if r := i.ctl(asClient...); r.code != 0 || r.out != "this is "+internet.MutualHost+"\n" {
		i.Errorf("a certificate for %s, which is not decrypted: %d, %q, %q", internet.MutualHost, r.code, r.out, r.errout)
	}
	for _, c := range []struct{ host, code, why string }{
		{internet.MutualHost, "CLIENT_CERTIFICATE", internet.MutualHost + " wants a certificate of its client, and sandboxd has none"},
		{internet.StrangerHost, "SERVER_CERTIFICATE", "the certificate of " + internet.StrangerHost + " cannot be verified"},
	} {
		name, _, _ := strings.Cut(c.host, ".")
		i.bind(id, name, c.host, "--bearer")
		before := len(i.in.Requests(c.host))
		for _, version := range []string{"--http1.1", "--http2"} {
			r := i.ctl("exec", id, "--", "curl", "-sS", version, "-w", "%{http_code}", "https://"+c.host)
			if r.code != 0 || !strings.HasSuffix(r.out, "502") || !strings.Contains(r.out, "SANDBOX::"+c.code) ||
				!strings.Contains(r.out, c.host) {
				i.Errorf("curl %s to %s: %d, %q, %q", version, c.host, r.code, r.out, r.errout)
			}
		}
		i.explained(id, c.why)
		if got := i.in.Requests(c.host)[before:]; len(got) > 0 {
			i.Errorf("%s got %+v", c.host, got)
		}
	}
}

// trusting are programs that find what they trust in different places. Their scripts print
// on the last line what /hello of EchoHost answers.
var trusting = []struct {
	name, image string
	bring       func(*inspection, string) // puts into a sandbox what its image does not have; or nil
	script      string
	all         bool // its image is large: make test-all only
}{
	{"curl", "python", nil, "curl -sSf " + echoURL + "/hello && env -i curl -sSf " + echoURL + "/hello", false},
	{"python", "python", nil, `ask='import urllib.request
print(urllib.request.urlopen("` + echoURL + `/hello").read().decode())'
python3 -c "$ask" && env -i python3 -c "$ask"`, false},
	// Its own roots do not have the authority: the variable brings it.
	{"requests", "python", bringRequests, `set -e
ask='import certifi, requests
assert certifi.where().startswith("/opt/foreign/")
print(requests.get("` + echoURL + `/hello").text)'
export PYTHONPATH=/opt/foreign
if env -u REQUESTS_CA_BUNDLE python3 -c "$ask" 2>/tmp/said; then exit 9; fi
grep -q CERTIFICATE_VERIFY_FAILED /tmp/said
python3 -c "$ask"`, false},
	{"node", "code-interpreter", nil, `node -e 'fetch("` + echoURL + `/hello").then(r => r.text()).then(console.log)'`, true},
	// Of the environment Java reads nothing.
	{"java", "code-interpreter", nil, `cat >/tmp/Ask.java <<'END'
import java.net.URI;
import java.net.http.*;

class Ask {
	public static void main(String[] args) throws Exception {
		HttpRequest r = HttpRequest.newBuilder(URI.create(args[0])).build();
		System.out.println(HttpClient.newHttpClient().send(r, HttpResponse.BodyHandlers.ofString()).body());
	}
}
END
env -i PATH="$PATH" java -XX:TieredStopAtLevel=1 /tmp/Ask.java ` + echoURL + "/hello", true},
}

// trusts runs a program.
func (i *inspection) trusts(image string, bring func(*inspection, string), script string) {
	i.Helper()
	id := i.bound("--memory", "1Gi", image)
	if bring != nil {
		bring(i, id)
	}
	var r result
	got := i.reached(func() { r = i.ctl("exec", id, "--", "sh", "-c", script) })
	words := strings.Fields(r.out)
	if r.code != 0 || len(words) == 0 || words[len(words)-1] != "GET" || len(got) == 0 {
		i.Errorf("exit status %d, %.2000q and %.2000q; %s got %+v", r.code, r.out, r.errout, internet.EchoHost, got)
	}
}

// bringRequests puts Python's requests into /opt/foreign, with the roots that PyPI has for it.
func bringRequests(i *inspection, id string) {
	python, err := official.Python(i.Context(), "../compat/python/requirements-schemathesis.txt")
	if err != nil {
		i.Fatal(err)
	}
	packages, err := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(python)), "lib/python3*/site-packages"))
	if err != nil || len(packages) != 1 {
		i.Fatalf("packages of %s: %q, %v", python, packages, err)
	}
	tar, err := exec.Command("tar", "-C", packages[0], "-c", "requests", "certifi", "urllib3", "idna", "charset_normalizer").Output()
	if err != nil {
		i.Fatal(err)
	}
	i.ok("exec", id, "--", "mkdir", "/opt/foreign")
	if r := i.feed(bytes.NewReader(tar), "cp", "-", id+":/opt/foreign"); r.code != 0 {
		i.Fatalf("cp: %s", r.errout)
	}
}

// tellForeign: images as others make them, with a program that reads their stores, and one that
// has nothing but that program. They trust the authority beside what they trusted.
func tellForeign(i *inspection) {
	for name, c := range map[string]struct {
		bundle string
		links  map[string]string
	}{
		"fedora": {"etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", map[string]string{
			"etc/pki/tls/certs/ca-bundle.crt": "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
			"etc/pki/tls/cert.pem":            "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
		}},
		"alpine":  {"etc/ssl/certs/ca-certificates.crt", map[string]string{"etc/ssl/cert.pem": "certs/ca-certificates.crt"}},
		"scratch": {},
	} {
		image := i.planted(name, c.bundle, c.links)
		id := i.bound(image, "--allow", internet.NodeHost)
		get := func(how, url string, works bool) {
			i.Helper()
			r := i.ctl("exec", id, "--", "/guest", how, url)
			if works && r.code == 0 || !works && r.code == 1 && strings.Contains(r.errout, "unknown authority") {
				return
			}
			i.Errorf("%s: %s %s: %d, %q, %q", name, how, url, r.code, r.out, r.errout)
		}
		own := c.bundle != ""
		get("get", echoURL+"/hello", true)
		get("get-by-stores", echoURL+"/hello", own)
		for _, how := range []string{"get", "get-by-stores"} { // this host is not decrypted
			get(how, "https://"+internet.NodeHost+"/"+internet.Package, own)
		}
		i.ok("rm", "-f", id)
		i.ok("image", "rm", image)
	}
}

// planted imports an image that has the program guest and, at bundle, the authority of the
// test's servers.
func (i *inspection) planted(name, bundle string, links map[string]string) string {
	i.Helper()
	root := filepath.Join(i.TempDir(), name)
	put := func(name string, f func(path string) error) {
		i.Helper()
		path := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = f(path)
		}
		if err != nil {
			i.Fatal(err)
		}
	}
	put("guest", func(path string) error { return os.Link(i.guest, path) })
	if bundle != "" {
		put(bundle, func(path string) error { return os.WriteFile(path, i.in.CA, 0o644) })
	}
	for link, to := range links {
		put(link, func(path string) error { return os.Symlink(to, path) })
	}
	tar := root + ".tar"
	if out, err := exec.Command("tar", "-C", root, "-cf", tar, ".").CombinedOutput(); err != nil {
		i.Fatalf("tar: %v: %s", err, out)
	}
	name += ":inspected"
	i.ok("image", "import", tar, name)
	return name
}

// authority is the certificate of a sandbox's authority, and a line of it that no other has: the
// last whole one, in which its signature is.
func (i *inspection) authority(id string) (cert *x509.Certificate, line string) {
	i.Helper()
	text := i.ok("exec", id, "--", "cat", "/opt/opensandbox/mitmproxy-ca-cert.pem")
	block, _ := pem.Decode([]byte(text))
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if block == nil || len(lines) < 5 {
		i.Fatalf("the certificate of the authority is %q", text)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		i.Fatal(err)
	}
	return cert, lines[len(lines)-3]
}

// tellTrustReadOnly: a root that cannot be written trusts the authority, and stays as it is.
func tellTrustReadOnly(i *inspection) {
	id := i.bound("base", "--read-only")
	for _, clean := range [][]string{nil, {"env", "-i"}} {
		i.ok(slices.Concat([]string{"exec", id, "--"}, clean, []string{"curl", "-sSf", echoURL + "/hello"})...)
	}
	for _, file := range []string{"/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/certs/new", "/opt/opensandbox/ca-bundle.pem"} {
		i.wants(i.ctl("exec", id, "--", "sh", "-c", "echo x >>"+file), 2, "cannot create")
	}
}

// tellTrustSnapshot: a snapshot has nothing of the authority, and a sandbox that is made of it
// has one of its own or none.
func tellTrustSnapshot(i *inspection) {
	defer i.deleteSnapshots(i.T)
	id := i.bound("base")
	i.ok("exec", id, "--", "curl", "-sSf", echoURL+"/hello")
	authority, line := i.authority(id)
	// found is where that certificate, or a variable with the path of one, is in a sandbox. What
	// else its disk has is in its diff.
	found := func(id string) string {
		i.Helper()
		r := i.ctl("exec", id, "--", "sh", "-c", "env | grep /opt/opensandbox/; grep -rlF -e '"+line+"' /etc /opt /root /run /srv /tmp "+
			"/usr/lib/ssl /usr/local /usr/share/ca-certificates /var/tmp /workspace")
		return r.out + r.errout
	}
	all := found(id)
	for _, where := range []string{"/etc/ssl/certs/ca-certificates.crt\n", "/opt/opensandbox/ca-bundle.pem\n", "SSL_CERT_FILE="} {
		if !strings.Contains(all, where) {
			i.Errorf("the authority is not in %q of its own sandbox: %s", where, all)
		}
	}
	snap := strings.TrimSpace(i.ok("snapshot", "create", id))
	without := i.from(snap, i.runtime)
	if all := found(without); all != "" {
		i.Errorf("the sandbox of a snapshot has of another one's authority: %s", all)
	}
	if changed := i.ok("diff", without); changed != "" {
		i.Errorf("the snapshot has %s", changed)
	}
	other := i.from(snap, i.runtime, "--credential-proxy", "--allow", internet.EchoHost)
	i.bind(other, "echo", internet.EchoHost, "--bearer")
	i.ok("exec", other, "--", "curl", "-sSf", echoURL+"/hello")
	if all := found(other); strings.Contains(all, "/etc/") {
		i.Errorf("another sandbox has the authority: %s", all)
	}
	if again, _ := i.authority(other); bytes.Equal(again.RawSubjectPublicKeyInfo, authority.RawSubjectPublicKeyInfo) {
		i.Error("two sandboxes have authorities with one key")
	}
}
