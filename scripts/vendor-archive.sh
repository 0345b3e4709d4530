#!/usr/bin/env bash
# Writes all Go modules that the repository needs into one archive, those of tools/runsc (gVisor)
# and tools/lint too, for hosts without a network:
#   scripts/vendor-archive.sh [FILE]          # default: build/modules.tar.zst
#   tar -C build --zstd -xf build/modules.tar.zst
#   make build MODULES=build/modules
# The same go.sum files give the same bytes, also from other proxies (tools/modules/main.go).
set -euo pipefail
out=$(realpath -m "${1:-$(dirname "$0")/../build/modules.tar.zst}")
cd "$(dirname "$0")/.."
mkdir -p "$(dirname "$out")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

go build -o "$work/modules" ./tools/modules
# An empty cache, so that nothing comes in that another project needs. What this host has is not
# downloaded again.
GOPROXY="file://$(go env GOMODCACHE)/cache/download,$(go env GOPROXY)"
export GOPROXY GOMODCACHE="$work/cache" GOFLAGS="${GOFLAGS:+$GOFLAGS }-modcacherw"
mapfile -t mods < <(git ls-files go.mod '*/go.mod')
for mod in "${mods[@]}"; do
  # What is downloaded has the sums of go.sum. The graph needs more go.mod files than the modules.
  (cd "$(dirname "$mod")" && go mod download && go mod graph >/dev/null)
done
"$work/modules" -o "$out" "$work/cache/cache/download"
echo "$out"
