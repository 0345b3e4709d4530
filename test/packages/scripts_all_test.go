//go:build all

package packages

import "maps"

func init() { maps.Copy(scripts, rare) }

// rare are the scripts of cases that are rare.
var rare = map[string]string{
	"downgrade": `dpkg -i p/v2.deb
dpkg -i p/v1.deb
same "sandboxd version 0.1.1-dev+v1" "$(sandboxd --version)" "the program"
dpkg -i p/v2.deb
echo 99 >/usr/lib/sandboxd/current/share/sandboxd/schema
fails "the installed version writes state of schema 99" dpkg -i p/v1.deb
same installed "$(state)" "the package"
same "sandboxd version 0.1.2-dev+v2" "$(sandboxd --version)" "the program"
touch /etc/sandboxd/downgrade
dpkg -i p/v1.deb
same "sandboxd version 0.1.1-dev+v1" "$(sandboxd --version)" "the program"
gone /etc/sandboxd/downgrade`,

	"a configuration that the new version rejects": `dpkg -i p/v1.deb
echo colour = 1 >>/etc/sandboxd/config.toml
fails "0.1.2-dev+v2 rejects /etc/sandboxd/config.toml" dpkg -i p/v2.deb
there $V/0.1.1-dev+v1/bin/sandboxd # of the daemon that runs
sed -i '/colour/d' /etc/sandboxd/config.toml
dpkg --configure -a
same installed "$(state)" "the package"`,

	"sandboxes that cannot be ended": `dpkg -i p/v1.deb
used
touch broken
fails "so nothing was removed" dpkg -r sandboxd
same installed "$(state)" "the package"
same "sandboxd version 0.1.1-dev+v1" "$(sandboxd --version)" "the program"
fails "so nothing was removed" dpkg -P sandboxd
there /srv/state/sandboxd.db
rm broken
dpkg -P sandboxd
gone /srv/state /usr/bin/sandboxd`,

	"purge of what is mounted or not ours": `dpkg -i p/v1.deb
used
dpkg -r sandboxd
mkdir /srv/state/pool
mount -t tmpfs none /srv/state/pool
touch /srv/state/pool/precious
fails "file systems are still mounted below /srv/state" dpkg -P sandboxd
there /srv/state/pool/precious /etc/sandboxd/.removed
umount /srv/state/pool
rm /srv/state/sandboxd.db
dpkg -P sandboxd
there /srv/state/pool
gone /etc/sandboxd`,

	"an installation of scripts/install.sh": `
printf '[Service]\nExecStart=/usr/local/bin/sandboxd serve\n' >/etc/systemd/system/sandboxd.service
fails "another sandboxd is installed: /etc/systemd/system/sandboxd.service starts /usr/local/bin/sandboxd" dpkg -i p/v1.deb
same not-installed "$(state)" "the package"
gone /usr/bin/sandboxd /etc/sandboxd
rm /etc/systemd/system/sandboxd.service
touch /usr/local/bin/sandboxd
dpkg -i p/v1.deb 2>&1 | grep "/usr/local/bin/sandboxd comes before"`,

	"other programs of this name": `echo other >/usr/bin/sandboxd
fails "/usr/bin/sandboxd is there and belongs to another program" dpkg -i p/v1.deb
same other "$(cat /usr/bin/sandboxd)" "its program"
rm /usr/bin/sandboxd
mkdir -p /var/lib/sandboxd /run/sandboxd
touch /var/lib/sandboxd/games
fails "/var/lib/sandboxd has files and no sandboxd.db" dpkg -i p/v1.deb
rm /var/lib/sandboxd/games
python3 -c 'import socket, time; s = socket.socket(socket.AF_UNIX); s.bind("/run/sandboxd/sandboxd.sock"); s.listen(); open("/srv/bound", "w"); time.sleep(1000)' &
until [ -e /srv/bound ]; do :; done
fails "a program listens on /run/sandboxd/sandboxd.sock" dpkg -i p/v1.deb
kill %1
wait %1 || true
dpkg -i p/v1.deb`,

	"an image": `dpkg -i p/v1.deb p/image-v1.deb
same "asked: version asked: image import /usr/share/sandboxd/images/tiny.tar" "$(paste -sd ' ' asked)" "what was asked"
: >asked
touch broken
dpkg -i p/image-v2.deb 2>&1 | grep "no daemon runs; when it does: sandboxctl image import /usr/share/sandboxd/images/tiny.tar"
rm broken
fails "sandboxd-image-tiny depends on sandboxd" dpkg -r sandboxd
dpkg -r sandboxd-image-tiny sandboxd
gone /usr/share/sandboxd`,

	"rpm under systemd": systemd + `rpm() { command rpm --dbpath /srv/db --nodeps "$@"; }
mkdir db
cp /usr/local/sbin/* /sbin/ # where rpm looks
rpm -i p/v1.rpm
runs 0.1.1-dev+v1
touch broken
rpm -U p/v2.rpm 2>&1 | tee /dev/stderr | grep -F "run: $V/0.1.2-dev+v2/bin/sandboxd try 0.1.2-dev+v2"
current 0.1.1-dev+v1
cmp /usr/bin/sleep $V/0.1.1-dev+v1/bin/sandboxd
ended
rm broken
: >asked
rpm -U p/v3.rpm
same "tried: 0.1.3-dev+v3 with versions/0.1.1-dev+v1" "$(cat asked)" "what was tried"
current 0.1.3-dev+v3
ended
kill "$(cat pid)"`,

	// rpm has a database of its own here, and looks for no packages of Debian in it.
	"rpm": `rpm() { command rpm --dbpath /srv/db --nodeps "$@"; }
mkdir db
printf '[Service]\nExecStart=/opt/other/sandboxd\n' >/etc/systemd/system/sandboxd.service
fails "another sandboxd is installed" rpm -i p/v1.rpm
gone /usr/bin/sandboxd
rm /etc/systemd/system/sandboxd.service
rpm -i p/v1.rpm
same "sandboxd version 0.1.1-dev+v1" "$(sandboxd --version)" "the program"
there $V/0.1.1-dev+v1/libexec/sandboxd/agent/ca-bundle.pem
getent group sandboxd
used
echo 'kept by the operator' >$V/0.1.1-dev+v1/libexec/sandboxd/agent/ca-bundle.pem # as a mount is
rpm -U p/v2.rpm
same "sandboxd version 0.1.2-dev+v2" "$(sandboxd --version)" "the program"
same "agent of 0.1.1-dev+v1" "$(cat $V/0.1.1-dev+v1/libexec/sandboxd/agent/sandbox-agent)" "the agent of the version before"
same 'kept by the operator' "$(cat $V/0.1.1-dev+v1/libexec/sandboxd/agent/ca-bundle.pem)" "a file of the version before"
grep state_dir /etc/sandboxd/config.toml
same "" "$(grep teardown asked || true)" "what was ended"
rpm -U p/v3.rpm
same "0.1.1-dev+v1 0.1.2-dev+v2 0.1.3-dev+v3" "$(ls $V | paste -sd ' ')" "versions: the daemon removes those that nothing needs"
fails "is already installed" rpm -i p/v3.rpm
echo 99 >/usr/lib/sandboxd/current/share/sandboxd/schema
fails "the installed version writes state of schema 99" rpm -U --oldpackage p/v2.rpm
touch broken
fails "so nothing was removed" rpm -e sandboxd
there /usr/bin/sandboxd
rm broken asked
rpm -e sandboxd
same "asked: teardown --config /etc/sandboxd/config.toml" "$(cat asked)" "what the daemon was asked"
gone /usr/bin/sandboxd /usr/lib/sandboxd /usr/lib/systemd/system/sandboxd.service /usr/share/doc/sandboxd /usr/share/sandboxd
there /srv/state/sandboxd.db /etc/sandboxd/config.toml.rpmsave`,
}
