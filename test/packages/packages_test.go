// Package packages holds what tools/packages writes to what docs/install.md promises. Programs
// that only note what they are asked stand for the real ones, so a package takes a second; the
// real ones are packed, and judged by lintian and rpmlint, in `make test-all`.
package packages

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/store"
)

const top = "../.."

// daemon is a program that takes the place of sandboxd and sandboxctl in a package. A file
// /srv/broken has it fail, and the script /srv/ends is how a trial ends.
const daemon = `#!/bin/sh
case "$1 $2" in
"config init") echo 'state_dir = ""' ;;
"config check") ! grep -s colour "$3" ;;
"completion "*) echo "completion of $2" ;;
"--version "*) echo "sandboxd version @version@" ;;
"try "*)
	echo "tried: $2 with $(readlink /usr/lib/sandboxd/current)" >>/srv/asked
	if [ -e /srv/ends ]; then . /srv/ends; fi
	[ ! -e /srv/broken ] && ln -sfn "versions/$2" /usr/lib/sandboxd/current
	;;
*) echo "asked: $*" >>/srv/asked; [ ! -e /srv/broken ] ;;
esac
`

// pack writes the packages of a version of the programs above and returns their directory.
func pack(t *testing.T, version string, args ...string) string {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{
		"bin/sandboxd": daemon, "bin/sandboxctl": daemon, "bin/runsc": "runsc of @version@", "bin/sandboxd-runc": "runc of @version@",
		"bin/agent/sandbox-agent": "agent of @version@", "man/sandboxctl.1": ".TH sandboxctl 1\n", "man/sandboxd.8": ".TH sandboxd 8\n",
		"licences": "licences", "images/tiny.tar": "archive of @version@",
	}
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(strings.ReplaceAll(text, "@version@", version)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	run(t, filepath.Join(top, "build/tools/packages"), append([]string{
		"-source", top, "-bin", dir + "/bin", "-native", dir + "/bin", "-man", dir + "/man", "-images", dir + "/images",
		"-licences", dir + "/licences", "-out", dir + "/out", "-version", version, "-epoch", "1795780000",
	}, args...)...)
	return dir + "/out"
}

// run runs a program that must succeed and returns what it printed.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s(make packager builds build/tools/packages; scripts/deps.sh test installs the others)", name,
			strings.Join(args, " "), err, out)
	}
	return string(out)
}

// one returns the only file that matches.
func one(t *testing.T, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) != 1 {
		t.Fatalf("%s: %q, %v", pattern, found, err)
	}
	return found[0]
}

// listing is what a package holds: a line "mode path [-> target]" for each file, sorted.
func listing(t *testing.T, path string) (lines []string) {
	t.Helper()
	if strings.HasSuffix(path, ".deb") {
		owner := regexp.MustCompile(`^(\S{10}) root/root +\d+ \S+ \S+ \.(/.*)$`)
		for l := range strings.Lines(run(t, "dpkg-deb", "--contents", path)) {
			m := owner.FindStringSubmatch(strings.TrimRight(l, "\n"))
			if m == nil {
				if !strings.HasSuffix(l, " ./\n") {
					t.Errorf("%s holds what is not root's: %s", path, l)
				}
				continue
			}
			lines = append(lines, m[1]+" "+m[2])
		}
	} else {
		const format = `[%{FILEMODES:perms} %{FILENAMES}|%{FILELINKTOS}|%{FILEUSERNAME}:%{FILEGROUPNAME}\n]`
		for l := range strings.Lines(run(t, "rpm", "-qp", "--queryformat", format, path)) {
			f := strings.Split(strings.TrimRight(l, "\n"), "|")
			if f[2] != "root:root" {
				t.Errorf("%s holds what is not root's: %s", path, l)
			}
			if f[1] != "" { // nfpm gives links no permissions, and Linux does not use them
				f[0] = "lrwxrwxrwx" + f[0][10:] + " -> " + f[1]
			}
			lines = append(lines, f[0])
		}
	}
	slices.Sort(lines)
	return lines
}

