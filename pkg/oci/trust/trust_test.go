package trust

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/authority"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// vouches is the authority of all tests, ca its certificate.
var (
	vouches = func() *authority.Authority {
		a, err := authority.New("rabcdefghijk", time.Now())
		if err != nil {
			panic(err)
		}
		return a
	}()
	ca = vouches.Certificate()
)

// roots is a bundle of a guest. What a plan makes of it is a copy, so it need not be true.
const roots = "# roots\n-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"

// plant makes a tree: "path/" is a directory, "path -> target" a link, "path" a file with
// roots, and "path = text" one with text, or with that file of testdata. It returns the tree's
// root.
func plant(t testing.TB, entries ...string) *os.File {
	t.Helper()
	root := filepath.Join(t.TempDir(), "root")
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(os.Mkdir(root, 0o755))
	for _, e := range entries {
		name, to, link := strings.Cut(e, " -> ")
		name, text, given := strings.Cut(name, " = ")
		p := filepath.Join(root, name)
		check(os.MkdirAll(filepath.Dir(p), 0o755))
		switch {
		case strings.HasSuffix(name, "/"):
			check(os.MkdirAll(p, 0o755))
		case link:
			check(os.Symlink(to, p))
		default:
			b := []byte(roots)
			if given {
				b = []byte(text)
				if stored, err := os.ReadFile(filepath.Join("testdata", text)); err == nil {
					b = stored
				}
			}
			check(os.WriteFile(p, b, 0o644))
		}
	}
	return openDir(t, root)
}

