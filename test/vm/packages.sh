# shellcheck shell=bash disable=SC2016 # single quotes: the guest's shell expands these
# An operator installs the packages, upgrades them while a sandbox runs on each runtime, goes back,
# removes and purges them. The second version is the first one with another number. The gVisor of the third starts
# nothing, so it is not taken until that is cured.

status() { dpkg-query -W -f '${db:Status-Status}' sandboxd 2>/dev/null || echo not-installed; }
daemon_pid() { systemctl show -p MainPID --value sandboxd.service; }
versions() { ls /usr/lib/sandboxd/versions; }

# serves VERSION: the daemon that runs, the programs and the link are of it.
serves() {
  same "$1" "$(sandboxctl version --format '{{.Server.Version}}')" "the version that serves"
  same "versions/$1" "$(readlink /usr/lib/sandboxd/current)" "the current one"
  same active "$(systemctl is-active sandboxd.service)" "the service"
  [ ! -e /usr/lib/sandboxd/kept ]
}

# alive: the sandboxes answer.
alive() { for runtime in runc runsc; do sandboxctl exec on-$runtime -- test -x /opt/opensandbox/sandbox-agent; done; }

# ended SANDBOX COMMAND: the log has the command's last line.
ended() { sandboxctl command logs "$1" "$2" | grep '^end$' >/dev/null; }

# whole SANDBOX COMMAND: no line of a counting command is missing.
whole() {
  eventually 30 ended "$1" "$2"
  sandboxctl command logs "$1" "$2" >/tmp/out
  { seq $(($(wc -l </tmp/out) - 1)); echo end; } | cmp - /tmp/out
}

stage_1() {
  local first second third image box cmd old v2=0.8.1-dev+0000000 v3=0.9.1-dev+0000000
  first=$(echo build/packages/sandboxd_*_amd64.deb) image=$(echo build/packages/sandboxd-image-base_*_amd64.deb)
  second=$(echo build/packages/second/sandboxd_*_amd64.deb) third=$(echo build/packages/third/sandboxd_*_amd64.deb)
  uplink

  say "another sandboxd is there: nothing is installed"
  printf '[Service]\nExecStart=/opt/other/sandboxd run\n' >/etc/systemd/system/sandboxd.service
  fails "another sandboxd is installed" dpkg -i "$first"
  rm /etc/systemd/system/sandboxd.service
  systemctl daemon-reload
  [ ! -e /usr/bin/sandboxd ]

  say install
  mkdir /etc/sandboxd # an operator prepared the configuration; dpkg keeps it
  cat >/etc/sandboxd/config.toml <<'TOML'
[storage]
pool_size = "2Gi"
[defaults]
disk = "256Mi"
[runtime]
start_timeout = "5m"
[upgrade]
gate = "20m"
soak = "1h"
TOML
  cp /etc/sandboxd/config.toml /root/config.toml
  dpkg --force-confold -i "$first"
  same installed "$(status)" "the package"
  same active "$(systemctl is-active sandboxd.service)" "the service"
  same enabled "$(systemctl is-enabled sandboxd.service)" "the service at boot"
  same "srw-rw---- root sandboxd" "$(stat -c '%A %U %G' /run/sandboxd/sandboxd.sock)" "the socket"
  same "$(readlink /proc/1/ns/mnt)" "$(readlink "/proc/$(daemon_pid)/ns/mnt")" "the host's mount namespace"
  dpkg -i "$image"
  sandboxctl image inspect base >/dev/null

  say "an upgrade with a sandbox on each runtime"
  for runtime in runc runsc; do
    box=on-$runtime
    sandboxctl create base --runtime $runtime --name "$box"
    sandboxctl exec -d "$box" -- bash -c 'for ((i = 1; ; i++)); do echo $i; [ ! -e /dev/shm/stop ] || break; sleep 0.5; done; echo end' >"/root/$box"
  done
  old=$(daemon_pid)
  dpkg -i "$second" 2>&1 | tee /tmp/said
  grep "a new sandbox on runsc came up: a file, a command, a name, a fork, its end" /tmp/said
  grep "if it crashes within 1h0m0s, .* runs again by itself" /tmp/said
  [ "$(daemon_pid)" != "$old" ]
  serves $v2
  same 2 "$(versions | wc -l)" "versions side by side"
  cmp /root/config.toml /etc/sandboxd/config.toml
  for runtime in runc runsc; do
    box=on-$runtime cmd=$(cat "/root/on-$runtime")
    sandboxctl exec "$box" -- sh -c 'touch /dev/shm/stop; [ -x /opt/opensandbox/sandbox-agent ]'
    whole "$box" "$cmd"
  done
  same "$(readlink -f /usr/bin/sandboxd)" "$(readlink "/proc/$(daemon_pid)/exe")" "the program that runs"

  say "a release is unpacked, and the service is restarted before its trial: the version before runs"
  touch /root/dead
  dpkg --unpack "$third"
  same "versions/$v3" "$(readlink /usr/lib/sandboxd/current)" "the current one before its trial"
  [ ! -e /usr/lib/sandboxd/versions/$v2/bin/sandboxd ]
  systemctl restart sandboxd.service
  same $v2 "$(sandboxctl version --format '{{.Server.Version}}')" "the version that serves"

  say "its gVisor is dead, so it is not taken"
  fails "$v3 was not taken, for the reason above, and $v2 runs on" dpkg --configure sandboxd
  same half-configured "$(status)" "the package"
  serves $v2
  alive
  sandboxd versions | tee /tmp/said
  grep "the change to $v3 was undone at .* on runsc did not come up" /tmp/said

  say "once the cause is gone, dpkg finishes it"
  rm /root/dead
  dpkg --configure sandboxd
  same installed "$(status)" "the package"
  serves $v3
  alive

  say "without a trial, back to the second version"
  mkdir /etc/sandboxd/config.d
  printf '[upgrade]\ntry_packages = false\n' >/etc/sandboxd/config.d/trial.toml
  dpkg -i "$second" 2>&1 | tee /tmp/said
  grep "changing from $v3 to $v2, without a trial" /tmp/said
  rm /etc/sandboxd/config.d/trial.toml
  serves $v2
  alive

  say "a service that the operator has stopped stays stopped, also in a downgrade"
  systemctl stop sandboxd.socket sandboxd.service
  dpkg -i "$first"
  same inactive "$(systemctl is-active sandboxd.service || true)" "the service"
  systemctl start sandboxd.socket sandboxd.service
  same alive "$(sandboxctl exec on-runc -- echo alive)" "a sandbox of the version before"

  say "remove ends the sandboxes and keeps the data"
  dpkg -r sandboxd-image-base
  dpkg -r sandboxd
  same config-files "$(status)" "the package"
  eventually 5 nothing_left
  [ ! -e /run/sandboxd/sandboxd.sock ]
  [ ! -e /usr/lib/sandboxd ]
  [ -e /var/lib/sandboxd/sandboxd.db ]
  cmp /root/config.toml /etc/sandboxd/config.toml
  fails "" systemctl cat sandboxd.service

  say "install again: the records of before are there"
  dpkg -i "$second"
  same active "$(systemctl is-active sandboxd.service)" "the service"
  sandboxctl image inspect base >/dev/null

  say purge
  dpkg -P sandboxd
  same not-installed "$(status)" "the package"
  [ ! -e /var/lib/sandboxd ]
  [ ! -e /etc/sandboxd ]
  [ ! -e /etc/systemd/system/multi-user.target.wants/sandboxd.service ]
  rules=$(iptables-save && ip6tables-save && ipset list -n)
  fails "" grep -iE 'sandboxd|sb-' <<<"$rules"
}
