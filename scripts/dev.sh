#!/usr/bin/env bash
# The development daemon: instance d with its own directories, a Unix socket, and TCP on
# loopback with a key. `dev.sh up|down|pid|env`.
set -euo pipefail

top=$(cd "$(dirname "$0")/.." && pwd)
bin=$top/build/bin
dev=$top/build/dev
port=${SANDBOXD_DEV_PORT:-8080}
socket=/run/sandboxd-d/sandboxd.sock

# kill -0 would also find a zombie; a zombie has no executable.
running() { [ -s "$dev/pid" ] && [ -n "$(readlink "/proc/$(cat "$dev/pid")/exe")" ]; }

key() {
  mkdir -p "$dev"
  [ -s "$dev/api-key" ] || (umask 077; head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$dev/api-key")
}

# configure writes config.toml, unless somebody has edited it since: config.toml.made is the text as it was written.
configure() {
  key
  if [ -s "$dev/config.toml" ] && ! cmp -s "$dev/config.toml" "$dev/config.toml.made"; then
    echo "dev-up: $dev/config.toml was edited and is used as it is; delete it to get the default again" >&2
    return
  fi
  cat >"$dev/config.toml.made" <<TOML
instance = "d"
libexec_dir = "$bin"
recipes_dir = "$top/rootfs"
[listen]
socket_group = "root"
tcp = "127.0.0.1:$port"
api_key_file = "$dev/api-key"
[storage]
pool_size = "${SANDBOXD_DEV_POOL:-8Gi}"
TOML
  cp "$dev/config.toml.made" "$dev/config.toml"
}

case ${1:-} in
up)
  running && { echo "the development daemon is already running, pid $(cat "$dev/pid")"; exit 0; }
  [ -x "$bin/sandboxd" ] || { echo "dev-up: $bin/sandboxd is missing: run make build" >&2; exit 1; }
  configure
  "$bin/sandboxd" serve --config "$dev/config.toml" --detach --pid-file "$dev/pid" --log-file "$dev/sandboxd.log"
  echo "sandboxd is running: pid $(cat "$dev/pid"), unix://$socket, http://127.0.0.1:$port, log $dev/sandboxd.log"
  ;;
down)
  if running; then
    pid=$(cat "$dev/pid")
    kill -TERM "$pid"
    tail --pid="$pid" -f /dev/null
  fi
  rm -f "$dev/pid"
  [ ! -s "$dev/config.toml" ] || "$bin/sandboxd" teardown --config "$dev/config.toml"
  ;;
pid)
  running || { echo "dev-pid: the development daemon is not running: run make dev-up" >&2; exit 1; }
  cat "$dev/pid"
  ;;
env)
  key
  echo "export SANDBOXD_HOST=unix://$socket"
  echo "export OPEN_SANDBOX_DOMAIN=127.0.0.1:$port"
  echo "export OPEN_SANDBOX_API_KEY=$(cat "$dev/api-key")"
  echo "export PATH=$bin:\$PATH"
  ;;
*)
  echo "usage: $0 up|down|pid|env" >&2
  exit 2
  ;;
esac
