package appliance

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"aead.dev/minisign"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/bundle"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// bench is a directory that dpkg takes for the host's root, and what bundles are made of.
type bench struct {
	t      *testing.T
	dir    string // of the test
	root   string // of dpkg
	secret minisign.PrivateKey
	order  Order
	said   *strings.Builder
}

func newBench(t *testing.T) *bench {
	t.Helper()
	return benchIn(t, t.TempDir())
}

func benchIn(t *testing.T, dir string) *bench {
	t.Helper()
	hosttest.Root(t)
	b := &bench{t: t, dir: dir, said: &strings.Builder{}}
	b.root = filepath.Join(b.dir, "root")
	b.put("root/var/lib/dpkg/info/format", "1\n")
	b.put("root/var/lib/dpkg/updates/.keep", "")
	b.put("root/var/lib/dpkg/status", `Package: dpkg
Status: install ok installed
Architecture: all
Version: 1.21.22
Maintainer: a <a@example.org>
Description: a

Package: present
Status: install ok installed
Architecture: all
Multi-Arch: allowed
Version: 2.0-1
Provides: virtual, numbered (= 1.5)
Maintainer: a <a@example.org>
Description: a

Package: removed
Status: deinstall ok config-files
Architecture: all
Version: 2.0-1
Maintainer: a <a@example.org>
Description: a

`)
	t.Setenv("DPKG_ROOT", b.root)
	t.Setenv("PATH", filepath.Join(b.dir, "bin")+":"+os.Getenv("PATH"))
	b.program("sandboxd", `echo another program`)
	public, secret, err := minisign.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	key, err := bundle.ReadKey(public.String())
	if err != nil {
		t.Fatal(err)
	}
	b.secret = secret
	b.put("work/.keep", "")
	b.order = Order{
		Keys: []bundle.Key{key}, Lacks: func(context.Context) []string { return nil }, Out: b.said, Work: filepath.Join(b.dir, "work"),
	}
	return b
}

func (b *bench) put(name, text string) string {
	b.t.Helper()
	path := filepath.Join(b.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		b.t.Fatal(err)
	}
	return path
}

// program puts a script in front of the host's programs.
func (b *bench) program(name, text string) {
	b.t.Helper()
	if err := os.Chmod(b.put("bin/"+name, "#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		b.t.Fatal(err)
	}
}

// deb makes a package with a conffile.
func (b *bench) deb(name, version, fields string) string {
	b.t.Helper()
	dir := name + "_" + version + "_all"
	b.put(dir+"/DEBIAN/control", fmt.Sprintf("Package: %s\nVersion: %s\nArchitecture: all\nMaintainer: a <a@example.org>\n"+
		"Description: a\n%s", name, version, fields))
	b.put(dir+"/DEBIAN/conffiles", "/etc/"+name+".conf\n")
	b.put(dir+"/etc/"+name+".conf", "of "+version+"\n")
	b.put(dir+"/usr/share/"+name+"/version", version)
	path := filepath.Join(b.dir, dir)
	if out, err := exec.Command("dpkg-deb", "--root-owner-group", "-Znone", "--build", path).CombinedOutput(); err != nil {
		b.t.Fatalf("dpkg-deb: %v: %s", err, out)
	}
	return path + ".deb"
}

// bundle makes one of packages, and of an image if there is one.
func (b *bench) bundle(version, image string, packages ...string) {
	b.t.Helper()
	p := bundle.Plan{
		Manifest: bundle.Manifest{Version: version, OS: "linux", Architecture: runtime.GOARCH, Created: time.Unix(0, 0)},
		Verifier: b.put("verifier", "#!/bin/sh\n"), Key: b.secret,
	}
	for _, file := range packages {
		s, err := bundle.Packaged(file, runtime.GOARCH)
		if err != nil {
			b.t.Fatal(err)
		}
		p.Sources = append(p.Sources, s)
	}
	if image != "" {
		p.Sources = append(p.Sources, bundle.Source{Member: bundle.Member{Name: "images/base.tar", Kind: bundle.Image}, Path: image})
	}
	b.order.File = filepath.Join(b.dir, version+".bundle")
	if err := bundle.Create(b.t.Context(), b.order.File, p); err != nil {
		b.t.Fatal(err)
	}
}

// installed returns the packages that dpkg has, and holds that no work is left.
func (b *bench) installed() (all []string) {
	b.t.Helper()
	out, err := exec.Command("dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Status}\n").Output()
	if err != nil {
		b.t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); f[0] != "dpkg" && f[0] != "present" && f[0] != "removed" {
			all = append(all, strings.TrimSpace(line))
		}
	}
	if left, err := os.ReadDir(b.order.Work); err != nil || len(left) != 1 {
		b.t.Errorf("left in the work directory: %v, %v", left, err)
	}
	return all
}

