# shellcheck shell=sh disable=SC2154 # common.sh stands above
restore_versions "dpkg --configure sandboxd"
case $1 in
configure | abort-remove | abort-deconfigure) ;;
abort-upgrade)
	go_back
	exit 0
	;;
*) exit 0 ;;
esac
# dpkg also names the version before if the package was removed. Then this is no upgrade: nothing runs.
if [ "$1" = configure ] && [ -e "$note" ]; then set -- configure; fi
prepare
runs=$(running)
if [ -z "$runs" ] || [ "$runs" = "$version" ]; then
	take
	check_config "dpkg --configure sandboxd"
fi
rm -f "$note"
for unit in sandboxd.socket sandboxd.service; do
	deb-systemd-helper unmask $unit >/dev/null || true
	if deb-systemd-helper --quiet was-enabled $unit; then
		deb-systemd-helper enable $unit >/dev/null || true
	else
		deb-systemd-helper update-state $unit >/dev/null || true
	fi
done
booted || exit 0
systemctl --system daemon-reload >/dev/null || true
if [ "$1" = configure ] && [ -n "${2:-}" ]; then
	# An upgrade. The socket stays, and sandboxes with their commands go on. A service that the
	# operator has stopped stays stopped.
	change "dpkg --configure sandboxd"
	exit 0
fi
check_pool "dpkg --configure sandboxd"
deb-systemd-invoke start sandboxd.socket sandboxd.service >/dev/null ||
	say "sandboxd is installed, and does not run; see: systemctl status sandboxd, journalctl -u sandboxd, sandboxd doctor"
if [ "$1" = configure ]; then say "to let USER use it: usermod -aG sandboxd USER; such a user is root on this host in all but name"; fi
