#!/usr/bin/env bash
# Makes what the story "deploy" needs, of what `make build` made:
#   test/vm/deployed.sh DIR IMAGE
# DIR gets keys and two bundles: first.bundle has the package of this version and the archive IMAGE,
# second.bundle the package of another version. The first package is there by itself, too.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$1 image=$2 work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
make packager
command -v minisign >/dev/null || { echo "deployed: minisign is missing: apt-get install minisign" >&2; exit 1; }
for key in other bundle; do minisign -G -W -f -p "$out/$key.pub" -s "$work/key" >/dev/null; done
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

# bundle NAME PROGRAMS ARGS...: a bundle of a package of the programs.
bundle() {
  local name=$1 bin=$2 version
  shift 2
  version=$("$bin/sandboxd" --version)
  mkdir "$work/$name"
  build/tools/packages -bin "$bin" -native build/bin -images /nowhere -out "$work/$name" -version "${version##* }" -epoch "$SOURCE_DATE_EPOCH"
  "$bin/sandboxd" bundle create -o "$out/$name.bundle" --key "$work/key" --package "$(echo "$work/$name"/*.deb)" "$@"
}

bundle first build/bin --image "$image"
mv "$work"/first/*.deb "$out/"

cp -al build/bin "$work/bin"
rm "$work/bin/sandboxd"
CGO_ENABLED=0 go build -trimpath -o "$work/bin/sandboxd" \
  -ldflags "-s -w -X github.com/sandboxd/sandboxd/internal/release.described=v0.2.0-1-g0000000" ./cmd/sandboxd
bundle second "$work/bin"
