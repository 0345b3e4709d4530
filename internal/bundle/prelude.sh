# shellcheck shell=sh
# The lines above set the sizes of the parts that follow this script, in order.
set -eu
: "${version:?}" "${architecture:?}" "${prelude:?}" "${verifier:?}" "${manifest:?}" "${members:?}" "${signature:?}"

refuse() {
  echo "sandboxd bundle: $*; nothing was written" >&2
  exit 1
}

case $0 in
*/*) file=$0 ;;
*) file=./$0 ;;
esac
if [ ! -f "$file" ] || [ ! -r "$file" ]; then refuse "cannot read this file as $file: call it as sh /PATH/FILE"; fi

missing=
for program in head tail wc gzip mktemp chmod rm uname; do
  command -v "$program" >/dev/null || missing="$missing $program"
done
[ -z "$missing" ] || refuse "this host lacks the programs$missing, of Debian's packages coreutils and gzip"

case $(uname -s)/$(uname -m) in
Linux/x86_64) here=amd64 ;;
Linux/aarch64) here=arm64 ;;
*) here=$(uname -s)/$(uname -m) ;;
esac
[ "$here" = "$architecture" ] ||
  refuse "$file is sandboxd $version for $architecture, and this host is $here: get the bundle for $here"

has=$(($(wc -c <"$file")))
wants=$((prelude + verifier + manifest + members + 1 + signature))
[ "$has" -eq "$wants" ] || refuse "$file has $has bytes and should have $wants: the copy is not whole, copy it again"

# A directory may forbid programs (noexec), so the next one is tried.
work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
for place in "${TMPDIR:-/tmp}" /var/tmp /run /root; do
  work=$(mktemp -d "$place/sandboxd-bundle.XXXXXXXX" 2>/dev/null) || { work=; continue; }
  if tail -c "+$((prelude + 1))" "$file" 2>/dev/null | head -c "$verifier" | gzip -dc >"$work/sandboxd" 2>/dev/null; then
    chmod 700 "$work/sandboxd"
    "$work/sandboxd" --version >/dev/null 2>&1 && break
  fi
  rm -rf "$work"
  work=
done
[ -n "$work" ] || refuse "cannot run the program in $file from ${TMPDIR:-/tmp}, /var/tmp, /run or /root: \
they are full or forbid programs, or the copy is damaged; name another directory by TMPDIR"

case ${1:-} in
verify | show | install) verb=$1 && shift ;;
*) verb=install ;;
esac
status=0
"$work/sandboxd" bundle "$verb" "$file" "$@" || status=$?
exit "$status"