func (b *bench) install() error { return Install(b.t.Context(), b.order) }

// TestInstall tells the story of a host: a first bundle, the same again, the next one, and back.
func TestInstall(t *testing.T) {
	b := newBench(t)
	old := b.deb("ta", "1.0", "Depends: tb (= 1.0), present:any (>= 2.0-1~), virtual | nobody, numbered (>> 1.0)\n")
	other := b.deb("tb", "1.0", "Pre-Depends: present\n")
	b.program("sandboxctl", `echo "$@" >>"`+b.dir+`/calls"; cat "$3" >>"`+b.dir+`/calls"`)
	b.bundle("1.0.0", b.put("base.tar", "image\n"), old, other)
	for range 2 {
		if err := b.install(); err != nil {
			t.Fatalf("%v\n%s", err, b.said)
		}
		if got := b.installed(); !slices.Equal(got, []string{"ta 1.0 installed", "tb 1.0 installed"}) {
			t.Errorf("installed %q", got)
		}
	}
	calls, err := os.ReadFile(filepath.Join(b.dir, "calls"))
	if lines := strings.Split(string(calls), "\n"); err != nil || len(lines) != 5 || lines[1] != "image" ||
		!strings.HasPrefix(lines[0], "image import ") || !strings.HasSuffix(lines[0], "/images/base.tar") {
		t.Errorf("sandboxctl was called: %q, %v", calls, err)
	}
	b.put("root/etc/ta.conf", "of the operator\n")
	b.program("sandboxd", `echo "sandboxd version 1.0.0"`)
	b.bundle("1.1.0", "", b.deb("ta", "1.1", "Depends: tb\n"), other)
	if err := b.install(); err != nil {
		t.Fatalf("%v\n%s", err, b.said)
	}
	b.holds("etc/ta.conf", "of the operator\n")
	b.holds("usr/share/ta/version", "1.1")

	b.program("sandboxd", `echo "sandboxd version 1.1.0"`)
	b.order.File = filepath.Join(b.dir, "1.0.0.bundle")
	if err := b.install(); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "1.1.0 is installed") {
		t.Errorf("an older release: %v", err)
	}
	b.holds("usr/share/ta/version", "1.1")
	b.order.Force = true
	if err := b.install(); err != nil {
		t.Fatalf("%v\n%s", err, b.said)
	}
	b.holds("usr/share/ta/version", "1.0")
}

func (b *bench) holds(name, want string) {
	b.t.Helper()
	if got, err := os.ReadFile(filepath.Join(b.root, name)); err != nil || string(got) != want {
		b.t.Errorf("%s has %q, %v; want %q", name, got, err, want)
	}
}

// TestLacks: all that the host lacks is said at once, and nothing is installed.
func TestLacks(t *testing.T) {
	b := newBench(t)
	needs := "Pre-Depends: none\nDepends: present (>= 2.1), one|two , removed, virtual (>= 1), tb (>= 2)\n"
	b.bundle("1.0.0", "", b.deb("ta", "1.0", needs), b.deb("tb", "1.0", "Depends: none\n"))
	b.order.Lacks = func(context.Context) []string {
		return []string{
			"none is missing; fix: apt-get install none", "find none: install the Debian package none; fix: modprobe none",
			"the kernel has no overlayfs: use another kernel",
		}
	}
	err := b.install()
	want := "nothing was installed:\n  the package none\n  the package present (>= 2.1)\n  the package one or two\n" +
		"  the package removed\n  the package virtual (>= 1)\n  the package tb (>= 2)\n  the kernel has no overlayfs: use another kernel"
	if !errs.Is(err, errs.Unsupported) || !strings.HasSuffix(err.Error(), want) {
		t.Errorf("%v; want %s", err, want)
	}
	if got := b.installed(); got != nil {
		t.Errorf("installed %q", got)
	}
}

