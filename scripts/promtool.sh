#!/usr/bin/env bash
# Puts promtool, which checks the alert rules, into build/tools. It is part of Debian's
# prometheus package, whose server starts at installation, so the script unpacks the package
# and does not install it. If promtool is there, it does nothing and needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."

tool=build/tools/promtool
[ -x "$tool" ] && exit 0
mkdir -p build/tools
if have=$(command -v promtool); then
  ln -sf "$have" "$tool"
  exit 0
fi
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
get() { (cd "$tmp" && apt-get -q -o APT::Sandbox::User=root download prometheus >&2); }
if ! get; then
  apt-get update -q >&2 # the lists may be older than the archive
  get
fi
dpkg-deb --extract "$tmp"/prometheus_*.deb "$tmp/x"
install -m 755 "$tmp/x/usr/bin/promtool" "$tool"
