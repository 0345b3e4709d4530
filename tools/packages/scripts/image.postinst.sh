# shellcheck shell=sh
set -eu
say() { echo "sandboxd-image-@image@: $*" >&2; }
# The first argument is "configure" of dpkg, or a number of rpm.
case $1 in configure | [1-9]*) ;; *) exit 0 ;; esac
archive=/usr/share/sandboxd/images/@image@.tar
if sandboxctl version >/dev/null 2>&1; then
	sandboxctl image import $archive >/dev/null || say "the image was not imported; try: sandboxctl image import $archive"
else
	say "no daemon runs; when it does: sandboxctl image import $archive"
fi
