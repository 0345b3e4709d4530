#!/usr/bin/env bash
# Ends all sandboxes and removes what scripts/install.sh installed:
#   scripts/uninstall.sh [--prefix DIR] [--dry-run] [--purge]
# The default prefix is that of the installed unit. Configuration and data stay unless
# --purge is given: /etc/sandboxd, and the state directory with images, the store and
# the disks of ended sandboxes.
set -euo pipefail

prefix='' dry='' purge=''
while [ $# -gt 0 ]; do
  case $1 in
  --prefix) prefix=${2:?--prefix needs a directory}; shift ;;
  --prefix=*) prefix=${1#*=} ;;
  --dry-run) dry=yes ;;
  --purge) purge=yes ;;
  *) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
fail() { echo "uninstall: $*" >&2; exit 1; }
[ ! -e /usr/lib/sandboxd/current ] || fail "this host has the package sandboxd: apt-get remove sandboxd, or purge"
[[ -z $prefix || $prefix = /* ]] || fail "--prefix $prefix: want an absolute path"
[ -n "$dry" ] || [ "$(id -u)" -eq 0 ] || fail "run it as root, or use --dry-run to see what it would do"
do_() { if [ -n "$dry" ]; then echo "$*"; else "$@"; fi; }
# refuse is fail, except that a dry run goes on and shows the rest.
refuse() { if [ -n "$dry" ]; then echo "uninstall: without --dry-run it would fail here: $*" >&2; else fail "$@"; fi; }

unit=/etc/systemd/system/sandboxd.service config=/etc/sandboxd/config.toml

# The unit, and not --prefix, determines which daemon serves. Without a teardown by that
# daemon, sandboxes would go on running on deleted disks.
if [ -e $unit ]; then
  of_unit=$(sed -n 's,^ExecStart=\(/.*\)/bin/sandboxd serve.*,\1,p' $unit)
  [ -n "$of_unit" ] || fail "$unit does not start PREFIX/bin/sandboxd serve: it was changed after install.sh wrote it; fix ExecStart="
  [ "${prefix:-$of_unit}" = "$of_unit" ] || fail "--prefix $prefix: the service runs $of_unit/bin/sandboxd ($unit); leave --prefix out"
  prefix=$of_unit
fi
prefix=${prefix:-/usr/local}
sandboxd=$prefix/bin/sandboxd

# setting KEY prints a top-level string of the configuration; of the file and its drop-ins, the last that
# sets it counts. The daemon, which could read it, may be gone already, as at a --purge after an uninstall.
setting() {
  local line file
  line=$(for file in $config "${config%.toml}".d/*.toml; do
    [ ! -e "$file" ] || sed -n '/^[[:space:]]*\[/q; /^[[:space:]]*'"$1"'[[:space:]]*=/p' "$file"
  done | tail -n 1)
  [ -n "$line" ] || return 0
  [[ $line =~ ^[[:space:]]*$1[[:space:]]*=[[:space:]]*(\"([^\"\\]*)\"|\'([^\']*)\')[[:space:]]*(#.*)?$ ]] ||
    fail "$config: cannot read $1 from the line: $line; write it as $1 = \"...\""
  echo "${BASH_REMATCH[2]}${BASH_REMATCH[3]}"
}
instance=$(setting instance)
state=$(setting state_dir)
run=$(setting run_dir)
suffix=''
case $instance in '' | a) ;; *) suffix=-$instance ;; esac
state=${state:-/var/lib/sandboxd$suffix} run=${run:-/run/sandboxd$suffix}
[[ $state = /*/* && $run = /*/* ]] || fail "$config: state_dir $state, run_dir $run: both must be directories that only sandboxd uses"
state=$(realpath -m "$state") run=$(realpath -m "$run")

# below DIR lists the mounts below DIR.
below() { findmnt -lno TARGET | awk -v dir="$1/" 'index($0, dir) == 1'; }

if [ -d /run/systemd/system ] && [ -e $unit ]; then
  do_ systemctl disable --now sandboxd.socket sandboxd.service
fi
# Only the daemon knows all sandboxes, links, rules, mounts and cgroups.
if [ -x "$sandboxd" ]; then
  args=()
  [ ! -e $config ] || args=(--config "$config")
  do_ "$sandboxd" teardown "${args[@]}" ||
    fail "the teardown failed, so nothing was removed; fix what it reports and run this again"
elif [ -e $unit ]; then
  refuse "$unit exists, but not $sandboxd, which ends the sandboxes: install it again (scripts/install.sh --no-start --prefix $prefix); nothing was removed"
fi
held=$(below "$run" && below "$state")
[ -z "$held" ] || [[ -n $dry && -x $sandboxd ]] || refuse "still mounted, so nothing was removed: ${held//$'\n'/, }; a daemon with another configuration than $config, or of another prefix than $prefix, may use it: end it with its own sandboxd teardown --config FILE"

do_ rm -f $unit /etc/systemd/system/sandboxd.socket \
  /etc/sysusers.d/sandboxd.conf /etc/tmpfiles.d/sandboxd.conf /etc/modules-load.d/sandboxd.conf /etc/sysctl.d/60-sandboxd.conf
[ ! -d /run/systemd/system ] || do_ systemctl daemon-reload
do_ rm -rf "$prefix/libexec/sandboxd" "$prefix/share/sandboxd" "$prefix/share/doc/sandboxd"
do_ rm -f "$prefix"/share/man/man1/sandboxctl{,-*}.1 "$prefix"/share/man/man8/sandboxd{,-*}.8 \
  "$prefix"/share/bash-completion/completions/sandbox{d,ctl} "$prefix"/share/zsh/site-functions/_sandbox{d,ctl} \
  "$prefix"/share/fish/vendor_completions.d/sandbox{d,ctl}.fish
do_ rm -f "$sandboxd" "$prefix/bin/sandboxctl"
if [ -z "$purge" ]; then
  [ -n "$dry" ] || echo "uninstall: /etc/sandboxd and $state are kept; --purge removes them too"
  exit 0
fi
if [ -e "$state" ] && [ ! -e "$state/sandboxd.db" ] && [ -n "$(ls -A "$state")" ]; then
  refuse "$state has no sandboxd.db, so it is not the state directory of a daemon; check its files, and delete it yourself"
fi
moved=$(readlink "$state/pool.img" || true) # sandboxd pool move made it
case $moved in /*/sandboxd-pool.img) do_ rm -f "$moved" "$moved.new" ;; esac
# The state directory may be a mount point: it stays, empty.
if mountpoint -q "$state"; then
  do_ find "$state" -xdev -mindepth 1 -delete
else
  do_ rm -rf --one-file-system "$state"
fi
do_ rm -rf /etc/sandboxd