// TestRefused: what is no bundle for this host is refused before dpkg is called.
func TestRefused(t *testing.T) {
	b := newBench(t)
	b.bundle("1.0.0", "", b.deb("ta", "1.0", ""))
	whole, err := os.ReadFile(b.order.File)
	if err != nil {
		t.Fatal(err)
	}
	whole[len(whole)/2] ^= 1
	b.put("1.0.0.bundle", string(whole))
	if err := b.install(); !errs.Is(err, errs.Denied) {
		t.Errorf("a changed byte: %v", err)
	}
	b.bundle("1.1.0", b.put("base.tar", "image"))
	if err := b.install(); !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), "no package .deb") {
		t.Errorf("no package: %v", err)
	}
	b.bundle("1.2.0", "", b.deb("ta", "1.2", ""))
	b.order.Work = "/proc"
	if err := b.install(); err == nil {
		t.Error("installed without a work directory")
	}
	b.order.Work = filepath.Join(b.dir, "work")
	if got := b.installed(); got != nil {
		t.Errorf("installed %q", got)
	}
}

// TestHalfway: a dpkg that fails and images without a daemon are said, and the next try succeeds.
func TestHalfway(t *testing.T) {
	b := newBench(t)
	lock, err := os.Create(filepath.Join(b.root, "var/lib/dpkg/lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := unix.FcntlFlock(lock.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		t.Fatal(err)
	}
	b.bundle("1.0.0", b.put("base.tar", "image"), b.deb("ta", "1.0", ""))
	if err := b.install(); err == nil || !strings.Contains(err.Error(), "install the bundle again") {
		t.Errorf("while another dpkg runs: %v", err)
	}
	if err := unix.FcntlFlock(lock.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_UNLCK}); err != nil {
		t.Fatal(err)
	}
	b.program("sandboxctl", "echo no daemon runs >&2; exit 1")
	if err := b.install(); err == nil || !strings.Contains(err.Error(), "images/base.tar: exit status 1: no daemon runs") {
		t.Errorf("no daemon: %v", err)
	}
	b.program("sandboxctl", "exit 0")
	if err := b.install(); err != nil {
		t.Fatalf("%v\n%s", err, b.said)
	}
	if got := b.installed(); !slices.Equal(got, []string{"ta 1.0 installed"}) {
		t.Errorf("installed %q", got)
	}
}

// pending gives the package present of the host a trigger that is to be done.
func (b *bench) pending() {
	b.t.Helper()
	text, err := os.ReadFile(filepath.Join(b.root, "var/lib/dpkg/status"))
	if err != nil {
		b.t.Fatal(err)
	}
	b.put("root/var/lib/dpkg/triggers/File", "/usr/lib present\n")
	b.put("root/var/lib/dpkg/triggers/Unincorp", "") // without it dpkg forgets what is pending
	const was, is = "Package: present\nStatus: install ok installed", "Package: present\nStatus: install ok triggers-pending"
	pending := strings.Replace(string(text), was, is, 1)
	b.put("root/var/lib/dpkg/status", strings.Replace(pending, "Provides: virtual", "Triggers-Pending: /usr/lib\nProvides: virtual", 1))
}

func (b *bench) status(name string) string {
	b.t.Helper()
	out, err := exec.Command("dpkg-query", "-W", "-f", "${db:Status-Status}", name).Output()
	if err != nil {
		b.t.Fatal(err)
	}
	return string(out)
}

// TestTriggers: an installation that was cut short has left triggers of a package of the host. That package counts as
// present, and its triggers are done.
func TestTriggers(t *testing.T) {
	b := newBench(t)
	b.pending()
	b.bundle("1.0.0", b.put("base.tar", "image"), b.deb("ta", "1.0", "Depends: present\n"))
	b.program("sandboxctl", "exit 0")
	if err := b.install(); err != nil {
		t.Fatalf("%v\n%s", err, b.said)
	}
	if got := b.status("present"); got != "installed" {
		t.Errorf("the package whose triggers were pending is %s", got)
	}
}

