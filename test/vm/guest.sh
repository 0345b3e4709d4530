#!/bin/bash
# What a machine of scripts/test-vm.sh does when it is up: the stage of the story
# that its kernel's command line names. The second serial line is its voice.
exec >/dev/ttyS1 2>&1 </dev/null
story='' stage=''
for word in $(</proc/cmdline); do
  case $word in story=* | stage=*) declare "$word" ;; esac
done
cd /mnt/sandboxd || exit
echo "== $(uname -r), $(systemctl --version | head -n 1 | cut -d' ' -f1,2), cgroups $(stat -fc %T /sys/fs/cgroup), up $(cut -d. -f1 /proc/uptime) s, clock $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)"
bash test/vm/tell.sh "$story" "$stage"
echo "END $story $stage $?"
sync
systemctl poweroff --force --force
