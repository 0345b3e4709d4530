#!/bin/sh
# What the role asks of the host, and does there. The role copies this script into its work directory.
set -eu
fail() {
  echo "$*" >&2
  exit 1
}
etc=/etc/sandboxd

# name, version: of a package's file. installed_version NAME: nothing if it is not installed.
name() {
  case $1 in
  *.deb) dpkg-deb --field "$1" Package ;;
  *.rpm) rpm -qp --queryformat '%{NAME}' "$1" ;;
  *) fail "$1 is no package: want a .deb or a .rpm" ;;
  esac
}
version() {
  case $1 in
  *.deb) dpkg-deb --field "$1" Version ;;
  *.rpm) rpm -qp --queryformat '%{VERSION}-%{RELEASE}' "$1" ;;
  esac
}
installed_version() {
  case $2 in
  *.deb) dpkg-query --show --showformat '${db:Status-Status} ${Version}' "$1" 2>/dev/null | sed -n 's/^installed //p' ;;
  *.rpm) rpm -q --queryformat '%{VERSION}-%{RELEASE}' "$1" 2>/dev/null || true ;;
  esac
}

# newer FILE VERSION: the installed version is newer than the file's. rpm refuses by itself.
newer() { case $1 in *.deb) dpkg --compare-versions "$2" gt "$(version "$1")" ;; *) false ;; esac; }

daemon_pid() { systemctl show --property MainPID --value sandboxd.service; }

verb=$1
shift
case $verb in
version) # prints the version of sandboxd that is installed; nothing if none is
  for program in sandboxd /usr/bin/sandboxd; do
    line=$("$program" --version 2>/dev/null) || continue
    case $line in "sandboxd version "?*) echo "${line##* }" && exit ;; esac
  done
  ;;

outdated) # DOWNGRADE PACKAGE...: prints the packages that are not installed in their version
  downgrade=$1
  shift
  for file; do
    [ -r "$file" ] || fail "$file cannot be read"
    is=$(installed_version "$(name "$file")" "$file")
    [ "$is" != "$(version "$file")" ] || continue
    if [ -n "$is" ] && [ "$downgrade" != True ] && newer "$file" "$is"; then
      fail "$file is older than the installed $(name "$file") $is: get a newer one, or set sandboxd_downgrade"
    fi
    echo "$file"
  done
  ;;

program) # TO FILE...: prints the path of the program that checks the configuration
  # It is that of the bundle or the packages that are to be installed, written to TO, or else the installed one.
  to=$1 unpacked=$1.unpacked
  shift
  for file; do
    case $file in
    *.deb) [ "$(name "$file")" != sandboxd ] || dpkg-deb --extract "$file" "$unpacked" ;;
    *.rpm) [ "$(name "$file")" != sandboxd ] || { mkdir "$unpacked" && (cd "$unpacked" && rpm2cpio "$file" | cpio -idm --quiet); } ;;
    *) # a bundle: the sizes in its header were checked with its signature
      prelude=$(head -c 512 "$file" | sed -n 's/^prelude=\([0-9]*\)$/\1/p')
      verifier=$(head -c 512 "$file" | sed -n 's/^verifier=\([0-9]*\)$/\1/p')
      tail -c "+$((prelude + 1))" "$file" | head -c "$verifier" | gzip -dc >"$to"
      ;;
    esac
  done
  if [ -d "$unpacked" ]; then
    mv "$unpacked"/usr/lib/sandboxd/versions/*/bin/sandboxd "$to"
    rm -rf "$unpacked"
  fi
  if [ -e "$to" ]; then
    chmod 700 "$to"
    echo "$to"
  else
    command -v sandboxd || fail "sandboxd is not installed: set sandboxd_bundle, or sandboxd_packages with the package sandboxd"
  fi
  ;;

check) # PROGRAM STAGED: PROGRAM checks the configuration among the files in STAGED
  # /etc/sandboxd with the files in STAGED lies over /etc/sandboxd in a mount namespace of this check, so that
  # the configuration can name files which are not there yet, and nothing changes if it is refused.
  made=
  [ -d $etc ] || { mkdir $etc && made=yes; }
  status=0
  # shellcheck disable=SC2016 # the inner shell expands these
  unshare --mount sh -eu -c 'cp -a /etc/sandboxd "$2.whole" && cp -a "$2/." "$2.whole" && mount --bind "$2.whole" /etc/sandboxd &&
    "$1" config check /etc/sandboxd/config.toml' check "$1" "$2" || status=$?
  [ -z "$made" ] || rmdir $etc
  exit $status
  ;;

upgrade) # GATE BUNDLE FLAG...: takes a bundle on a host that has sandboxd
  # A version that is no good is undone within GATE. Without a daemon there is nothing that could find out.
  gate=$1
  shift
  if systemctl --quiet is-active sandboxd.service; then exec sandboxd upgrade --gate "$gate" "$@"; fi
  exec sandboxd bundle install "$@"
  ;;

keep) # DIR: copies /etc/sandboxd to DIR
  if [ -d $etc ]; then cp -a $etc "$1"; fi
  daemon_pid >"$1.pid"
  ;;

restore) # DIR: the reverse of keep; says what it did, and why the daemon ended. The service runs again if it should.
  if systemctl --quiet is-active sandboxd.service; then
    [ "$(daemon_pid)" = "$(cat "$1.pid")" ] || began=since # with the new files
  else
    journalctl --unit sandboxd.service --lines 100 --output cat --quiet | grep '^sandboxd: ' | tail -n 1 || true
  fi
  if [ -d "$1" ]; then
    find $etc -mindepth 1 -delete
    cp -a "$1/." $etc
    if [ "${began:-}" = since ] ||
      { ! systemctl --quiet is-active sandboxd.service && systemctl --quiet is-enabled sandboxd.service; }; then
      systemctl restart sandboxd.service || echo "The service does not run."
    fi
  elif [ -e /usr/lib/sandboxd/current ]; then
    echo "sandboxd is installed, and /etc/sandboxd has the new files."
    exit
  else
    rm -rf $etc
  fi
  echo "/etc/sandboxd is as it was before."
  ;;

install) # DOWNGRADE PACKAGE...
  downgrade=$1
  shift
  case $1 in
  *.deb)
    set -- -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold --no-install-recommends "$@"
    [ "$downgrade" != True ] || set -- --allow-downgrades "$@"
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet "$@"
    ;;
  *.rpm)
    if [ "$downgrade" = True ]; then set -- --oldpackage "$@"; fi
    rpm --upgrade "$@"
    ;;
  esac
  ;;

stale) # prints "stale" if the daemon runs since before the newest file of its configuration
  pid=$(daemon_pid)
  [ "${pid:-0}" != 0 ] || exit 0
  started=$(($(date +%s) - $(ps -o etimes= -p "$pid")))
  for file in $etc/config.toml "$@"; do
    [ "$(stat -c %Y "$file")" -le "$started" ] || { echo stale && exit; }
  done
  ;;

missing) # NAME...: prints the images that are not there
  there=$(sandboxctl image ls --output name)
  for image; do
    printf '%s\n' "$there" | grep -qxF -e "$image" -e "$image:latest" || echo "$image"
  done
  ;;

*) fail "host.sh: no verb $verb" ;;
esac
