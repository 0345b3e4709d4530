# shellcheck shell=bash disable=SC2016 # single quotes: the guest's shell expands these
# Twelve days, each of which ends with a power cut in the middle of creates: load, a backup by the
# timer, kill -9 of the daemon, a change between two releases of test/vm/releases.sh. The machine
# has no clock that goes on without power: it starts with the time of the cut, and is set a day
# further under the running daemon. At the end disk, memory, descriptors and what the host holds are
# flat. test/year simulates a whole year, elsewhere.

releases=build/releases
days=12 cycle=3
state=/var/lib/sandboxd pool=/var/lib/sandboxd/pool rows=/root/rows

daemon_pid() { systemctl show -p MainPID --value sandboxd.service; }
restarted() { [ "$(daemon_pid)" != 0 ] && [ "$(daemon_pid)" != "$1" ] && sandboxctl ps >/dev/null 2>&1; }

# backed_up SINCE: the timer has taken a backup that is not older.
backed_up() { [ -n "$(find /root/backups -name '*.sha256' -newermt "@$1")" ]; }
gone() { ! sandboxctl inspect "$1" >/dev/null 2>&1; }
known() { [ -e /root/ids ] && [ "$(wc -l </root/ids)" -ge "$1" ]; }
hibernates() { sandboxctl ps | grep ' asleep .* Paused (hibernated) '; }

# release N is what day N ends with: 3 on odd days, 2 on even ones.
release() { echo "0.$((2 + $1 % 2)).1-dev+0000000"; }
serves() { same "$(release "$1")" "$(sandboxctl version --format '{{.Server.Version}}')" "the release that serves"; }

# number NAME VALUE notes what is measured.
number() { echo "$day $1 $2" >>$rows; }

# measure notes what the daemon and the host hold, in bytes, or pieces.
measure() {
  local pid
  pid=$(daemon_pid)
  btrfs subvolume sync $pool >/dev/null # disks that were removed take room until then
  sync
  number state $(($(du -skx --exclude=pool.img $state | cut -f1) * 1024))
  number pool "$(stat -fc '%b %f %S' $pool | awk '{ print ($1 - $2) * $3 }')"
  number run $(($(du -skx /run/sandboxd | cut -f1) * 1024))
  number backups $(($(du -sk /root/backups | cut -f1) * 1024))
  number memory "$(awk '$1 == "VmRSS:" { print $2 * 1024 }' "/proc/$pid/status")"
  number descriptors "$(find "/proc/$pid/fd" -mindepth 1 | wc -l)"
  number files "$(find $state -xdev | wc -l)"
  number disks "$(find $pool -mindepth 1 -maxdepth 1 | wc -l)"
  number lost "$(find $pool/lost+found -mindepth 1 -maxdepth 1 | wc -l)"
  number links "$(ip -br link | grep -c '^sb-' || true)"
  number mounts "$(grep -c ' /run/sandboxd/' /proc/self/mountinfo || true)"
  number cgroups "$(find /sys/fs/cgroup/sandboxd.slice -type d | wc -l)"
  number rules "$(iptables-save | grep -c sandboxd || true)"
  number sets "$(ipset list -n | grep -c sandboxd || true)"
  number loops "$(losetup -n -O NAME | wc -l)"
  number versions "$(sandboxd versions | grep -c '^0')"
  number records "$(sandboxctl ps -aq | wc -l)"
}

# flat fails if a mean of the last cycle is above that of the second by more than a twentieth, and
# by more than a few pieces or 4 MiB. The first cycle fills what turns over.
flat() {
  awk -v cycle=$cycle -v days=$days '
    { at = int(($1 - 1) / cycle); sum[$2, at] += $3; n[$2, at]++; names[$2] }
    END {
      last = int((days - 1) / cycle)
      for (name in names) {
        a = sum[name, 1] / n[name, 1]; b = sum[name, last] / n[name, last]
        floor = name ~ /^(state|pool|run|backups|memory)$/ ? 4194304 : 2
        if (floor < a / 20) floor = a / 20
        printf "%-12s days 4 to 6 %.0f, days 10 to 12 %.0f\n", name, a, b
        if (b - a > floor) { print name " grows"; bad = 1 }
      }
      exit bad
    }' $rows || { cat $rows; return 1; }
}

# morning sets the clock, and checks what the power cut has left of the day before.
morning() {
  [ "$day" = 1 ] || { uplink && date -s "@$(($(cat /root/morning) + 86400))"; }
  date +%s >/root/morning
  eventually 60 sandboxctl ps
  [ "$day" -gt 1 ] || return 0
  serves $((day - 1))
  # All that a create answered is known: it has failed with the host, or its time has come.
  sandboxctl ps -a
  eventually 90 gone "short-$((day - 1))"
  eventually 30 gone "kept-$((day - 2))"
  sandboxctl inspect "kept-$((day - 1))" | grep -q host_reboot
  hibernates
  while read -r id; do
    [[ $id =~ ^a[a-z2-7]{11}$ ]] || continue
    sandboxctl inspect "$id" | grep -q host_reboot
  done </root/ids
  for id in $(sandboxctl ps -a -o json | grep -o '"id": "a[a-z2-7]*"' | cut -d'"' -f4); do
    [ "$id" = "$(id_of asleep)" ] || [ "$id" = "$(id_of "kept-$((day - 1))")" ] || sandboxctl rm -f "$id"
  done
  rm -f /root/ids
}

