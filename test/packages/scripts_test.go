package packages

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// steps are the packages of four versions: v1.deb, v1.rpm and image-v1.deb to those of v4.
func steps(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for i, v := range []string{"v1", "v2", "v3", "v4"} {
		out := pack(t, "0.1."+string(rune('1'+i))+"-dev+"+v)
		for pattern, name := range map[string]string{
			"/sandboxd_*.deb": v + ".deb", "/sandboxd-image-tiny_*.deb": "image-" + v + ".deb", "/sandboxd-0*.rpm": v + ".rpm",
		} {
			if err := os.Rename(one(t, out+pattern), filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

// prelude are words of the scripts below. The daemon of an installation has been used: it has a
// state file, and the configuration names another directory than the default.
const prelude = `
export DEBIAN_FRONTEND=noninteractive
umask 022
touch /srv/asked
rm -rf /etc/sandboxd /var/lib/sandboxd /var/lib/man-db/auto-update # of the host; the last one takes seconds of each run
state() { dpkg-query -W -f '${db:Status-Status}\n' sandboxd 2>/dev/null || echo not-installed; }
same() { [ "$1" = "$2" ] || { echo "want $3: $1, got: $2"; exit 1; }; }
there() { for f; do [ -e "$f" ] || { echo "$f is missing"; exit 1; }; done; }
gone() { for f; do [ ! -e "$f" ] || { echo "$f is left"; exit 1; }; done; }
fails() { if out=$("${@:2}" 2>&1); then echo "did not fail: ${*:2}: $out"; exit 1; fi; [[ $out = *"$1"* ]] || { echo "want \"$1\" of ${*:2}, got: $out"; exit 1; }; }
used() { mkdir -p /srv/state; touch /srv/state/sandboxd.db; echo 'state_dir = "/srv/state" # a disk of its own' >/etc/sandboxd/config.toml; }
V=/usr/lib/sandboxd/versions
`

// systemd are more words: the service manager that the scripts ask. The daemon is the process of the file pid.
const systemd = `
mkdir -p /run/systemd/system
rm -f /usr/sbin/policy-rc.d
for p in systemctl deb-systemd-invoke modprobe; do
  printf '#!/bin/sh\necho "$(basename "$0") $*" >>/srv/systemd\n' >/usr/local/sbin/$p
  chmod +x /usr/local/sbin/$p
done
cat >>/usr/local/sbin/systemctl <<'SH'
case " $* " in
*" is-active "*) [ -e /srv/pid ] || exit 3 ;;
*" MainPID "*) cat /srv/pid ;;
esac
SH
runs() { # VERSION: its daemon runs; the program of a script would be its shell
  cp /usr/bin/sleep $V/$1/bin/serve
  mv $V/$1/bin/serve $V/$1/bin/sandboxd
  $V/$1/bin/sandboxd infinity &
  echo $! >/srv/pid
}
current() { same "versions/$1" "$(readlink /usr/lib/sandboxd/current)" "the current version"; }
ended() { gone /usr/lib/sandboxd/kept /usr/lib/sandboxd/undo; }
`

// scripts are what TestMaintainerScripts does. `make test-all` adds those of scripts_all_test.go.
var scripts = map[string]string{
	"install": `dpkg -i p/v1.deb
same installed "$(state)" "the package"
same "sandboxd version 0.1.1-dev+v1" "$(sandboxd --version)" "the program"
same $V/0.1.1-dev+v1/bin/sandboxctl "$(readlink -f /usr/bin/sandboxctl)" "where the link leads"
same "0 644" "$(stat -c '%s %a' $V/*/libexec/sandboxd/agent/ca-bundle.pem)" "the file of the authority"
there $V/*/libexec/sandboxd/agent/mitmproxy-ca-cert.pem /etc/systemd/system/multi-user.target.wants/sandboxd.service \
  /etc/systemd/system/sockets.target.wants/sandboxd.socket
getent group sandboxd
same "" "$(dpkg --verify sandboxd)" "what dpkg finds changed"
same "" "$(dpkg --audit)" "what dpkg finds broken"
same "" "$(grep teardown asked || true)" "what was ended"`,

	"upgrade with a sandbox that runs": `dpkg -i p/v1.deb
used
a=$V/0.1.1-dev+v1/libexec/sandboxd/agent
mkdir -p /srv/opensandbox
echo authority >/srv/pem
mkfifo /srv/mounted /srv/held
unshare -m sh -c "mount --bind $a /srv/opensandbox && mount --bind /srv/pem /srv/opensandbox/ca-bundle.pem && echo >/srv/mounted; exec sleep 1000" &
sandbox=$!
read -r _ </srv/mounted
cp $V/0.1.1-dev+v1/libexec/sandboxd/sandboxd-runc /srv/before
dpkg -i p/v2.deb
same "sandboxd version 0.1.2-dev+v2" "$(sandboxd --version)" "the program"
same authority "$(cat /proc/$sandbox/root/srv/opensandbox/ca-bundle.pem)" "what the sandbox trusts"
same "agent of 0.1.1-dev+v1" "$(cat /proc/$sandbox/root/srv/opensandbox/sandbox-agent)" "its agent"
cmp /srv/before $V/0.1.1-dev+v1/libexec/sandboxd/sandboxd-runc
there $V/0.1.2-dev+v2/libexec/sandboxd/agent/ca-bundle.pem
same versions/0.1.1-dev+v1 "$(readlink /usr/lib/sandboxd/previous)" "where a rollback goes"
same 'state_dir = "/srv/state" # a disk of its own' "$(cat /etc/sandboxd/config.toml)" "the configuration"
same "" "$(grep teardown asked || true)" "what was ended"
dpkg -i p/v3.deb
same "0.1.1-dev+v1 0.1.2-dev+v2 0.1.3-dev+v3" "$(ls $V | paste -sd ' ')" "versions: the daemon removes those that nothing needs"
same authority "$(cat /proc/$sandbox/root/srv/opensandbox/ca-bundle.pem)" "what the sandbox trusts"
kill $sandbox
wait $sandbox || true
rm -r $V/0.1.1-dev+v1 # as the daemon does
dpkg -i p/v4.deb
same "0.1.2-dev+v2 0.1.3-dev+v3 0.1.4-dev+v4" "$(ls $V | paste -sd ' ')" "versions"
same "/etc/sandboxd/config.toml" "$(dpkg --verify sandboxd | sed 's/.* //')" "what dpkg finds changed"
dpkg -i p/v4.deb
same "sandboxd version 0.1.4-dev+v4" "$(sandboxd --version)" "the program after a reinstallation"
same "0.1.2-dev+v2 0.1.3-dev+v3 0.1.4-dev+v4" "$(ls $V | paste -sd ' ')" "versions after a reinstallation"
gone /usr/lib/sandboxd/kept
hold() { # until it is killed
  python3 -c 'import fcntl, sys; f = open(sys.argv[1], "w"); fcntl.lockf(f, fcntl.LOCK_EX); open("/srv/mounted", "w").write("x\n"); input()' "$1" <>/srv/held &
  holder=$!
  read -r _ </srv/mounted
}
touch /usr/lib/sandboxd/upgrade.lock
number=$(stat -c %i /usr/lib/sandboxd/upgrade.lock)
mkdir other
mount -t tmpfs none other # it numbers its files one after the other
until : >other/twin && [ "$(stat -c %i other/twin)" -ge "$number" ]; do rm other/twin; done
same "$number" "$(stat -c %i other/twin)" "the number of a file of another file system"
hold other/twin
grep -q ":$number " /proc/locks
dpkg -i p/v3.deb # what others lock is not in its way
dpkg -i p/v4.deb
kill $holder
wait $holder || true
hold /usr/lib/sandboxd/upgrade.lock
number=$(stat -c %i /usr/lib/sandboxd/current)
fails "sandboxd upgrade (process $holder) is changing the version" dpkg -i p/v3.deb
same "$number" "$(stat -c %i /usr/lib/sandboxd/current)" "the number of the link, which the holder of the lock changes"
kill $holder
wait $holder || true
ln -sfn versions/0.1.3-dev+v3 /usr/lib/sandboxd/current # as sandboxd rollback does
ln -sfn versions/0.1.4-dev+v4 /usr/lib/sandboxd/previous
dpkg -i p/v2.deb
same versions/0.1.3-dev+v3 "$(readlink /usr/lib/sandboxd/previous)" "where a rollback goes: to what ran"
same "0.1.2-dev+v2 0.1.3-dev+v3 0.1.4-dev+v4" "$(ls $V | paste -sd ' ')" "versions after an installation over a rollback"`,

	"an upgrade under systemd": systemd + `dpkg -i p/v1.deb
runs 0.1.1-dev+v1
touch broken
for again in "dpkg -i p/v2.deb" "dpkg --configure sandboxd"; do
  : >asked
  fails "0.1.2-dev+v2 was not taken, for the reason above, and 0.1.1-dev+v1 runs on" $again
  same "tried: 0.1.2-dev+v2 with versions/0.1.1-dev+v1" "$(cat asked)" "what was tried"
  same half-configured "$(state)" "the package"
  current 0.1.1-dev+v1
  ended
done
rm broken
for end in 'ln -sfn "versions/$2" /usr/lib/sandboxd/current' 'mv /srv/pid /srv/ended'; do # the new one is taken; none runs
  echo "$end; exit 1" >ends
  fails "the change from 0.1.1-dev+v1 to 0.1.2-dev+v2 failed: the text above says why" dpkg --configure sandboxd
done
rm ends
mv ended pid
dpkg --configure sandboxd
same installed "$(state)" "the package"
current 0.1.2-dev+v2
ended
kill "$(cat pid)"
runs 0.1.2-dev+v2
dpkg --unpack p/v3.deb
current 0.1.3-dev+v3 # no trial yet
same kept/0.1.2-dev+v2 "$(readlink /usr/lib/sandboxd/undo)" "the program that a start calls"
same 0.1.2-dev+v2 "$(cat /usr/lib/sandboxd/kept/current)" "the version that a start runs"
cmp /usr/bin/sleep /usr/lib/sandboxd/undo/bin/sandboxd
gone $V/0.1.2-dev+v2/bin/sandboxd # dpkg has removed it
: >asked
dpkg --unpack p/v4.deb # the one before it has not been tried
same 0.1.2-dev+v2 "$(cat /usr/lib/sandboxd/kept/current)" "the version that a start runs"
echo '# of v4' >>/usr/lib/systemd/system/sandboxd.service # as if it had another unit
dpkg --configure sandboxd
same "tried: 0.1.4-dev+v4 with versions/0.1.2-dev+v2" "$(cat asked)" "what was tried"
fails "" grep '# of v4' /usr/lib/systemd/system/sandboxd.service # the trial begins with the unit of before
ended
printf '#!/bin/sh\n[ "$*" != "sandboxd.service restart" ] || exit 101\n' >/usr/sbin/policy-rc.d
chmod +x /usr/sbin/policy-rc.d
: >asked
dpkg -i p/v3.deb 2>&1 | grep "policy-rc.d forbids a restart, so 0.1.2-dev+v2 runs on"
current 0.1.3-dev+v3
same versions/0.1.4-dev+v4 "$(readlink /usr/lib/sandboxd/previous)" "where a rollback goes"
rm /usr/sbin/policy-rc.d
kill "$(cat pid)"
rm pid
dpkg -i p/v4.deb # the service is stopped
current 0.1.4-dev+v4
same versions/0.1.3-dev+v3 "$(readlink /usr/lib/sandboxd/previous)" "where a rollback goes"
runs 0.1.4-dev+v4
dpkg -i p/v4.deb # it runs already
current 0.1.4-dev+v4
ended
echo 99 >/usr/lib/sandboxd/current/share/sandboxd/schema
fails "the installed version writes state of schema 99" dpkg -i p/v3.deb
current 0.1.4-dev+v4
ended
same "" "$(cat asked)" "what was tried since"
kill "$(cat pid)"`,

	// A file system that takes no more names. The last whole copy of a version stays until the version is whole again,
	// and no part of one is kept.
	"an upgrade on a full disk": systemd + `mkdir -p /usr/lib/sandboxd
mount -t tmpfs -o nr_inodes=10000 none /usr/lib/sandboxd
room() { # FILES that can still be made
  read -r all free <<<"$(stat -f -c '%c %d' /usr/lib/sandboxd)"
  mount -o remount,nr_inodes=$((all - free + $1)) /usr/lib/sandboxd
}
whole() { diff -r --no-dereference before "$1"; }
dpkg -i p/v1.deb
runs 0.1.1-dev+v1
cp -a $V/0.1.1-dev+v1 before
dpkg --unpack p/v2.deb
removed=$(($(find before | wc -l) - $(find $V/0.1.1-dev+v1 | wc -l)))
for again in "dpkg --configure sandboxd" "dpkg -i p/v3.deb"; do
  for files in 0 $((removed / 2)); do
    room $files
    fails "version 0.1.1-dev+v1 cannot be put back whole: $V/0.1.1-dev+v1 lacks" $again
    whole /usr/lib/sandboxd/kept/0.1.1-dev+v1
    same 0.1.1-dev+v1 "$(cat /usr/lib/sandboxd/kept/current)" "the version that a start runs"
  done
  rm -r $V/0.1.1-dev+v1
done
room 5000
: >asked
dpkg -i p/v3.deb
same "tried: 0.1.3-dev+v3 with versions/0.1.1-dev+v1" "$(cat asked)" "what was tried"
whole $V/0.1.1-dev+v1
ended
kill "$(cat pid)"
runs 0.1.3-dev+v3
dpkg-deb -e p/v4.deb control
room 20
control/preinst upgrade 0.1.3~dev+v3-1 2>&1 | grep "version 0.1.3-dev+v3 cannot be kept beside 0.1.4-dev+v4"
same "" "$(ls /usr/lib/sandboxd/kept)" "what is kept, as no version is whole there"
room 5000
control/postrm abort-upgrade 0.1.3~dev+v3-1
ended
rm -r before
cp -a $V/0.1.3-dev+v3 before
dpkg --unpack p/v4.deb
dpkg-deb -e p/v3.deb again
again/preinst upgrade 0.1.4~dev+v4-1 # the version that runs, over one that nobody has tried
whole $V/0.1.3-dev+v3
current 0.1.3-dev+v3
kill "$(cat pid)"`,

	"remove and purge": `dpkg -i p/v1.deb
dpkg -i p/v2.deb
used
mkdir /srv/state/disk
mount -t tmpfs none /srv/state/disk
fails "nothing was stopped or removed" dpkg -P sandboxd
same installed "$(state)" "the package after a purge that was refused"
same "" "$(grep teardown asked || true)" "what a purge has ended that was refused"
there /usr/bin/sandboxd /etc/sandboxd/config.toml /srv/state/sandboxd.db
umount /srv/state/disk
rmdir /srv/state/disk
dpkg -r sandboxd
same "asked: teardown --config /etc/sandboxd/config.toml" "$(cat asked)" "what the daemon was asked"
same config-files "$(state)" "the package"
gone /usr/bin/sandboxd /usr/bin/sandboxctl /usr/lib/sandboxd /usr/lib/systemd/system/sandboxd.service /usr/share/doc/sandboxd
there /etc/sandboxd/config.toml /srv/state/sandboxd.db
dpkg -i p/v2.deb # again: what was kept is used
there /srv/state/sandboxd.db
grep state_dir /etc/sandboxd/config.toml
dpkg -r sandboxd
dpkg -P sandboxd
gone /etc/sandboxd /srv/state /etc/systemd/system/multi-user.target.wants/sandboxd.service /var/lib/systemd/deb-systemd-helper-enabled/sandboxd.service.dsh-also
same not-installed "$(state)" "the package"`,

	"install again after a removal under systemd": systemd + `
started() { local n; n=$(grep -c '^deb-systemd-invoke start sandboxd.socket sandboxd.service' systemd) || true; same "$1" "$n" "times that the service was started"; }
dpkg -i p/v1.deb
started 1
dpkg -i p/v2.deb
started 1 # an upgrade; it was stopped
dpkg -r sandboxd
echo 'colour = "red"' >>/etc/sandboxd/config.toml # the daemon would reject it
fails "rejects /etc/sandboxd/config.toml" dpkg -i p/v2.deb
started 1
sed -i '/colour/d' /etc/sandboxd/config.toml
dpkg --configure sandboxd
started 2
gone /etc/sandboxd/.removed
dpkg -i p/v1.deb
started 2`,
}

// TestMaintainerScripts: the packages are installed, upgraded, removed and purged by dpkg, in a
// copy of this host on which nothing of sandboxd is installed and systemd is not init. test/vm
// (story packages) does it with systemd and live sandboxes.
func TestMaintainerScripts(t *testing.T) {
	hosttest.Root(t)
	packages := steps(t)
	for name, script := range scripts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if out, err := world(t, packages, prelude+script); err != nil {
				lines := strings.Split(strings.TrimSpace(out), "\n")
				t.Errorf("%v:\n%s", err, strings.Join(lines[max(0, len(lines)-25):], "\n"))
			}
		})
	}
}
