# shellcheck shell=bash
# A clean reboot, and a power cut in the middle of creates.

# known N: the daemon answered at least N creates.
known() { [ "$(wc -l </root/ids)" -ge "$1" ]; }

stage_1() {
  install_sandboxd
  say "a sandbox before the reboot"
  sandboxctl create base --runtime runc --name kept
  sandboxctl exec kept -- sh -c 'echo precious >/root/file; sync'
}

stage_2() {
  say "after a reboot it is Failed, its disk kept"
  eventually 30 sandboxctl ps
  sandboxctl inspect kept | tee /tmp/kept | grep -q host_reboot
  sandboxctl ps -a
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
  same again "$(sandboxctl run --runtime runc base -- echo again)" "a new sandbox"
  for id in $(sandboxctl ps -a -o name); do sandboxctl rm "$id"; done
  same "" "$(sandboxctl ps -a -o name)" "sandboxes left"
  eventually 5 nothing_left
}
