#!/usr/bin/env bash
# `make quickstart` runs this after building: it starts a development daemon, builds two
# images, runs Python in a sandbox on both runtimes, and prints timings and what to try next.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" -eq 0 ] || { echo "quickstart: sandboxd makes namespaces, cgroups and firewall rules, so this needs root" >&2; exit 1; }

scripts/dev.sh up
eval "$(scripts/dev.sh env)"

for image in base python; do
  if ! sandboxctl image ls -o name | grep -qx "$image:latest"; then
    echo "building the image $image from Debian packages (once)"
    sandboxctl image build "$image"
  fi
done

now() { date +%s%N; }
declare -A took
for runtime in runsc runc; do
  echo "\$ sandboxctl run --runtime $runtime python -- python3 -c 'print(6*7)'"
  start=$(now)
  answer=$(sandboxctl run --runtime "$runtime" python -- python3 -c 'print(6*7)')
  took[$runtime]=$((($(now) - start) / 1000000))
  echo "$answer"
  [ "$answer" = 42 ] || { echo "quickstart: expected 42 from $runtime" >&2; exit 1; }
done

cat <<TEXT

From nothing to Python's answer to nothing left behind:
  gVisor (runsc)  ${took[runsc]} ms
  runc            ${took[runc]} ms

The development daemon runs. To talk to it from this shell:
  eval "\$(make -s dev-env)"
Then try:
  sandboxctl run base -- uname -a                     # gVisor's kernel, not yours
  sandboxctl create python --name lab --timeout 30m   # one that stays
  sandboxctl exec lab -- python3 -c 'import os; print(os.getpid())'
  sandboxctl ps
  sandboxctl rm -f lab
  make dev-down                                       # when you are done
TEXT
