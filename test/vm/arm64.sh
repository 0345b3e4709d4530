# shellcheck shell=bash disable=SC2016 # single quotes: the guest's shell expands these
# arch: arm64
# An operator installs the package of arm64 on a host of arm64, and runs code on both runtimes.
# The filters of system calls are tried with arm64's own numbers.

# image makes the archive of an image: this Debian's shell, a busybox and the program of attacks.
image() {
  local dir=/root/image tool
  mkdir -p $dir/{bin,etc,tmp,root,usr/bin}
  ldd /bin/bash | grep -o '/[^ ]*' | xargs cp -L --parents -t $dir /bin/bash
  cp /bin/busybox build/guest $dir/bin/
  for tool in sh echo cat ls mkdir rm mv ln sleep seq sha256sum dd stat id nc wget uname; do ln -s busybox "$dir/bin/$tool"; done
  echo root:x:0:0::/root:/bin/sh >$dir/etc/passwd
  tar -C $dir -cf /root/image.tar .
}

# program PACKAGE ARGS... runs the tests of a package that were compiled for this architecture.
program() {
  local name=$1
  shift
  (cd "build/tests/$name" && "./${name##*/}.test" -test.timeout=20m "$@") >/tmp/tests 2>&1 || { tail -n 40 /tmp/tests; return 1; }
  grep -x PASS /tmp/tests
}

# call SANDBOX NAME: the guest's system call is refused.
call() {
  local got
  got=$(sandboxctl exec "$1" -- guest call "$2" || true)
  echo "$1: $2: $got"
  case ${got%% *} in EPERM | EACCES | ENOSYS | ENODEV) ;; *) return 1 ;; esac
}

stage_1() {
  uplink
  same aarch64 "$(uname -m)" "this machine"

  say install
  mkdir /etc/sandboxd
  cat >/etc/sandboxd/config.toml <<'TOML'
[storage]
pool_size = "2Gi"
[defaults]
disk = "256Mi"
[runtime]
start_timeout = "5m"
TOML
  dpkg --force-confold -i build/packages/sandboxd_*_arm64.deb
  same active "$(systemctl is-active sandboxd.service)" "the service"
  sandboxd --version
  sandboxctl version
  sandboxd doctor || true
  image
  sandboxctl image import /root/image.tar base 2>&1 | cat # no progress bars

  for runtime in runc runsc; do
    say "a sandbox on $runtime"
    sandboxctl create base --runtime $runtime --name $runtime
    same aarch64 "$(sandboxctl exec $runtime -- uname -m)" "the guest's machine"
    same 42 "$(sandboxctl exec $runtime -- bash -c 'echo $((6 * 7))')" "a command of glibc"
    fails "" sandboxctl exec $runtime -- sh -c 'exit 3'

    say "files on $runtime"
    seq 20000 >/root/sent
    sandboxctl cp /root/sent $runtime:/root/sent
    sandboxctl exec $runtime -- sh -c 'mkdir /root/d && ln /root/sent /root/d/link && mv /root/d/link /root/d/moved && rm /root/sent'
    sandboxctl cp $runtime:/root/d/moved /root/received
    cmp /root/sent /root/received

    say "a connection without a rule, from $runtime"
    same ECONNREFUSED "$(sandboxctl exec $runtime -- sh -c 'guest connect 192.0.2.1:80 2>/dev/null; true' | cut -d' ' -f1)" "a denied connection"

    say "refused system calls on $runtime"
    for name in bpf perf_event_open io_uring_setup userfaultfd fsopen open_tree mount-tmpfs add_key; do
      call $runtime $name
    done
    if [ $runtime = runc ]; then # what these change in the sentry is of one sandbox
      call $runtime setns
      call $runtime io_setup
    fi
    same ok "$(sandboxctl exec $runtime -- guest nothing | cut -d' ' -f1)" "the program of attacks itself"
  done

  say "the service restarts with the sandboxes"
  systemctl restart sandboxd.service
  for runtime in runc runsc; do
    same alive "$(sandboxctl exec $runtime -- echo alive)" "a sandbox on $runtime"
  done

  say "the tests of the filters, compiled for arm64"
  program internal/seccomp -test.run '^(TestInstall|TestStrictIsStricter)$'
  program internal/seccomp/compile
  program pkg/oci

  say remove
  sandboxctl rm -f runc runsc
  eventually 5 nothing_left
  dpkg -P sandboxd
  [ ! -e /var/lib/sandboxd ]
}
