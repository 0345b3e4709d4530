# shellcheck shell=sh disable=SC2154 # common.sh stands above
case $1 in
remove | deconfigure) ;;
*) exit 0 ;; # an upgrade: the daemon and its sandboxes go on
esac
[ "$1" = deconfigure ] || purgeable
if booted; then
	deb-systemd-invoke stop sandboxd.socket sandboxd.service >/dev/null || fail "the service could not be stopped; nothing was removed"
fi
[ "$1" = deconfigure ] || end_sandboxes
