#!/usr/bin/env bash
# Runs each fuzz target of the repository, one after the other, for the given time (go help
# testflag: -fuzztime):
#   scripts/fuzz.sh 1m
# A failing input is written below testdata/fuzz of its package: mend the fault and commit
# the file. An input that reached new code is made small for 2 s at most. By default that is
# a minute, in which a target with large inputs tries nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
failed=()
while IFS=: read -r file target; do
  echo "== $target of $(dirname "$file") for $1"
  go test -tags seccomp -run '^$' -fuzz "^$target\$" -fuzztime "$1" -fuzzminimizetime 2s "./$(dirname "$file")" || failed+=("$target")
done < <(git ls-files '*_test.go' | xargs grep -o '^func Fuzz[A-Za-z0-9]*' | sed 's/func //' | sort)
[ ${#failed[@]} -eq 0 ] || { echo "fuzz: failed: ${failed[*]}" >&2; exit 1; }
