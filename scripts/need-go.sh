#!/usr/bin/env bash
# Checks that there is a Go that can fetch the toolchain that go.mod asks for: 1.21 was the
# first. If there is none, prints the one command that installs it.
set -euo pipefail

go=${1:-go}
if have=$("$go" env GOVERSION 2>/dev/null); then
  minor=${have#go1.}
  minor=${minor%%[!0-9]*}
  [ "${minor:-0}" -ge 21 ] && exit 0
  echo "sandboxd needs Go 1.21 or later to build; this is $have. To get it:" >&2
else
  echo "sandboxd needs Go 1.21 or later to build. To get it:" >&2
fi
# shellcheck source=/dev/null
. /etc/os-release 2>/dev/null || true
if [ "${ID:-}" = debian ] && [ "${VERSION_ID:-0}" -lt 13 ]; then
  echo "  apt-get install -y -t $VERSION_CODENAME-backports golang-go    # if your apt sources include backports" >&2
else
  echo "  apt-get install -y golang-go" >&2
fi
exit 1
