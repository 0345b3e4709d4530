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

unit=(go test -race -json -tags seccomp)
root=(env SANDBOXD_TEST=root "SANDBOXD_BIN=$PWD/build/bin" go test -json -p 1 -timeout 40m -tags "$tags")

# again PASS GO-TEST... runs the few tests that failed in a pass twice more, each by
# itself, so that what is unsteady can be told from what is broken.
again() {
  local package tests
  build/tools/summary -again <"build/$1.json" >"build/$1.again" || return 0
  while read -r package tests; do
    for _ in 1 2; do
      echo "== again: $package $tests"
      "${@:2}" -count=1 -run "$tests" "$package" </dev/null || return 0
    done
  done <"build/$1.again"
}

# What fails in one pass does not keep the other from being seen.
{
  failed=()
  echo "== unit tests under the race detector"
  "${unit[@]}" ./pkg/... ./internal/... ./cmd/... | tee build/unit.json || failed+=(unit)
  echo "== root, end-to-end, crash and SDK tests"
  "${root[@]}" -count=1 ./... | tee build/root.json || failed+=(root)
  for pass in "${failed[@]}"; do
    declare -n command=$pass
    again "$pass" "${command[@]}"
  done
  [ "${#failed[@]}" -eq 0 ]
} | build/tools/summary
