# shellcheck shell=sh disable=SC2154 # common.sh stands above
case $1 in
install)
	clashes
	downgrade
	;;
upgrade)
	upgrading "Nothing was installed."
	go_back
	downgrade
	keep_versions
	;;
esac
