#!/usr/bin/env bash
# Whole machines, emulated by qemu: a Debian with its own kernel, systemd and
# pure cgroup v2, in which sandboxd is installed by its script and a story is
# told (test/vm/STORY.sh, boot by boot).
#   scripts/test-vm.sh [--debian bookworm|trixie] [STORY...]
# Needs root, qemu-system-x86 and mmdebstrap; .ci/run tells some, too. What a machine said stays in
# build/vm/STORY.log, its kernel's words in STORY.console.
#
# Emulation is slow: a boot takes 12 s, a start on runc 3, on runsc 24. So a
# story is one boot where it can be, with few starts on runsc.
set -euo pipefail
cd "$(dirname "$0")/.."
vm=$PWD/build/vm suite=bookworm
if [ "${1:-}" = --debian ]; then suite=$2; shift 2; fi
stories=("$@")
[ ${#stories[@]} -gt 0 ] || stories=(service power)

fail() { echo "test-vm: $*" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || fail "making a machine's disk needs root"
for tool in qemu-system-x86_64 mmdebstrap mkfs.ext4; do
  command -v $tool >/dev/null || fail "$tool is missing: apt-get install qemu-system-x86 mmdebstrap e2fsprogs"
done
for s in "${stories[@]}"; do [ -f "test/vm/$s.sh" ] || fail "no story $s: test/vm has $(cd test/vm && ls -m ./*.sh)"; done
mkdir -p "$vm"

# An interrupted run leaves no machine, and no disk of 12 GB.
tidy() {
  local job
  for job in $(jobs -p); do kill "$job" 2>/dev/null || true; done
  rm -rf --one-file-system "$vm/$suite.disk.new" "$vm/.$suite.root" "$vm/payload"
  for story in test/vm/*.sh; do rm -f "$vm/$(basename "$story" .sh).disk"; done
}
trap tidy EXIT
trap 'exit 130' INT TERM HUP

# base makes the disk of a plain Debian, once.
base() {
  local disk=$vm/$suite.disk root=$vm/.$suite.root # hidden: go walks ./...
  [ ! -s "$disk" ] || return 0
  echo "== a Debian ($suite)"
  rm -rf "$root"
  mmdebstrap --variant=minbase --mode=root --include=systemd-sysv,linux-image-cloud-amd64,udev,kmod,dbus,iptables,ipset,iproute2,procps,btrfs-progs,e2fsprogs,xfsprogs,util-linux-extra,ca-certificates,apparmor,firewalld,docker.io \
    "$suite" "$root"
  cp "$root"/boot/vmlinuz-* "$vm/$suite.vmlinuz"
  cp "$root"/boot/initrd.img-* "$vm/$suite.initrd"
  rm -f "$root"/boot/initrd.img-* "$root"/var/cache/apt/archives/*.deb
  mkdir "$root/mnt/sandboxd"
  echo 'LABEL=sandboxd /mnt/sandboxd ext4 ro 0 0' >>"$root/etc/fstab"
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
  local off
  for off in serial-getty@ttyS1 docker.service docker.socket containerd firewalld; do
    rm -f "$root/etc/systemd/system/"*.wants/"$off"*
  done
  ln -sf /dev/null "$root/etc/systemd/system/serial-getty@ttyS1.service"
  rm -f "$disk.new"
  mkfs.ext4 -q -L root -d "$root" "$disk.new" 12G
  rm -rf "$root"
  mv "$disk.new" "$disk"
}

# payload makes the disk with what is tested: as a clone after `make build`.
payload() {
  local dir=$vm/payload
  scripts/images.sh base # to import another would take a minute of each story
  rm -rf "$dir" "$vm/payload.disk"
  mkdir -p "$dir/build/images"
  cp -a build/bin build/man "$dir/build/"
  cp build/images/base.tar "$dir/build/images/"
  go test -c -tags seccomp -o "$dir/build/snapshot.test" ./pkg/snapshot
  cp -a scripts systemd rootfs test README.md ARCHITECTURE.md LICENSE THIRD_PARTY.md "$dir/"
  mkfs.ext4 -q -L sandboxd -d "$dir" "$vm/payload.disk" 2G
  rm -rf "$dir"
}

# boot runs stage $2 of story $1 until the machine is off, or the story asks
# for a power cut.
boot() {
  local story=$1 stage=$2 log=$vm/$1.log qemu
  : >"$vm/serial"
  timeout 30m qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 6144 -display none -no-reboot -nic none \
    -serial "file:$vm/$story.console" -serial "file:$vm/serial" \
    -kernel "$vm/$suite.vmlinuz" -initrd "$vm/$suite.initrd" \
    -append "root=LABEL=root rw console=ttyS0 quiet story=$story stage=$stage" \
    -drive "file=$vm/$story.disk,format=raw,if=virtio,cache=unsafe" \
    -drive "file=$vm/payload.disk,format=raw,if=virtio,readonly=on" &
  qemu=$!
  tail -n +1 -f --pid=$qemu "$vm/serial" 2>/dev/null | while read -r line; do
    line=${line%$'\r'}
    echo "$line" >>"$log"
    case $line in
    '== '*) echo "  $line" ;;
    'CUT THE POWER') kill $qemu ;; # timeout passes it on, qemu ends at once
    esac
  done &
  wait $! || true # bash runs no trap while it waits for what is not in the background
  wait $qemu 2>/dev/null || true
}

base
payload
bad=()
for story in "${stories[@]}"; do
  echo "== story $story ($suite)"
  start=$SECONDS stages=$(grep -c '^stage_[0-9]*()' "test/vm/$story.sh")
  rm -f "$vm/$story.log"
  cp --sparse=always "$vm/$suite.disk" "$vm/$story.disk"
  for stage in $(seq 1 "$stages"); do
    boot "$story" "$stage"
    grep -q "^END $story $stage 0\$" "$vm/$story.log" || { bad+=("$story"); break; }
  done
  rm -f "$vm/$story.disk"
  echo "   $((SECONDS - start)) s"
done
if [ ${#bad[@]} -gt 0 ]; then
  for s in "${bad[@]}"; do tail -n 25 "$vm/$s.log" >&2; done
  fail "failed: ${bad[*]}; all of it is in $vm/STORY.log"
fi
