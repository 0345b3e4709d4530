// Package install holds the scripts and units that make sandboxd a service to
// what they promise, as far as that goes without a systemd; test/vm does the rest.
package install

import (
	"context"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/oci/trust"
)

const top = "../.."

// exposure is what systemd-analyze of Debian 12 gives the service, on a scale
// from 0 to 10; docker.service has 9.6. It may only be lowered. Each version of
// systemd asks for more, so figures of two cannot be compared.
const (
	exposure = 7.1
	version  = "systemd 252 "
)

// unit writes the service unit as the installer does.
func unit(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(top + "/systemd/sandboxd.service")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "sandboxd.service")
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(string(b), "@prefix@", "/usr/local")), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestExposure(t *testing.T) {
	hosttest.Root(t) // systemd-analyze is among what make deps installs
	v, err := exec.Command("systemd-analyze", "--version").Output()
	if err != nil {
		t.Fatalf("systemd-analyze: %v; make deps installs it", err)
	}
	out, err := exec.Command("systemd-analyze", "security", "--offline=true", unit(t)).CombinedOutput()
	m := regexp.MustCompile(`Overall exposure level for sandboxd.service: ([0-9.]+)`).FindSubmatch(out)
	if m == nil {
		t.Fatalf("systemd-analyze: %v: %s", err, out)
	}
	if !strings.HasPrefix(string(v), version) {
		t.Logf("%s on %s: not compared", m[1], v)
		return
	}
	got, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil || got > exposure {
		t.Errorf("the exposure of the service is %s (%v), and may be %.1f at most:\n%s", m[1], err, exposure, out)
	}
	if got < exposure {
		t.Errorf("the exposure of the service is %s: write that into this test, so that it stays", m[1])
	}
}

// TestMemoryLimit: the service has a limit of memory by default, at which the kernel kills one
// process and not the whole service.
func TestMemoryLimit(t *testing.T) {
	b, err := os.ReadFile(unit(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"MemoryMax=50%", "OOMPolicy=continue", "OOMScoreAdjust=-900"} {
		if !strings.Contains(string(b), "\n"+line+"\n") {
			t.Errorf("the unit has no line %s", line)
		}
	}
	if regexp.MustCompile(`(?m)^Memory(High|SwapMax)=`).Match(b) {
		t.Error("the unit has a limit at which the kernel slows the daemon down, so that its watchdog ends it")
	}
}

// TestMountNamespace: each of these options would give the daemon a mount
// namespace of its own, and sandboxes' root file systems would go with it
// (systemd.exec(5)).
func TestMountNamespace(t *testing.T) {
	b, err := os.ReadFile(unit(t))
	if err != nil {
		t.Fatal(err)
	}
	private := regexp.MustCompile(`(?m)^(Private(Tmp|Devices|Mounts|Users|Network|IPC)|Protect\w+|(ReadOnly|ReadWrite|Inaccessible|Exec|NoExec|Bind|BindReadOnly)Paths|TemporaryFileSystem|Root(Directory|Image)|DynamicUser|MountAPIVFS|MountImages|ExtensionImages|LoadCredential\w*|RuntimeDirectory)=`)
	if found := private.FindAllString(string(b), -1); len(found) > 0 {
		t.Errorf("the unit has %q", found)
	}
}

// TestRestartLater: a daemon that does not start is tried more and more rarely, and for ever, also by a systemd that
// knows no steps. The first restart after a crash comes at once.
func TestRestartLater(t *testing.T) {
	b, err := os.ReadFile(unit(t))
	if err != nil {
		t.Fatal(err)
	}
	head, _, _ := strings.Cut(string(b), "[Service]")
	if !strings.Contains(head, "\nStartLimitIntervalSec=0\n") || !strings.Contains(string(b), "\nExecStopPost=-/bin/sh ") ||
		!strings.Contains(string(b), "\nRestart=always\nRestartSec=1\nRestartSteps=8\nRestartMaxDelaySec=60\n") {
		t.Errorf("want restarts after 1 to 60 s, without a limit, in:\n%s", b)
	}
}

// TestUndoMayFail: the program of the version before, which may not know a key of the configuration, does not keep the
// daemon from starting.
func TestUndoMayFail(t *testing.T) {
	b, err := os.ReadFile(unit(t))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(b), "\nExecStartPre=-/bin/sh ") || strings.Count(string(b), "\nExecStartPre=") != 1 {
		t.Errorf("want one ExecStartPre=, which may fail, in:\n%s", b)
	}
}