func openDir(t testing.TB, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func planOf(t testing.TB, root *os.File, env map[string]string, hidden ...string) *Plan {
	t.Helper()
	p, err := NewPlan(root, ca, env, hidden)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// mounts are all mounts of a plan.
func (p *Plan) mounts() []Mount { return slices.Concat(p.AgentMounts, p.StoreMounts) }

// file is the content that a plan mounts on target; nil: none.
func (p *Plan) file(target string) []byte {
	for _, m := range p.mounts() {
		for _, f := range p.Files {
			if m.Target == target && m.File == f.Name {
				return f.Data
			}
		}
	}
	return nil
}

// text is a plan without the environment: a line for each mount, with the file and what is in
// it, and for each store that is left.
func (p *Plan) text() string {
	var lines []string
	for _, m := range p.mounts() {
		b := p.file(m.Target)
		what := fmt.Sprintf("%d bytes", len(b))
		switch rest, ok := bytes.CutPrefix(b, ca); {
		case b == nil:
			what = "no file"
		case ok && len(rest) == 0:
			what = "the authority"
		case ok && string(rest) == roots:
			what = "the authority and roots"
		case ok:
			what = fmt.Sprintf("the authority and %.40q", rest)
		case bytes.HasPrefix(b, jksHead[:]):
			what = "a JKS"
		case b[0] == 0x30:
			what = "a PKCS #12"
		}
		lines = append(lines, fmt.Sprintf("%s %s: %s\n", m.Target, m.File, what))
	}
	for _, l := range p.Left {
		lines = append(lines, fmt.Sprintf("left %s: %s\n", l.Path, l.Why))
	}
	return strings.Join(lines, "")
}

// What stands in most plans.
const (
	cert   = "/opt/opensandbox/mitmproxy-ca-cert.pem trust-0: the authority\n"
	always = cert + "/opt/opensandbox/ca-bundle.pem trust-1: the authority and roots\n"
)

// What stands in the plan of a guest without roots.
const (
	bare      = cert + "/opt/opensandbox/ca-bundle.pem trust-0: the authority\n"
	bareNoted = "left REQUESTS_CA_BUNDLE: the guest has no bundle, and what reads this variable would lose the roots that it has\n" +
		"left GRPC_DEFAULT_SSL_ROOTS_FILE_PATH: the guest has no bundle, and what reads this variable would lose the roots that it has\n"
)

// Roots that programs bring along.
const (
	conda   = "opt/conda/ssl/cacert.pem"
	certifi = "usr/local/lib/python3.13/site-packages/pip/_vendor/certifi/cacert.pem"
)

// TestLayouts: trees with the links that distributions have.
func TestLayouts(t *testing.T) {
	for name, c := range map[string]struct {
		tree []string
		env  map[string]string
		want string
	}{
		"Debian": {tree: []string{"etc/ssl/certs/ca-certificates.crt", "usr/lib/ssl/certs -> /etc/ssl/certs"}, want: always +
			"/etc/ssl/certs/ca-certificates.crt trust-1: the authority and roots\n"},
		"Debian 13, with Java": {tree: []string{
			"etc/ssl/certs/ca-certificates.crt", "etc/ssl/cert.pem -> certs/ca-certificates.crt",
			"usr/lib/ssl/cert.pem -> /etc/ssl/cert.pem",
			"etc/ssl/certs/java/cacerts = changeit.jks",
			"usr/lib/jvm/java-21-openjdk-amd64/lib/security/cacerts -> /etc/ssl/certs/java/cacerts",
			"usr/lib/jvm/default-java -> java-21-openjdk-amd64",
		}, env: map[string]string{"JAVA_HOME": "/usr/lib/jvm/default-java"}, want: always +
			"/etc/ssl/certs/ca-certificates.crt trust-1: the authority and roots\n" +
			"/etc/ssl/certs/java/cacerts trust-2: a JKS\n"},
		"Alpine": {tree: []string{"etc/ssl/certs/ca-certificates.crt", "etc/ssl/cert.pem -> certs/ca-certificates.crt"}, want: always +
			"/etc/ssl/certs/ca-certificates.crt trust-1: the authority and roots\n"},
		"RHEL": {tree: []string{
			"etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", "etc/pki/ca-trust/extracted/java/cacerts = open.p12",
			"etc/pki/tls/certs/ca-bundle.crt -> /etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
			"etc/pki/tls/cert.pem -> /etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
			"etc/pki/java/cacerts -> /etc/pki/ca-trust/extracted/java/cacerts", "etc/ssl/certs -> ../pki/tls/certs",
			"usr/lib/jvm/java-21-openjdk/lib/security/cacerts -> ../../../../../../etc/pki/java/cacerts",
		}, want: always +
			"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem trust-1: the authority and roots\n" +
			"/etc/pki/ca-trust/extracted/java/cacerts trust-2: a PKCS #12\n"},
		"openSUSE": {tree: []string{
			"var/lib/ca-certificates/ca-bundle.pem", "etc/ssl/ca-bundle.pem -> /var/lib/ca-certificates/ca-bundle.pem",
			"etc/ssl/certs -> /var/lib/ca-certificates/pem", "var/lib/ca-certificates/pem/",
			"var/lib/ca-certificates/java-cacerts = changeit.jks",
			"usr/lib64/jvm/jre-21/lib/security/cacerts -> /var/lib/ca-certificates/java-cacerts",
		}, want: always +
			"/var/lib/ca-certificates/ca-bundle.pem trust-1: the authority and roots\n" +
			"/var/lib/ca-certificates/java-cacerts trust-2: a JKS\n"},
		"Temurin, and Java 8": {tree: []string{
			"etc/ssl/certs/ca-certificates.crt", "opt/java/openjdk/lib/security/cacerts = open.p12",
			"usr/local/openjdk-8/jre/lib/security/cacerts = changeit.jks", "usr/local/bin/",
		}, env: map[string]string{"JAVA_HOME": "/opt/java/openjdk"}, want: always +
			"/etc/ssl/certs/ca-certificates.crt trust-1: the authority and roots\n" +
			"/opt/java/openjdk/lib/security/cacerts trust-2: a PKCS #12\n" +
			"/usr/local/openjdk-8/jre/lib/security/cacerts trust-3: a JKS\n"},
		"a store of Java that has a MAC": {tree: []string{
			"etc/ssl/certs/ca-certificates.crt", "opt/java/openjdk/lib/security/cacerts = encrypted.p12",
		}, want: always +
			"/etc/ssl/certs/ca-certificates.crt trust-1: the authority and roots\n" +
			"left /opt/java/openjdk/lib/security/cacerts: a PKCS #12 with a MAC, which would be wrong: " +
			`make it a JKS, with the password "changeit"` + "\n"},
		"bare": {tree: []string{"bin/program"}, want: bare + bareNoted},
		"an empty bundle": {tree: []string{"etc/ssl/certs/ca-certificates.crt = "}, want: bare +
			"/etc/ssl/certs/ca-certificates.crt trust-0: the authority\n" + bareNoted},
		"two empty bundles, and Python's": {tree: []string{
			"etc/ssl/certs/ca-certificates.crt = \n", "etc/ssl/cert.pem = ", conda + " =  \n", certifi,
		}, want: always +
			"/etc/ssl/certs/ca-certificates.crt trust-0: the authority\n" +
			"/etc/ssl/cert.pem trust-0: the authority\n"},
		"an empty bundle, and one": {tree: []string{"etc/ssl/certs/ca-certificates.crt = ", "etc/ssl/cert.pem"}, want: always +
			"/etc/ssl/certs/ca-certificates.crt trust-0: the authority\n" +
			"/etc/ssl/cert.pem trust-1: the authority and roots\n"},
		"no bundle, but Python's": {tree: []string{
			certifi, "usr/local/lib/libx.so = x",
		}, want: always},
		"two bundles that differ": {tree: []string{
			"etc/ssl/certs/ca-certificates.crt", "etc/ssl/cert.pem = -----BEGIN other", "usr/lib/ssl/cert.pem -> /nowhere",
		}, want: always +
			"/etc/ssl/certs/ca-certificates.crt trust-1: the authority and roots\n" +
			`/etc/ssl/cert.pem trust-2: the authority and "-----BEGIN other"` + "\n"},
	} {
		t.Run(name, func(t *testing.T) {
			p := planOf(t, plant(t, c.tree...), c.env)
			if got := p.text(); got != c.want {
				t.Errorf("the plan is\n%s\nwant\n%s", got, c.want)
			}
		})
	}
}

// TestRead: openssl and Go read an extended bundle, with the authority and what was there.
func TestRead(t *testing.T) {
	guest := stored(t, "guest.pem")
	const target = "/etc/ssl/certs/ca-certificates.crt"
	root := plant(t, target[1:]+" = # of the guest\n\n"+strings.TrimSpace(string(guest)))
	bundle := planOf(t, root, nil).file(target)
	dir := t.TempDir()
	file := func(name string, b []byte) string {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, name)
	}
	leaf, _, err := vouches.Leaf("example.com", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	signed := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf})
	for name, c := range map[string]struct {
		bundle, cert []byte
		good         bool
	}{
		"a leaf": {bundle, signed, true}, "the guest's own": {bundle, guest, true}, "a leaf, before": {guest, signed, false},
	} {
		out, err := exec.Command("openssl", "verify", "-no-CApath", "-no-CAstore", "-CAfile", file("bundle", c.bundle),
			file("cert", c.cert)).CombinedOutput()
		if (err == nil) != c.good || err != nil && !strings.Contains(string(out), "unable to get local issuer") {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(c.bundle)
		block, _ := pem.Decode(c.cert)
		cert, err := x509.ParseCertificate(block.Bytes)
		if err == nil {
			_, err = cert.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		}
		if (err == nil) != c.good {
			t.Errorf("%s, in Go: %v", name, err)
		}
	}
}

// TestHostile: a tree that a guest has made leads nowhere, costs nothing, and stops nothing.
func TestHostile(t *testing.T) {
	const store = "etc/ssl/certs/ca-certificates.crt"
	// What is not of the guest: the links lead there if they are followed out of its root.
	victim := func(file string) string {
		t.Helper()
		err := os.MkdirAll(filepath.Dir(file), 0o755)
		if err == nil {
			err = os.WriteFile(file, []byte("-----BEGIN secret of the host"), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	host := t.TempDir()
	secret := victim(filepath.Join(host, "secret"))
	victim(filepath.Join(host, "certs/ca-certificates.crt"))
	special := func(mode uint32) func(string) error {
		return func(p string) error { return unix.Mknod(p, mode|0o644, 0) }
	}
	for name, c := range map[string]struct {
		tree []string
		make func(path string) error // makes the store
		left string                  // why it is left; "": it is taken for absent
	}{
		"an absolute link to the host":       {tree: []string{store + " -> " + secret}},
		"a link up to the host":              {tree: []string{store + " -> ../../../../secret"}},
		"a link up and up":                   {tree: []string{store + " -> " + strings.Repeat("../", 40) + secret[1:]}},
		"a directory that is a link up":      {tree: []string{"etc/ssl -> ../../../../../../../../../" + host[1:]}},
		"a link to itself":                   {tree: []string{store + " -> ca-certificates.crt"}, left: "too many levels"},
		"a ring of links":                    {tree: []string{store + " -> /a", "a -> b", "b -> " + store}, left: "too many levels"},
		"a link to what is not there":        {tree: []string{store + " -> /gone"}},
		"a file in the place of a directory": {tree: []string{"etc/ssl = x"}},
		"a directory":                        {tree: []string{store + "/x"}, left: "not a regular file"},
		"a fifo":                             {tree: []string{"etc/ssl/certs/"}, make: special(unix.S_IFIFO), left: "not a regular file"},
		"a socket":                           {tree: []string{"etc/ssl/certs/"}, make: special(unix.S_IFSOCK), left: "not a regular file"},
		// 0:0 is a whiteout, and the only device that anybody may make.
		"a device": {tree: []string{"etc/ssl/certs/"}, make: special(unix.S_IFCHR), left: "not a regular file"},
		"a link to a fifo": {
			tree: []string{store + " -> /fifo"},
			make: func(p string) error { return special(unix.S_IFIFO)(strings.TrimSuffix(p, store) + "fifo") }, left: "not a regular file",
		},
		"a huge file": {
			tree: []string{"etc/ssl/certs/"},
			make: func(p string) error {
				f, err := os.Create(p)
				if err == nil {
					err = f.Truncate(1 << 40)
					f.Close()
				}
				return err
			},
			left: "1099511627776 bytes, more than 4 MiB",
		},
		"a file of few": {
			tree: []string{store}, make: func(p string) error { return os.Chmod(p, 0o640) },
			left: "not all users of the guest may read it",
		},
		"a program": {tree: []string{store + " = \x7fELF"}, left: "not a bundle of certificates as PEM"},
		"in a place of the runtime": {
			tree: []string{store + " -> /proc/self/mem", "proc/self/mem"}, left: `"/proc/self/mem" is hidden by a mount of the runtime`,
		},
		"in memory": {tree: []string{store + " -> /var/run/x", "var/run -> /run", "run/x"}, left: `"/run/x" is hidden`},
		"the agent": {
			tree: []string{store + " -> /opt/opensandbox/sandbox-agent", "opt/opensandbox/sandbox-agent"}, left: "hidden",
		},
		"the name servers":  {tree: []string{store + " -> /etc/resolv.conf", "etc/resolv.conf"}, left: `"/etc/resolv.conf" is hidden`},
		"a name of no text": {tree: []string{store + " -> /\xff\xfe", "\xff\xfe"}, left: `"/\xff\xfe" is a strange path`},
		"a name of a line":  {tree: []string{store + " -> /a\nb", "a\nb"}, left: `"/a\nb" is a strange path`},
	} {
		t.Run(name, func(t *testing.T) {
			root := plant(t, c.tree...)
			victim(filepath.Join(root.Name(), "../secret"))
			if c.make != nil {
				if err := c.make(filepath.Join(root.Name(), store)); err != nil {
					t.Fatal(err)
				}
			}
			p := planOf(t, root, nil)
			left := ""
			if len(p.Left) > 0 && p.Left[0].Path == "/"+store {
				left, p.Left = p.Left[0].Why, p.Left[1:]
			}
			if got := p.text(); got != bare+bareNoted || left == "" != (c.left == "") || !strings.Contains(left, c.left) {
				t.Errorf("the plan is\n%s\nand left because %q, want %q", got, left, c.left)
			}
		})
	}
}

// TestBounds: a tree that is large in every way costs little, and says what was left.
func TestBounds(t *testing.T) {
	large := roots + strings.Repeat("x", maxFile-len(roots))
	var many, versions, heavy, listed []string
	for i := range maxMounts + 8 {
		many = append(many, fmt.Sprintf("usr/lib/jvm/%02d/lib/security/cacerts = changeit.jks", i))
	}
	for i := range maxNames + 1 {
		versions = append(versions, fmt.Sprintf("usr/lib/jvm/%d/lib/security/cacerts = changeit.jks", i))
	}
	for i := range maxListed + 1 {
		listed = append(listed, fmt.Sprintf("usr/lib/jvm/%d = ", i))
	}
	for _, name := range bundles[:6] {
		heavy = append(heavy, name[1:]+" = "+large)
	}
	for name, c := range map[string]struct {
		tree   []string
		mounts int
		left   string
	}{
		"many stores":   {many, maxMounts + 2, "32 stores are mounted already"},
		"many versions": {versions, 2, "more than 64 names"},
		"many names":    {listed, 2, "more than 1024 names"},
		"large stores":  {heavy, 6, "all stores together have more than 16 MiB"},
		"the largest":   {heavy[:1], 3, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := planOf(t, plant(t, c.tree...), nil)
			if len(p.mounts()) != c.mounts || p.file(BundlePath) == nil || p.file(CertPath) == nil {
				t.Errorf("%d mounts, want %d: %+v", len(p.mounts()), c.mounts, p.mounts())
			}
			if c.left == "" && len(p.Left) > 0 || c.left != "" && !strings.Contains(fmt.Sprint(p.Left), c.left) {
				t.Errorf("left are %v, want %q", p.Left, c.left)
			}
			size := 0
			for _, f := range p.Files {
				size += len(f.Data)
			}
			if size > maxRead+len(p.Files)*4096 {
				t.Errorf("the files have %d bytes", size)
			}
		})
	}
}

// TestManyLibraries: a directory with more names than there may be versions of Python is no
// obstacle, neither where the roots of Python are needed nor where they are not.
func TestManyLibraries(t *testing.T) {
	tree := []string{certifi}
	for i := range 2 * maxNames {
		tree = append(tree, fmt.Sprintf("usr/local/lib/lib%d.so = x", i))
	}
	if p := planOf(t, plant(t, tree...), nil); string(p.file(BundlePath)) != string(ca)+roots || len(p.Left) > 0 {
		t.Errorf("the plan is\n%s", p.text())
	}
	for i := range 2 * maxNames {
		tree = append(tree, fmt.Sprintf("usr/local/lib/python%d/x = x", i))
	}
	if p := planOf(t, plant(t, append(tree, "etc/ssl/certs/ca-certificates.crt")...), nil); len(p.Left) > 0 {
		t.Errorf("with a bundle, the plan is\n%s", p.text())
	}
}

// TestOneFileSystem: neither another file system nor a link of procfs, which leads to what a
// process has open, is a part of a root.
func TestOneFileSystem(t *testing.T) {
	for _, c := range []struct {
		root, name string
		want       error
	}{
		{"/", "proc/version", unix.EXDEV},
		{"/proc", "self/exe", unix.ELOOP}, // EXDEV would come of RESOLVE_IN_ROOT alone: see openat2(2)
	} {
		p, err := newPlanner(openDir(t, c.root), ca)
		if err != nil {
			t.Fatal(err)
		}
		if f, err := p.resolve(c.name, unix.O_PATH, 0); !errors.Is(err, c.want) {
			t.Errorf("%s in %s: %v, %v, want %v", c.name, c.root, f, err, c.want)
		}
	}
}

// TestPlaces: what stands before the memory and the volumes of a sandbox is nothing in the
// agent's directory, and what stands after it is nothing else.
func TestPlaces(t *testing.T) {
	p := planOf(t, plant(t, "etc/ssl/certs/ca-certificates.crt"), nil)
	if len(p.StoreMounts) != 1 || p.StoreMounts[0].Target != "/etc/ssl/certs/ca-certificates.crt" {
		t.Errorf("over stores: %+v", p.StoreMounts)
	}
	if len(p.AgentMounts) != 2 || p.AgentMounts[0].Target != CertPath || p.AgentMounts[1].Target != BundlePath {
		t.Errorf("in the agent's directory: %+v", p.AgentMounts)
	}
	for _, m := range p.AgentMounts {
		if !record.Within(m.Target, oci.AgentDir) {
			t.Errorf("%s is not in %s", m.Target, oci.AgentDir)
		}
	}
}

// TestAgain: equal roots give equal plans, and a plan changes nothing of the root, not even
// when a file was read last.
func TestAgain(t *testing.T) {
	root := plant(t, "etc/ssl/certs/ca-certificates.crt", "etc/ssl/certs/java/cacerts = changeit.jks", "usr/lib/jvm/17/x")
	long := time.Now().Add(-48 * time.Hour)
	state := func() (all []string) {
		err := filepath.Walk(root.Name(), func(p string, _ os.FileInfo, err error) error {
			var st unix.Stat_t
			if err == nil {
				err = unix.Lstat(p, &st)
			}
			all = append(all, fmt.Sprint(p, st.Ino, st.Size, st.Mode, st.Nlink, st.Mtim, st.Ctim, st.Atim))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	for _, p := range []string{"etc/ssl/certs/ca-certificates.crt", "etc/ssl/certs/java/cacerts", "usr/lib/jvm"} {
		if err := os.Chtimes(filepath.Join(root.Name(), p), long, long); err != nil {
			t.Fatal(err)
		}
	}
	state() // it reads directories itself
	before := state()
	first, second := planOf(t, root, nil), planOf(t, root, nil)
	if !reflect.DeepEqual(first, second) {
		t.Errorf("the second plan is\n%s\nthe first\n%s", second.text(), first.text())
	}
	if after := state(); !slices.Equal(after, before) {
		t.Errorf("the root was\n%s\nand is\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
	}
}

// TestEnv: what the guest has not set is set, and what it has set stays and is extended.
func TestEnv(t *testing.T) {
	all := map[string]string{
		"SSL_CERT_FILE": BundlePath, "REQUESTS_CA_BUNDLE": BundlePath, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": BundlePath,
		"NODE_EXTRA_CA_CERTS": CertPath, "DENO_CERT": CertPath,
	}
	without := func(names ...string) map[string]string {
		m := maps.Clone(all)
		for _, name := range names {
			delete(m, name)
		}
		return m
	}
	tree := []string{"etc/ssl/certs/ca-certificates.crt", "opt/own.pem = -----BEGIN own", "opt/link.pem -> own.pem", "bin/sh = x"}
	const own = `/opt/own.pem trust-2: the authority and "-----BEGIN own"` + "\n"
	const hidden = "left REQUESTS_CA_BUNDLE: it would hide CURL_CA_BUNDLE, which the guest has set\n"
	for name, c := range map[string]struct {
		env  map[string]string
		want map[string]string
		more string // of the plan
	}{
		"none":            {nil, all, ""},
		"of another kind": {map[string]string{"PATH": "/bin", "SSL_CERT_DIR": "/etc/ssl/certs"}, all, ""},
		"an own bundle":   {map[string]string{"SSL_CERT_FILE": "/opt/own.pem"}, without("SSL_CERT_FILE"), own},
		"one for two, by a link": {
			map[string]string{"SSL_CERT_FILE": "/opt/../opt//link.pem", "DENO_CERT": "/opt/own.pem"},
			without("SSL_CERT_FILE", "DENO_CERT"), own,
		},
		"one that ours would hide": {
			map[string]string{"CURL_CA_BUNDLE": "/opt/own.pem"}, without("REQUESTS_CA_BUNDLE"), own + hidden,
		},
		"both": {
			map[string]string{"CURL_CA_BUNDLE": "/opt/own.pem", "REQUESTS_CA_BUNDLE": "/opt/own.pem"},
			without("REQUESTS_CA_BUNDLE"), own,
		},
		"one that is never set": {map[string]string{"PIP_CERT": "/opt/own.pem"}, all, own},
		"that of git":           {map[string]string{"GIT_SSL_CAINFO": "/opt/own.pem"}, all, own},
		"more for node":         {map[string]string{"NODE_EXTRA_CA_CERTS": "/opt/own.pem"}, without("NODE_EXTRA_CA_CERTS"), own},
		"that of the image":     {map[string]string{"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt"}, without("SSL_CERT_FILE"), ""},
		"ours": {
			map[string]string{"DENO_CERT": CertPath, "SSL_CERT_FILE": BundlePath}, without("DENO_CERT", "SSL_CERT_FILE"), "",
		},
		"a file that is not there": {
			map[string]string{"AWS_CA_BUNDLE": "/gone.pem"},
			all,
			`left AWS_CA_BUNDLE: the guest has set it to a file that is not in the root: it is absent or on a volume` + "\n",
		},
		"empty": {
			map[string]string{"SSL_CERT_FILE": ""},
			without("SSL_CERT_FILE"),
			`left SSL_CERT_FILE: the guest has set it, and not to an absolute path` + "\n",
		},
		"a program": {
			map[string]string{"SSL_CERT_FILE": "/bin/sh"}, without("SSL_CERT_FILE"), "left /bin/sh: not a bundle of certificates as PEM\n",
		},
		"a directory": {map[string]string{"SSL_CERT_FILE": "/etc"}, without("SSL_CERT_FILE"), "left /etc: not a regular file\n"},
		"no path": {
			map[string]string{"SSL_CERT_FILE": "/a\x00b"}, without("SSL_CERT_FILE"), "left /a\x00b: openat2: invalid argument\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := planOf(t, plant(t, tree...), c.env)
			if !maps.Equal(p.Env, c.want) {
				t.Errorf("the environment is %v, want %v", p.Env, c.want)
			}
			want := always + "/etc/ssl/certs/ca-certificates.crt trust-1: the authority and roots\n" + c.more
			if got := p.text(); got != want {
				t.Errorf("the plan is\n%s\nwant\n%s", got, want)
			}
		})
	}
}

// TestBareEnv: where BundlePath has the authority alone, no program trades its own roots for
// it. An empty bundle does not change that, and the roots of a program do.
func TestBareEnv(t *testing.T) {
	bare := map[string]string{"SSL_CERT_FILE": BundlePath, "NODE_EXTRA_CA_CERTS": CertPath, "DENO_CERT": CertPath}
	full := maps.Clone(bare)
	full["REQUESTS_CA_BUNDLE"], full["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = BundlePath, BundlePath
	const store = "etc/ssl/certs/ca-certificates.crt"
	for name, c := range map[string]struct {
		tree []string
		want map[string]string
	}{
		"bare":                       {nil, bare},
		"an empty bundle":            {[]string{store + " = "}, bare},
		"a bundle of space":          {[]string{store + " = \n\n"}, bare},
		"and Python's":               {[]string{store + " = ", certifi}, full},
		"and an empty one of Python": {[]string{store + " = ", certifi + " = "}, bare},
	} {
		if p := planOf(t, plant(t, c.tree...), nil); !maps.Equal(p.Env, c.want) {
			t.Errorf("%s: the environment is %v, want %v", name, p.Env, c.want)
		}
	}
}

// TestPaths: what a plan mounts on is in no link and in no directory of another name.
func TestPaths(t *testing.T) {
	p := planOf(t, plant(t, "usr/share/tls/bundle", "etc/ssl -> /usr/share/tls", "usr/share/tls/certs/ca-certificates.crt -> ../bundle",
		"home -> /usr"), map[string]string{"SSL_CERT_FILE": "/home/share/tls/./bundle", "JAVA_HOME": "relative/home"})
	want := always + "/usr/share/tls/bundle trust-1: the authority and roots\n"
	if got := p.text(); got != want {
		t.Errorf("the plan is\n%s\nwant\n%s", got, want)
	}
}

// TestHidden: nothing is mounted in a place of memory or of a volume, by whatever name that
// has. A bundle that is hidden is still what the image trusts.
func TestHidden(t *testing.T) {
	tree := []string{
		"usr/share/tls/certs/ca-certificates.crt", "etc/ssl -> /usr/share/tls", "etc/ssl2 -> ssl", "opt/own.pem = -----BEGIN own",
		"usr/lib/jvm/jdk/lib/security/cacerts = changeit.jks", "etc/dangling -> /absent/dir", "loop -> loop",
	}
	const (
		store = "/usr/share/tls/certs/ca-certificates.crt trust-1: the authority and roots\n"
		noted = "left /etc/ssl/certs/ca-certificates.crt: memory or a volume of the sandbox hides it\n"
		java  = "/usr/lib/jvm/jdk/lib/security/cacerts trust-%d: a JKS\n"
		own   = `/opt/own.pem trust-%d: the authority and "-----BEGIN own"` + "\n"
	)
	imageOnly := cert + "/opt/opensandbox/ca-bundle.pem trust-2: the authority and roots\n" + fmt.Sprintf(java+own, 1, 3) + noted
	for name, c := range map[string]struct {
		hidden []string
		want   string
	}{
		"none": {nil, always + store + fmt.Sprintf(java+own, 2, 3)},
		"others": {
			[]string{"/work", "/usr/share/tls/certs/ca", "/opt/own", "/etc/dangling/x", "/loop/x", "/absent/etc"},
			always + store + fmt.Sprintf(java+own, 2, 3),
		},
		"by its own path":     {[]string{"/usr/share/tls"}, imageOnly},
		"the file itself":     {[]string{"/usr/share/tls/certs/ca-certificates.crt"}, imageOnly},
		"by a link":           {[]string{"/etc/ssl"}, imageOnly},
		"by a link to a link": {[]string{"/etc/ssl2/certs/"}, imageOnly},
		"by a path with dots": {[]string{"/opt/../etc/./ssl"}, imageOnly},
		"one of Java, and an own": {
			[]string{"/usr/lib/jvm", "/opt"},
			always + store + "left /usr/lib/jvm/jdk/lib/security/cacerts: memory or a volume of the sandbox hides it\n" +
				"left /opt/own.pem: memory or a volume of the sandbox hides it\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := planOf(t, plant(t, tree...), map[string]string{"SSL_CERT_FILE": "/opt/own.pem"}, c.hidden...)
			if got := p.text(); got != c.want {
				t.Errorf("the plan is\n%s\nwant\n%s", got, c.want)
			}
			if p.Env["REQUESTS_CA_BUNDLE"] != BundlePath {
				t.Error("the image has a bundle, and its programs do not read it")
			}
		})
	}
}

// TestRefused: an authority that is none, and a root that is none, are errors.
func TestRefused(t *testing.T) {
	root := plant(t)
	for what, bad := range map[string][]byte{
		"nothing": nil, "text": []byte("hello"), "two": append(bytes.Clone(ca), ca...), "half": ca[:len(ca)-40],
		"not a certificate": []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
	} {
		if _, err := NewPlan(root, bad, nil, nil); err == nil || !strings.Contains(err.Error(), "authority") {
			t.Errorf("%s: %v", what, err)
		}
	}
	closed := openDir(t, root.Name())
	closed.Close()
	if _, err := NewPlan(closed, ca, nil, nil); err == nil {
		t.Error("a closed root gives a plan")
	}
}

func BenchmarkNewPlan(b *testing.B) {
	root := plant(b, "etc/ssl/certs/ca-certificates.crt = "+roots+strings.Repeat("x", 220<<10), "etc/ssl/certs/java/cacerts = changeit.jks")
	for b.Loop() {
		planOf(b, root, nil)
	}
}

// TestKnown: what other packages keep free for these variables are all of them.
func TestKnown(t *testing.T) {
	var names []string
	for _, v := range known {
		names = append(names, v.name)
	}
	if !slices.Equal(names, record.TrustVariables) {
		t.Errorf("known are %q, and record.TrustVariables %q", names, record.TrustVariables)
	}
}
