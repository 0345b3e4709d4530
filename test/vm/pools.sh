# shellcheck shell=bash
# The kinds of pool that the test host itself cannot limit: xfs and ext4 with project
# quotas, and a btrfs that an operator mounted. On each, the conformance suite runs, and a
# daemon with a sandbox of each runtime.
# needs: xfsprogs

pool=/var/lib/sandboxd/pool

# suite PATTERN NAMES...: the tests of pkg/snapshot that match pass, and NAMES are among them.
suite() {
  local name
  TMPDIR=/var/tmp SANDBOXD_TEST=root build/snapshot.test -test.v -test.timeout 20m -test.run "$1" 2>&1 | tee /tmp/suite |
    grep --line-buffered -- '--- PASS' || { cat /tmp/suite; return 1; }
  shift
  for name in "$@"; do grep -q "^ *--- PASS: $name " /tmp/suite || { cat /tmp/suite; echo "$name did not run"; return 1; }; done
}

# daemon_on KIND OPTIONS MKFS...: starts sandboxd anew with a new file system as its pool.
daemon_on() {
  local kind=$1 options=$2
  shift 2
  systemctl stop sandboxd.service sandboxd.socket
  ! mountpoint -q $pool || umount $pool
  rm -rf /var/lib/sandboxd/* /root/pool.fs
  truncate -s 2G /root/pool.fs
  "$@" /root/pool.fs
  mkdir -p $pool
  mount -o "loop,nosuid,nodev$options" /root/pool.fs $pool
  sed -i "s/^pool = .*//; s/^\[storage\]/[storage]\npool = \"$kind\"/" /etc/sandboxd/config.toml
  scripts/install.sh 2>&1 | tail -n 1
  sandboxd doctor >/tmp/doctor || true
  grep "pool .*$kind" /tmp/doctor
}

# limits: disks have their limit, and snapshots keep their content, on both runtimes.
limits() {
  local runtime snap
  for runtime in runc runsc; do
    sandboxctl create base --runtime $runtime --name full --disk 64Mi
    fails "" sandboxctl exec full -- dd if=/dev/zero of=/root/big bs=1M count=200
    sandboxctl exec full -- sh -c 'rm /root/big; echo kept >/root/file'
    snap=$(sandboxctl snapshot create full)
    sandboxctl create --runtime runc --from "$snap" --name copy
    same kept "$(sandboxctl exec copy -- cat /root/file)" "what was in a snapshot of $runtime"
    sandboxctl rm -f copy
    sandboxctl update --disk 128Mi full
    sandboxctl exec full -- dd if=/dev/zero of=/root/big bs=1M count=100
    sandboxctl rm -f full
    sandboxctl snapshot rm "$snap"
  done
}

stage_1() {
  say "the suite on btrfs"
  suite 'TestBtrfsLoop$|TestBtrfsMounted/^btrfs$' TestBtrfsLoop/Limit TestBtrfsMounted/btrfs/Limit
}

stage_2() {
  say "the suite on xfs and ext4 with project quotas"
  suite TestProjectQuotas/^xfs$ TestProjectQuotas/xfs/suite/{Limit,Files,Snapshot}
  suite TestProjectQuotas/^ext4$ TestProjectQuotas/ext4/suite/{Limit,Files,Snapshot}
}

stage_3() {
  say install
  install_sandboxd
  say sandboxes on xfs with project quotas
  daemon_on prjquota ,prjquota mkfs.xfs -q
  limits
  say sandboxes on ext4 with project quotas
  daemon_on prjquota ,prjquota mkfs.ext4 -q -O quota,project -E quotatype=prjquota -N 400000
  limits
  say sandboxes on a btrfs
  daemon_on btrfs "" mkfs.btrfs -q
  limits
  say a daemon without its pool says so
  sandboxctl create base --runtime runc --name stays
  systemctl stop sandboxd.service sandboxd.socket
  umount -l $pool
  fails "" systemctl start sandboxd.service
  journalctl -u sandboxd -o cat | grep 'none is mounted there'
  mount -o loop,nosuid,nodev /root/pool.fs $pool
  systemctl reset-failed sandboxd.service
  systemctl start sandboxd.service
  sandboxctl inspect stays >/dev/null
  sandboxctl rm -f stays
  eventually 10 nothing_left
}
