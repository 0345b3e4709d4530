#!/usr/bin/env bash
# Makes what the stories "upgrade" and "year" need, of what `make build` made:
#   test/vm/releases.sh DIR
# DIR gets the package of release 2, and bundles of three more with their key: 3 is good, the daemon of
# 4 does not start, or hangs if there is /root/hang, and 5 writes a state of a newer schema. Release N
# is version 0.N.1-dev+0000000.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$1 work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
make packager
command -v minisign >/dev/null || { echo "releases: minisign is missing: apt-get install minisign" >&2; exit 1; }
minisign -G -W -f -p "$out/bundle.pub" -s "$work/key" >/dev/null
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

# program N SOURCE: the programs of make build, with a daemon of release N.
program() {
  cp -al build/bin "$work/$1"
  rm "$work/$1/sandboxd"
  (cd "$2" && CGO_ENABLED=0 go build -trimpath -o "$work/$1/sandboxd" \
    -ldflags "-s -w -X github.com/sandboxd/sandboxd/internal/release.described=v0.$1.0-1-g0000000" ./cmd/sandboxd)
}

# package N SOURCE: its .deb.
package() {
  mkdir -p "$work/packages"
  build/tools/packages -source "$2" -bin "$work/$1" -native build/bin -images /nowhere -out "$work/packages" \
    -version "0.$1.1-dev+0000000" -epoch "$SOURCE_DATE_EPOCH"
  mv "$work"/packages/*.deb "$out/"
}

# bundle N SOURCE: a bundle of its .deb.
bundle() {
  local package
  package "$1" "$2"
  package=$(echo "$out/sandboxd_0.$1.1"*.deb)
  build/bin/sandboxd bundle create -o "$out/$1.bundle" --key "$work/key" --release "0.$1.1-dev+0000000" --file LICENSE=LICENSE \
    --package "$package"
  rm "$package"
}

program 2 .
package 2 .

program 3 .
bundle 3 .

cp -al "$work/2" "$work/4" # all of it works but the daemon
rm "$work/4/sandboxd"
cat >"$work/4/sandboxd" <<'SH'
#!/bin/sh
case $1 in
serve) [ ! -e /root/hang ] || exec sleep infinity; echo "this release is broken" >&2; exit 1 ;;
--version) echo "sandboxd version 0.4.1-dev+0000000" ;;
*) exec /usr/lib/sandboxd/versions/0.2.1-dev+0000000/bin/sandboxd "$@" ;;
esac
SH
chmod 755 "$work/4/sandboxd"
bundle 4 .

mkdir "$work/source"
git ls-files -z | xargs -0 cp -al --parents --target-directory "$work/source"
schema=$(sed -n 's/^const Schema = //p' pkg/store/store.go)
sed -i "s/^const Schema = .*/const Schema = $((schema + 1))/" "$work/source/pkg/store/store.go"
sed -i "s/^var migrations = .*/&\n$schema: func(*bbolt.Tx) error { return nil },/" "$work/source/pkg/store/migrate.go"
program 5 "$work/source"
bundle 5 "$work/source"
