#!/bin/bash
# Runs one stage of a story; see guest.sh. Every line must succeed.
set -eEuo pipefail
trap 'echo "FAILED: ${BASH_SOURCE[0]}:$LINENO: $BASH_COMMAND"; journalctl -u sandboxd --no-pager -o cat | grep -v "msg=request" | tail -n 40' ERR
export PATH=/usr/local/bin:$PATH

# say WORDS...: prints what comes next, and the seconds since the stage began.
say() { echo "== $* (at $SECONDS s)"; }

# same WANT GOT WHAT
same() {
  [ "$1" = "$2" ] && return
  echo "want $3: $1, got: $2"
  return 1
}

# eventually SECONDS COMMAND...: repeats the command until it succeeds. This machine is at
# least five times slower than hardware, and on a slow host each try is slow, too. So it
# gives up only after five times SECONDS and twenty tries.
eventually() {
  local end=$((SECONDS + $1 * 5)) looks=0
  shift
  until "$@"; do
    [ $((looks += 1)) -lt 20 ] || [ $SECONDS -lt $end ] || { echo "never: $*"; return 1; }
    sleep 0.2
  done
}

# fails WORDS COMMAND...: the command must fail and print WORDS.
fails() {
  local words=$1 out
  shift
  if out=$("$@" 2>&1); then echo "did not fail: $*: $out"; return 1; fi
  [[ $out = *$words* ]] || { echo "want \"$words\" of $*, got: $out"; return 1; }
}

# fill leaves no byte of the disk free.
fill() {
  local size n=0
  for size in 1G 64M 1M 4K; do
    while fallocate -l $size "/fill.$((n += 1))" 2>/dev/null; do :; done
  done
}

# uplink: guests need one. This one leads nowhere, and is gone after a boot.
uplink() {
  ip link add up0 type dummy
  ip addr add 192.0.2.2/24 dev up0
  ip link set up0 up
  ip route add default via 192.0.2.1
}

# install_sandboxd installs as an operator does, with images from another host.
install_sandboxd() {
  uplink
  scripts/install.sh --no-start
  cat >/etc/sandboxd/config.toml <<'TOML'
[storage]
pool_size = "2Gi"
[defaults]
disk = "256Mi"
[runtime]
start_timeout = "5m"
TOML
  scripts/install.sh 2>&1 | cat # no progress bars
}

# counter ARGS... creates a sandbox on gVisor with a program that counts. A value and 16 MiB
# of text are in its memory and nowhere else. When it is asked it says the value, how often
# it was asked, and the length of the text. It starts one program only: on gVisor here each
# takes seconds.
# shellcheck disable=SC2016 # the guest's shell expands these
counter() {
  sandboxctl create base --runtime runsc "$@" -- bash -c 'mkfifo /run/ask /run/tell
    printf -v text %16777216s ""
    value=$RANDOM.$RANDOM n=0
    exec 3<>/run/ask 4<>/run/tell
    while read -ru 3 _; do echo "$value $((++n)) ${#text}" >&4; done'
}

# count NAME prints what a counter says.
# shellcheck disable=SC2016
count() {
  sandboxctl exec "$1" -- sh -c 'until [ -p /run/tell ]; do sleep 0.2; done; echo >/run/ask; read -r said </run/tell; echo "$said"'
}

# id_of NAME
id_of() { sandboxctl inspect "$1" | sed -n 's/^ *"id": "\([a-z2-7]\{12\}\)".*/\1/p' | head -n 1; }

# nothing_left: this host has no trace of any sandbox.
nothing_left() {
  ! { ip -br link | grep '^sb-' || grep '/run/sandboxd/[a-z2-7]\{12\}' /proc/self/mountinfo ||
    find /sys/fs/cgroup/sandboxd.slice -mindepth 2 -type d ! -name holder ! -name heads | grep . ||
    pgrep -af 'sandbox-agent|runsc-sandbox|runsc-gofer'; }
}

story=$1 stage=$2
# shellcheck source=/dev/null
. "test/vm/$story.sh"
"stage_$stage"
