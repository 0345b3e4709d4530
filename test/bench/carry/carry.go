// Package carry measures how long the installation of a bundle takes, beside copying and unpacking
// the same files with tar and dpkg-deb.
//
// A bundle is installed in a world of its own: an overlay of the host's root, in which dpkg may do
// what it likes, without systemd. The images go to the daemon of the bench, by its socket, which is
// all that the world has of the host's /run.
package carry

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Load is a bundle and an archive of tar and zstd with the same files.
type Load struct {
	dir    string
	socket string   // of the daemon that gets the images
	images []string // names of their archives
}

// Pack makes both below dir: of a package of the programs in bin, written by the program packager,
// and of the archives below dir/images. It runs at the root of the checkout.
func Pack(ctx context.Context, dir, bin, packager, socket string) (*Load, error) {
	l := &Load{dir: dir, socket: socket}
	found, err := filepath.Glob(filepath.Join(dir, "images", "*.tar"))
	if err != nil {
		return nil, err
	}
	for _, f := range found {
		l.images = append(l.images, filepath.Base(f))
	}
	_, err = script(ctx, `
bin=$1 packager=$2 dir=$3
for program in minisign zstd; do
  command -v $program >/dev/null || { echo "$program is missing: apt-get install $program" >&2; exit 1; }
done
minisign -G -W -p "$dir/key.pub" -s "$dir/key" >/dev/null
version=$("$bin/sandboxd" --version)
version=${version##* }
export SOURCE_DATE_EPOCH=0
"$packager" -bin "$bin" -native "$bin" -images /nowhere -out "$dir/packages" -version "$version"
rm "$dir"/packages/*.rpm
args=()
for image in "$dir"/images/*.tar; do args+=(--image "$image"); done
"$bin/sandboxd" bundle create -o "$dir/bundle" --key "$dir/key" --package "$(echo "$dir"/packages/*.deb)" "${args[@]}"
tar -C "$dir" -cf - images packages | zstd -q -6 --long=25 -o "$dir/archive"
`, bin, packager, dir)
	return l, err
}

func (l *Load) path(name string) string { return filepath.Join(l.dir, name) }

// Bytes is the size of the bundle.
func (l *Load) Bytes() (int64, error) {
	fi, err := os.Stat(l.path("bundle"))
	if err != nil {
		return 0, err
	}
	return fi.Size(), nil
}

// Install installs the bundle and returns how many seconds it took until all was on disk. The
// daemon must not have its images.
func (l *Load) Install(ctx context.Context) (float64, error) {
	out, err := script(ctx, `
if [ "${1:-}" != world ]; then exec unshare -mpf --kill-child bash -euo pipefail -c "$0" "$0" world "$@"; fi
dir=$2 socket=$3
world=$dir/world
rm -rf --one-file-system "$world"
mkdir -p "$world"/{upper,work,root,tmp,state}
mount -t overlay -o "lowerdir=/,upperdir=$world/upper,workdir=$world/work" overlay "$world/root"
mount -t proc none "$world/root/proc"
mount --rbind /dev "$world/root/dev"
mount --rbind /sys "$world/root/sys"
mount -t tmpfs none "$world/root/run"
mkdir "$world"/root/run/{bundle,daemon,host}
mount --bind "$dir" "$world/root/run/bundle"
mount --bind "$(dirname "$socket")" "$world/root/run/daemon"
mount --bind "$world/tmp" "$world/root/var/tmp"
mkdir -p "$world/root/var/lib/sandboxd"
mount --bind "$world/state" "$world/root/var/lib/sandboxd" # the doctor tries overlays there
export SANDBOXD_HOST="unix:///run/daemon/$(basename "$socket")"
cd "$world/root"
pivot_root . run/host # not chroot: in one, nobody can make user namespaces, which the doctor tries
umount -l /run/host
begin=$EPOCHREALTIME
sh /run/bundle/bundle --key /run/bundle/key.pub >&2
sync -f /run/bundle
echo "$begin $EPOCHREALTIME"
`, l.dir, l.socket)
	if err != nil {
		return 0, err
	}
	return seconds(out)
}

// seconds is the difference of two times in a line.
func seconds(line string) (float64, error) {
	begin, end, _ := strings.Cut(strings.TrimSpace(line), " ")
	a, err := strconv.ParseFloat(begin, 64)
	if err != nil {
		return 0, err
	}
	b, err := strconv.ParseFloat(end, 64)
	return b - a, err
}

// Unpack copies the bundle, as from a medium, and unpacks the archive, the package and the layers of
// the images. It returns how many seconds it took until all was on disk.
func (l *Load) Unpack(ctx context.Context) (float64, error) {
	to := l.path("unpacked")
	if err := errors.Join(os.RemoveAll(to), os.MkdirAll(to, 0o700)); err != nil {
		return 0, err
	}
	begin := time.Now()
	_, err := script(ctx, `
dir=$1 to=$2
cp "$dir/bundle" "$to/bundle"
tar -C "$to" -I 'zstd -d --long=25' -xf "$dir/archive"
dpkg-deb -x "$to"/packages/*.deb "$to/package"
for image in "$to"/images/*.tar; do
  tree=${image%.tar}
  mkdir "$tree"
  for layer in $(tar -xOf "$image" manifest.json | grep -o '"Layers":\[[^]]*' | grep -oE 'blobs/sha256/[0-9a-f]+'); do
    tar -xOf "$image" "$layer" | tar -C "$tree" --numeric-owner -xpf -
  done
done
sync -f "$to"
`, l.dir, to)
	took := time.Since(begin).Seconds()
	return took, errors.Join(err, os.RemoveAll(to), syncDir(l.dir))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// script runs bash and returns what it prints.
func script(ctx context.Context, text string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "bash", append([]string{"-euo", "pipefail", "-c", text, text}, args...)...)
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.TrimSpace(strings.Split(strings.TrimSpace(text), "\n")[0]), err, said.String())
	}
	return string(out), nil
}
