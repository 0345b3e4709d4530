package appliance

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/bundle"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// spare bundles packages of which the host gets only what it needs.
func (b *bench) spare(version string, given []string, spare ...string) {
	b.t.Helper()
	p := bundle.Plan{
		Manifest: bundle.Manifest{Version: version, OS: "linux", Architecture: runtime.GOARCH, Created: time.Unix(0, 0)},
		Verifier: b.put("verifier", "#!/bin/sh\n"), Key: b.secret,
	}
	for _, file := range slices.Concat(given, spare) {
		s, err := bundle.Packaged(file, runtime.GOARCH)
		if err != nil {
			b.t.Fatal(err)
		}
		s.IfNeeded = slices.Contains(spare, file)
		p.Sources = append(p.Sources, s)
	}
	b.order.File = filepath.Join(b.dir, version+".bundle")
	if err := bundle.Create(b.t.Context(), b.order.File, p); err != nil {
		b.t.Fatal(err)
	}
}

// version is that of a package that dpkg has.
func (b *bench) version(name string) string {
	out, _ := exec.Command("dpkg-query", "-W", "-f", "${Version}", name).Output() // none: it is not there
	return string(out)
}

// TestSpare: a host gets the packages of its distribution that it needs and has not, one that it has too old, and
// no other. Newer ones of the host stay, also with --force. What the doctor lacks without them is not said.
func TestSpare(t *testing.T) {
	b := newBench(t)
	ta := b.deb("ta", "1.0", "Depends: tb (>= 1.0), tc | td, present (>= 1.0)\n")
	b.order.Lacks = func(ctx context.Context) []string {
		return []string{"tb is missing; fix: apt-get install tb", "find te: install the Debian package te; fix: modprobe te"}
	}
	b.spare("1.0.0", []string{ta}, b.deb("tb", "1.0", "Depends: te\n"), b.deb("td", "1.0", ""), b.deb("te", "1.0", ""),
		b.deb("tf", "1.0", ""), b.deb("present", "1.0", ""))
	if err := b.install(); err != nil {
		t.Fatalf("%v\n%s", err, b.said)
	}
	want := []string{"ta 1.0 installed", "tb 1.0 installed", "td 1.0 installed", "te 1.0 installed"}
	if got := b.installed(); !slices.Equal(got, want) || b.version("present") != "2.0-1" {
		t.Errorf("installed %q, and present %s", got, b.version("present"))
	}
	b.spare("1.1.0", []string{b.deb("ta", "1.1", "Depends: tb (>= 1.1)\n"), b.deb("te", "0.9", "")}, b.deb("tb", "1.1", ""),
		b.deb("present", "1.1", ""))
	if err := b.install(); err != nil {
		t.Fatalf("%v\n%s", err, b.said)
	}
	want = []string{"ta 1.1 installed", "tb 1.1 installed", "td 1.0 installed", "te 1.0 installed"}
	if got := b.installed(); !slices.Equal(got, want) || b.version("present") != "2.0-1" {
		t.Errorf("installed %q, and present %s", got, b.version("present"))
	}
	b.spare("1.2.0", []string{b.deb("ta", "1.2", "Depends: nobody, tb (>= 3)\n")}, b.deb("tb", "1.2", ""))
	if err := b.install(); !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), "package nobody\n  the package tb (>= 3)") {
		t.Errorf("without all of them: %v", err)
	}
}

// TestFetch: apt fetches what a package needs from a signed repository of scripts/repository.sh. A package that was
// changed there, a repository that another key signed, and one without a signature are refused.
func TestFetch(t *testing.T) {
	b := newBench(t)
	t.Setenv("DPKG_ROOT", "") // apt asks dpkg of this host about architectures
	script, err := filepath.Abs("../../scripts/repository.sh")
	if err != nil {
		t.Fatal(err)
	}
	keys := func(name string) (gpg, public string) {
		dir := filepath.Join(b.dir, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = exec.Command("gpgconf", "--homedir", dir, "--kill", "all").Run() })
		if out, err := exec.Command("gpg", "--homedir", dir, "--batch", "--passphrase", "", "--quick-generate-key", name+"@example.org",
			"ed25519").CombinedOutput(); err != nil {
			t.Fatalf("gpg: %v\n%s", err, out)
		}
		out, err := exec.Command("gpg", "--homedir", dir, "--export").Output()
		if err != nil {
			t.Fatal(err)
		}
		return dir, b.put(name+".gpg", string(out))
	}
	home, key := keys("ours")
	_, other := keys("other")
	depends := b.deb("tb", "1.0", "Depends: te\n")
	for _, d := range []string{depends, b.deb("te", "1.0", ""), b.deb("tf", "1.0", "")} {
		arch := strings.Replace(filepath.Base(d), "_all", "_amd64", 1) // the script looks for a package of a machine
		if err := os.Rename(d, filepath.Join(b.dir, "work", arch)); err != nil {
			t.Fatal(err)
		}
	}
	repository := filepath.Join(b.dir, "repository")
	cmd := exec.Command(script, "ours@example.org")
	cmd.Env = append(os.Environ(), "GNUPGHOME="+home, "PACKAGES="+b.order.Work, "OUT="+repository)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	ta := b.deb("ta", "1.0", "Depends: tb (>= 1.0)\n")
	n := 0
	fetch := func(signed string) ([]string, error) {
		n++
		b.said.Reset()
		return Fetch(t.Context(), Wish{
			Packages: []string{ta}, Arch: "amd64", Sources: fmt.Sprintf("deb [signed-by=%s] copy:%s stable main\n", signed, repository),
			Dir: filepath.Join(b.dir, fmt.Sprint("fetched", n)), Out: b.said,
		})
	}
	got, err := fetch(key)
	var fetched []string
	for _, file := range got {
		name, _, _ := strings.Cut(filepath.Base(file), "_")
		fetched = append(fetched, name)
	}
	if err != nil || !slices.Equal(fetched, []string{"tb", "te"}) {
		t.Errorf("fetched %q, %v\n%s", fetched, err, b.said)
	}
	if _, err := fetch(other); err == nil || !strings.Contains(err.Error(), "NO_PUBKEY") {
		t.Errorf("signed by another key: %v", err)
	}
	deb := filepath.Join(repository, "pool", "te_1.0_amd64.deb")
	text, err := os.ReadFile(deb)
	if err != nil {
		t.Fatal(err)
	}
	text[len(text)/2] ^= 1
	if err := os.WriteFile(deb, text, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := fetch(key); err == nil || !strings.Contains(err.Error(), "Hash Sum mismatch") {
		t.Errorf("a package that was changed: %v", err)
	}
	for _, f := range []string{"InRelease", "Release.gpg"} {
		if err := os.Remove(filepath.Join(repository, "dists/stable", f)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := fetch(key); err == nil || !strings.Contains(err.Error(), "is not signed") {
		t.Errorf("without a signature: %v", err)
	}
}