// built skips a test that needs what `make build` makes, where that was not run.
func built(t *testing.T) {
	t.Helper()
	if os.Getenv("SANDBOXD_TEST") != "root" {
		t.Skip("needs make build; SANDBOXD_TEST=root says that it was made")
	}
	if _, err := os.Stat(filepath.Join(top, "build/bin/sandboxd")); err != nil {
		t.Fatal(err)
	}
}

// TestAgentFiles: both `make build` and an installation have the files on which the authority
// of a sandbox is mounted. An upgrade leaves them as they are, because a rename over one would
// end its mounts.
func TestAgentFiles(t *testing.T) {
	built(t)
	prefix := t.TempDir()
	agent := filepath.Join(prefix, "libexec/sandboxd/agent")
	install := func() string {
		t.Helper()
		out, err := exec.Command(filepath.Join(top, "scripts/install.sh"), "--dry-run", "--prefix", prefix).CombinedOutput()
		if err != nil {
			t.Fatalf("install.sh: %v: %s", err, out)
		}
		return string(out)
	}
	first := install()
	if err := os.MkdirAll(agent, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, target := range trust.AgentFiles {
		name := filepath.Join(agent, filepath.Base(target))
		if want := "install -m 644 /dev/null " + name + "\n"; !strings.Contains(first, want) {
			t.Errorf("an installation does not do %q:\n%s", want, first)
		}
		if err := os.WriteFile(name, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(top, "build/bin/agent", filepath.Base(target)))
		if err != nil || len(b) > 0 {
			t.Errorf("make build makes %s with %d bytes, %v; want an empty file", filepath.Base(target), len(b), err)
		}
	}
	for _, target := range trust.AgentFiles {
		if again := install(); strings.Contains(again, filepath.Base(target)) {
			t.Errorf("an upgrade touches %s:\n%s", filepath.Base(target), again)
		}
	}
}

// TestDryRun: it names all it would do, and does nothing.
func TestDryRun(t *testing.T) {
	built(t)
	prefix := filepath.Join(t.TempDir(), "prefix")
	for _, script := range []string{"install.sh", "uninstall.sh"} {
		out, err := exec.Command(filepath.Join(top, "scripts", script), "--dry-run", "--prefix", prefix).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", script, err, out)
		}
		for _, want := range []string{
			prefix + "/libexec/sandboxd", "/etc/systemd/system/sandboxd.service", "/etc/sysusers.d/sandboxd.conf",
			"/etc/tmpfiles.d/sandboxd.conf", prefix + "/share/bash-completion/completions/sandboxctl",
			"/etc/modules-load.d/sandboxd.conf",
		} {
			if !strings.Contains(string(out), want) {
				t.Errorf("%s says nothing of %s:\n%s", script, want, out)
			}
		}
	}
	out, err := exec.Command(filepath.Join(top, "scripts/install.sh"), "--dry-run", "--prefix", prefix).Output()
	link := "ln -sfn /opt/code-interpreter/code-interpreter.sh " + prefix + "/libexec/sandboxd/agent/code-interpreter.sh\n"
	if err != nil || !strings.Contains(string(out), link) {
		t.Errorf("install.sh does not link the code interpreter into the agent's directory: %v\n%s", err, out)
	}
	if to, err := os.Readlink(filepath.Join(top, "build/bin/agent/code-interpreter.sh")); err != nil ||
		!strings.HasPrefix(link, "ln -sfn "+to+" ") {
		t.Errorf("make build links it to %q, %v", to, err)
	}
	if _, err := os.Stat(prefix); err == nil {
		t.Errorf("a dry run made %s", prefix)
	}
}

// TestBadFlags: what cannot be is refused before anything is touched.
func TestBadFlags(t *testing.T) {
	for _, args := range [][]string{{"--prefix", "relative"}, {"--prefix", "/a b"}, {"--prefix", "/x;reboot"}, {"--no-such"}} {
		out, err := exec.Command(filepath.Join(top, "scripts/install.sh"), append([]string{"--dry-run"}, args...)...).CombinedOutput()
		if err == nil || len(out) == 0 {
			t.Errorf("install.sh %q: %v, %s", args, err, out)
		}
	}
}

