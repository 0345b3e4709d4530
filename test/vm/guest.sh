#!/bin/bash
# A machine of scripts/test-vm.sh runs this after boot. It runs the stage of the story that
# the kernel's command line names, and writes its output to the second serial line.
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
