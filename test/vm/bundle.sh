# shellcheck shell=bash disable=SC2016 # single quotes: the guest's shell expands these
# A person carries a bundle to a bare Debian that has no network and no package that sandboxd needs: the
# bundle brings them (sandboxd bundle create --debian). What is no bundle for this host is refused, and
# nothing is written. The disk is full in the middle, and the power is cut at four steps: each time the
# same command is given again, and goes on.
# needs: minisign
# lacks: iptables ipset btrfs-progs

dir=/mnt/sandboxd/build/bundle
key=$dir/bundle.pub
bundle=$dir/sandboxd-$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release).bundle
install=(sh "$bundle" --key "$key")

status() { dpkg-query -W -f '${db:Status-Status}' sandboxd 2>/dev/null || echo not-installed; }

# files lists what is on disk, and when each file was changed.
files() {
  find / -xdev \( -path /root -o -path /var/log -o -path /var/lib/systemd \) -prune -o -type d -print -o -printf '%p %s %C@\n' | sort
}

# refused WORDS COMMAND...: the command fails with WORDS, and no file is changed.
refused() {
  fails "$@"
  files | diff /dev/shm/files -
}

# lacking FILE: the bundle is refused for what the host lacks, and no file is changed. What it says is in
# /dev/shm/said.
lacking() {
  files >/dev/shm/files
  if sh "$1" --key $key >/dev/shm/said 2>&1; then echo "installed: $1"; return 1; fi
  files | diff /dev/shm/files -
  cat /dev/shm/said
  grep "lacks what sandboxd needs, and nothing was installed:" /dev/shm/said
}