// world runs a script as root of a copy of this host, in which it may write
// what it likes and systemd is not init, and returns what it said. The working
// directory is the top of the source.
func world(t *testing.T, script string) (string, error) {
	t.Helper()
	hosttest.Root(t)
	const make = `set -e
mount -t tmpfs none "$1"
mkdir "$1"/upper "$1"/work "$1"/root
mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" overlay "$1/root"
mount --rbind /proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mount -t tmpfs none "$1/root/run"
exec chroot "$1/root" bash -c 'cd "$1" && set -eu && eval "$2"' world "$2" "$3"`
	source, err := filepath.Abs(top)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "unshare", "-m", "bash", "-c", make, "make", t.TempDir(), source, script)
	cmd.WaitDelay = time.Second // for what a script that failed has left
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// installed is a world with a service whose daemon only notes what it is asked.
const installed = `
mkdir -p /opt/x/bin /etc/sandboxd /srv/state /var/lib/sandboxd
echo 'ExecStart=/opt/x/bin/sandboxd serve --config /etc/sandboxd/config.toml' >/etc/systemd/system/sandboxd.service
printf '#!/bin/sh\necho asked: "$@"\n' >/opt/x/bin/sandboxd
chmod +x /opt/x/bin/sandboxd
touch /srv/state/sandboxd.db /srv/state/disk /var/lib/sandboxd/sandboxd.db
echo 'state_dir = "/srv/state" # a disk of its own' >/etc/sandboxd/config.toml
`

// TestUninstall: sandboxes are ended by the daemon that serves, before anything
// goes; where that cannot be, nothing goes.
func TestUninstall(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		fails  bool
		want   string // what is said
		gone   string // files
		stay   string
	}{
		"prefix of the unit": {
			script: "scripts/uninstall.sh", want: "asked: teardown --config /etc/sandboxd/config.toml\n",
			gone: "/opt/x/bin/sandboxd /etc/systemd/system/sandboxd.service", stay: "/srv/state/disk /etc/sandboxd/config.toml",
		},
		"manual and completion": {
			script: `cd /opt/x && mkdir -p share/man/man1 share/man/man8 share/bash-completion/completions
touch share/man/man1/sandboxctl.1 share/man/man1/sandboxctl-exec.1 share/man/man8/sandboxd-serve.8 share/man/man1/sandbox.1 share/bash-completion/completions/sandboxctl
"$OLDPWD/scripts/uninstall.sh"`,
			gone: "/opt/x/share/man/man1/sandboxctl.1 /opt/x/share/man/man1/sandboxctl-exec.1 /opt/x/share/man/man8/sandboxd-serve.8 " +
				"/opt/x/share/bash-completion/completions/sandboxctl",
			stay: "/opt/x/share/man/man1/sandbox.1",
		},
		"no configuration": {
			script: "rm /etc/sandboxd/config.toml; scripts/uninstall.sh", want: "asked: teardown\n", gone: "/opt/x/bin/sandboxd",
		},
		"wrong prefix": {
			script: "scripts/uninstall.sh --purge --prefix /usr/local", fails: true, want: "the service runs /opt/x/bin/sandboxd",
			stay: "/opt/x/bin/sandboxd /srv/state/disk",
		},
		"no daemon": {
			script: "rm /opt/x/bin/sandboxd; scripts/uninstall.sh --purge", fails: true,
			want: "but not /opt/x/bin/sandboxd, which ends the sandboxes",
			stay: "/srv/state/disk /etc/systemd/system/sandboxd.service",
		},
		"no teardown": {
			script: "echo exit 3 >>/opt/x/bin/sandboxd; scripts/uninstall.sh --purge", fails: true, want: "the teardown failed",
			stay: "/srv/state/disk /opt/x/bin/sandboxd",
		},
		"purge": {
			script: "scripts/uninstall.sh --purge", gone: "/srv/state /etc/sandboxd /opt/x/bin/sandboxd",
			stay: "/var/lib/sandboxd/sandboxd.db",
		},
		"purge later": {
			script: "scripts/uninstall.sh; scripts/uninstall.sh --purge", gone: "/srv/state /etc/sandboxd",
		},
		"purge of another instance": {
			script: `mkdir /var/lib/sandboxd-b; touch /var/lib/sandboxd-b/sandboxd.db; echo 'instance = "b"' >/etc/sandboxd/config.toml; scripts/uninstall.sh --purge`,
			gone:   "/var/lib/sandboxd-b", stay: "/var/lib/sandboxd/sandboxd.db",
		},
		"purge of what is mounted": {
			script: "mkdir /srv/state/pool; mount -t tmpfs none /srv/state/pool; touch /srv/state/pool/precious; scripts/uninstall.sh " +
				"--purge",
			fails: true, want: "still mounted, so nothing was removed: /srv/state/pool", stay: "/srv/state/pool/precious " +
				"/srv/state/disk /opt/x/bin/sandboxd",
		},
		"purge of a disk": {
			script: "mount -t tmpfs none /srv/state; mkdir /srv/state/d; touch /srv/state/d/f /srv/state/sandboxd.db; " +
				"scripts/uninstall.sh --purge",
			gone: "/srv/state/d /srv/state/sandboxd.db /etc/sandboxd", stay: "/srv/state",
		},
		"purge of what is not ours": {
			script: "rm /srv/state/sandboxd.db; scripts/uninstall.sh --purge", fails: true, want: "/srv/state has no sandboxd.db",
			stay: "/srv/state/disk",
		},
		"a state directory it cannot read": {
			script: "echo 'state_dir = \"/srv/\\u0041\"' >/etc/sandboxd/config.toml; scripts/uninstall.sh --purge",
			fails:  true, want: "cannot read state_dir from the line", stay: "/opt/x/bin/sandboxd /srv/state/disk",
		},
	} {
		t.Run(name, func(t *testing.T) {
			files := "for f in " + c.gone + "; do [ ! -e $f ] || echo LEFT $f; done; for f in " + c.stay +
				"; do [ -e $f ] || echo GONE $f; done"
			out, err := world(t, installed+"status=0; ("+c.script+") || status=$?; "+files+"; exit $status")
			if (err != nil) != c.fails || !strings.Contains(out, c.want) || strings.Contains(out, "LEFT /") ||
				strings.Contains(out, "GONE /") {
				t.Errorf("%v:\n%s", err, out)
			}
		})
	}
}