// TestContents: both formats hold the same files, with the same modes; docs/install.md says
// which. dpkg and rpm keep the configuration.
func TestContents(t *testing.T) {
	hosttest.Root(t)
	const v = "0.1.0-dev+1a2b3c4"
	out := pack(t, v)
	deb, rpm := one(t, out+"/sandboxd_0.1.0~dev+1a2b3c4-1_amd64.deb"), one(t, out+"/sandboxd-0.1.0~dev+1a2b3c4-1.x86_64.rpm")
	inDeb, inRPM := listing(t, deb), listing(t, rpm)
	const prefix = "/usr/lib/sandboxd/versions/" + v
	for _, want := range []string{
		"-rwxr-xr-x " + prefix + "/bin/sandboxd", "-rwxr-xr-x " + prefix + "/bin/sandboxctl",
		"-rwxr-xr-x " + prefix + "/libexec/sandboxd/runsc", "-rwxr-xr-x " + prefix + "/libexec/sandboxd/sandboxd-runc",
		"-rwxr-xr-x " + prefix + "/libexec/sandboxd/agent/sandbox-agent",
		"lrwxrwxrwx " + prefix + "/libexec/sandboxd/agent/code-interpreter.sh -> /opt/code-interpreter/code-interpreter.sh",
		"-rw-r--r-- " + prefix + "/share/sandboxd/rootfs/base/recipe.toml", "-rw-r--r-- " + prefix + "/share/sandboxd/schema",
		"-rw-r--r-- " + prefix + "/systemd/sandboxd.service", "-rw-r--r-- " + prefix + "/systemd/sandboxd.socket",
		"lrwxrwxrwx /usr/lib/sandboxd/current -> versions/" + v,
		"lrwxrwxrwx /usr/bin/sandboxd -> ../lib/sandboxd/current/bin/sandboxd",
		"lrwxrwxrwx /usr/bin/sandboxctl -> ../lib/sandboxd/current/bin/sandboxctl",
		"-rw-r--r-- /usr/lib/systemd/system/sandboxd.service", "-rw-r--r-- /usr/lib/systemd/system/sandboxd.socket",
		"-rw-r--r-- /usr/lib/sysusers.d/sandboxd.conf", "-rw-r--r-- /usr/lib/tmpfiles.d/sandboxd.conf",
		"-rw-r--r-- /usr/lib/modules-load.d/sandboxd.conf", "-rw-r--r-- /etc/sandboxd/config.toml",
		"-rw-r--r-- /usr/share/man/man1/sandboxctl.1.gz", "-rw-r--r-- /usr/share/man/man8/sandboxd.8.gz",
		"-rw-r--r-- /usr/share/bash-completion/completions/sandboxctl", "-rw-r--r-- /usr/share/fish/vendor_completions.d/sandboxd.fish",
		"-rw-r--r-- /usr/share/doc/sandboxd/copyright", "-rw-r--r-- /usr/share/doc/sandboxd/docs/install.md",
		"-rw-r--r-- /usr/share/doc/sandboxd/CHANGELOG.md", "-rw-r--r-- /usr/share/doc/sandboxd/docs/monitoring/alerts.yml",
		"-rw-r--r-- /usr/share/doc/sandboxd/deploy/ansible/roles/sandboxd/tasks/main.yml",
		"-rw-r--r-- /usr/share/doc/sandboxd/third-party-licences.txt.gz",
	} {
		if !slices.Contains(inDeb, want) || !slices.Contains(inRPM, want) {
			t.Errorf("a package lacks %s:\n%s", want, strings.Join(inDeb, "\n"))
		}
	}
	if a, b := shared(inDeb), shared(inRPM); !slices.Equal(a, b) {
		t.Errorf("the packages differ:\n%s\n\n%s", strings.Join(a, "\n"), strings.Join(b, "\n"))
	}
	for _, l := range append(inDeb, inRPM...) {
		if mode := l[1:10]; l[0] != 'l' && (mode[4] == 'w' || mode[7] == 'w' || strings.ContainsAny(mode, "st")) {
			t.Errorf("others may write, or it has a special bit: %s", l)
		}
	}
	if got := run(t, "dpkg-deb", "--info", deb, "conffiles"); got != "/etc/sandboxd/config.toml\n" {
		t.Errorf("conffiles: %q", got)
	}
	if got := run(t, "rpm", "-qp", "--configfiles", rpm); got != "/etc/sandboxd/config.toml\n" {
		t.Errorf("configuration of the rpm: %q", got)
	}
	images := []string{"-rw-r--r-- /usr/share/sandboxd/images/tiny.tar"}
	for _, path := range []string{one(t, out+"/sandboxd-image-tiny_*.deb"), one(t, out+"/sandboxd-image-tiny-*.rpm")} {
		if !slices.Contains(listing(t, path), images[0]) {
			t.Errorf("%s lacks its archive: %q", path, listing(t, path))
		}
	}
	again := pack(t, v)
	for _, path := range []string{deb, rpm} {
		run(t, "cmp", path, filepath.Join(again, filepath.Base(path)))
	}
}

