#!/usr/bin/env bash
# Makes a repository for apt of the packages in build/packages, in the directory build/repository, and signs it:
#   scripts/repository.sh KEY
# KEY is the fingerprint, or the address, of a secret key of gpg. Packages that are in the directory already stay:
# it can be copied to any server of files, or mirrored. PACKAGES and OUT are other directories.
set -euo pipefail
key=${1:-}
[ -n "$key" ] || { echo "repository: name the secret key of gpg, as make repository KEY=FINGERPRINT; gpg --quick-generate-key NAME makes one" >&2; exit 2; }
for tool in gpg dpkg-scanpackages; do
  command -v $tool >/dev/null || { echo "repository: $tool is missing: apt-get install gnupg dpkg-dev" >&2; exit 1; }
done
top=$(cd "$(dirname "$0")/.." && pwd)
packages=$(realpath "${PACKAGES:-$top/build/packages}") out=$(realpath -m "${OUT:-$top/build/repository}")
shopt -s nullglob
debs=("$packages"/*.deb)
[ ${#debs[@]} -gt 0 ] || { echo "repository: $packages has no .deb: make packages" >&2; exit 1; }

# All is written beside the repository, which is then exchanged: a failure leaves it as it was.
new=$out.new
rm -rf "$new"
trap 'rm -rf "$new"' EXIT
mkdir -p "$new/pool"
[ ! -d "$out/pool" ] || cp -a "$out/pool" "$new/"
cp "${debs[@]}" "$new/pool/"
cd "$new"
architectures=()
for arch in amd64 arm64; do
  found=(pool/*_"$arch".deb)
  [ ${#found[@]} -gt 0 ] || continue
  architectures+=("$arch")
  dir=dists/stable/main/binary-$arch
  mkdir -p "$dir"
  dpkg-scanpackages --multiversion --arch "$arch" pool >"$dir/Packages"
  gzip -9nk "$dir/Packages"
done
[ ${#architectures[@]} -gt 0 ] || { echo "repository: no package is for amd64 or arm64" >&2; exit 1; }
cd dists/stable
{
  printf 'Origin: sandboxd\nLabel: sandboxd\nSuite: stable\nCodename: stable\nDate: %s\nArchitectures: %s\nComponents: main\n' \
    "$(date -u -R -d "@${SOURCE_DATE_EPOCH:-$(date +%s)}")" "${architectures[*]}"
  echo SHA256:
  find main -type f | LC_ALL=C sort | while read -r file; do
    printf ' %s %s %s\n' "$(sha256sum "$file" | cut -d' ' -f1)" "$(stat -c %s "$file")" "$file"
  done
} >Release.unsigned
sign=(gpg --batch --yes --local-user "$key" --digest-algo SHA512 ${PASSPHRASE_FILE:+--pinentry-mode loopback --passphrase-file "$PASSPHRASE_FILE"})
mv Release.unsigned Release
"${sign[@]}" --clearsign --output InRelease Release
"${sign[@]}" --armor --detach-sign --output Release.gpg Release
gpg --batch --export "$key" >"$new/sandboxd.gpg"
cd "$top"
old=$out.old
rm -rf "$old"
[ ! -d "$out" ] || mv "$out" "$old"
mv "$new" "$out"
rm -rf "$old"
echo "$out"
