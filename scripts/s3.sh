#!/usr/bin/env bash
# Builds the S3-compatible server with which backups are tested, from the module tools/s3, and
# prints its path. If it is there, this does nothing and needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."

tool=build/tools/versitygw-$(sha256sum tools/s3/go.sum | cut -c1-12)
if [ ! -x "$tool" ]; then
  mkdir -p build/tools
  tmp=$(mktemp -d build/tools/.versitygw.XXXXXX)
  trap 'rm -rf "$tmp"' EXIT
  go build -C tools/s3 -trimpath -ldflags '-s -w' -o "$PWD/$tmp/" github.com/versity/versitygw/cmd/versitygw
  mv "$tmp/versitygw" "$tool" # two builds at once are one after the other
fi
echo "$PWD/$tool"
