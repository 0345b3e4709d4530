# shellcheck shell=sh disable=SC2154 # common.sh stands above
prepare
booted || exit 0
systemctl --system daemon-reload >/dev/null || true
[ "$1" -eq 1 ] || exit 0
systemctl --no-reload preset sandboxd.socket sandboxd.service >/dev/null 2>&1 || true
(check_pool "systemctl enable --now sandboxd.socket sandboxd.service") || true
say "to start it: systemctl enable --now sandboxd.socket sandboxd.service"
