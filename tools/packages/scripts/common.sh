# shellcheck shell=sh disable=SC2034 # some scripts use only some of these
# Each maintainer script begins with this text. @version@ and @schema@ are of this package.
set -eu
version='@version@' schema='@schema@'
root=/usr/lib/sandboxd config=/etc/sandboxd/config.toml note=/etc/sandboxd/.removed
say() { echo "sandboxd: $*" >&2; }
fail() {
	say "$*"
	exit 1
}
# booted: systemd is init here; it is not in a chroot.
booted() { [ -d /run/systemd/system ]; }

# setting KEY prints a top-level string of the configuration; nothing if it is not set. Of the file and its
# drop-ins, the last that sets it counts.
setting() {
	for file in $config "${config%.toml}".d/*.toml; do
		[ ! -e "$file" ] || sed -n '/^[[:space:]]*\[/q; s/^[[:space:]]*'"$1"'[[:space:]]*=[[:space:]]*//p' "$file"
	done | tail -n 1 | while read -r value; do
		case $value in
		\"*\"* | \'*\'*) ;;
		*) fail "$config: cannot read $1 from: $value; write it as $1 = \"...\"" ;;
		esac
		rest=${value#?}
		case $value in
		\"*) printf '%s\n' "${rest%%\"*}" ;;
		*) printf '%s\n' "${rest%%\'*}" ;;
		esac
	done
}

# directories sets $state and $run to the directories of the daemon that the configuration means.
directories() {
	instance=$(setting instance) state=$(setting state_dir) run=$(setting run_dir) suffix=''
	case $instance in '' | a) ;; *) suffix=-$instance ;; esac
	state=${state:-/var/lib/sandboxd$suffix} run=${run:-/run/sandboxd$suffix}
}

# foreign_unit prints a unit file that comes before this package's and starts another program.
foreign_unit() {
	for unit in /etc/systemd/system/sandboxd.service /run/systemd/system/sandboxd.service /usr/local/lib/systemd/system/sandboxd.service; do
		if [ ! -f "$unit" ] || [ -L "$unit" ]; then continue; fi
		grep -q '^ExecStart=/usr/bin/sandboxd ' "$unit" || echo "$unit"
	done
}

# clashes refuses the first installation beside another program called sandboxd.
clashes() {
	unit=$(foreign_unit)
	[ -z "$unit" ] || fail "another sandboxd is installed: $unit starts $(sed -n 's/^ExecStart=\([^ ]*\).*/\1/p' "$unit")." \
		"If scripts/install.sh of a checkout installed it, scripts/uninstall.sh ends its sandboxes, removes it, and keeps configuration and data." \
		"Nothing was installed."
	for program in /usr/bin/sandboxd /usr/bin/sandboxctl; do
		[ -e $program ] || [ -L $program ] || continue
		case $(readlink $program || true) in
		*lib/sandboxd/current/*) ;; # of this package, and half removed
		*) fail "$program is there and belongs to another program; move it away. Nothing was installed." ;;
		esac
	done
	directories
	if grep -qs " $run/sandboxd.sock\$" /proc/net/unix; then
		fail "a program listens on $run/sandboxd.sock, and is not the service of this package; stop it (a daemon that was started by" \
			"hand: sandboxd teardown ends its sandboxes). Nothing was installed."
	fi
	if [ -d "$state" ] && [ ! -e "$state/sandboxd.db" ] && [ -n "$(ls -A "$state")" ]; then
		fail "$state has files and no sandboxd.db, so it belongs to another program; name another state_dir in $config, or move it" \
			"away. Nothing was installed."
	fi
	for program in /usr/local/bin/sandboxd /usr/local/sbin/sandboxd /usr/local/bin/sandboxctl; do
		[ ! -e $program ] || say "$program comes before /usr/bin in most paths: shells go on to use it"
	done
}

# upgrading SO refuses while "sandboxd upgrade" tries a version: it holds a lock of fcntl(2), and has the file
# open, which root alone can. /proc/locks has the locks of all users and guests, and files of other file
# systems have the same inode number.
upgrading() {
	lock=$(stat -c %d:%i $root/upgrade.lock 2>/dev/null) || return 0
	holders=$(awk -v inode="${lock#*:}" '$2 != "->" { split($6, at, ":"); if (at[3] == inode) print $5 }' /proc/locks 2>/dev/null) || true
	for pid in $holders; do
		if stat -L -c %d:%i "/proc/$pid/fd/"* 2>/dev/null | grep -qxF "$lock"; then
			fail "sandboxd upgrade (process $pid) is changing the version; wait until it ends. $1"
		fi
	done
}

# downgrade refuses a version that cannot read the state that the installed one has written.
downgrade() {
	have=$(cat $root/current/share/sandboxd/schema 2>/dev/null || echo 0)
	[ "$have" -gt "$schema" ] || return 0
	[ ! -e /etc/sandboxd/downgrade ] || return 0
	directories
	fail "the installed version writes state of schema $have, and $version reads schemas up to $schema. To go back, run" \
		"systemctl stop sandboxd.socket sandboxd.service, put $state/sandboxd.db.v$schema in the place of $state/sandboxd.db," \
		"run touch /etc/sandboxd/downgrade, and install again. What was done since that copy is lost. Nothing was installed."
}

# replaced prints the version that ran when this installation began; nothing if there was none.
replaced() {
	if [ -s $root/kept/current ]; then
		cat $root/kept/current
	elif old=$(readlink $root/current); then
		echo "${old##*/}"
	fi
}