// TestInstall puts everything in place, and over an older version nothing if
// the new one does not take its configuration.
func TestInstall(t *testing.T) {
	out, err := world(t, `rm -rf /etc/sandboxd; scripts/install.sh
[ -x /usr/local/bin/sandboxd ]; grep -q 'ExecStart=/usr/local/bin/sandboxd serve --config /etc/sandboxd/config.toml' /etc/systemd/system/sandboxd.service
/usr/local/bin/sandboxd config check /etc/sandboxd/config.toml
grep -q '^.SH SYNOPSIS' /usr/local/share/man/man1/sandboxctl-exec.1 /usr/local/share/man/man8/sandboxd-serve.8
. /usr/local/share/bash-completion/completions/sandboxctl; . /usr/local/share/bash-completion/completions/sandboxd
declare -F __start_sandboxctl __start_sandboxd
[ -s /usr/local/share/zsh/site-functions/_sandboxctl ]; [ -s /usr/local/share/fish/vendor_completions.d/sandboxctl.fish ]
echo old >/usr/local/bin/sandboxd; echo old >/etc/systemd/system/sandboxd.service
echo 'no_such_key = 1' >>/etc/sandboxd/config.toml
! scripts/install.sh
cat /usr/local/bin/sandboxd /etc/systemd/system/sandboxd.service
echo end`)
	if err != nil || !strings.HasSuffix(out, "nothing was changed\nold\nold\nend\n") || !strings.Contains(out, "no_such_key") {
		t.Errorf("%v:\n%s", err, out)
	}
}

// TestConfigurationIsNeeded: a service whose configuration is gone does not
// serve with the defaults: they name another state directory, and what runs
// there would be ended as strays.
func TestConfigurationIsNeeded(t *testing.T) {
	out, err := world(t, `rm -rf /etc/sandboxd
command=$(sed -n 's,^ExecStart=@prefix@/bin,build/bin,p' systemd/sandboxd.service)
if timeout 20 unshare -n $command; then exit 1; fi
[ ! -e /var/lib/sandboxd/sandboxd.db ]; [ ! -e /run/sandboxd ]`)
	if err != nil || !strings.Contains(out, "read configuration: open /etc/sandboxd/config.toml: no such file") {
		t.Errorf("%v:\n%s", err, out)
	}
}

