#!/bin/sh
# build.sh OUT: build the pinned runsc into OUT and check it against runsc.sha256.
#
# The same source, toolchain and flags give the same bytes on every machine, so
# a checksum that differs means that one of the three differs. The script asks
# for the recorded toolchain itself (Go fetches it if need be).
#
#   build.sh --record    compile the seccomp filters, build, and rewrite the line
#                        of this platform; after a bump of the pin
set -eu
cd "$(dirname "$0")"
sums=$PWD/runsc.sha256
say() { echo "tools/runsc: $*" >&2; }

case ${1-} in
'' | -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$(basename "$0")" >&2; exit 2 ;;
--record) record=1 out=$(mktemp) ;;
*) record='' out=$1 ;;
esac
case $out in /*) ;; *) out=$OLDPWD/$out ;; esac

os=$(go env GOOS) arch=$(go env GOARCH)
# A line of runsc.sha256: SUM  OS/ARCH  GOVERSION  PIN
pin=$(go list -m -f '{{.Version}}' gvisor.dev/gvisor)
line=$(grep "  $os/$arch  " "$sums" 2>/dev/null || true)
if [ -z "$record" ]; then
	if [ -z "$line" ]; then
		say "no checksum is recorded for $os/$arch in $sums."
		say "To trust this machine's build: tools/runsc/build.sh --record, and commit what it writes."
		exit 1
	fi
	# shellcheck disable=SC2086 # its fields
	set -- $line
	want=$1 tool=$3
	if [ "$4" != "$pin" ]; then
		say "go.mod pins gVisor $pin, but $sums was recorded for $4."
		say "After a bump on purpose: tools/runsc/build.sh --record, and commit what it writes."
		exit 1
	fi
else
	tool=$(go env GOVERSION)
fi

# What these very files gave before, and still has the recorded sum, is not built again.
sum() { sha256sum "$1" 2>/dev/null | cut -d' ' -f1; }
if [ -z "$record" ]; then
	from=$(cat build.sh go.mod go.sum ./*.go precompile/*.go patches/*.patch "$sums" | sha256sum | cut -d' ' -f1)
	cached=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/sandboxd/runsc-$arch-$from # of each architecture its own: packages of the other one evict no build
	if [ "$(sum "$cached")" = "$want" ]; then
		[ "$(sum "$out")" = "$want" ] || { cp "$cached" "$out.tmp.$$" && mv "$out.tmp.$$" "$out"; }
		exit 0
	fi
fi

export GOTOOLCHAIN="$tool" CGO_ENABLED=0 GOFLAGS=-mod=readonly GOAMD64=v1 GOARM64=v8.0 GOEXPERIMENT='' GOWORK=off
if ! have=$(go env GOVERSION 2>&1); then
	say "Go toolchain $tool, with which the checksum was recorded, cannot be had: $have"
	exit 1
fi
tmp=$out.tmp.$$
trap 'rm -rf "$tmp" patched' EXIT

# The source that is built is the pin with our patches. Its place is a fixed one,
# because the binary remembers it.
go mod download gvisor.dev/gvisor
source=$(go list -m -f '{{.Dir}}' gvisor.dev/gvisor)
rm -rf patched
mkdir patched
cp -R "$source" patched/gvisor
chmod -R u+w patched
# Each patch begins with its reason. One that does not fit exactly is refused: after a bump
# of the pin, read what changed there, and renew or drop it.
for patch in patches/*.patch; do
	if ! patch --silent -p1 --fuzz=0 --batch --forward --no-backup-if-mismatch -d patched/gvisor <"$patch" >&2; then
		say "$patch does not fit gVisor $pin: read its reason, and renew or drop it"
		exit 1
	fi
done

cp go.mod patched/go.mod
cp go.sum patched/go.sum
go mod edit -replace gvisor.dev/gvisor=./patched/gvisor patched/go.mod

if [ -n "$record" ] && [ -e "filters_$arch.go" ]; then
	say "compiling the seccomp filters (a minute)"
	go run -modfile patched/go.mod ./precompile "filters_$arch.go"
fi
go build -trimpath -buildvcs=false -modfile patched/go.mod -o "$tmp" \
	-ldflags="-s -w -buildid= -X gvisor.dev/gvisor/runsc/version.version=$pin+sandboxd" .
got=$(sha256sum "$tmp" | cut -d' ' -f1)
if [ -n "$record" ]; then
	{ grep -v "  $os/$arch  " "$sums" 2>/dev/null || true; echo "$got  $os/$arch  $tool  $pin"; } | sort -k2 >"$sums.new"
	mv "$sums.new" "$sums"
	rm -f "$out"
	say "recorded $got for $os/$arch, $tool, $pin"
	exit 0
fi
if [ "$got" != "$want" ]; then
	say "the runsc just built is not the one recorded:"
	say "  want $want ($tool, $pin)"
	say "  got  $got ($have, $pin)"
	if [ "$have" != "$tool" ]; then
		say "The Go toolchain differs: this one is $have. Use GOTOOLCHAIN=$tool."
	else
		say "Toolchain and pin are the same, so the source differs: go clean -modcache, and look at go.sum."
	fi
	exit 1
fi
mkdir -p "$(dirname "$cached")"
rm -f "$(dirname "$cached")/runsc-$arch"-* # of other sources
cp "$tmp" "$cached.$$" && mv "$cached.$$" "$cached"
mv "$tmp" "$out"