# link NAME VERSION lets a link name a version, by rename(2).
link() {
	ln -sfn "versions/$2" "$root/$1.new"
	mv -fT "$root/$1.new" "$root/$1"
}

# keep_versions links the files of other versions aside. The package manager removes those of the
# package before while its daemon runs, and while files of it are mounted in sandboxes; and
# "sandboxd rollback" goes back to them. While the directory kept is there, the daemon removes no version: neither
# a link nor a list of the package manager names the one that is being unpacked. Until the version that is unpacked has
# its trial, a start of the service goes back to the one that kept/current names (internal/versions/kept.go).
keep_versions() {
	was=$(replaced)
	mkdir -p $root/kept
	for dir in "$root"/versions/*; do
		if [ -d "$dir" ] && [ "${dir##*/}" != "$version" ]; then
			cp -al "$dir" $root/kept/ || {
				say "version ${dir##*/} cannot be kept beside $version, for the reason above, so nothing goes back to it by itself"
				rm -rf "$root/kept/${dir##*/}" # else a part of it is taken for the whole
				[ "${dir##*/}" != "$was" ] || was=''
			}
		fi
	done
	if [ -n "$was" ] && [ -d "$root/kept/$was" ]; then
		ln -sfn "kept/$was" $root/undo # the service's unit calls it
		echo "$was" >$root/kept/current
		sync $root/kept/current || true
	fi
}

# restore_versions AGAIN puts back what keep_versions has linked aside, into the same directories. If a name is missing
# after that, it fails, and the directory kept stays. AGAIN is the command that does it again.
restore_versions() {
	for dir in "$root"/kept/*; do
		[ -d "$dir" ] || continue
		back=$root/versions/${dir##*/}
		mkdir -p $root/versions
		# cp of coreutils 9.2 fails if it skips a file, so its status says nothing.
		said=$(LC_ALL=C cp -aln "$dir" $root/versions/ 2>&1) || true
		names=$(cd "$dir" && find .)
		missing=$(printf '%s\n' "$names" | while read -r name; do
			[ -e "$back/$name" ] || [ -L "$back/$name" ] || { echo "$name" && break; }
		done)
		[ -n "$missing" ] || continue
		said=$(printf '%s\n' "$said" | grep -v ': not replacing ' | head -n 1)
		fail "version ${dir##*/} cannot be put back whole: $back lacks ${missing#./}${said:+ ($said)}. All of it is in $dir," \
			"which stays. If that file system is full, make room; then run: $1"
	done
}

