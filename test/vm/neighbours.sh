# shellcheck shell=bash disable=SC2016 # single quotes: the guest's shell expands these
# docker, ufw and firewalld write rules of their own, and start and stop beside sandboxd. Closed
# addresses stay closed, and allowed ones stay allowed.
# needs: docker.io firewalld ufw apparmor

# serve PORT COMMAND... answers "hello" on a port, where COMMAND runs its arguments.
serve() {
  local port=$1
  shift
  "$@" perl -MIO::Socket::INET -e '
    $s = IO::Socket::INET->new(LocalPort => $ARGV[0], Listen => 5, ReuseAddr => 1) or die;
    while ($c = $s->accept) { print $c "hello\n"; close $c }' "$port" &
}

# outside is a host that answers "hello" on 203.0.113.2, ports 8080 and 8081. This host, which
# is 203.0.113.1 there, does so on port 8082.
outside() {
  ip netns add outside
  ip link add out0 type veth peer name in0 netns outside
  ip addr add 203.0.113.1/24 dev out0
  ip link set out0 up
  ip -n outside addr add 203.0.113.2/24 dev in0
  ip -n outside link set in0 up
  ip -n outside link set lo up
  ip -n outside route add default via 203.0.113.1
  serve 8080 ip netns exec outside
  serve 8081 ip netns exec outside
  serve 8082 env
}

# enters: the outside reaches this host's port 8082, which ufw closes.
enters() {
  [ "$(ip netns exec outside timeout 20 bash -c 'exec 3<>/dev/tcp/203.0.113.1/8082 && head -n 1 <&3')" = hello ]
}

# ask SANDBOX ADDRESS PORT prints the answer from there. Starting bash on gVisor alone takes
# five seconds on such a machine.
ask() { sandboxctl exec "$1" -- timeout 20 bash -c 'exec 3<>"/dev/tcp/$1/$2" && head -n 1 <&3' ask "$2" "$3"; }

# hears SANDBOX: the address that it is allowed to reach answers.
hears() { [ "$(ask "$1" 203.0.113.2 8080)" = hello ]; }

# walls must hold beside any other firewall: closed addresses are closed at every moment, and
# allowed ones answer as soon as flushed chains are back.
walls() {
  local s
  for s in free gvisor; do
    fails "" ask $s 203.0.113.2 8081 # no rule
    fails "" ask $s 203.0.113.1 8082 # the host
    fails "" ask $s 169.254.169.254 80
    eventually 20 hears $s
  done
  fails "" ask closed 203.0.113.2 8080
}

stage_1() {
  outside
  say install
  install_sandboxd
  sandboxctl create base --name free --runtime runc --allow 203.0.113.2:8080
  sandboxctl create base --name gvisor --runtime runsc --allow 203.0.113.2:8080
  sandboxctl create base --name closed --runtime runc
  eventually 20 enters
  walls

  say docker comes, restarts and goes
  systemctl start docker
  walls
  systemctl restart docker
  walls
  systemctl restart sandboxd
  walls
  systemctl stop docker docker.socket containerd
  walls

  say "ufw comes, reloads, flushes the rules of others and goes"
  ufw default reject incoming
  ufw --force enable
  fails "" enters
  walls
  sandboxd doctor >/tmp/doctor || { grep ^fail /tmp/doctor; return 1; }
  grep -E '^ok +docker-ufw +ufw: ' /tmp/doctor
  ufw allow 8082/tcp
  ufw reload
  eventually 20 enters
  walls
  sed -i 's/^MANAGE_BUILTINS=.*/MANAGE_BUILTINS=yes/' /etc/default/ufw
  ufw reload
  fails "" ask free 203.0.113.2 8081
  fails "" ask closed 203.0.113.2 8080
  walls
  ufw disable
  walls

  say "firewalld comes, with what the doctor advises, reloads, restarts and goes"
  systemctl start firewalld
  fails "" ask closed 203.0.113.2 8080
  fails "" ask free 203.0.113.2 8081
  sandboxd doctor >/tmp/doctor || grep ^fail /tmp/doctor
  advice=$(awk '/^[a-z]+ +firewalld / {its = 1} its && sub(/.* fix: /, "") {print; exit}' /tmp/doctor)
  echo "the doctor advises: $advice"
  bash -c "$advice"
  sandboxd doctor >/tmp/doctor || { grep ^fail /tmp/doctor; return 1; }
  walls
  firewall-cmd --reload
  walls
  systemctl restart firewalld
  walls
  systemctl stop firewalld
  walls

  say "somebody flushes the rules: closed, and mended"
  iptables -F
  fails "" ask free 203.0.113.2 8081
  fails "" ask closed 203.0.113.2 8080
  walls
}
