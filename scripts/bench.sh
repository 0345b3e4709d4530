#!/usr/bin/env bash
# Measures the programs in build/bin against their baselines, writes build/bench.json and
# prints a table. A whole run also replaces the table in docs/benchmarks.md; with -merge, a
# run of some rows (-run REGEX) replaces these. Arguments are passed to test/bench, for
# example -quick.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" -eq 0 ] || { echo "bench: sandboxd makes namespaces, cgroups and firewall rules, so this needs root" >&2; exit 1; }
go build -trimpath -o build/bench-tool ./test/bench
make packager >/dev/null
CGO_ENABLED=0 go build -trimpath -o build/bench-guest ./test/bench/guest
CGO_ENABLED=0 go test -c -trimpath -tags seccomp -o build/bench-egress ./pkg/egress
before=$(sha256sum docs/benchmarks.md)
build/bench-tool -bin build/bin -recipes rootfs -out build/bench.json -doc docs/benchmarks.md "$@"
# What `sandboxctl bench` compares with is a part of the table. The run may have left that
# as it was: -quick, -run without -merge, another -doc.
if [ "$(sha256sum docs/benchmarks.md)" != "$before" ]; then
	go test ./internal/cli/bench -run '^TestReference$' -update
fi