# forget_kept ends what keep_versions has begun.
forget_kept() {
	rm -f $root/kept/current # first: it may be cut here
	case $(readlink $root/undo || true) in kept/*) rm -f $root/undo ;; esac
	rm -rf $root/kept
}

# go_back lets the version be the current one that ran when this installation began, or one that was interrupted.
# If none has begun, it changes nothing: "sandboxd upgrade" may be at work.
go_back() {
	[ -d $root/kept ] || return 0
	restore_versions "the same installation again"
	was=$(replaced)
	if [ -n "$was" ] && [ -e "$root/versions/$was/bin/sandboxd" ]; then make_current "$was"; fi
	forget_kept
}

# make_current VERSION lets the link and the unit files be of a version.
make_current() {
	for unit in sandboxd.service sandboxd.socket; do
		own=$root/versions/$1/systemd/$unit there=/usr/lib/systemd/system/$unit
		if [ -e "$own" ] && ! cmp -s "$own" $there; then cp "$own" $there; fi
	done
	link current "$1"
}

# take lets this version be the one that starts next, without a trial.
take() {
	was=$(replaced)
	if [ -n "$was" ] && [ "$was" != "$version" ]; then link previous "$was"; fi
	make_current "$version"
	forget_kept
}

# prepare makes what the package manager does not: the files on which the authority of a sandbox
# is mounted. They are never replaced: that would end the mounts of sandboxes that run.
prepare() {
	agent=$root/versions/$version/libexec/sandboxd/agent
	for file in mitmproxy-ca-cert.pem ca-bundle.pem; do
		[ -e "$agent/$file" ] || install -m 644 /dev/null "$agent/$file"
	done
	rm -f /etc/sandboxd/downgrade
	if command -v systemd-sysusers >/dev/null; then systemd-sysusers sandboxd.conf || say "the group sandboxd could not be made"; fi
	booted || return 0
	systemd-tmpfiles --create sandboxd.conf || say "/run/sandboxd could not be made"
	# Not by systemd-modules-load.service: it fails if a module of any other package is missing.
	grep -v '^#' /usr/lib/modules-load.d/sandboxd.conf | xargs -r modprobe -a 2>/dev/null ||
		say "some kernel modules could not be loaded; sandboxd doctor says what is missing"
}

# check_config refuses to go on with a version that rejects the configuration.
check_config() {
	"$root/versions/$version/bin/sandboxd" config check $config >&2 ||
		fail "$version rejects $config, so the daemon was not restarted; mend the file and run: $1"
}

# check_pool says how large the pool is to be. It refuses where the first start could not make it.
check_pool() {
	directories
	[ ! -e "$state/sandboxd.db" ] || return 0
	said=$("$root/versions/$version/bin/sandboxd" pool show --config $config 2>&1) ||
		fail "$said. So the daemon cannot start, and was not started; mend that, in $config if need be, and run: $1"
	say "$said"
}

# running prints the version of the daemon that runs; nothing if none does, or another program.
running() {
	if booted && systemctl --quiet is-active sandboxd.service; then
		readlink "/proc/$(systemctl show --property MainPID --value sandboxd.service)/exe" |
			sed -n "s,^$root/versions/\([^/]*\)/bin/sandboxd\( (deleted)\)\?\$,\1,p"
	fi
}

# may_restart: the operator's policy lets packages restart the service, as deb-systemd-invoke reads it.
may_restart() {
	[ -x /usr/sbin/policy-rc.d ] || return 0
	allowed=0
	/usr/sbin/policy-rc.d sandboxd.service restart >/dev/null 2>&1 || allowed=$?
	[ $allowed -ne 101 ]
}

# change AGAIN lets this version run in the place of the one that runs: by the trial of "sandboxd upgrade", in which that
# one runs again if this one is not good. Without a daemon, or if the policy of the host forbids a restart, the next start
# is one of this version, and nothing is tried. "sandboxd upgrade" itself installs the package when the version runs already.
# AGAIN is the command that does it again.
change() {
	runs=$(running)
	if [ -z "$runs" ] || [ "$runs" = "$version" ]; then
		take
	elif ! may_restart; then
		take
		say "policy-rc.d forbids a restart, so $runs runs on; the next start of the service is one of $version, without a trial"
	elif [ ! -e "$root/versions/$runs/bin/sandboxd" ]; then
		take
		say "$runs, which runs, could not be kept, so $version takes its place without a trial"
		systemctl restart sandboxd.service >/dev/null || say "sandboxd does not run; see: journalctl -u sandboxd, sandboxd doctor"
	else
		upgrading "Nothing was changed; then run: $1"
		make_current "$runs"
		forget_kept
		say "trying $version; if it is not good, $runs runs again"
		if "$root/versions/$version/bin/sandboxd" try "$version" --config $config >&2; then return; fi
		systemctl --system daemon-reload >/dev/null || true
		if [ "$(running)" != "$runs" ] || [ "$(readlink $root/current)" != "versions/$runs" ]; then
			fail "the change from $runs to $version failed: the text above says why, which of them runs now, if any, and what to do." \
				"If that is not the end of it, run: $1"
		fi
		fail "$version was not taken, for the reason above, and $runs runs on. When the cause is gone, run: $1. To take it without" \
			"a trial, set try_packages = false in [upgrade] of the configuration, and run the same. To stay, install the package of $runs."
	fi
}

# end_sandboxes ends what lives, as only the daemon's program can, and notes for a purge which
# directories were the daemon's.
end_sandboxes() {
	directories
	if booted || [ -e "$state/sandboxd.db" ]; then
		set --
		[ ! -e $config ] || set -- --config $config
		$root/current/bin/sandboxd teardown "$@" ||
			fail "the sandboxes could not be ended, so nothing was removed; mend what is said above and remove the package again"
	fi
	if [ -d /etc/sandboxd ]; then printf '%s\n%s\n' "$state" "$run" >$note; fi
}

# own_pool SOURCE: the daemon has mounted it as its pool.
own_pool() {
	image=$(cat "/sys/block/${1##*/}/loop/backing_file" 2>/dev/null || true)
	[ "${image% (deleted)}" != "$(readlink -f "$state")/pool.img" ] || return 0
	device=$(sed -n 's/^[[:space:]]*device[[:space:]]*=[[:space:]]*["'\'']\([^"'\'']*\).*/\1/p' $config 2>/dev/null | head -n 1)
	[ -n "$device" ] && [ "$(readlink -f "$1")" = "$(readlink -f "$device")" ]
}

# foreign_mounts prints what is mounted below the state directory, and not by the daemon.
foreign_mounts() {
	awk -v a="$(readlink -f "$state")/" 'index($5, a) == 1 { for (i = 7; $i != "-"; i++); print $5, $(i + 2) }' /proc/self/mountinfo |
		while read -r dir source; do
			if [ "$dir" = "$(readlink -f "$state")/pool" ] && own_pool "$source"; then continue; fi
			printf '%s ' "$dir"
		done
}

# purgeable refuses a purge that could not end, before anything is stopped. Such a purge removes the
# package first, and its script is the only one that can still stop it.
purgeable() {
	[ "$(dpkg-query -W -f '${db:Status-Want}' sandboxd 2>/dev/null)" = purge ] || return 0
	directories
	case $state in
	/*/*) ;;
	*) fail "$config: state_dir $state is no directory that only sandboxd uses, so it cannot be purged; nothing was stopped or removed." \
		"To keep it, remove the package without a purge" ;;
	esac
	foreign=$(foreign_mounts)
	[ -z "$foreign" ] || fail "file systems that sandboxd has not mounted are below $state, which a purge deletes: ${foreign% }." \
		"Unmount them and purge again; nothing was stopped or removed. To keep $state, remove the package without a purge"
}

# remove_versions removes what this package's scripts have made below /usr/lib.
remove_versions() {
	rm -rf $root/versions $root/kept $root/current $root/previous $root/undo $root/upgrade.* $root/*.new
	rmdir $root 2>/dev/null || true
	rm -f /etc/sysctl.d/60-sandboxd.conf # sandboxd doctor --fix wrote it
}

# purge removes configuration and data.
purge() {
	state=/var/lib/sandboxd run=/run/sandboxd
	if [ -s $note ]; then
		{ read -r state && read -r run; } <$note
	fi
	case $state in
	/*/*) ;;
	*) fail "$note: $state is no directory that only sandboxd uses" ;;
	esac
	if awk -v a="$state/" -v b="$run/" 'index($5, a) == 1 || index($5, b) == 1 { found = 1 } END { exit !found }' /proc/self/mountinfo; then
		fail "file systems are still mounted below $state or $run: a daemon uses them; nothing was purged"
	fi
	if [ -d "$state" ] && [ ! -e "$state/sandboxd.db" ] && [ -n "$(ls -A "$state")" ]; then
		say "$state has no sandboxd.db, so it is not the state directory of a daemon, and is kept"
		rm -rf /etc/sandboxd
		return
	fi
	moved=$(readlink "$state/pool.img" || true) # sandboxd pool move made it
	case $moved in /*/sandboxd-pool.img) rm -f "$moved" "$moved.new" ;; esac
	if mountpoint -q "$state"; then
		find "$state" -xdev -mindepth 1 -delete # the mount point stays, empty
	else
		rm -rf --one-file-system "$state"
	fi
	rm -rf /etc/sandboxd
}
