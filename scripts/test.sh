#!/usr/bin/env bash
# Every test there is. The first pass needs nothing and looks for races; the
# second needs root and allows no skip. With STORIES="service power" it ends with
# those, in whole machines (scripts/test-vm.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" -eq 0 ] || { echo "make test: the root and end-to-end tests need root" >&2; exit 1; }

go build -o build/tools/summary ./test/summary
# need PACKAGE PROGRAM installs what tests alone use.
need() {
  ! command -v "$2" >/dev/null || return 0
  local get=(env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$1")
  "${get[@]}" >&2 || { apt-get update -q >&2 && "${get[@]}" >&2; }
}
need podman podman # one test takes images there and back
need runc runc
need xfsprogs mkfs.xfs # one has a pool on it
need nodejs node
need npm npm # the JavaScript SDK
need node-typescript tsc # code contexts
need default-jdk-headless java # and these
if ! command -v docker-registry >/dev/null; then
  need docker-registry docker-registry
  # Debian starts it, for everybody who reaches port 5000; the tests start their own.
  [ ! -d /run/systemd/system ] || systemctl disable --now docker-registry >&2
fi
tags=seccomp
if [ -n "${STORIES:-}" ]; then
  need qemu-system-x86 qemu-system-x86_64
  need e2fsprogs mkfs.ext4
  tags+=,vm
fi

# What fails in one pass does not keep the other from being seen.
{
  failed=0
  echo "== unit tests under the race detector"
  go test -race -json -tags seccomp ./pkg/... ./internal/... ./cmd/... || failed=1
  echo "== root, end-to-end, crash and SDK tests"
  SANDBOXD_TEST=root SANDBOXD_BIN=$PWD/build/bin \
    go test -json -count=1 -p 1 -timeout 40m -tags "$tags" ./... || failed=1
  exit "$failed"
} | build/tools/summary
