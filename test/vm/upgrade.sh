# shellcheck shell=bash disable=SC2016 # single quotes: the guest's shell expands these
# An operator changes the version with four sandboxes on each runtime: to a good one, back, to one
# that does not start or hangs, and to one with a newer schema. The program that changes it is
# killed, and the power is cut. test/vm/releases.sh makes the releases.
# needs: minisign

releases=build/releases
v() { echo "0.$1.1-dev+0000000"; }
boxes=$(echo on-{runc,runsc}-{1,2,3,4})

# runs N [soaks]: release N is current, serves, and nothing is under way, or a crash of it is undone.
runs() {
  same "$(v "$1")" "$(sandboxctl version --format '{{.Server.Version}}')" "the release that serves"
  same "versions/$(v "$1")" "$(readlink /usr/lib/sandboxd/current)" "the current one"
  same active "$(systemctl is-active sandboxd.service)" "the service"
  same "${2:-}" "$([ ! -e /usr/lib/sandboxd/undo ] || echo soaks)" "the soak"
  # dpkg replaces the program that runs by one that is the same.
  same "$(readlink -f /usr/bin/sandboxd)" \
    "$(readlink "/proc/$(systemctl show -p MainPID --value sandboxd.service)/exe" | sed 's/ (deleted)$//')" "the program"
}

# alive: each sandbox answers, and nobody restarted it.
alive() {
  local box
  for box in $boxes; do sandboxctl exec "$box" -- test -e /dev/shm/begun; done
}

# whole BOX: no line of its counting command is missing.
ended() { sandboxctl command logs "$1" "$2" | grep '^end$' >/dev/null; }
whole() {
  local cmd
  cmd=$(</root/"$1")
  sandboxctl exec "$1" -- touch /dev/shm/stop
  eventually 60 ended "$1" "$cmd"
  sandboxctl command logs "$1" "$cmd" >/tmp/out
  { seq $(($(wc -l </tmp/out) - 1)); echo end; } | cmp - /tmp/out
  echo "$1: $(($(wc -l </tmp/out) - 1)) lines, none lost"
}

change() { sandboxd "$@" --gate 20m 2>&1 | tee /tmp/said; } # the emulated machine is slow
packaged() { dpkg-query -W -f '${Version}' sandboxd; }

# serves N: release N answers.
serves() { [ "$(sandboxctl version --format '{{.Server.Version}}')" = "$(v "$1")" ]; }

