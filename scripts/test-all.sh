#!/usr/bin/env bash
# Runs all tests in parts of at most an hour, which together are the whole: `scripts/test-all.sh` runs the parts that
# have not passed on this tree, `scripts/test-all.sh K` runs part K. The ledger is in ${XDG_CACHE_HOME:-~/.cache}/sandboxd-ci:
# a part that passes on a clean tree leaves <tree hash>.all.K-of-N (scripts/proof.sh), and when each has passed, <tree hash>.all
# has a line for each.
set -euo pipefail
cd "$(dirname "$0")/.."
parts=5
only=${1:-}
case $only in
'' | [1-5]) ;;
*) echo "test-all: PART=$only: want 1 to $parts" >&2; exit 2 ;;
esac
ledger=${XDG_CACHE_HOME:-$HOME/.cache}/sandboxd-ci/$(git rev-parse 'HEAD^{tree}').all
clean() { [ -z "$(git status --porcelain)" ]; }

failed=()
for k in ${only:-$(seq $parts)}; do
  note=$ledger.$k-of-$parts
  if [ -z "$only" ] && [ -s "$note" ] && clean; then
    echo "== part $k of $parts: passed on this tree: $(cat "$note")"
    continue
  fi
  echo "== part $k of $parts"
  scripts/proof.sh ".all.$k-of-$parts" scripts/test.sh all "$k/$parts" || failed+=("$k")
done
if clean; then
  missing=()
  for k in $(seq $parts); do [ -s "$ledger.$k-of-$parts" ] || missing+=("$k"); done
  if [ ${#missing[@]} -eq 0 ]; then
    for k in $(seq $parts); do echo "part $k of $parts: $(cat "$ledger.$k-of-$parts")"; done | tee "$ledger"
  else
    echo "test-all: not passed on this tree: part ${missing[*]}; make test-all runs what is missing, make test-all PART=K runs one part"
  fi
fi
[ ${#failed[@]} -eq 0 ] || { echo "test-all: failed: part ${failed[*]}" >&2; exit 1; }
