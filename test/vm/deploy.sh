# shellcheck shell=bash disable=SC2016 # single quotes: the guest's shell expands these
# The Ansible role provisions a bare host over a local connection, twice, changes and upgrades it, and
# refuses what must not be applied. Then cloud-init does so at the first boot of a host without a network,
# from a bundle and from packages.
# needs: ansible-core cloud-init

export HOME=/root LC_ALL=C.UTF-8 ANSIBLE_PIPELINING=1 ANSIBLE_LOCALHOST_WARNING=0 ANSIBLE_NOCOLOR=1
made=/mnt/sandboxd/build/deploy

# play ARGS...: applies the role; ansible's arguments come after the settings of /root/settings.yml.
play() { ansible-playbook -i localhost, -c local /root/play.yml -e @/root/settings.yml "$@" >/root/play.log 2>&1 || { cat /root/play.log; return 1; }; }

# counts WANT: what the last play says of changed tasks.
counts() { grep "changed=$1 .*failed=0" /root/play.log || { cat /root/play.log; return 1; }; }

daemon_pid() { systemctl show -p MainPID --value sandboxd.service; }

# files lists what could have changed: programs, configuration, users, units.
files() {
  find /etc /usr /opt /srv /var/cache /var/lib/dpkg /var/tmp -type f ! -name '*.pyc' -printf '%p %s %T@ %m\n' | sort
}

# refused WORDS ARGS...: the play fails with sandboxd's WORDS, and the host is as it was.
refused() {
  files >/dev/shm/before
  fails "$@"
  files | diff /dev/shm/before -
}

stage_1() {
  local box pid before secret
  uplink
  secret=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
  cat >/root/play.yml <<'YAML'
- hosts: localhost
  gather_facts: false
  roles: [{role: /mnt/sandboxd/deploy/ansible/roles/sandboxd}]
YAML
  cat >/root/settings.yml <<YAML
sandboxd_bundle: $made/first.bundle
sandboxd_key: "{{ lookup('file', '$made/bundle.pub') }}"
sandboxd_gate: 20m # the emulated machine is slow
sandboxd_config:
  storage: {pool_size: 2Gi}
  defaults: {disk: 256Mi}
  runtime: {start_timeout: 5m}
  listen: {tcp: 127.0.0.1:8080, api_key_file: /etc/sandboxd/api-keys}
  policies: {build: {rules: ["allow pypi.org:443"]}}
sandboxd_files:
  - {name: api-keys, content: "a-s3cret-word\n"}
sandboxd_users: [games]
sandboxd_secrets_key: $secret
sandboxd_escrow_recipients: [age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p]
sandboxd_escrow_file: /srv/sandboxd.key.age
YAML

  say "a bare host: another key, and a configuration that sandboxd refuses"
  refused "it was signed with the key" play -e '{"sandboxd_key": "'"$(tail -n 1 $made/other.pub)"'"}'
  refused "want a whole number" play -e '{"sandboxd_config": {"colour": 1, "limits": {"max_sandboxes": "many"}}}'
  grep 'unknown key colour' /root/play.log
  [ ! -e /etc/sandboxd ]

  say "install, where packages may not start services"
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
  chmod 755 /usr/sbin/policy-rc.d
  play -vv -D
  rm /usr/sbin/policy-rc.d
  fails "" grep s3cret /root/play.log
  same active "$(systemctl is-active sandboxd.service)" "the service"
  same enabled "$(systemctl is-enabled sandboxd.service)" "the service at boot"
  same "600 root" "$(stat -c '%a %U' /etc/sandboxd/api-keys)" "the file with a key"
  same "644 root" "$(stat -c '%a %U' /etc/sandboxd/config.toml)" "the configuration"
  same sandboxd "$(id -Gn games | tr ' ' '\n' | grep sandboxd)" "the user's group"
  cmp $made/bundle.pub /etc/sandboxd/bundle.pub
  same "$secret 600" "$(cat /var/lib/sandboxd/sandboxd.key) $(stat -c %a /var/lib/sandboxd/sandboxd.key)" "the key of the secrets"
  fails "" grep "$secret" /root/play.log
  same "age-encryption.org/v1 600" "$(head -n 1 /srv/sandboxd.key.age) $(stat -c %a /srv/sandboxd.key.age)" "the key in escrow"
  same $((2 << 30)) "$(stat -c %s /var/lib/sandboxd/pool.img)" "the size of the pool"
  same 42 "$(sandboxctl run --runtime runc base -- sh -c 'echo $((6*7))')" "runc"
  same 42 "$(sandboxctl run --runtime runsc base -- sh -c 'echo $((6*7))')" "runsc"
  box=$(sandboxctl create base --runtime runc)

  say "again: nothing changes"
  pid=$(daemon_pid)
  play
  counts 0
  same "$pid" "$(daemon_pid)" "the daemon"

  say "a changed setting with --check, and with a port that another program has"
  sed -i 's/^sandboxd_config:/&\n  limits: {max_sandboxes: 50}/' /root/settings.yml
  files >/dev/shm/before
  play --check -D
  counts 2
  grep '^+max_sandboxes = 50' /root/play.log
  files | diff /dev/shm/before -
  python3 -c 'import socket, time; s = socket.socket(); s.bind(("127.0.0.1", 9109)); s.listen(); time.sleep(1e6)' &
  cp /etc/sandboxd/config.toml /root/config.toml
  fails "bind: address already in use" play -e '{"sandboxd_config": {"listen": {"metrics": "127.0.0.1:9109"}}}'
  grep '/etc/sandboxd is as it was before' /root/play.log
  kill %1
  cmp /root/config.toml /etc/sandboxd/config.toml
  same active "$(systemctl is-active sandboxd.service)" "the service"
  same alive "$(sandboxctl exec "$box" -- echo alive)" "the sandbox"

  say "a newer bundle, the changed setting, and an image that is not in it"
  pid=$(daemon_pid) before=$(sandboxd --version)
  sed -i 's/first.bundle/second.bundle/' /root/settings.yml
  echo 'sandboxd_images: [{name: extra, archive: /mnt/sandboxd/build/images/base.tar}]' >>/root/settings.yml
  play
  [ "$(daemon_pid)" != "$pid" ]
  same "sandboxd version 0.2.1-dev+0000000" "$(sandboxd --version)" "the program"
  same "$(readlink -f /usr/bin/sandboxd)" "$(readlink "/proc/$(daemon_pid)/exe" | sed 's/ (deleted)$//')" "the program that runs"
  same "versions/${before##* }" "$(readlink /usr/lib/sandboxd/previous)" "the version that a rollback goes back to"
  grep '^max_sandboxes = 50' /etc/sandboxd/config.toml
  same alive "$(sandboxctl exec "$box" -- echo alive)" "the sandbox of before"
  sandboxctl image inspect extra >/dev/null
  pid=$(daemon_pid)
  refused "want a whole number" play -e '{"sandboxd_config": {"limits": {"max_sandboxes": "many"}}}'
  same "$pid" "$(daemon_pid)" "the daemon"

  say "the seed of cloud-init"
  dpkg -P sandboxd
  [ ! -e /etc/sandboxd ]
  gpasswd -d games sandboxd
  schema
  seed bundle
  cat >/etc/cloud/cloud.cfg.d/99-story.cfg <<'YAML'
network: {config: disabled}
locale: C.UTF-8
YAML
}

