# shellcheck shell=bash
# needs: kexec-tools
# The host ends in each way that it may end in good order: a power off, a reboot, a kexec, and a
# soft reboot where systemd has one (254). No end is taken for a crash of a sandbox, and the time
# for which what has ended is kept does not run while the host is down: three hours each time.

# later HOURS sets the clock of the next boots forward, before sandboxd starts, as if the host had been
# down for so long. (Each boot begins with the time of the real host.)
later() {
  cat >/etc/systemd/system/later.service <<UNIT
[Unit]
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=oneshot
ExecStart=/usr/bin/date -s "$1 hours"
[Install]
WantedBy=sysinit.target
UNIT
  systemctl enable -q later.service
}

# goes ends this stage for the harness, and the host by a command.
goes() {
  echo "END reboot $1 0"
  shift
  "$@"
  sleep infinity
}

# reason NAME: why a sandbox has ended.
reason() { sandboxctl inspect "$1" | sed -n 's/^ *"reason": "\(.*\)",*/\1/p' | head -n 1; }

has_exited() { [ "$(reason ended)" = exited ]; }

# alive starts what the last end of the host has ended, and has each say that its disk is whole.
alive() {
  local name
  for name in runc gvisor; do
    sandboxctl start "$name"
    same precious "$(sandboxctl exec "$name" -- cat /root/file)" "the file of $name"
  done
}

# went WAY: both sandboxes went down with the host, the one that had ended before is kept as it was,
# and the daemon has not called any of it a crash.
went() {
  eventually 60 sandboxctl ps
  sandboxctl ps -a
  same host_reboot "$(reason runc)" "why runc ended at a $1"
  same host_reboot "$(reason gvisor)" "why gvisor ended at a $1"
  same exited "$(reason ended)" "why it ended"
  fails "" grep -E 'runtime_crash|a child that reads bytes of guests died' <(journalctl -u sandboxd --no-pager -o cat)
  alive
}

stage_1() {
  install_sandboxd
  sandboxctl create base --runtime runc --name runc
  sandboxctl create base --runtime runsc --name gvisor
  for name in runc gvisor; do sandboxctl exec "$name" -- sh -c 'echo precious >/root/file; sync'; done
  sandboxctl create base --runtime runc --name ended -- sh -c 'sleep 1; exit 3'
  eventually 20 has_exited
  mkdir -p /var/log/journal # what the daemon says while the host ends is kept
  journalctl --flush
  say "a power off"
  later 3
  goes 1 systemctl poweroff
}

stage_2() {
  went "power off"
  say "a reboot"
  later 6
  goes 2 systemctl reboot
}

stage_3() {
  if [ ! -e /root/kexec ]; then
    went reboot
    say "a kexec"
    mkinitramfs -o /root/initrd
    kexec --load "/boot/vmlinuz-$(uname -r)" --initrd=/root/initrd --reuse-cmdline
    touch /root/kexec
    later 9
    systemctl kexec
    sleep infinity # the new kernel runs this stage
  fi
  if [ ! -e /root/soft ]; then
    went kexec
    if [ "$(systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p')" -ge 254 ]; then
      say "a soft reboot"
      cat /proc/sys/kernel/random/boot_id >/root/soft
      systemctl disable -q later.service # the clock of this boot goes on
      systemctl soft-reboot
      sleep infinity
    fi
  else
    same "$(</root/soft)" "$(</proc/sys/kernel/random/boot_id)" "the boot id, which a soft reboot leaves"
    went "soft reboot"
  fi
  say "and nothing is left"
  for id in $(sandboxctl ps -a -o name); do sandboxctl rm -f "$id"; done
  eventually 5 nothing_left
}
