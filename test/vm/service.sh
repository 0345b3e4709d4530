# shellcheck shell=bash disable=SC2016 # single quotes: the guest's shell expands these
# An operator installs the service, uses it on both runtimes, breaks it in every way that an
# init system can, upgrades it and removes it.

daemon_pid() { systemctl show -p MainPID --value sandboxd.service; }

# new_daemon OLD: a daemon with another pid than OLD is up.
new_daemon() {
  local pid
  pid=$(daemon_pid)
  [ "$pid" != 0 ] && [ "$pid" != "$1" ] && [ "$(systemctl is-active sandboxd.service)" = active ]
}

# waits_to_restart: the service waits before its next start, as the unit makes systemd 252 do.
waits_to_restart() { [ "$(systemctl show -p SubState --value sandboxd.service)" = stop-post ]; }

# nobody_sleeps ends the sleeps in lim, and succeeds when none is left. It must be repeated,
# because pkill misses a process that is about to sleep. (The scope's holder is a
# "sleep infinity".)
nobody_sleeps() {
  pkill -f '^sleep 100000$' || true
  sandboxctl exec lim -- sh -c '[ "$(pgrep -c -f "^(sleep 100000|sh -c for)")" = 0 ]'
}

# ended COMMAND: the log has the command's last line.
ended() { sandboxctl command logs lim "$1" | grep '^end$' >/dev/null; }

crashed() { sandboxctl inspect ends | grep runtime_crash >/dev/null; }

