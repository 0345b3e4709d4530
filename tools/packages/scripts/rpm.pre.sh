# shellcheck shell=sh disable=SC2154 # common.sh stands above
if [ "$1" -eq 1 ]; then clashes; fi
upgrading "Nothing was installed."
go_back
downgrade
keep_versions