# schema: cloud-init knows every key of the examples.
schema() {
  local file
  for file in deploy/cloud-init/*.yaml; do cloud-init schema --config-file "$file"; done
}

# seed NAME: the example deploy/cloud-init/NAME.yaml, with this test's key, pool and disk, is what
# cloud-init finds at the next boot.
seed() {
  local dir=/var/lib/cloud/seed/nocloud
  mkdir -p $dir /opt
  echo "instance-id: $1" >$dir/meta-data
  sed "s|RWQ[A-Za-z0-9+/]*|$(tail -n 1 $made/bundle.pub)|; s|20Gi|2Gi|; s|LABEL=SANDBOXD|LABEL=sandboxd|
    s|/run/carried/sandboxd.bundle|/run/carried/build/deploy/first.bundle|; s|^\( *\)\[storage\]|\1[runtime]\n\1start_timeout = \"5m\"\n&|" \
    "deploy/cloud-init/$1.yaml" >$dir/user-data
  ln -sfn $made /opt/sandboxd
  systemctl daemon-reload
}

# provisioned: cloud-init is done, and sandboxd runs.
provisioned() {
  cloud-init status --wait || { cat /var/log/cloud-init-output.log; return 1; }
  cloud-init status --long | grep 'status: done' || { cloud-init status --long; cat /var/log/cloud-init-output.log; return 1; }
  same active "$(systemctl is-active sandboxd.service)" "the service"
  grep 'pool_size = "2Gi"' /etc/sandboxd/config.toml
}

stage_2() {
  uplink
  say "the first boot, with a bundle on a disk"
  provisioned
  same "600 root" "$(stat -c '%a %U' /etc/sandboxd/api-keys)" "the file with a key"
  same 42 "$(sandboxctl run --runtime runc base -- sh -c 'echo $((6*7))')" "runc"

  say "by hand, with packages"
  dpkg -P sandboxd
  cloud-init clean --logs
  seed packages
  for args in "init --local" init "modules --mode config" "modules --mode final"; do
    # shellcheck disable=SC2086 # two words
    cloud-init $args >/dev/null
  done
  provisioned
}