stage_1() {
  say install
  install_sandboxd
  same active "$(systemctl is-active sandboxd.service)" "the service"
  [[ $(cat /sys/fs/cgroup/system.slice/sandboxd.service/memory.max) =~ ^[0-9]+$ ]]
  journalctl -u sandboxd.service | grep -F "the memory of the daemon is limited by its cgroup" >/dev/null
  same "srw-rw---- root sandboxd" "$(stat -c '%A %U %G' /run/sandboxd/sandboxd.sock)" "the socket"
  same "$(readlink /proc/1/ns/mnt)" "$(readlink "/proc/$(daemon_pid)/ns/mnt")" "the host's mount namespace"
  fails "permission denied" setpriv --reuid 65534 --clear-groups sandboxctl ps
  setpriv --reuid 65534 --groups "$(getent group sandboxd | cut -d: -f3)" sandboxctl ps
  sandboxctl version

  say run on both runtimes
  same 42 "$(sandboxctl run --runtime runc base -- sh -c 'echo $((6*7))')" "runc"
  same 42 "$(sandboxctl run --runtime runsc base -- sh -c 'echo $((6*7))')" "runsc"
  same "755 nobody" "$(sandboxctl run --runtime runc -u nobody base -- sh -c 'cat /etc/resolv.conf >/dev/null && echo "$(stat -c %a /) $(id -un)"')" "what others than root may enter, although the unit has a umask"

  same "" "$(dmesg | grep -F overlayfs: || true)" "errors of overlayfs in the log of the kernel"

  [[ $(ip6tables-save) = *"-i sb-a+ -j DROP"* ]]

  say limits on v2
  id=$(sandboxctl create base --runtime runc --name lim --memory 128Mi --cpu 500m --pids 64 --disk 128Mi --credential-proxy --allow 192.0.2.7:443)
  cg=/sys/fs/cgroup/sandboxd.slice/sandboxd-a.scope/$id
  same $((128 << 20)) "$(cat "$cg/memory.max")" memory.max
  same "50000 100000" "$(cat "$cg/cpu.max")" cpu.max
  same $((64 + 32)) "$(cat "$cg/pids.max")" "pids.max, 32 for the agent"
  fails "Disk quota exceeded" sandboxctl exec lim -- dd if=/dev/zero of=/big bs=1M count=200
  fails "" sandboxctl exec lim -- tail /dev/zero # tail keeps a line until its end, and this line has none
  fails "Cannot fork" sandboxctl exec lim -- sh -c 'for i in $(seq 100); do sleep 100000 & done'
  eventually 30 nobody_sleeps
  same alive "$(sandboxctl exec lim -- echo alive)" "lim after all that"

  say "kill -9 of the daemon: no byte of output lost"
  cmd=$(sandboxctl exec -d lim -- bash -c 'for i in $(seq 3000); do echo line $i; done; until [ -e /dev/shm/killed ]; do sleep 0.2; done; echo end')
  old=$(daemon_pid)
  kill -KILL "$old"
  eventually 30 new_daemon "$old"
  sandboxctl exec lim -- touch /dev/shm/killed
  eventually 30 ended "$cmd"
  sandboxctl command logs lim "$cmd" >/tmp/out
  { for i in $(seq 3000); do echo "line $i"; done; echo end; } | cmp - /tmp/out

  say "a restart and an upgrade, with a command running; the key of secrets becomes a credential of the service"
  printf s3cr3t | sandboxctl secret set lim before
  mv /var/lib/sandboxd/sandboxd.key /root/secrets.key
  mkdir /etc/systemd/system/sandboxd.service.d
  printf '[Service]\nLoadCredential=sandboxd.key:/root/secrets.key\n' >/etc/systemd/system/sandboxd.service.d/key.conf
  systemctl daemon-reload
  cmd=$(sandboxctl exec -d lim -- bash -c 'for ((i = 1; ; i++)); do echo $i; [ ! -e /dev/shm/upgraded ] || break; sleep 0.5; done; echo end')
  old=$(daemon_pid)
  systemctl restart sandboxd.service
  new_daemon "$old"
  echo no-such-module >/etc/modules-load.d/foreign.conf # another package's module
  scripts/install.sh
  sandboxctl exec lim -- touch /dev/shm/upgraded
  eventually 30 ended "$cmd"
  sandboxctl command logs lim "$cmd" >/tmp/out
  { seq $(($(wc -l </tmp/out) - 1)); echo end; } | cmp - /tmp/out
  sandboxd doctor >/tmp/doctor || true
  grep -E '^ok +secrets-key .*/run/credentials/sandboxd.service/sandboxd.key' /tmp/doctor
  same "$(readlink /proc/1/ns/mnt)" "$(readlink "/proc/$(daemon_pid)/ns/mnt")" "the host's mount namespace, with a credential"
  sandboxctl secret ls lim | grep before
  printf s3cr3t | sandboxctl secret set lim after
  [ ! -e /var/lib/sandboxd/sandboxd.key ] # no new one

  say "a daemon that fails for as long as it may: it comes back, its socket too"
  mv /etc/sandboxd/config.toml /root/
  kill -KILL "$(daemon_pid)"
  many=5 # systemd 254 and later wait longer each time
  [ -n "$(systemctl show -p RestartSteps --value sandboxd.service)" ] || many=10
  while [ "$(systemctl show -p NRestarts --value sandboxd.service)" -lt "$many" ]; do
    timeout 1 sandboxctl ps >/dev/null 2>&1 || true # a client: the socket starts the daemon
  done
  same active "$(systemctl is-active sandboxd.socket)" "the socket"
  fails "journalctl -u sandboxd" timeout 60 sandboxctl ps # at once, and not after two minutes
  [ "$many" != 10 ] || eventually 30 waits_to_restart
  mv /root/config.toml /etc/sandboxd/
  eventually 60 new_daemon 0
  same alive "$(sandboxctl exec lim -- echo alive)" "lim, which no default configuration met"

  say "a daemon that hangs is started anew by the watchdog; the key of secrets is in its file again"
  mv /root/secrets.key /var/lib/sandboxd/sandboxd.key
  rm -r /etc/systemd/system/sandboxd.service.d
  systemctl daemon-reload
  old=$(daemon_pid)
  kill -STOP "$old"
  eventually 60 new_daemon "$old"
  same alive "$(sandboxctl exec lim -- echo alive)" "lim after the watchdog"
  same $'after\nbefore' "$(sandboxctl secret ls lim -q | sort)" "the secrets, with the key of the file"

  say "a guest that crashes does not start the host's core handler"
  printf '#!/bin/sh\necho "$1" >>/tmp/crashed\n' >/usr/local/sbin/core-handler
  chmod +x /usr/local/sbin/core-handler
  echo '|/usr/local/sbin/core-handler %e' >/proc/sys/kernel/core_pattern
  fails "" sandboxctl exec lim -- bash -c 'ulimit -c unlimited; kill -SEGV $$'
  cp /bin/bash /tmp/host # the handler runs later: once it knows of this crash, it would know of the guest's
  fails "" /tmp/host -c 'ulimit -c unlimited; kill -SEGV $$'
  eventually 30 [ -s /tmp/crashed ]
  same host "$(cat /tmp/crashed)" "the crashes that the handler knows of"

  say "the holder of the scope is killed; sandboxes go on, and later ones start"
  kill -KILL "$(cat /sys/fs/cgroup/sandboxd.slice/sandboxd-a.scope/holder/cgroup.procs)"
  same alive "$(sandboxctl exec lim -- echo alive)" "lim without a holder"
  same two "$(sandboxctl run --runtime runc base -- echo two)" "a new sandbox without a holder"

  say "nobody can hold the scope: the daemon starts and recovers all the same"
  scope=/sys/fs/cgroup/sandboxd.slice/sandboxd-a.scope
  ln -s /usr/bin/sleep /usr/local/bin/ # first in this story's PATH
  printf '#!/nowhere\n' >/usr/local/sbin/sleep
  chmod +x /usr/local/sbin/sleep
  xargs -r kill -KILL <$scope/holder/cgroup.procs
  systemctl restart sandboxd.service
  same alive "$(sandboxctl exec lim -- echo alive)" "lim, whose scope nobody holds"
  mkdir $scope/aaaaaaaaaaaa # a stray: no sandbox has this ID
  eventually 20 [ ! -e $scope/aaaaaaaaaaaa ]
  rm /usr/local/sbin/sleep /usr/local/bin/sleep
  eventually 20 grep -q . $scope/holder/cgroup.procs
  grep -q . $scope/heads/cgroup.procs # a restart of the service would not end it

  say "an operator ends all sandboxes by their scope; a new daemon makes another one"
  sandboxctl create base --runtime runc --name ends # the disk of lim is full, which would be its reason
  systemctl stop sandboxd-a.scope
  systemctl restart sandboxd.service
  same three "$(sandboxctl run --runtime runc base -- echo three)" "a sandbox in another scope"
  eventually 10 crashed # the host did not end

  say remove
  sandboxctl rm -f lim ends
  eventually 5 nothing_left
  scripts/uninstall.sh
  [ ! -e /run/sandboxd ]
  [ ! -e /usr/local/bin/sandboxd ]
  [ -e /var/lib/sandboxd/sandboxd.db ]
  [ ! -e /sys/fs/cgroup/sandboxd.slice/sandboxd-a.scope ]
  # Rules of IPv6 name only links, so look for their prefix, too.
  rules=$(iptables-save && ip6tables-save && ipset list -n)
  fails "" grep -iE 'sandboxd|sb-' <<<"$rules"
  scripts/uninstall.sh --purge
  [ ! -e /var/lib/sandboxd ]
  [ ! -e /etc/sandboxd ]
}
