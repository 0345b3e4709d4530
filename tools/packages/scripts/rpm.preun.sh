# shellcheck shell=sh disable=SC2154 # common.sh stands above
[ "$1" -eq 0 ] || exit 0 # an upgrade: the daemon and its sandboxes go on
if booted; then systemctl --no-reload disable --now sandboxd.socket sandboxd.service >/dev/null 2>&1 || true; fi
end_sandboxes
rm -f "$note" # RPM has no purge
