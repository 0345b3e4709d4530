#!/usr/bin/env bash
# Writes build/sandboxd-VERSION-ARCH.bundle of build/packages, build/images and the bill of
# materials, if there is one, and signs it:
#   scripts/bundle.sh SECRETKEY [deb|rpm...]
# The packages of images are left out: the archives themselves are in the bundle.
set -euo pipefail
cd "$(dirname "$0")/.."
key=${1:-}
[ -n "$key" ] || { echo "bundle: name the secret key, as make bundle KEY=FILE; minisign -G makes one" >&2; exit 2; }
shift
forms=("${@:-deb}")
arch=$(go env GOARCH)
version=$(build/bin/sandboxd --version)
version=${version##* }
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}

args=()
for form in "${forms[@]}"; do
  n=${#args[@]}
  for package in build/packages/*."$form"; do
    case ${package##*/} in
    sandboxd-image-* | '*'.*) ;;
    *_"$arch".deb | *_all.deb | *."$(uname -m)".rpm | *.noarch.rpm) args+=(--package "$package") ;;
    esac
  done
  [ ${#args[@]} -gt "$n" ] || { echo "bundle: build/packages has no .$form for $arch: make packages" >&2; exit 1; }
done
for image in build/images/*.tar; do
  [ -e "$image" ] || { echo "bundle: build/images has no archives, so there are no images in it; make images writes them" >&2; break; }
  args+=(--image "$image")
done
for sbom in build/*.cdx.json; do
  [ -e "$sbom" ] || { echo "bundle: there is no build/sbom.cdx.json, so there is no bill of materials in it" >&2; break; }
  args+=(--sbom "$sbom")
done
for file in LICENSE THIRD_PARTY.md; do args+=(--file "licences/$file=$file"); done
for file in README.md ARCHITECTURE.md SECURITY.md docs; do args+=(--file "documents/$file=$file"); done
build/bin/sandboxd bundle create -o "build/sandboxd-$version-$arch.bundle" --key "$key" --commit "$(git rev-parse HEAD)" \
  --file units=systemd "${args[@]}"
