#!/usr/bin/env bash
# Installs the Debian packages that building and running need; `deps.sh test` also installs
# those of the tests. If all are installed, it does nothing and needs no network.
set -euo pipefail

want=(
  gcc libc6-dev libseccomp-dev pkg-config   # sandboxd-runc is cgo
  patch                                     # runsc is gVisor with patches
  iptables ipset iproute2                   # the packet layer
  btrfs-progs                               # mkfs of the storage pool
  mmdebstrap                                # images from recipes
  ca-certificates git python3 python3-venv  # tests: the official Python clients
  systemd                                   # tests: systemd-analyze of the unit
  shellcheck
)
if [ "${1:-}" = test ]; then
  want+=(
    podman runc              # tests exchange images with podman, and have runc check a bundle
    xfsprogs                 # a pool on xfs
    rpm cpio lintian rpmlint # judges of the packages
    minisign                 # a second reader of bundles' signatures
    ansible-core             # reads deploy/ansible
    qemu-system-x86 qemu-utils e2fsprogs # whole machines (test/vm)
    qemu-system-arm debootstrap          # and those of arm64
  )
  # The packages for arm64 are made on amd64.
  [ "$(dpkg --print-architecture)" != amd64 ] || want+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross libseccomp-dev:arm64)
  # Any release of these will do, also one that is no Debian package.
  command -v node >/dev/null && command -v npm >/dev/null || want+=(nodejs npm)
  command -v tsc >/dev/null || want+=(node-typescript)
  command -v javac >/dev/null || want+=(default-jdk-headless)
  command -v docker-registry >/dev/null || want+=(docker-registry)
fi
missing=()
for p in "${want[@]}"; do
  # One that is there for two architectures gives two lines.
  dpkg-query -W -f='${db:Status-Status}\n' "$p" 2>/dev/null | grep -x installed >/dev/null || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ]; then
  echo "deps: these packages are missing: ${missing[*]}; run this as root to install them" >&2
  exit 1
fi
echo "installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
[[ ${missing[*]} != *:arm64* ]] || dpkg --add-architecture arm64
apt-get update -q >&2
apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
# Debian starts it, open to everyone who reaches port 5000. The tests start their own.
if [[ " ${missing[*]} " = *" docker-registry "* && -d /run/systemd/system ]]; then
  systemctl disable --now docker-registry >&2
fi