// machine has scripts/test-vm.sh tell a story with programs that only seem to make
// a Debian and to emulate: what they were asked for is in /run/asked.
const machine = `rm -rf build/bin build/man build/images build/vm; mkdir -p build/bin build/man build/images
export XDG_CACHE_HOME=/run/cache
printf '#!/bin/sh\necho image $1 >>/run/asked; echo an image >build/images/$1.tar\n' >scripts/images.sh
printf 'import shutil, sys; shutil.copy(*sys.argv[1:])' >test/vm/thin.py
cat >/usr/local/bin/mmdebstrap <<'END'
#!/bin/sh
echo debian >>/run/asked
for root; do :; done
mkdir -p "$root/boot" "$root/mnt" "$root/etc/systemd/system/multi-user.target.wants"
touch "$root/boot/vmlinuz-1" "$root/boot/initrd.img-1"
END
printf '#!/bin/sh\nfor file; do :; done; echo a disk >"$file"\n' >/usr/local/bin/qemu-img
cat >/usr/local/bin/qemu-system-x86_64 <<'END'
#!/bin/sh
for arg; do
  case $arg in file:*.serial) echo 'END clock 1 0' >"${arg#file:}" ;; esac
done
END
ln -sf ../../bin/true /usr/local/bin/mkfs.ext4
chmod +x /usr/local/bin/*
`

// TestInterruptedStory: a machine that is interrupted is gone, with its disk.
func TestInterruptedStory(t *testing.T) {
	// A shell traps no signal that it began with ignored, as under nohup; what is handled here is not for it.
	heard := make(chan os.Signal, 1)
	signal.Notify(heard, syscall.SIGHUP)
	defer signal.Stop(heard)
	for _, signal := range []string{"TERM", "HUP"} {
		out, err := world(t, machine+`mkfifo /run/pid
printf '#!/bin/sh\necho $$ >/run/pid; exec sleep 1000\n' >/usr/local/bin/qemu-system-x86_64
scripts/test-vm.sh --debian fake clock & story=$!
read -r qemu </run/pid
[ -s build/vm/clock.disk ]
kill -`+signal+` $story
status=0; wait $story || status=$?
timeout 20 tail -f --pid=$qemu /dev/null
ls build/vm /run/cache/sandboxd-test/vm; echo ended with $status`)
		if err != nil || !strings.HasSuffix(out, "ended with 130\n") || strings.Contains(out, "clock.disk") ||
			!strings.Contains(out, "fake-plain-") {
			t.Errorf("SIG%s: %v:\n%s", signal, err, out)
		}
	}
}

// TestStoryCache: the disk below stories and the images for them are made once, and
// again if they are damaged or made of something else.
func TestStoryCache(t *testing.T) {
	out, err := world(t, machine+`cache=/run/cache/sandboxd-test
tell() { # WANT...: what must be made for it
  local want=$*
  rm -f /run/asked
  touch /run/asked
  scripts/test-vm.sh --debian fake "${story:-clock}" >/run/said 2>&1 || { cat /run/said; exit 1; }
  [ "$want" = "$(tr '\n' ' ' </run/asked | sed 's/ $//')" ] || { echo "want: $want"; cat /run/asked; exit 1; }
  ! compgen -G "$cache/vm/new.*" || exit 1
}
tell image base debian
tell
printf x | dd of="$(echo $cache/vm/fake-plain-*/disk)" conv=notrunc status=none # a byte of the disk
tell debian
truncate -s 3 $cache/vm/fake-plain-*/disk
tell debian
rm $cache/vm/fake-plain-*/sums
tell debian
mkdir -p $cache/vm/new.1/root # of one that was killed
rm -r $cache/vm/fake-plain-*
tell debian
printf x >>"$(echo $cache/images/base-*.tar)"
tell image base
rm $cache/images/base-*.tar.sha256
tell image base
digest=$(sha256sum <rootfs/base/recipe.toml | head -c 16)
[ "$(sha256sum <$cache/images/base-$digest.tar | head -c 64)" = "$(cat $cache/images/base-$digest.tar.sha256)" ]
exec 7<"$(echo $cache/vm/fake-plain-*)"; flock -s 7 # another run stands on it
before=$(echo $cache/vm/fake-plain-*)
sed -i 's/firewalld; do/firewalld other; do/' scripts/test-vm.sh
tell debian
[ "$(ls -d $cache/vm/fake-plain-* | wc -l)" = 2 ]
exec 7<&-
tell
[ ! -e "$before" ]
sed -i '1i# needs: more packages' test/vm/clock.sh
tell debian
tell
ls $cache/vm`)
	if err != nil || !strings.Contains(out, "fake-clock-") || strings.Count(out, "fake-plain-") != 1 {
		t.Errorf("%v:\n%s", err, out)
	}
}
