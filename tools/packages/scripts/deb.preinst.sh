# shellcheck shell=sh disable=SC2154 # common.sh stands above
case $1 in
install)
	clashes
	downgrade
	;;
upgrade)
	downgrade
	keep_version
	;;
esac
