#!/usr/bin/env bash
# Runs a command that proves the tree. If it succeeds and nothing is uncommitted, the script
# leaves a note in ${XDG_CACHE_HOME:-~/.cache}/sandboxd-ci: a file named by the tree's hash
# and a suffix. Its first word is how many seconds the command took.
#   scripts/proof.sh SUFFIX COMMAND...
set -euo pipefail
suffix=$1
shift
clean() { [ -z "$(git status --porcelain)" ]; }
tree=$(git rev-parse 'HEAD^{tree}')
was_clean=no
! clean || was_clean=yes
start=$SECONDS
"$@"
took=$((SECONDS - start))
if [ $was_clean = no ] || ! clean || [ "$(git rev-parse 'HEAD^{tree}')" != "$tree" ]; then
  echo "no note was left: the tested files differ from the commit" >&2
  exit 0
fi
notes=${XDG_CACHE_HOME:-$HOME/.cache}/sandboxd-ci
mkdir -p "$notes"
echo "$took s, $(date -u +%FT%TZ), $(nproc) x $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)" >"$notes/$tree$suffix"
