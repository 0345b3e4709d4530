# shellcheck shell=sh disable=SC2154 # common.sh stands above
# Not earlier: rpm has just removed the files of the version before. If this fails, rpm prints a warning, and has the package
# installed all the same.
restore_versions "dnf reinstall sandboxd (or rpm -U --replacepkgs FILE)"
again="systemctl restart sandboxd.service"
runs=$(running)
if [ -n "$runs" ]; then again="$root/versions/$version/bin/sandboxd try $version"; fi
change "$again"
if [ -z "$runs" ]; then check_config "systemctl start sandboxd.service"; fi
