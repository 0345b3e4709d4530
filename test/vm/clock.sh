# shellcheck shell=bash disable=SC2016 # single quotes: the guest's shell expands these
# The clock is set an hour forward and an hour back, with sandboxes that have timeouts: an
# expiry that a client was promised is a time of the wall clock.

# step SECONDS sets the clock.
step() { date -s "@$(($(date +%s) + $1))"; }

# known NAME: the sandbox exists.
known() { sandboxctl inspect "$1" >/dev/null 2>&1; }
unknown() { ! known "$1"; }

stage_1() {
  say install
  install_sandboxd
  pid=$(systemctl show -p MainPID --value sandboxd.service)
  sandboxctl create base --runtime runc --name short --timeout 30m
  sandboxctl create base --runtime runc --name long --timeout 3h
  sandboxctl create base --runtime runsc --name never
  cmd=$(sandboxctl exec -d never -- bash -c 'for i in $(seq 60); do echo $i; sleep 0.5; done')
  # Its sleep goes by the wall clock if the runtime is wrong; read waits by another clock.
  sleeper=$(sandboxctl exec -d never -- bash -c 'mkfifo /tmp/f; sleep 40 & read -rt 10 <>/tmp/f
    kill -0 $! && echo asleep; wait $!; echo awake')

  say an hour forth
  step 3600
  eventually 2 unknown short # it has expired
  known long
  known never
  same alive "$(sandboxctl exec long -- echo alive)" "long, an hour on"
  same "$(date +%H)" "$(sandboxctl exec long -- date -u +%H)" "the hour inside"

  say an hour back
  sandboxctl create base --runtime runc --name brief --timeout 2m
  step -3600
  for name in long never brief; do known $name; done
  same alive "$(sandboxctl exec brief -- echo alive)" "brief, whose time is an hour further away"
  code=0
  sandboxctl exec --timeout 3s long -- sleep 1000 || code=$?
  same 124 $code "a command's own timeout, which is counted by a clock that nobody sets"
  sandboxctl run --runtime runc base -- true

  say and forth again, past its time
  step 3900
  eventually 2 unknown brief
  known long

  say a day back, before all of them were made
  step -86400
  for name in long never; do same alive "$(sandboxctl exec $name -- echo alive)" $name; done
  sandboxctl ps -a
  same $'asleep\nawake' "$(sandboxctl command logs -f never "$sleeper")" "a sleep of 40 s while the clock was set"
  same "$(seq 60)" "$(sandboxctl command logs -f never "$cmd")" "what a command printed meanwhile"
  same "$pid" "$(systemctl show -p MainPID --value sandboxd.service)" "the daemon, which no step may end"
  step 86400
  sandboxctl rm -f long
  sandboxctl rm -f never
  eventually 5 nothing_left
}
