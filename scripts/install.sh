#!/usr/bin/env bash
# Installs what `make build` made, and starts it as a systemd service:
#   scripts/install.sh [--prefix DIR] [--dry-run] [--no-start]
# Needs no network. Over an older version it is an upgrade: it replaces the programs
# and restarts the daemon; running sandboxes go on. It never changes an existing
# configuration.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=/usr/local dry='' start=yes
while [ $# -gt 0 ]; do
  case $1 in
  --prefix) prefix=${2:?--prefix needs a directory}; shift ;;
  --prefix=*) prefix=${1#*=} ;;
  --dry-run) dry=yes ;;
  --no-start) start='' ;;
  *) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
fail() { echo "install: $*" >&2; exit 1; }
[[ $prefix = /* ]] || fail "--prefix $prefix: want an absolute path"
# Other characters would need quoting, differently in the unit file and for systemd.
[[ $prefix =~ ^[A-Za-z0-9/._+-]+$ ]] || fail "--prefix $prefix: only letters, digits and /._+- are allowed"
[ ! -e /usr/lib/sandboxd/current ] || fail "this host has the package sandboxd; to replace it: apt-get remove sandboxd (it ends all sandboxes)"
bin=build/bin
for f in sandboxd sandboxctl sandboxd-runc runsc agent/sandbox-agent; do
  [ -x $bin/$f ] || fail "$bin/$f is missing: run make build"
done
[ -s build/man/sandboxctl.1 ] || fail "build/man/sandboxctl.1 is missing: run make build"

# do_ runs a command or, with --dry-run, prints it.
do_() { if [ -n "$dry" ]; then echo "$*"; else "$@"; fi; }
# put FILE TARGET MODE replaces TARGET by a rename, so that running programs keep the old
# file.
put() {
  do_ install -D -m "$3" "$1" "$2.new"
  do_ mv -f "$2.new" "$2"
}
# say COMMAND TARGET writes the output of a command to TARGET.
say() {
  if [ -n "$dry" ]; then echo "$1 > $2"; return; fi
  $1 | install -D -m 644 /dev/stdin "$2.new"
  mv -f "$2.new" "$2"
}
# fill FILE TARGET is put, with the prefix in place of @prefix@.
fill() {
  if [ -n "$dry" ]; then echo "sed s,@prefix@,$prefix, $1 > $2"; return; fi
  sed "s,@prefix@,$prefix,g" "$1" | install -D -m 644 /dev/stdin "$2.new"
  mv -f "$2.new" "$2"
}

if [ -z "$dry" ]; then
  [ "$(id -u)" -eq 0 ] || fail "this writes to $prefix and /etc: run it as root, or use --dry-run to see what it would do"
  missing=()
  for need in iptables:iptables mkfs.btrfs:btrfs-progs; do
    command -v "${need%%:*}" >/dev/null || missing+=("${need##*:}")
  done
  [ ${#missing[@]} -eq 0 ] || fail "programs that the daemon needs are missing: apt-get install ${missing[*]}"
fi

# Check the configuration before replacing anything: if the new daemon rejected it, the
# host would be without a daemon.
config=/etc/sandboxd/config.toml
if [ -e $config ]; then
  do_ $bin/sandboxd config check $config || fail "the new version rejects $config, so nothing was changed"
fi

put $bin/sandboxd "$prefix/bin/sandboxd" 755
put $bin/sandboxctl "$prefix/bin/sandboxctl" 755
put $bin/runsc "$prefix/libexec/sandboxd/runsc" 755
put $bin/sandboxd-runc "$prefix/libexec/sandboxd/sandboxd-runc" 755
put $bin/agent/sandbox-agent "$prefix/libexec/sandboxd/agent/sandbox-agent" 755
# /opt/opensandbox of every sandbox is this directory. Programs from before June 2026 start the
# code interpreter there; the link leads to where images have it since.
do_ ln -sfn /opt/code-interpreter/code-interpreter.sh "$prefix/libexec/sandboxd/agent/code-interpreter.sh"
# A sandbox with inspected hosts has its authority mounted on these empty files. They are never
# replaced: a rename over one would end that mount in all sandboxes that run.
for f in mitmproxy-ca-cert.pem ca-bundle.pem; do
  [ -e "$prefix/libexec/sandboxd/agent/$f" ] || do_ install -m 644 /dev/null "$prefix/libexec/sandboxd/agent/$f"
done
while read -r f; do put "$f" "$prefix/share/sandboxd/$f" 644; done < <(find rootfs -type f | sort)
for section in 1 8; do do_ install -D -m 644 -t "$prefix/share/man/man$section" build/man/*.$section; done # no rename: nothing executes them
# Each program prints its own completions; each shell reads them from its own directory.
for program in sandboxd sandboxctl; do
  for shell in "bash bash-completion/completions/$program" "zsh zsh/site-functions/_$program" "fish fish/vendor_completions.d/$program.fish"; do
    say "$bin/$program completion ${shell%% *}" "$prefix/share/${shell##* }"
  done
done
documents=(README.md CHANGELOG.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md LICENSE THIRD_PARTY.md docs deploy)
while read -r f; do put "$f" "$prefix/share/doc/sandboxd/$f" 644; done < <(find "${documents[@]}" -type f | sort)

fill systemd/sandboxd.service /etc/systemd/system/sandboxd.service
put systemd/sandboxd.socket /etc/systemd/system/sandboxd.socket 644
put systemd/sandboxd.sysusers /etc/sysusers.d/sandboxd.conf 644
put systemd/sandboxd.tmpfiles /etc/tmpfiles.d/sandboxd.conf 644
put systemd/sandboxd.modules /etc/modules-load.d/sandboxd.conf 644

if [ ! -e $config ]; then
  do_ install -d -m 755 /etc/sandboxd
  do_ "$prefix/bin/sandboxd" config init $config
fi

[ -e /usr/share/bash-completion/bash_completion ] ||
  echo "install: for completion of sandboxctl's commands, bash needs the package bash-completion: apt-get install bash-completion" >&2

if [ ! -d /run/systemd/system ] && [ -z "$dry" ]; then
  echo "install: this host does not run systemd, so nothing was started; to start the daemon: $prefix/bin/sandboxd serve"
  exit 0
fi
do_ systemd-sysusers /etc/sysusers.d/sandboxd.conf
do_ systemd-tmpfiles --create /etc/tmpfiles.d/sandboxd.conf
# Not by systemd-modules-load.service: it fails if a module of any other package is missing.
mapfile -t modules < <(grep -v '^#' systemd/sandboxd.modules)
do_ modprobe -a "${modules[@]}" || echo "install: some kernel modules could not be loaded; sandboxd doctor reports what is missing" >&2
do_ systemctl daemon-reload
[ -n "$start" ] || exit 0
if [ -z "$dry" ]; then
  "$prefix/bin/sandboxd" pool show --config $config || fail "the daemon cannot make its pool, so it was not started: mend $config or the disk, and" \
    "run this again"
fi
do_ systemctl enable --now sandboxd.socket
do_ systemctl enable sandboxd.service
do_ systemctl restart sandboxd.service
if [ -z "$dry" ]; then
  "$prefix/bin/sandboxctl" version
  for archive in build/images/*.tar; do
    [ -s "$archive" ] || continue # no archives: sandboxctl image build makes images, with a network
    name=$(basename "$archive" .tar)
    "$prefix/bin/sandboxctl" image inspect "$name" >/dev/null 2>&1 || "$prefix/bin/sandboxctl" image import "$archive"
  done
  echo "sandboxd is running; to let USER use it: usermod -aG sandboxd USER"
fi