stage_1() {
  local box runtime
  uplink
  say install
  mkdir /etc/sandboxd
  cat >/etc/sandboxd/config.toml <<'TOML'
[storage]
pool_size = "2Gi"
[defaults]
disk = "128Mi"
memory = "128Mi"
[runtime]
start_timeout = "10m"
TOML
  dpkg --force-confold -i "$releases"/sandboxd_0.2.1*.deb
  cp "$releases/bundle.pub" /etc/sandboxd/
  sandboxctl image import build/images/base.tar 2>/dev/null
  runs 2
  fails "no version ran before" sandboxd rollback

  say "four sandboxes on each runtime"
  for box in $boxes; do
    runtime=${box#on-}
    sandboxctl create base --runtime "${runtime%-*}" --name "$box"
    sandboxctl exec -d "$box" -- bash -c 'touch /dev/shm/begun; for ((i = 1; ; i++)); do echo $i; [ ! -e /dev/shm/stop ] || break; sleep 0.5; done; echo end' >"/root/$box"
  done

  say "refused: a bundle that was changed, and another key"
  cp "$releases/3.bundle" /root/changed.bundle
  printf x | dd of=/root/changed.bundle bs=1 seek=20000000 conv=notrunc status=none
  fails "did not sign these bytes" sandboxd upgrade /root/changed.bundle
  rm /root/changed.bundle
  minisign -G -W -p /root/other.pub -s /root/other.key >/dev/null
  fails "was signed with the key" sandboxd upgrade "$releases/3.bundle" --key /root/other.pub
  same 1 "$(sandboxd versions | grep -c '^0')" "versions"

  say "an upgrade"
  change upgrade "$releases/3.bundle" --soak 1h
  runs 3 soaks
  alive
  grep "a new sandbox on runsc came up" /tmp/said
  grep "if it crashes within 1h0m0s, $(v 2) runs again by itself" /tmp/said
  case $(packaged) in 0.3.1*) ;; *) echo "dpkg has $(packaged)"; false ;; esac
  sandboxd versions
  journalctl -u sandboxd -o short-monotonic --no-pager | grep -E 'Stopping|sandboxd serves' | tail -n 2

  say "a restart in its soak, and a crash: the service goes back by itself"
  systemctl restart sandboxd.service
  runs 3 soaks
  kill -KILL "$(systemctl show -p MainPID --value sandboxd.service)"
  eventually 60 serves 2
  runs 2
  alive
  sandboxd versions | grep "ended without having been asked to"

  say "to the release that is there, and a rollback"
  change rollback "$(v 3)"
  runs 3
  alive
  change rollback
  runs 2
  alive

  say "a release that does not start"
  fails "this release is broken" sandboxd upgrade "$releases/4.bundle" --gate 20m
  runs 2
  alive
  sandboxd versions | grep "was undone"

  say "a release that hangs at its start"
  touch /root/hang
  fails "it was not found good within 1m0s: restart the daemon" sandboxd upgrade "$releases/4.bundle" --gate 1m
  rm /root/hang
  runs 2
  alive

  say "whoever upgrades is killed, and the new release does not start: the service goes back by itself"
  fails "" env SANDBOXD_FAILPOINT=upgrade:restart=kill sandboxd upgrade "$releases/4.bundle" --gate 20m
  same "versions/$(v 4)" "$(readlink /usr/lib/sandboxd/current)" "what the service would start"
  systemctl restart sandboxd.service
  runs 2
  alive

  say "whoever upgrades is killed while the new schema is tried"
  fails "" env SANDBOXD_FAILPOINT=upgrade:gate=kill sandboxd upgrade "$releases/5.bundle" --gate 20m
  eventually 60 runs 2 # the daemon on trial notices, and ends
  alive
  [ -e /var/lib/sandboxd/sandboxd.db.undone ]

  say "the disk is full"
  fill
  fails "free space: " sandboxd upgrade "$releases/5.bundle" --gate 20m
  rm /fill.*
  runs 2
  fails "" sh -c 'find /usr/lib/sandboxd -name ".staged-*" | grep .'

  say "the disk becomes full while the new schema is tried: that is undone on the full disk"
  sandboxd upgrade "$releases/5.bundle" --gate 20m >/dev/shm/said 2>&1 &
  eventually 120 serves 5
  fill
  if wait $!; then cat /dev/shm/said; echo "upgraded on a full disk"; return 1; fi
  cat /dev/shm/said
  runs 2
  rm /fill.*
  alive

  say "no byte lost"
  for box in $boxes; do whole "$box"; done

  say "the power is cut while the new schema is tried"
  sandboxd upgrade "$releases/5.bundle" --gate 20m &
  eventually 120 serves 5
  kill -STOP $!
  grep '"step": "trial"' /usr/lib/sandboxd/upgrade.json
  echo "END upgrade 1 0"
  echo "CUT THE POWER"
  sleep infinity
}

stage_2() {
  say "after the power cut the release of before runs, with its state"
  uplink
  eventually 60 sandboxctl ps
  runs 2
  same 8 "$(sandboxctl ps -a | grep -c ' on-')" "sandboxes that it knows"
  say "the newer schema, and no way back"
  change upgrade "$releases/5.bundle"
  runs 5
  fails "reads state up to schema" sandboxd rollback
  same 8 "$(sandboxctl ps -a | grep -c ' on-')" "sandboxes that it knows"
  case $(packaged) in 0.5.1*) ;; *) echo "dpkg has $(packaged)"; false ;; esac

  say "removal leaves nothing of any version"
  dpkg -r sandboxd
  [ ! -e /usr/lib/sandboxd ]
}
