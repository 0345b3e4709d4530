#!/usr/bin/env bash
# Runs the fuzz targets of the repository one after the other, each for the given time (go help
# testflag: -fuzztime), and prints what each has done:
#   scripts/fuzz.sh 10m
#   TARGETS=pkg/api scripts/fuzz.sh 10m       # those whose line "./pkg/api FuzzBody" matches
#   RESUME=1 scripts/fuzz.sh 10m              # without those that were clean since the last start
# The log of each target is in build/fuzz. A failing input is written below testdata/fuzz of its
# package: mend the fault and commit the file. Other inputs that reached new code stay in
# $(go env GOCACHE)/fuzz, and the next run begins with them.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:?usage: scripts/fuzz.sh TIME}
out=build/fuzz
mkdir -p "$out"
[ -n "${RESUME:-}" ] || rm -f "$out"/*
if [ ! -e "$out/summary" ]; then
  printf '%-32s %-20s %-8s %10s %6s %6s  %s\n' package target result inputs new kept finding >"$out/summary"
fi
touch "$out/clean"

mapfile -t targets < <(git grep -o '^func Fuzz[A-Za-z0-9]*' -- '*_test.go' |
  sed -E 's|^(.*)/[^/]*:func |./\1 |' | sort | grep -E -- "${TARGETS:-.}" | grep -vxFf "$out/clean")
[ ${#targets[@]} -gt 0 ] || [ -s "$out/clean" ] || { echo "fuzz: no target matches ${TARGETS:-}" >&2; exit 1; }
total=
if [[ $time =~ ^[0-9hms]+$ ]]; then
  each=$(sed 's/h/*3600+/; s/m/*60+/; s/s/+/' <<<"$time")
  total=$(((${each}0) * ${#targets[@]} / 60))
  total=", $((total / 60)) h $((total % 60)) min in all and what compiling takes"
fi
echo "fuzz: ${#targets[@]} targets, $time each$total"

failed=0
ended() {
  echo && cat "$out/summary"
  [ "$failed" -eq 0 ] || echo "fuzz: $failed failed; see $out" >&2
}
trap ended EXIT
trap 'exit 130' INT TERM
for line in "${targets[@]}"; do
  read -r dir target <<<"$line"
  log=$out/$(tr / - <<<"${dir#./}").$target
  echo "== $line"
  result=clean
  # An input that reached new code is made small in at most 50 calls. With a bound of time, by
  # default a minute, a target of large inputs did little else: 8 inputs a second.
  go test -tags seccomp -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 50x "$dir" 2>&1 | tee "$log" || result=FAILED
  # Go 1.26 may report the end of the time as a failure (golang/go#75804; Go 1.27 does not).
  if grep -qx ' *context deadline exceeded' "$log" && ! grep -q 'Failing input written' "$log"; then result=clean; fi
  [ "$result" = clean ] && echo "$line" >>"$out/clean" || failed=$((failed + 1))
  last=$(grep -o 'execs: .*' "$log" | tail -1 || true)
  printf '%-32s %-20s %-8s %10s %6s %6s  %s\n' "${dir#./}" "$target" "$result" \
    "$(sed -nE 's/^execs: ([0-9]+).*/\1/p' <<<"$last")" "$(sed -nE 's/.*interesting: ([0-9]+).*/\1/p' <<<"$last")" \
    "$(sed -nE 's/.*total: ([0-9]+).*/\1/p' <<<"$last")" \
    "$(sed -nE 's/.*Failing input written to (.*)/\1/p' "$log")" >>"$out/summary"
done
[ "$failed" -eq 0 ]
