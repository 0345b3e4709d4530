#!/usr/bin/env bash
# Runs stories in whole machines that qemu emulates: a Debian with its own kernel, systemd
# and pure cgroup v2. A story (test/vm/STORY.sh) installs sandboxd with its script and has
# one stage for each boot.
#   scripts/test-vm.sh [--debian bookworm|trixie] [STORY[@bookworm|@trixie]...]
# Needs root, qemu-system-x86, qemu-utils, mmdebstrap and python3; the stories "bundle",
# "upgrade" and "year" also minisign. The output of a story is in build/vm/STORY.log, that of its kernel in STORY.console.
#
# The disk of the Debian is made once and kept in ~/.cache/sandboxd-test/vm; a story writes
# to an overlay of it. A line "# needs: PACKAGE..." in a story asks for a Debian of its own
# with more packages, and "# lacks: PACKAGE..." for one without some that the others have. A line
# "# arch: arm64" asks for a machine and for packages of arm64: this needs qemu-system-arm, debootstrap,
# cpio and what `make packages ARCH=arm64` needs, and no other story in the same run.
#
# Emulation is slow: a story should be one boot if it can, with few starts on runsc.
set -euo pipefail
cd "$(dirname "$0")/.."
vm=$PWD/build/vm suite=bookworm
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sandboxd-test
if [ "${1:-}" = --debian ]; then suite=$2; shift 2; fi
stories=("$@")
[ ${#stories[@]} -gt 0 ] || stories=(service power)

fail() { echo "test-vm: $*" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || fail "creating the disk of a machine needs root"
for tool in qemu-system-x86_64 qemu-img mmdebstrap mkfs.ext4 python3; do
  command -v $tool >/dev/null || fail "$tool is missing: apt-get install qemu-system-x86 qemu-utils mmdebstrap e2fsprogs python3"
done
for s in "${stories[@]}"; do [ -f "test/vm/${s%@*}.sh" ] || fail "no story $s: test/vm has $(cd test/vm && ls -m ./*.sh)"; done
mkdir -p "$vm" "$cache/vm" "$cache/images"
new=$cache/vm/new.$$ # a disk that is not complete yet
payload=$vm/_${stories[0]} # the files under test; the "_" hides them from "./..." of go

# arm64: this run is of a story for arm64.
arm64() { grep -qx '# arch: arm64' "test/vm/${stories[0]%@*}.sh"; }
if arm64; then
  [ ${#stories[@]} -eq 1 ] || fail "${stories[0]} is a story for arm64, which needs files of its own: run it alone"
  for tool in qemu-system-aarch64 debootstrap cpio; do
    command -v $tool >/dev/null || fail "$tool is missing: apt-get install qemu-system-arm debootstrap cpio"
  done
fi

# An interrupted run leaves no machine, no overlay and no incomplete disk.
tidy() {
  local job run
  for job in $(jobs -p); do kill "$job" 2>/dev/null || true; done
  rm -rf --one-file-system "$new" "$payload" "$payload.disk" "$payload.key" "$payload.bin"
  for run in "${stories[@]}"; do rm -f "$vm/$run.disk"; done
}
trap tidy EXIT
trap 'exit 130' INT TERM HUP

# debian DIR PACKAGES makes disk, vmlinuz and initrd of a plain Debian in DIR. It runs in a
# mount namespace of its own, so that no other process sees its mounts or keeps them in use.
# The code of this function is part of the disk's name: a change makes another disk.
debian() {
  local root=$1/root off
  mkdir "$root"
  mount -t tmpfs -o size=2g,mode=755 none "$root" # dpkg syncs each file it writes
  # shellcheck disable=SC2016 # $1 is the argument that mmdebstrap gives a hook
  # An initrd of three modules is made and loaded in a tenth of the time.
  mmdebstrap --variant=minbase --mode=root --include="$2" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --setup-hook='mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/usr/share/initramfs-tools/modules.d"' \
    --setup-hook='echo MODULES=list >"$1/etc/initramfs-tools/conf.d/list"' \
    --setup-hook='printf "%s\n" virtio_pci virtio_blk ext4 >"$1/usr/share/initramfs-tools/modules.d/disk"' \
    "$suite" "$root"
  cp "$root"/boot/vmlinuz-* "$1/vmlinuz"
  cp "$root"/boot/initrd.img-* "$1/initrd"
  rm -f "$root"/boot/initrd.img-*
  mkdir "$root/mnt/sandboxd"
  # On a busy host it takes longer than systemd's minute and a half to find the disks.
  echo 'LABEL=sandboxd /mnt/sandboxd ext4 ro,x-systemd.device-timeout=20min 0 0' >>"$root/etc/fstab"
  mkdir -p "$root/etc/systemd/system.conf.d"
  printf '[Manager]\nDefaultTimeoutStartSec=10min\n' >"$root/etc/systemd/system.conf.d/slow.conf"
  cat >"$root/etc/systemd/system/story.service" <<'UNIT'
[Unit]
After=basic.target
RequiresMountsFor=/mnt/sandboxd
[Service]
ExecStart=/mnt/sandboxd/test/vm/guest.sh
[Install]
WantedBy=multi-user.target
UNIT
  ln -s /etc/systemd/system/story.service "$root/etc/systemd/system/multi-user.target.wants/story.service"
  for off in serial-getty@ttyS1 docker.service docker.socket containerd firewalld; do
    rm -f "$root/etc/systemd/system/"*.wants/"$off"*
  done
  rm -rf "$root/etc/systemd/system/timers.target.wants" # apt's and the like
  ln -sf /dev/null "$root/etc/systemd/system/serial-getty@ttyS1.service"
  mkfs.ext4 -q -L root -d "$root" "$1/raw" 12G
  qemu-img convert -O qcow2 "$1/raw" "$1/disk"
  umount "$root"
  rm -rf "$1/root" "$1/raw"
}

# base STORY sets $base to the directory of the Debian that a story uses. It makes the Debian
# if the cache has none or a damaged one: checking it takes a second. It deletes older ones of
# the same kind, unless another run uses them.
base() {
  local kind=plain packages=systemd-sysv,linux-image-cloud-amd64,udev,kmod,dbus,iptables,ipset,iproute2
  packages+=,procps,btrfs-progs,e2fsprogs,util-linux-extra
  local needs lacks lock held old make
  make=$(declare -f debian)
  if arm64; then kind=arm64 packages=${packages/cloud-amd64/cloud-arm64},busybox-static make=$(<test/vm/foreign.sh); fi
  needs=$(sed -n 's/^# needs: //p' "test/vm/$1.sh") lacks=$(sed -n 's/^# lacks: //p' "test/vm/$1.sh")
  for old in $lacks; do packages=,$packages, packages=${packages//,$old,/,} packages=${packages#,} packages=${packages%,}; done
  if [ -n "$needs" ]; then packages+=,${needs// /,}; fi
  if [ -n "$needs$lacks" ]; then kind=$1; fi
  base=$cache/vm/$suite-$kind-$({ echo "$suite $packages"; echo "$make"; } | sha256sum | head -c 16)
  exec {lock}>"$cache/vm/lock"
  flock "$lock"
  if ! (cd "$base" && sha256sum --status --check sums) 2>/dev/null; then
    echo "== a Debian ($suite, $kind)"
    rm -rf --one-file-system "$base" "$cache/vm"/new.* # of killed runs: no other run makes one now
    mkdir "$new"
    if arm64; then
      unshare -m test/vm/foreign.sh "$suite" "$new" "$packages"
    else
      suite=$suite unshare -m bash -euo pipefail -c "$make; debian \"\$@\"" debian "$new" "$packages"
    fi
    (cd "$new" && sha256sum disk vmlinuz initrd >sums)
    mv -T "$new" "$base"
  fi
  exec {held}<"$base"
  flock -s "$held" # until this run ends
  for old in "$cache/vm/$suite-$kind-"*; do
    [ "$old" = "$base" ] || flock -n "$old" rm -rf --one-file-system "$old" || true
  done
  exec {lock}>&-
}

# image NAME prints the path of an image's archive in the cache. It builds the image if the
# archive is missing or damaged.
image() {
  local recipe=rootfs/$1/recipe.toml archive lock
  archive=$cache/images/$1-$(sha256sum <"$recipe" | head -c 16).tar
  exec {lock}>"$archive.lock"
  flock "$lock"
  if ! sha256sum --status --check <<<"$(cat "$archive.sha256" 2>&1)  $archive" 2>/dev/null; then
    (exec {lock}>&- && scripts/images.sh "$1") >&2 # without the lock: a daemon would keep it
    cp "build/images/$1.tar" "$archive.new.$$"
    sha256sum <"$archive.new.$$" | head -c 64 >"$archive.sha256.new.$$"
    mv "$archive.new.$$" "$archive"
    mv "$archive.sha256.new.$$" "$archive.sha256"
  fi
  exec {lock}>&-
  echo "$archive"
}

# told STORY: it is one of the stories of this run, on any Debian.
told() { printf '%s\n' "${stories[@]%@*}" | grep -x "$1" >/dev/null; }

# packages DIR writes the packages into the files under test, and those of two later releases: "second" differs in its
# number alone, and the gVisor of "third" starts nothing while there is /root/dead.
packages() {
  local version epoch out=$1/build/packages
  version=$(build/bin/sandboxd --version)
  epoch=$(git log -1 --format=%ct)
  make packager
  build/tools/packages -images "$1/build/images" -out "$out" -version "${version##* }" -epoch "$epoch"
  later() { # NAME N: release 0.N.1-dev+0000000
    rm -rf "$payload.bin"
    cp -al build/bin "$payload.bin"
    rm "$payload.bin/sandboxd"
    CGO_ENABLED=0 go build -trimpath -o "$payload.bin/sandboxd" \
      -ldflags "-s -w -X github.com/sandboxd/sandboxd/internal/release.described=v0.$2.0-1-g0000000" ./cmd/sandboxd
    if [ "$1" = third ]; then
      rm "$payload.bin/runsc"
      cat >"$payload.bin/runsc" <<'SH'
#!/bin/sh
case " $* " in *" run "* | *" restore "*) [ ! -e /root/dead ] || { echo "this gVisor is dead" >&2; exit 1; } ;; esac
exec /usr/lib/sandboxd/versions/0.8.1-dev+0000000/libexec/sandboxd/runsc "$@"
SH
      chmod 755 "$payload.bin/runsc"
    fi
    build/tools/packages -bin "$payload.bin" -native build/bin -images /nowhere -out "$out/$1" \
      -version "0.$2.1-dev+0000000" -epoch "$epoch"
    rm -rf "$payload.bin"
  }
  later second 8
  later third 9
  rm -f "$out"/*.rpm "$out"/*/*.rpm
}

# bundles DIR writes, for each Debian of the story "bundle", a bundle of the package, the image and what
# the package needs of that Debian, and the public key of it. It adds a bundle of the package alone, one
# of an old release, one for another machine, and another key.
bundles() {
  local dir=$1/build/bundle deb run suite host list sources
  command -v minisign >/dev/null || fail "minisign is missing: apt-get install minisign"
  mkdir -p "$dir"
  make packager
  build/tools/packages -images /nowhere -out "$dir" -version "$(build/bin/sandboxd --version | cut -d' ' -f3)" -epoch "$(git log -1 --format=%ct)"
  deb=$(echo "$dir"/sandboxd_*_amd64.deb)
  minisign -G -W -f -p "$dir/other.pub" -s "$payload.key" >/dev/null
  minisign -G -W -f -p "$dir/bundle.pub" -s "$payload.key" >/dev/null
  create() { # FILE ARGS...
    local file=$dir/$1
    shift
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) build/bin/sandboxd bundle create -o "$file" --key "$payload.key" --file LICENSE=LICENSE "$@"
  }
  host=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
  for run in "${stories[@]}"; do
    [ "${run%@*}" = bundle ] || continue
    suite=$given sources=()
    [ "$run" = bundle ] || suite=${run#*@}
    if [ "$suite" != "$host" ]; then # apt of this host fetches from the same mirrors
      for list in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do [ ! -s "$list" ] || break; done
      sed "s/\b$host\b/$suite/g" "$list" >"$dir/$(basename "$list")"
      sources=(--apt-sources "$dir/$(basename "$list")")
    fi
    create "sandboxd-$suite.bundle" --package "$deb" --image "$1/build/images/base.tar" --debian "$suite" "${sources[@]}"
  done
  create package.bundle --package "$deb"
  create old.bundle --release 0.0.1
  create arm64.bundle --arch arm64 --verifier test/vm/guest.sh # no host of this kind runs it
  rm -f "$payload.key" "$dir"/*.deb "$dir"/*.rpm "$dir"/*sources*
}

# foreign DIR writes to the files under test the package of arm64, and the programs that a story there
# runs: that of the attacks, and the tests of the filters of system calls.
foreign() {
  local name
  make packager
  scripts/packages.sh arm64
  mkdir -p "$1/build/packages" "$1/build/tests"
  cp build/packages/sandboxd_*_arm64.deb "$1/build/packages/"
  CGO_ENABLED=0 GOARCH=arm64 go build -trimpath -o "$1/build/guest" ./test/attacks/guest
  for name in internal/seccomp internal/seccomp/compile pkg/oci; do
    mkdir -p "$1/build/tests/$name"
    cp -r "$name"/* "$1/build/tests/$name/" # tests compare with files of their package
    CGO_ENABLED=0 GOARCH=arm64 go test -c -trimpath -o "$1/build/tests/$name/" "./$name"
  done
  cp -a test "$1/"
}

# payload makes the disk with the files under test, like a clone after `make build`.
payload() {
  local dir=$payload archive
  rm -rf "$dir" "$dir.disk"
  if arm64; then
    foreign "$dir"
    mkfs.ext4 -q -L sandboxd -d "$dir" "$payload.disk" 1G
    rm -rf "$dir"
    return
  fi
  archive=$(image base) # each other image would take a minute of each story
  mkdir -p "$dir/build/images"
  cp -al build/bin build/man "$dir/build/"
  python3 test/vm/thin.py "$archive" "$dir/build/images/base.tar"
  if told packages; then packages "$dir"; fi
  if told bundle; then bundles "$dir"; fi
  if told upgrade || told year; then test/vm/releases.sh "$dir/build/releases"; fi
  if told limits; then CGO_ENABLED=0 go build -trimpath -o "$dir/build/guest" ./test/attacks/guest; fi
  if told pools; then go test -c -tags seccomp -o "$dir/build/snapshot.test" ./pkg/snapshot; fi
  if told deploy; then test/vm/deployed.sh "$dir/build/deploy" "$dir/build/images/base.tar"; fi
  cp -a deploy scripts systemd rootfs test docs README.md CHANGELOG.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md LICENSE THIRD_PARTY.md "$dir/"
  mkfs.ext4 -q -L sandboxd -d "$dir" "$payload.disk" 2G
  rm -rf "$dir"
}

# boot runs stage $2 of story $1 (STORY or STORY@SUITE) until the machine is off, or the story asks for a power cut.
#
# Options avoid what the emulator does slowly: there are no vector instructions (Go hashes an
# image three times faster without them) and no mitigations in the kernel, and the clock is
# the TSC, because reading another one is a call into the emulator. The kernel does not check
# that the timer ticks: on a busy host an emulated timer may be too late for the check, and
# the kernel would give up. A panic ends the machine at once.
boot() {
  local story=$1 stage=$2 log=$vm/$1.log qemu
  local emulator=(qemu-system-x86_64 -cpu "max,-avx,-avx2,-bmi2" -serial "file:$vm/$story.console" -serial "file:$vm/$story.serial")
  local words="root=LABEL=root rw console=ttyS0 quiet tsc=reliable no_timer_check panic=-1 mitigations=off"
  if arm64; then # the board has one serial line; those of PCI are ttyS0 and ttyS1, as a PC's
    emulator=(qemu-system-aarch64 -M virt -cpu "max,pauth-impdef=on" -serial "file:$vm/$story.console" -chardev "null,id=none" -device "pci-serial,chardev=none"
      -chardev "file,id=story,path=$vm/$story.serial" -device "pci-serial,chardev=story")
    words=${words/ttyS0/ttyAMA0}
  fi
  : >"$vm/$story.serial"
  "${emulator[@]}" -accel tcg,thread=multi -smp 2 -m 6144 -display none -no-reboot -nic none \
    -kernel "$base/vmlinuz" -initrd "$base/initrd" \
    -append "$words story=${story%@*} stage=$stage" \
    -drive "file=$vm/$story.disk,format=qcow2,if=virtio,cache=unsafe" \
    -drive "file=$payload.disk,format=raw,if=virtio,readonly=on" &
  qemu=$!
  # Not a pipeline: what a trap runs while bash starts one joins it, and waits for `tail`.
  while true; do
    # A machine that is silent for twenty minutes hangs, even on a slow host.
    read -t 1200 -r line || { [ $? -le 128 ] || { echo "no output for 20 minutes" >>"$log"; kill $qemu; }; break; }
    line=${line%$'\r'}
    echo "$line" >>"$log"
    case $line in
    '== '*) echo "  $line" ;;
    'CUT THE POWER') kill $qemu ;; # qemu ends at once, without a shutdown
    esac
  done < <(tail -n +1 -f --pid=$qemu "$vm/$story.serial" 2>/dev/null) &
  wait $! || true # bash runs no trap while it waits for a process in the foreground
  wait $qemu 2>/dev/null || true
}

given=$suite
payload
bad=()
for run in "${stories[@]}"; do
  story=${run%@*} suite=$given
  [ "$run" = "$story" ] || suite=${run#*@}
  base "$story"
  echo "== story $story ($suite)"
  start=$SECONDS stages=$(grep -c '^stage_[0-9]*()' "test/vm/$story.sh")
  rm -f "$vm/$run.log"
  qemu-img create -q -f qcow2 -F qcow2 -b "$base/disk" "$vm/$run.disk"
  for stage in $(seq 1 "$stages"); do
    boot "$run" "$stage"
    grep -q "^END $story $stage 0\$" "$vm/$run.log" || { bad+=("$run"); break; }
  done
  rm -f "$vm/$run.disk"
  echo "   $((SECONDS - start)) s"
done
if [ ${#bad[@]} -gt 0 ]; then
  for s in "${bad[@]}"; do tail -n 25 "$vm/$s.log" >&2; done
  fail "failed: ${bad[*]}; see $vm/STORY.log"
fi
