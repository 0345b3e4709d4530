# shellcheck shell=bash disable=SC2016 # single quotes: the guest's shell expands these
# Every limit on pure cgroup v2 is set, changed while the sandbox runs, and exceeded. A pause
# freezes, and a memory snapshot leaves limits as they were.

root=/sys/fs/cgroup/sandboxd.slice/sandboxd-a.scope

# ends_with REASON ARGS...: a sandbox created with ARGS ends for this reason.
ends_with() {
  local reason=$1 id
  shift
  id=$(sandboxctl create "$@" || true)
  [ -n "$id" ] || { echo "no sandbox: $*"; return 1; }
  eventually 30 sh -c "sandboxctl ps -a --no-trunc | grep '^$id' | grep -q 'Failed ($reason)'"
  sandboxctl rm -f "$id"
}

# ends_by_guest REASON ARGS...: a sandbox on runc in which the program of the attacks runs with ARGS ends for this reason.
ends_by_guest() {
  local reason=$1 id
  shift
  id=$(sandboxctl create base --runtime runc --memory 128Mi)
  sandboxctl cp /mnt/sandboxd/build/guest "$id:/guest"
  sandboxctl exec -d "$id" -- /guest "$@"
  eventually 60 sh -c "sandboxctl ps -a --no-trunc | grep '^$id' | grep -q 'Failed ($reason)'"
  sandboxctl rm -f "$id"
}

# seconds COMMAND...: prints how many whole seconds the command takes.
seconds() {
  local start=$SECONDS
  "$@" >&2
  echo $((SECONDS - start))
}

# used prints the microseconds of CPU time that a sandbox has used. moves: it uses some.
used() { sed -n 's/^usage_usec //p' "$cg/cpu.stat"; }
moves() {
  local before
  before=$(used)
  sleep 1
  [ "$(used)" -gt "$before" ]
}

# bounds prints the limits of a sandbox.
bounds() { (cd "$root/$1" && cat memory.max cpu.max pids.max | tr '\n' ' '); }

stage_1() {
  say install
  install_sandboxd

  say limits are set
  sandboxctl create base --runtime runc --name lim --memory 256Mi --pids 64 --disk 512Mi --cpu-shares 2048 --io-read-bps 4Mi --io-write-bps 4Mi --io-write-iops 1000
  cg=$root/$(id_of lim)
  same 174 "$(cat "$cg/cpu.weight")" cpu.weight
  same "0 2" "$(awk '/^7:/ {loop = $0} !/^7:/ {disk = $0}
    END {print (loop !~ /rbps=4194304 wbps=4194304 riops=max wiops=1000/) + (disk !~ /rbps=4194304 wbps=max riops=max wiops=max/), NR}' "$cg/io.max")" "io.max ($(tr '\n' ';' <"$cg/io.max"))"
  lim=$(sandboxctl inspect lim)
  fails "" grep '"notes"' <<<"$lim"

  say what the page cache writes back is limited, too
  took=$(seconds sandboxctl exec lim -- sh -c 'dd if=/dev/zero of=/var/x bs=1M count=32 && sync')
  [ "$took" -ge 5 ] || { echo "32 MiB at 4 MiB/s took $took s"; return 1; }

  say limits change in life
  sandboxctl update --memory 512Mi --pids 99 --cpu-shares 2 --cpu 250m --io-read-bps max --io-write-bps max --io-write-iops max --disk 600Mi lim
  same "$((512 << 20)) $((99 + 32)) 1 25000 100000" "$(cat "$cg/memory.max" "$cg/pids.max" "$cg/cpu.weight" "$cg/cpu.max" | tr '\n' ' ' | sed 's/ $//')" "limits after the update"
  limits=$(cat "$cg/io.max")
  fails "" grep '[0-9]\{4\}' <<<"$limits"
  sandboxctl exec -d lim -- dd if=/dev/zero of=/dev/null bs=210M # dd keeps one block in memory
  eventually 60 sh -c "[ \$(cat $cg/memory.current) -gt $((200 << 20)) ]"
  fails "MiB of memory" sandboxctl update --memory 64Mi lim
  same 0 "$(sed -n 's/^oom_kill //p' "$cg/memory.events")" "OOM kills of a refused update"
  sandboxctl rm -f lim

  say every reason
  ends_with pids_limit --runtime runc --pids 32 base -- bash -c 'for i in $(seq 100); do sleep 60 & done; exit 1'
  ends_with disk_full --runtime runc --disk 32Mi base -- dd if=/dev/zero of=/var/x bs=64k count=2000
  ends_with oom --runtime runc --memory 64Mi base -- bash -c 'x=$(head -c 300M /dev/zero | tr "\0" x)'
  fails "disk_full" sandboxctl run --runtime runc --disk 32Mi base -- dd if=/dev/zero of=/var/x bs=64k count=2000

  say memory of the kernel
  for kind in netlink icmp udp-errors; do ends_by_guest kernel_memory unread $kind 160; done
  ends_by_guest kernel_memory locks 700
  ends_by_guest oom unread-tcp 240 # v2 charges the cgroup with it

  say read-only roots
  for runtime in runc runsc; do
    same "ok 8192" "$(sandboxctl run --runtime $runtime --read-only --tmpfs /tmp:size=8m --io-read-bps 64Mi base -- \
      sh -c 'echo x >/tmp/x && ! echo x 2>/dev/null >/x && echo ok $(df -k /tmp | sed -n "s/^[a-z]* *\([0-9]*\) .*/\1/p")')" "$runtime"
  done

  say a paused sandbox stands still
  sandboxctl create base --runtime runc --name still -- bash -c 'mkfifo /tmp/f; while :; do read -rt 0.2 <>/tmp/f; done'
  cg=$root/$(id_of still)
  eventually 10 moves
  sandboxctl pause still
  grep -x 'frozen 1' "$cg/cgroup.events"
  before=$(used)
  sleep 3
  same "$before" "$(used)" "CPU time that it had used when it was paused"
  fails "resume it first" sandboxctl exec still -- true
  sandboxctl resume still
  grep -x 'frozen 0' "$cg/cgroup.events"
  eventually 10 moves
  fails "memory snapshots need runtime runsc" sandboxctl snapshot create --memory still
  fails "on runtime runsc only" sandboxctl hibernate still
  sandboxctl rm -f still

  say "memory snapshots: programs go on in a copy, and limits are as they were"
  counter --name warm --memory 128Mi --cpu 750m --pids 99
  id=$(id_of warm)
  limits=$(bounds "$id")
  first=$(count warm)
  value=${first%% *}
  same "$value 1 16777216" "$first" "what the counter says"
  sandboxctl snapshot create --memory warm --name heated
  same "$limits" "$(bounds "$id")" "limits after a memory snapshot"
  same "$value 2 16777216" "$(count warm)" "what the counter says after the snapshot"
  sandboxctl rm -f warm
  sandboxctl create --from heated --with-memory --name copy
  same "$limits" "$(bounds "$(id_of copy)")" "limits of a copy"
  same "$value 2 16777216" "$(count copy)" "what the counter says in a copy"
  sandboxctl rm -f copy
  sandboxctl snapshot rm heated
  eventually 10 nothing_left
}
