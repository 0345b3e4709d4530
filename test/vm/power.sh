# shellcheck shell=bash
# A clean reboot, and a power cut in the middle of creates. A sandbox that hibernates
# survives both with its memory.

scope=/sys/fs/cgroup/sandboxd.slice/sandboxd-a.scope

# memory prints how many bytes of memory guests on gVisor have: to this kernel it is shared.
memory() { sed -n 's/^shmem //p' $scope/memory.stat; }
released() { [ "$(memory)" -lt $((1 << 20)) ]; }

# hibernates: asleep has no processes, no cgroup and no memory.
hibernates() {
  sandboxctl ps | grep ' asleep .* Paused (hibernated) ' && [ ! -e "$scope/$(id_of asleep)" ] && released
}

# awake N: asleep has the memory that it had in the first boot, and was asked N times. While a
# sandbox wakes, a use of it fails after 15 s, which this machine may take.
awake() {
  eventually 60 says
  same "$(</root/value) $1 16777216" "$(</tmp/said)" "what the counter says"
}
says() { count asleep >/tmp/said; }

# known N: the daemon answered at least N creates.
known() { [ "$(wc -l </root/ids)" -ge "$1" ]; }

stage_1() {
  install_sandboxd
  say "a sandbox before the reboot"
  sandboxctl create base --runtime runc --name kept
  sandboxctl exec kept -- sh -c 'echo precious >/root/file; sync'
  say "a sandbox that hibernates when it is idle"
  counter --name asleep --idle 30s --on-idle hibernate
  count asleep | sed 's/ 1 16777216$//' >/root/value
  grep -x '[0-9]*\.[0-9]*' /root/value
  [ "$(memory)" -gt $((16 << 20)) ]
  eventually 120 hibernates
}

stage_2() {
  say "after a reboot it is Failed, its disk kept"
  eventually 30 sandboxctl ps
  sandboxctl inspect kept | tee /tmp/kept | grep -q host_reboot
  sandboxctl ps -a
  say "the other one hibernates, and a command wakes it"
  hibernates
  awake 2
  sandboxctl hibernate asleep
  eventually 10 hibernates
  say "the power is cut during creates"
  for _ in 1 2; do
    while sandboxctl create base --runtime runc >>/root/ids; do sync /root/ids; done &
  done
  eventually 120 known 3
  echo "END power 2 0"
  echo "CUT THE POWER"
  sleep infinity
}

stage_3() {
  say "after the cut"
  eventually 30 sandboxctl ps
  while read -r id; do
    [[ $id =~ ^a[a-z2-7]{11}$ ]] || continue
    sandboxctl inspect "$id" | grep -q host_reboot # the create was answered, so the sandbox must exist
  done </root/ids
  say "what hibernated goes on, and answers nobody before"
  hibernates
  fails "resume it first" sandboxctl exec asleep -- true
  sandboxctl resume asleep
  awake 3
  same again "$(sandboxctl run --runtime runc base -- echo again)" "a new sandbox"
  for id in $(sandboxctl ps -a -o name); do sandboxctl rm -f "$id"; done
  same "" "$(sandboxctl ps -a -o name)" "sandboxes left"
  same "" "$(ls /var/lib/sandboxd/pool/memory)" "images of memory left"
  eventually 5 nothing_left
}
