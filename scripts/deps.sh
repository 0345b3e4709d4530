#!/usr/bin/env bash
# Installs the Debian packages that building, running and testing need; does
# nothing, and needs no network, if all are there.
set -euo pipefail

want=(
  gcc libc6-dev libseccomp-dev pkg-config   # sandboxd-runc is cgo
  iptables ipset iproute2                   # the packet layer
  btrfs-progs                               # mkfs of the storage pool
  mmdebstrap                                # images from recipes
  ca-certificates git python3 python3-venv  # tests: the official Python clients
  systemd                                   # tests: systemd-analyze of the unit
  shellcheck
)
missing=()
for p in "${want[@]}"; do
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ]; then
  echo "sandboxd: these packages are missing, and installing them needs root: ${missing[*]}" >&2
  exit 1
fi
echo "installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >&2
apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
