#!/usr/bin/env bash
# Runs the tests: `scripts/test.sh push` is `make test`, `scripts/test.sh all K/N` is a part of
# `make test-all`. test/suite runs them side by side; test/summary prints the result. LANES
# is how many jobs run at a time; with RACE=1 the tests below test/ have the race detector, too,
# but not the programs that they start.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" -eq 0 ] || { echo "make test: the root and end-to-end tests need root" >&2; exit 1; }
what=${1:-push}

go build -trimpath -o build/tools/ ./test/suite ./test/summary
cp /proc/stat build/stat.before
build/tools/suite ${LANES:+-lanes "$LANES"} ${RACE:+-race} ${2:+-part "$2"} "$what"

# If a few tests failed, each runs twice more, by itself, to distinguish an unsteady test
# from a broken one. They count as failed either way. A whole machine takes too long for
# that, and lint is no test.
if build/tools/summary -again build/test/*.json >build/again; then
  n=0 tags=seccomp,vm
  [ "$what" != all ] || tags+=,all
  while read -r package tests; do
    case $package in script | */test/vm) continue ;; esac
    for _ in 1 2; do
      echo "== again: $package $tests"
      n=$((n + 1))
      SANDBOXD_TEST=root SANDBOXD_BIN=$PWD/build/bin \
        go test -json -trimpath -tags "$tags" -timeout 40m -count=1 -run "$tests" "$package" </dev/null >"build/test/~again-$n.json" || break
    done
  done <build/again
fi
build/tools/summary -since build/stat.before build/test/*.json
