#!/usr/bin/env bash
# Writes build/sandboxd-VERSION-ARCH.bundle of build/packages and build/images, with a bill of
# materials of the programs and images that it carries, and signs it:
#   scripts/bundle.sh SECRETKEY [deb|rpm...]
# With DEBIAN=SUITE it also carries what the packages need of that Debian.
# The packages of images are left out: the archives themselves are in the bundle. BUILD is another
# directory than build for all but the program that writes the bundle. PASSWORD_FILE has the password of an
# encrypted key; without it, a terminal is asked.
set -euo pipefail
cd "$(dirname "$0")/.."
key=${1:-}
[ -n "$key" ] || { echo "bundle: name the secret key, as make bundle KEY=FILE; minisign -G makes one" >&2; exit 2; }
[ -z "${PASSWORD_FILE:-}" ] || [ -r "$PASSWORD_FILE" ] || { echo "bundle: PASSWORD_FILE=$PASSWORD_FILE cannot be read" >&2; exit 2; }
shift
forms=("${@:-deb}")
build=${BUILD:-build}
arch=$(go env GOARCH)
version=$(build/bin/sandboxd --version)
version=${version##* }
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}

packaged=${version/-/\~} # as tools/packages writes it
args=() programs=''
for form in "${forms[@]}"; do
  main=''
  for package in "$build"/packages/*."$form"; do
    case ${package##*/} in
    sandboxd-image-* | '*'.*) ;;
    sandboxd_"$packaged"-1_"$arch".deb | sandboxd-"$packaged"-1."$(uname -m)".rpm) args+=(--package "$package") main=$package ;;
    sandboxd_* | sandboxd-[0-9]*) echo "bundle: $package is left out: it is not of sandboxd $version for $arch" >&2 ;;
    *_"$arch".deb | *_all.deb | *."$(uname -m)".rpm | *.noarch.rpm) args+=(--package "$package") ;;
    esac
  done
  [ -n "$main" ] || { echo "bundle: $build/packages has no .$form of sandboxd $version for $arch: make packages" >&2; exit 1; }
  programs=$main
done

# The bill is of the programs as they are in the package, whatever was compiled since.
work=$(mktemp -d "$build/bundle.XXXXXX")
trap 'rm -rf "$work"' EXIT
case $programs in
*.deb) dpkg-deb --extract "$programs" "$work" ;;
*.rpm) # rpm2cpio (rpm 4.18) writes all and fails: nfpm notes another size. cpio fails if bytes are missing.
  { rpm2cpio "$programs" || true; } | (cd "$work" && cpio --extract --make-directories --quiet --no-absolute-filenames)
  ;;
esac
dir=$work/usr/lib/sandboxd/versions/$version
bill=()
for program in bin/sandboxd bin/sandboxctl libexec/sandboxd/{sandboxd-runc,runsc,agent/sandbox-agent}; do
  bill+=(--program "$dir/$program")
done
for image in "$build"/images/*.tar; do
  [ -e "$image" ] || { echo "bundle: $build/images has no archives, so there are no images in it; make images writes them" >&2; break; }
  args+=(--image "$image") bill+=(--image "$image")
done
build/bin/sandboxd sbom -o "$build/sbom.cdx.json" "${bill[@]}"
args+=(--sbom "$build/sbom.cdx.json")
[ -z "${DEBIAN:-}" ] || args+=(--debian "$DEBIAN")

for file in LICENSE THIRD_PARTY.md; do args+=(--file "licences/$file=$file"); done
for file in README.md ARCHITECTURE.md CHANGELOG.md SECURITY.md docs deploy; do args+=(--file "documents/$file=$file"); done
build/bin/sandboxd bundle create -o "$build/sandboxd-$version-$arch.bundle" --key "$key" --commit "$(git rev-parse HEAD)" \
  ${PASSWORD_FILE:+--password-file "$PASSWORD_FILE"} --file units=systemd "${args[@]}"
