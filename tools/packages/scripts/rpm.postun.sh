# shellcheck shell=sh disable=SC2154 # common.sh stands above
if booted; then systemctl --system daemon-reload >/dev/null || true; fi
[ "$1" -eq 0 ] || exit 0
remove_versions
directories
say "/etc/sandboxd and $state are kept; remove them to remove all data"
