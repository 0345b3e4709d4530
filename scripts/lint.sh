#!/usr/bin/env bash
# Formatting, static analysis, known vulnerabilities, house rules.
set -euo pipefail
cd "$(dirname "$0")/.."

# What is compiled with -trimpath serves every checkout, and the tests.
export GOFLAGS="${GOFLAGS:+$GOFLAGS }-trimpath"
tools=$PWD/build/tools
(cd tools/lint && go build -o "$tools/" mvdan.cc/gofumpt honnef.co/go/tools/cmd/staticcheck golang.org/x/vuln/cmd/govulncheck)

unformatted=$(git ls-files '*.go' ':!tools/runsc/filters_*.go' | xargs "$tools/gofumpt" -l)
[ -z "$unformatted" ] || { echo "gofumpt would change:"; echo "$unformatted"; exit 1; }
go vet -tags seccomp,vm,all ./...
(cd tools/packages && go vet .)
go vet -tags weak ./internal/weak ./pkg/oci
"$tools/staticcheck" -tags seccomp,vm,all ./...
git ls-files '*.sh' .ci/run | xargs shellcheck
go test -count=1 ./internal/archtest

# The vulnerability database is a web service. If it cannot be reached (an air-gapped CI),
# the script prints that the check was left out.
if out=$("$tools/govulncheck" -tags seccomp ./... 2>&1); then
  echo "$out" | tail -n 3
elif grep -qE 'dial tcp|no such host|connection refused|vuln.go.dev.*(403|407|50[0-9])|Forbidden' <<<"$out"; then
  echo "govulncheck: SKIPPED, its database cannot be reached from this host" >&2
else
  echo "$out"
  exit 1
fi
echo "lint: clean"