# had prints the packages of this host that are installed.
had() { dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\n' | sort; }

# begin installs in the background; what it says is in /dev/shm/said.
begin() {
  "${install[@]}" >/dev/shm/said 2>&1 &
  installer=$!
}

# reaches COMMAND...: waits until the installation that began is where COMMAND succeeds.
reaches() {
  until "$@"; do
    kill -0 "$installer" || { cat /dev/shm/said; echo "it ended before: $*"; return 1; }
    sleep 0.02
  done
}

# cut STAGE COMMAND...: installs, and cuts the power as soon as COMMAND succeeds.
cut() {
  local stage=$1
  shift
  begin
  reaches "$@"
  cat /dev/shm/said
  echo "END bundle $stage 0"
  echo "CUT THE POWER"
  sleep infinity
}

# The steps of an installation.
extracts() { compgen -G '/var/tmp/sandboxd-install.*/.bundle.*/images/base.tar' >/dev/null; }
says_that_it_installs() { grep -q '^installing sandboxd' /dev/shm/said; }
unpacks() { compgen -G '/usr/lib/sandboxd/versions/*/libexec/sandboxd/*.dpkg-new' >/dev/null; }
configures() { pgrep -f sandboxd.postinst >/dev/null; }
imports() { pgrep -f 'sandboxctl image import' >/dev/null; }

stage_1() {
  local size missing p

  say "what is no bundle for this host is refused, and nothing is written"
  size=$(stat -c %s "$bundle")
  head -c $((size - 1)) "$bundle" >/root/short.bundle
  cp "$bundle" /root/changed.bundle
  printf '\377\377' | dd of=/root/changed.bundle bs=1 seek=$((size / 2)) conv=notrunc status=none
  fails "" cmp "$bundle" /root/changed.bundle
  mkdir /etc/sandboxd # an operator prepares the configuration; this machine is slow and small
  printf '[defaults]\ndisk = "256Mi"\n[runtime]\nstart_timeout = "5m"\n[storage]\npool_size = "64Gi"\n' >/etc/sandboxd/config.toml
  files >/dev/shm/files
  refused "no public key /etc/sandboxd/bundle.pub" sh "$bundle"
  refused "was signed with the key" sh "$bundle" --key $dir/other.pub
  refused "did not sign these bytes" sh /root/changed.bundle --key $key
  refused "the copy is not whole" sh /root/short.bundle --key $key
  refused "get the bundle for amd64" sh $dir/arm64.bundle --key $key
  rm /root/*.bundle

  say "what the host lacks is said at once, and nothing is written"
  for p in iptables btrfs-progs; do fails "" dpkg-query -W $p; done
  mv /lib/modules/*/kernel/net/netfilter/nfnetlink_queue.ko* /root
  depmod
  lacking $dir/package.bundle
  for missing in "the package iptables" "the package btrfs-progs" "modprobe -a nfnetlink_queue" "storage.pool_size needs 65536 MiB"; do
    grep "^  .*$missing" /dev/shm/said
  done
  lacking "$bundle" # which has the packages
  same 2 "$(grep -c '^  ' /dev/shm/said)" "things that the host lacks beside packages"
  grep "^  .*modprobe -a nfnetlink_queue" /dev/shm/said
  grep "^  .*storage.pool_size needs 65536 MiB" /dev/shm/said
  mv /root/nfnetlink_queue.ko* /lib/modules/*/kernel/net/netfilter/
  depmod
  sed -i 's/64Gi/2Gi/' /etc/sandboxd/config.toml

  say "the disk becomes full while dpkg unpacks"
  had >/dev/shm/had
  begin
  reaches says_that_it_installs
  fill
  if wait $installer; then echo "installed on a full disk"; return 1; fi
  cat /dev/shm/said
  grep "No space left on device" /dev/shm/said
  grep "install the bundle again" /dev/shm/said
  fails "" compgen -G '/var/tmp/sandboxd-install.*'
  rm /fill.*
  "${install[@]}"
  same installed "$(status)" "the package"
  same ok "$(sandboxctl run --runtime runc base -- echo ok)" "a sandbox"
  had | diff /dev/shm/had - >/dev/shm/added || true
  cat /dev/shm/added
  grep '^> installed iptables ' /dev/shm/added
  grep '^> installed btrfs-progs ' /dev/shm/added
  fails "" grep '^<' /dev/shm/added # what the host had stays as it is
  # shellcheck disable=SC2046 # words
  dpkg -P $(sed -n 's/^> installed \([^ ]*\) .*/\1/p' /dev/shm/added)
  same not-installed "$(status)" "the package"

  say "the power is cut while the bundle is extracted"
  mkdir -p /etc/sandboxd
  printf '[defaults]\ndisk = "256Mi"\n[runtime]\nstart_timeout = "5m"\n[storage]\npool_size = "2Gi"\n' >/etc/sandboxd/config.toml
  sync
  cut 1 extracts
}

stage_2() {
  same not-installed "$(status)" "the package"
  say "the power is cut while dpkg unpacks"
  cut 2 unpacks
}

stage_3() {
  fails "" grep -x installed <<<"$(status)"
  say "the power is cut while the package is configured"
  cut 3 configures
}

stage_4() {
  fails "" grep -x installed <<<"$(status)"
  say "the power is cut while the image is imported"
  cut 4 imports
}

stage_5() {
  same installed "$(status)" "the package"
  say "the installation ends"
  "${install[@]}"
  same installed "$(status)" "the package"
  same "" "$(dpkg --audit)" "what dpkg finds"
  same "" "$(compgen -G '/var/tmp/sandboxd-install.*' || true)" "files of the cut installations"
  same active "$(systemctl is-active sandboxd.service)" "the service"
  same 42 "$(sandboxctl run --runtime runc base -- sh -c 'echo $((6*7))')" "runc"
  same 42 "$(sandboxctl run --runtime runsc base -- sh -c 'echo $((6*7))')" "runsc"
  sandboxd doctor >/dev/shm/doctor || { grep ^fail /dev/shm/doctor; return 1; }

  say "an older one is refused, with the key of this host"
  cp $key /etc/sandboxd/
  fails "is installed, which is newer" sandboxd bundle install $dir/old.bundle
  fails "is installed, which is newer" sh $dir/old.bundle
  same installed "$(status)" "the package"

  say "Debian's minisign verifies it"
  cd /root || return
  tail -n 4 "$bundle" >FILE.minisig
  head -c "-$(wc -c <FILE.minisig)" "$bundle" >FILE.signed
  minisign -V -p $key -m FILE.signed -x FILE.minisig | grep "^Trusted comment: sandboxd "
  printf x | dd of=FILE.signed bs=1 seek=600 conv=notrunc status=none
  fails "Signature verification failed" minisign -V -p $key -m FILE.signed -x FILE.minisig
}
