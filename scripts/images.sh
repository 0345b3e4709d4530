#!/usr/bin/env bash
# Builds the images of all recipes, or of the named recipes, and writes them to
# build/images. scripts/install.sh imports them from there, on hosts without a network:
#   scripts/images.sh [NAME...]
set -euo pipefail
cd "$(dirname "$0")/.."
images=$PWD/build/images
names=("$@")
[ ${#names[@]} -gt 0 ] || mapfile -t names < <(dirname rootfs/*/recipe.toml | xargs -n 1 basename)
if ! scripts/dev.sh pid >/dev/null 2>&1; then
  scripts/dev.sh up >/dev/null
  trap 'scripts/dev.sh down' EXIT
fi
eval "$(scripts/dev.sh env)"
mkdir -p "$images"
for name in "${names[@]}"; do
  recipe=rootfs/$name/recipe.toml
  [ ! -s "$images/$name.tar" ] || [ "$recipe" -nt "$images/$name.tar" ] || continue
  sandboxctl image inspect "$name" >/dev/null 2>&1 || sandboxctl image build "$name" >&2
  sandboxctl image export "$name" -o "$images/$name.tar.new"
  mv "$images/$name.tar.new" "$images/$name.tar"
  echo "$images/$name.tar"
done
