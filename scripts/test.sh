#!/usr/bin/env bash
# Every test there is. The first pass needs nothing and looks for races; the
# second needs root and allows no skip.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" -eq 0 ] || { echo "make test: the root and end-to-end tests need root" >&2; exit 1; }

go build -o build/tools/summary ./test/summary

echo "== unit tests under the race detector"
go test -race -tags seccomp ./pkg/... ./internal/... ./cmd/... 2>&1 | { grep -v 'no test files' || true; }

echo "== root, end-to-end, crash and SDK tests"
SANDBOXD_TEST=root SANDBOXD_BIN=$PWD/build/bin \
  go test -json -count=1 -p 1 -timeout 40m -tags seccomp ./... | build/tools/summary
