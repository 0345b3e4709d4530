#!/usr/bin/env bash
# Writes the packages of one architecture to build/packages, of what `make build` made:
#   scripts/packages.sh [amd64|arm64]
# Programs of another architecture than this machine's are compiled first, into
# build/ARCH/bin. MAINTAINER is who answers for the packages: "NAME <ADDRESS>". SIGN is a secret key of gpg that
# signs them, and PASSPHRASE_FILE a file with its passphrase.
set -euo pipefail
cd "$(dirname "$0")/.."
native=$(go env GOARCH) arch=${1:-$(go env GOARCH)} bin=build/bin
version=$(build/bin/sandboxd --version)
version=${version##* }

if [ "$arch" != "$native" ]; then
  [ "$arch" = arm64 ] || { echo "packages: $arch: want $native or arm64" >&2; exit 2; }
  bin=build/$arch/bin
  # sandboxd-runc is cgo, and gVisor's runsc has a recorded checksum for each architecture.
  if ! command -v aarch64-linux-gnu-gcc >/dev/null || [ ! -e /usr/lib/aarch64-linux-gnu/libseccomp.so ]; then
    echo "packages: sandboxd-runc for arm64 needs a cross compiler and libseccomp: dpkg --add-architecture arm64 && apt-get update &&" \
      "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross libseccomp-dev:arm64" >&2
    exit 1
  fi
  mkdir -p "$bin/agent"
  flags=(-trimpath -ldflags "-s -w -X github.com/sandboxd/sandboxd/internal/release.described=$(
    git describe --tags --match 'v[0-9]*' --always --long --dirty)")
  export GOARCH=$arch
  CGO_ENABLED=0 go build "${flags[@]}" -o "$bin/" ./cmd/sandboxd ./cmd/sandboxctl
  CGO_ENABLED=0 go build "${flags[@]}" -o "$bin/agent/" ./cmd/sandbox-agent
  CGO_ENABLED=1 CC=aarch64-linux-gnu-gcc PKG_CONFIG_LIBDIR=/usr/lib/aarch64-linux-gnu/pkgconfig \
    go build "${flags[@]}" -tags seccomp -o "$bin/" ./cmd/sandboxd-runc
  tools/runsc/build.sh "$PWD/$bin/runsc"
  unset GOARCH
fi

# Packages of other commits would be installed together with these.
rm -f build/packages/*_"$arch".deb build/packages/*."$(case $arch in amd64) echo x86_64 ;; arm64) echo aarch64 ;; *) echo "$arch" ;; esac)".rpm
images=build/images
[ "$arch" = "$native" ] || images=build/$arch/images
build/tools/packages -arch "$arch" -bin "$bin" -images "$images" -version "$version" \
  -epoch "${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}" ${MAINTAINER:+-maintainer "$MAINTAINER"} \
  ${SIGN:+-sign "$SIGN"} ${PASSPHRASE_FILE:+-passphrase-file "$PASSPHRASE_FILE"}