# a_day N
a_day() {
  day=$1
  local old since=0 cmd
  say "day $day"
  morning
  [ "$day" = 1 ] || since=$(cat /root/morning)
  sandboxctl create base --runtime runc --name "short-$day" --timeout 2h
  sandboxctl create base --runtime runc --name "kept-$day" --timeout 30h
  cmd=$(sandboxctl exec -d "kept-$day" -- bash -c 'for ((i = 1; ; i++)); do echo $i; [ ! -e /dev/shm/over ] || break; sleep 0.2; done')
  sandboxctl exec "short-$day" -- sh -c 'head -c 1000000 /dev/urandom >/root/bulk'
  fails "" sandboxctl exec --timeout 60s "short-$day" -- bash -c 'exec 3<>/dev/tcp/203.0.113.9/443'
  sandboxctl snapshot create "short-$day" --name "snapshot-$day"
  sandboxctl commit "snapshot-$day" "made:$((day % cycle))"
  sandboxctl volume create "volume-$day" --size 16Mi
  [ "$day" -le $cycle ] || sandboxctl volume rm "volume-$((day - cycle))"
  if [ $((day % 6)) = 0 ]; then # it takes half a minute here
    sandboxctl resume asleep
    sandboxctl hibernate asleep
  fi
  old=$(daemon_pid)
  kill -KILL "$old"
  eventually 60 restarted "$old"
  if [ "$day" = 1 ]; then sandboxd upgrade $releases/3.bundle --gate 20m; else sandboxd rollback --gate 20m; fi
  serves "$day"
  sandboxctl exec "kept-$day" -- touch /dev/shm/over
  sandboxctl command logs -f "kept-$day" "$cmd" >/tmp/counted
  seq "$(wc -l </tmp/counted)" | cmp - /tmp/counted
  eventually 90 backed_up "$since"
  [ "$(find /root/backups -name '*.sha256' | wc -l)" -le $cycle ]
  measure
  for _ in 1 2; do
    while sandboxctl create base --runtime runc >>/root/ids; do sync /root/ids; done &
  done
  eventually 120 known 2
  date +%s >/root/now
  sync $rows /root/now /root/morning
  echo "END year $day 0"
  echo "CUT THE POWER"
  sleep infinity
}

stage_1() {
  say install
  uplink
  mkdir /etc/sandboxd
  mkdir -m 700 /root/backups
  cat >/etc/sandboxd/config.toml <<TOML
[storage]
pool_size = "2Gi"
[defaults]
disk = "256Mi"
[runtime]
start_timeout = "5m"
[limits]
retain_ended = "30h"
[snapshots]
max_age = "60h"
[backup]
target = "/root/backups"
every = "23h" # it is due each morning: with a day, each is up to a minute later than the one before
keep = $cycle
drill = "72h"
TOML
  # As fake-hwclock does on machines without a battery.
  cat >/etc/systemd/system/evening.service <<TOML
[Unit]
DefaultDependencies=no
Before=sandboxd.service sandboxd.socket
ConditionPathExists=/root/now
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'date -s "@\$\$(cat /root/now)"'
[Install]
WantedBy=sysinit.target
TOML
  systemctl enable evening.service
  dpkg --force-confold -i $releases/sandboxd_0.2.1*.deb
  cp $releases/bundle.pub /etc/sandboxd/
  sandboxctl image import build/images/base.tar 2>/dev/null
  sandboxctl create base --runtime runsc --name asleep
  sandboxctl hibernate asleep
  a_day 1
}
stage_2() { a_day 2; }
stage_3() { a_day 3; }
stage_4() { a_day 4; }
stage_5() { a_day 5; }
stage_6() { a_day 6; }
stage_7() { a_day 7; }
stage_8() { a_day 8; }
stage_9() { a_day 9; }
stage_10() { a_day 10; }
stage_11() { a_day 11; }
stage_12() { a_day 12; }

stage_13() {
  say "after twelve days"
  day=13
  morning
  flat
  for id in $(sandboxctl ps -a -o name); do sandboxctl rm -f "$id"; done
  for s in $(sandboxctl snapshot ls --format '{{.id}}'); do sandboxctl snapshot rm "$s"; done
  same "" "$(sandboxctl ps -aq)" "sandboxes left"
  eventually 5 nothing_left
}