// TestForeignTriggerFails: a trigger of another package of the host that fails is said, and the bundle is installed
// with its images all the same. What the bundle lacks then stays an error.
func TestForeignTriggerFails(t *testing.T) {
	b := newBench(t)
	if err := os.Chmod(b.put("root/var/lib/dpkg/info/present.postinst", "#!/bin/no-such-shell\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	b.bundle("1.0.0", b.put("base.tar", "image"), b.deb("ta", "1.0", ""), b.deb("tb", "1.0", ""))
	b.program("sandboxctl", `echo "$@" >>"`+b.dir+`/calls"`)
	b.pending()
	for _, warns := range []bool{true, false} { // dpkg does not try the trigger again
		b.said.Reset()
		if err := b.install(); err != nil {
			t.Fatalf("%v\n%s", err, b.said)
		}
		said := b.said.String()
		if strings.Contains(said, "installed present package post-installation script") != warns ||
			strings.Contains(said, "warning: dpkg --triggers-only --pending: dpkg: exit status 1") != warns {
			t.Errorf("it says:\n%s", said)
		}
		if got := b.status("present"); got != "half-configured" {
			t.Errorf("the package whose trigger failed is %s", got)
		}
		if got := b.installed(); !slices.Equal(got, []string{"ta 1.0 installed", "tb 1.0 installed"}) {
			t.Errorf("installed %q", got)
		}
	}
	if calls, err := os.ReadFile(filepath.Join(b.dir, "calls")); err != nil || strings.Count(string(calls), "base.tar") != 2 {
		t.Errorf("sandboxctl was called: %q, %v", calls, err)
	}
	for file, want := range map[string]string{
		b.deb("tc", "1.0", ""): "tc 1.0 all is not installed",
		b.deb("tb", "1.1", ""): "tb 1.1 all is not installed", // but 1.0 is
	} {
		if err := unfinished(t.Context(), []string{file}); err == nil || err.Error() != want {
			t.Errorf("%v; want %s", err, want)
		}
	}
	if out, err := exec.Command("dpkg", "--unpack", b.deb("tb", "1.1", "")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := unfinished(t.Context(), []string{b.deb("tb", "1.1", "")}); err == nil || err.Error() != "tb 1.1 all is unpacked" {
		t.Errorf("%v; it is only unpacked", err)
	}
}

// TestRPM: what rpm says about missing dependencies, in its own words.
func TestRPM(t *testing.T) {
	said := "error: Failed dependencies:\n\tiptables is needed by sandboxd-1.0.0-1.x86_64\n\tlibseccomp >= 2.5.0 is needed by sandboxd\n"
	var got []string
	for _, m := range needed.FindAllStringSubmatch(said, -1) {
		got = append(got, m[1])
	}
	if !slices.Equal(got, []string{"iptables", "libseccomp >= 2.5.0"}) {
		t.Errorf("%q", got)
	}
}

// TestUnpackRPM: rpm2cpio fails on packages of ours when it has written all of them. What it writes must be
// whole.
func TestUnpackRPM(t *testing.T) {
	b := newBench(t)
	b.put("in/usr/lib/file", strings.Repeat("text\n", 1000))
	archive := b.put("archive", "")
	if out, err := exec.Command("sh", "-c", "cd "+b.dir+"/in && find . | cpio -o -H newc --quiet >"+archive).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for what, c := range map[string]struct{ program, want string }{
		"whole":     {"cat " + archive + "; exit 1", ""},
		"cut":       {"head -c 3000 " + archive + "; exit 1", "cpio: exit status"},
		"nothing":   {"exit 1", "cpio: exit status"},
		"succeeded": {"cat " + archive, ""},
	} {
		b.program("rpm2cpio", c.program)
		dir := t.TempDir()
		err := rpm{}.unpack(t.Context(), "x.rpm", dir)
		if c.want == "" && err == nil {
			err = same(dir, filepath.Join(b.dir, "in"))
		}
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
