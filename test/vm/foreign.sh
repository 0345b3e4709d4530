#!/bin/bash
# Makes a Debian for arm64 on a host that runs no programs of arm64:
#   test/vm/foreign.sh SUITE DIR PACKAGE,...
# writes disk, vmlinuz and initrd to DIR, as the function debian of scripts/test-vm.sh does for
# the host's own architecture. debootstrap fetches the packages, and they are unpacked here, which an
# emulated machine does many times slower. That machine configures them in its first boot, so this
# host's kernel needs no interpreter for foreign programs.
set -euo pipefail
suite=$1 dir=$2 packages=$3
root=$dir/root archives=$dir/root/var/cache/apt/archives
console=$dir/console

# The unpacked disk has no owners but root's, and no mounts.
mkdir "$root"
mount -t tmpfs -o size=3g,mode=755 none "$root"
trap 'umount "$root"' EXIT
debootstrap --foreign --arch=arm64 --variant=minbase --include="$packages" "$suite" "$root" \
  >"$dir/debootstrap.log" || { tail -n 5 "$dir/debootstrap.log" >&2; exit 1; }

# unpack DEB does natively what `dpkg --unpack` would; the first versions of packages need no script before it.
unpack() {
  local control name file
  control=$(mktemp -d -p "$dir")
  dpkg-deb -e "$1" "$control"
  name=$(dpkg-deb -f "$1" Package)
  [ "$(dpkg-deb -f "$1" Multi-Arch)" != same ] || name+=:arm64
  sed '1a Status: install ok unpacked' "$control/control" >>"$root/var/lib/dpkg/status"
  echo >>"$root/var/lib/dpkg/status"
  for file in preinst postinst prerm postrm config templates triggers shlibs symbols md5sums; do
    [ ! -e "$control/$file" ] || cp "$control/$file" "$root/var/lib/dpkg/info/$name.$file"
  done
  dpkg-deb --fsys-tarfile "$1" >"$control/tar"
  tar -tf "$control/tar" | sed 's,^\.,,; s,/$,,; s,^$,/.,' >"$root/var/lib/dpkg/info/$name.list"
  tar -xf "$control/tar" --keep-directory-symlink -C "$root"
  rm -rf "$control"
}
[ ! -L "$root/proc" ] || { rm "$root/proc" && mkdir "$root/proc"; } # debootstrap in a container makes a link
mkdir -p "$root"/var/lib/dpkg/{info,updates,triggers,alternatives}
rm -rf "$root/debootstrap" "$root"/var/lib/dpkg/info/*
echo 1 >"$root/var/lib/dpkg/info/format"
: >"$root/var/lib/dpkg/status"
for deb in "$archives"/*.deb; do unpack "$deb"; done

# The initrd is a shell and the drivers of the disk: ext4 is in this kernel.
initrd=$dir/initrd.d
mkdir -p "$initrd/bin" "$initrd/root" "$dir/kernel"
dpkg-deb --fsys-tarfile "$archives"/busybox-static_*.deb | tar -xO ./bin/busybox >"$initrd/bin/busybox"
chmod +x "$initrd/bin/busybox"
dpkg-deb -x "$(echo "$archives"/linux-image-[0-9]*.deb)" "$dir/kernel"
cp "$dir"/kernel/boot/vmlinuz-* "$dir/vmlinuz"
for module in virtio virtio_ring virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_blk; do
  find "$dir/kernel/lib" "$dir/kernel/usr" -name "$module.ko*" -exec cp {} "$initrd/" \; 2>/dev/null || true
done
find "$initrd" -name '*.xz' -exec unxz {} +
cat >"$initrd/init" <<'INIT'
#!/bin/busybox sh
bb=/bin/busybox
$bb mkdir -p /dev /proc
$bb mount -t devtmpfs dev /dev
$bb mount -t proc proc /proc
for module in virtio virtio_ring virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_blk; do
  [ ! -e /$module.ko ] || $bb insmod /$module.ko
done
init=/sbin/init
for word in $($bb cat /proc/cmdline); do
  case $word in init=*) init=${word#init=} ;; esac
done
until $bb mount -t ext4 "$($bb findfs LABEL=root 2>/dev/null)" /root 2>/dev/null; do $bb usleep 100000; done
$bb mount --move /dev /root/dev
$bb umount /proc
exec $bb switch_root /root "$init"
INIT
chmod +x "$initrd/init"
(cd "$initrd" && find . | cpio --quiet -o -H newc -R 0:0 | gzip) >"$dir/initrd"

mkdir -p "$root/mnt/sandboxd" "$root/etc/systemd/system.conf.d" "$root/etc/systemd/system/multi-user.target.wants" "$root/etc/dpkg/dpkg.cfg.d"
printf 'force-unsafe-io\npath-exclude=/usr/share/%s/*\n' doc >"$root/etc/dpkg/dpkg.cfg.d/story"
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
ln -s ../story.service "$root/etc/systemd/system/multi-user.target.wants/story.service"
ln -s /dev/null "$root/etc/systemd/system/serial-getty@ttyS1.service"
# On a busy host it takes longer than systemd's minute and a half to find the disks.
echo 'LABEL=sandboxd /mnt/sandboxd ext4 ro,x-systemd.device-timeout=20min 0 0' >"$root/etc/fstab"
cat >"$root/configure" <<'CONFIGURE'
#!/bin/sh
export INITRD=No DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
dpkg --force-depends --configure base-passwd && # the names of users, for all others
  dpkg --configure -a &&
  rm -rf /etc/systemd/system/timers.target.wants /configure &&
  echo CONFIGURED
sync
busybox poweroff -f
CONFIGURE
chmod +x "$root/configure"
rm -f "$archives"/*.deb
mkfs.ext4 -q -L root -d "$root" "$dir/raw" 12G
qemu-system-aarch64 -M virt -accel tcg,thread=multi -cpu max,pauth-impdef=on -smp 2 -m 2048 -display none -no-reboot -nic none -serial "file:$console" \
  -kernel "$dir/vmlinuz" -initrd "$dir/initrd" -append "console=ttyAMA0 quiet panic=-1 mitigations=off init=/configure" \
  -drive "file=$dir/raw,format=raw,if=virtio,cache=unsafe"
grep -q CONFIGURED "$console" || { tail -n 20 "$console" >&2; echo "the Debian for arm64 was not configured: see above" >&2; exit 1; }
qemu-img convert -O qcow2 "$dir/raw" "$dir/disk"
umount "$root"
trap - EXIT
rm -rf --one-file-system "$root" "$dir/raw" "$initrd" "$dir/kernel" "$console" "$dir/debootstrap.log"
