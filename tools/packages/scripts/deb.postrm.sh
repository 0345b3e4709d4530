# shellcheck shell=sh disable=SC2154 # common.sh stands above
case $1 in
remove)
	remove_versions
	if booted; then systemctl --system daemon-reload >/dev/null || true; fi
	;;
purge)
	purge
	if command -v deb-systemd-helper >/dev/null; then
		deb-systemd-helper purge sandboxd.socket sandboxd.service >/dev/null || true
		deb-systemd-helper unmask sandboxd.socket sandboxd.service >/dev/null || true
	fi
	;;
abort-install | abort-upgrade) go_back ;;
esac
