#!/usr/bin/env bash
# Removes the state directories that tests keep for the next run: their images and pools, some 20 GB. A directory is
# the tests' own if there is a file DIRECTORY.made-by-tests beside it (internal/daemontest). One that is in use stays. STATES is another
# directory than /var/lib.
set -euo pipefail
states=${STATES:-/var/lib}

# in_use succeeds if a test runs with the instance, or the kernel holds a file below the directory.
in_use() {
  local lock=/run/lock/sandboxd-test-${1##*-}
  [ ! -e "$lock" ] || flock --nonblock "$lock" true || return 0
  cut -d ' ' -f 5 /proc/self/mountinfo | grep -qF "$1/" && return 0
  grep -qsF "$1/" /sys/block/loop*/loop/backing_file
}

for marker in "$states"/sandboxd-?.made-by-tests; do
  [ -e "$marker" ] || continue
  dir=${marker%.made-by-tests}
  if in_use "$dir"; then
    echo "clean: $dir stays: it is in use" >&2
    continue
  fi
  [ ! -e "$dir" ] || echo "rm -rf $dir ($(du -sh "$dir" | cut -f 1))"
  rm -rf --one-file-system "$dir" "$marker"
done
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sandboxd-test
[ ! -d "$cache" ] || echo "clean: $cache ($(du -sh "$cache" | cut -f 1)) stays: images and clients, which took long to make; rm -r removes it"