// shared are the lines of a listing that both formats must have: no directories, which rpm lists
// only if they are its own, and nothing that each distribution has elsewhere.
func shared(all []string) (some []string) {
	for _, l := range all {
		if l[0] != 'd' && !strings.Contains(l, "/zsh/") && !strings.Contains(l, "/share/licenses/") && !strings.Contains(l, "/lintian/") &&
			!strings.Contains(l, "/doc/sandboxd/changelog") {
			some = append(some, l)
		}
	}
	return some
}

// TestUnit: the unit of a package differs from that of scripts/install.sh by its prefix alone,
// and systemd takes it.
func TestUnit(t *testing.T) {
	hosttest.Root(t)
	root := t.TempDir()
	run(t, "dpkg-deb", "--extract", one(t, pack(t, "0.1.0-dev+1a2b3c4")+"/sandboxd_*.deb"), root)
	got, err := os.ReadFile(root + "/usr/lib/systemd/system/sandboxd.service")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile(top + "/systemd/sandboxd.service")
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.ReplaceAll(string(source), "@prefix@", "/usr"); string(got) != want {
		t.Errorf("the unit is\n%s\nwant\n%s", got, want)
	}
	if to, err := filepath.EvalSymlinks(root + "/usr/bin/sandboxd"); err != nil || !strings.HasSuffix(to, "+1a2b3c4/bin/sandboxd") {
		t.Errorf("/usr/bin/sandboxd leads to %s, %v", to, err)
	}
}

// TestRefused: a release without a section of the changelog is not packed, nor is what is no version.
func TestRefused(t *testing.T) {
	hosttest.Root(t)
	for version, want := range map[string]string{"9.9.9": "no section [9.9.9]", "v1": "no semantic version", "": "no semantic version"} {
		cmd := exec.Command(filepath.Join(top, "build/tools/packages"), "-source", top, "-out", t.TempDir(), "-version", version)
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%q: %v: %s", version, err, out)
		}
	}
}

// TestVersions: the programs say the version of the build, which is that of their packages.
func TestVersions(t *testing.T) {
	hosttest.Root(t)
	v := strings.TrimSpace(strings.TrimPrefix(run(t, top+"/build/bin/sandboxd", "--version"), "sandboxd version "))
	if !regexp.MustCompile(`^\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$`).MatchString(v) {
		t.Errorf("sandboxd says %q, which is no semantic version", v)
	}
	for _, program := range []string{"sandboxctl", "sandboxd-runc"} {
		if got := run(t, top+"/build/bin/"+program, "--version"); got != program+" "+v+"\n" {
			t.Errorf("%s says %q, want %s", program, got, v)
		}
	}
}

// TestSupport: docs/support.md names the schema of this source.
func TestSupport(t *testing.T) {
	text, err := os.ReadFile(top + "/docs/support.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		fmt.Sprintf("This release writes schema %d.", store.Schema), fmt.Sprintf("| schema %d | reads it |", store.Schema),
		fmt.Sprintf("| schema 1 to %d |", store.Schema-1),
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("docs/support.md lacks %q", want)
		}
	}
}

// world runs a script as root of a copy of this host, in which it may write what it likes and
// systemd is not init, and returns what it printed. /srv/p is the directory packages.
func world(t *testing.T, packages, script string) (string, error) {
	t.Helper()
	hosttest.Root(t)
	const make = `set -eu
umask 022
mount -t tmpfs none "$1"
mkdir "$1"/upper "$1"/work "$1"/root
mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" overlay "$1/root"
mount -t proc none "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mount -t tmpfs none "$1/root/run"
mount -t tmpfs none "$1/root/srv"
mkdir "$1/root/srv/p"
mount --bind "$2" "$1/root/srv/p"
exec chroot "$1/root" bash -c 'cd /srv && set -eu && eval "$1"' world "$3"`
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute) // lintian takes minutes on a busy host
	defer cancel()
	cmd := exec.CommandContext(ctx, "unshare", "-mnpf", "--kill-child", "bash", "-c", make, "make", t.TempDir(), packages, script)
	cmd.WaitDelay = time.Second // for what a script that failed has left
	out, err := cmd.CombinedOutput()
	return string(out), err
}
