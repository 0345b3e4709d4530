# shellcheck shell=sh disable=SC2154 # common.sh stands above
restore_versions
