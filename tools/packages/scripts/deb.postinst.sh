# shellcheck shell=sh disable=SC2154 # common.sh stands above
restore_versions
case $1 in
configure | abort-remove | abort-deconfigure | abort-upgrade) ;;
*) exit 0 ;;
esac
if [ "$1" = abort-upgrade ]; then exit 0; fi
# dpkg also names the version before if the package was removed. Then this is no upgrade: nothing runs.
if [ "$1" = configure ] && [ -e "$note" ]; then set -- configure; fi
prepare
check_config "dpkg --configure sandboxd"
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
failed="sandboxd is installed, and does not run; see: systemctl status sandboxd, journalctl -u sandboxd, sandboxd doctor"
if [ "$1" = configure ] && [ -n "${2:-}" ]; then
	# An upgrade. The socket stays, and sandboxes with their commands go on. A service that the
	# operator has stopped stays stopped.
	if systemctl --quiet is-active sandboxd.service && ! runs_already; then
		deb-systemd-invoke restart sandboxd.service >/dev/null || say "$failed"
	fi
	exit 0
fi
check_pool "dpkg --configure sandboxd"
deb-systemd-invoke start sandboxd.socket sandboxd.service >/dev/null || say "$failed"
if [ "$1" = configure ]; then say "to let USER use it: usermod -aG sandboxd USER; such a user is root on this host in all but name"; fi
