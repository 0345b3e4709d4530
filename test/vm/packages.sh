# shellcheck shell=bash disable=SC2016 # single quotes: the guest's shell expands these
# An operator installs the packages, upgrades them while a sandbox runs on each runtime, goes back,
# removes and purges them. The second version is the first one with another number.

status() { dpkg-query -W -f '${db:Status-Status}' sandboxd 2>/dev/null || echo not-installed; }
daemon_pid() { systemctl show -p MainPID --value sandboxd.service; }
versions() { ls /usr/lib/sandboxd/versions; }

# ended SANDBOX COMMAND: the log has the command's last line.
ended() { sandboxctl command logs "$1" "$2" | grep '^end$' >/dev/null; }

# whole SANDBOX COMMAND: no line of a counting command is missing.
whole() {
  eventually 30 ended "$1" "$2"
  sandboxctl command logs "$1" "$2" >/tmp/out
  { seq $(($(wc -l </tmp/out) - 1)); echo end; } | cmp - /tmp/out
}

stage_1() {
  local first second image box cmd old
  first=$(echo build/packages/sandboxd_*_amd64.deb) image=$(echo build/packages/sandboxd-image-base_*_amd64.deb)
  second=$(echo build/packages/second/sandboxd_*_amd64.deb)
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
  dpkg -i "$second"
  [ "$(daemon_pid)" != "$old" ]
  same active "$(systemctl is-active sandboxd.service)" "the service"
  same 2 "$(versions | wc -l)" "versions side by side"
  cmp /root/config.toml /etc/sandboxd/config.toml
  for runtime in runc runsc; do
    box=on-$runtime cmd=$(cat "/root/on-$runtime")
    sandboxctl exec "$box" -- sh -c 'touch /dev/shm/stop; [ -x /opt/opensandbox/sandbox-agent ]'
    whole "$box" "$cmd"
  done
  same "$(readlink -f /usr/bin/sandboxd)" "$(readlink "/proc/$(daemon_pid)/exe")" "the program that runs"

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
