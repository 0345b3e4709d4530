package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// A peer is another program that runs a command in a container of its own.
type peer struct {
	name    string
	run     []string // the whole command line
	faster  [2]float64
	cleanup func() error
}

// runOnce: sandboxctl run as a process, from its start to its end, against podman and
// docker, if they are installed.
func runOnce(ctx context.Context, b *bench) (err error) {
	peers := b.peers(ctx)
	defer func() {
		for _, p := range peers {
			err = errors.Join(err, p.cleanup())
		}
	}()
	for i, rt := range runtimes {
		ours := func() (float64, error) {
			return wall(ctx, []string{"SANDBOXD_HOST=" + b.host()}, b.program("sandboxctl"), "run", "--runtime", rt, image, "--", "true")
		}
		n := b.times(20, 2)
		for _, p := range peers {
			a, c, err := turns(n, 1, ours, func() (float64, error) { return wall(ctx, nil, p.run...) })
			if err != nil {
				return err
			}
			b.add(row("run_once", rt, "ms", a, p.name, c, goal{maxRatio: 1 / p.faster[i]}))
		}
		if len(peers) == 0 {
			a, _, err := turns(n, 1, ours, func() (float64, error) { return 0, nil })
			if err != nil {
				return err
			}
			b.add(row("run_once", rt, "ms", a, "", nil, goal{}))
		}
	}
	return nil
}

// wall runs a process to its end.
func wall(ctx context.Context, env []string, argv ...string) (float64, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), env...)
	start := time.Now()
	out, err := cmd.CombinedOutput()
	took := ms(time.Since(start))
	if err != nil {
		return 0, fmt.Errorf("%v: %w: %s", argv, err, out)
	}
	return took, nil
}

// peers are the peers that work on this host, each with our image imported. A peer that
// does not work is left out, with the reason.
func (b *bench) peers(ctx context.Context) (all []peer) {
	dir := filepath.Join(b.dir, "peers")
	tar := filepath.Join(dir, "base.tar")
	layer := filepath.Join(inst.StateDir(), "layers", b.bare.layers[0][len("sha256:"):])
	for name, open := range map[string]func(context.Context, string, string) (peer, error){"podman": podman, "docker": docker} {
		if _, err := exec.LookPath(name); err != nil {
			fmt.Fprintf(os.Stderr, "bench: %s is not installed: run_once goes without it\n", name)
			continue
		}
		err := os.MkdirAll(dir, 0o700)
		if _, statErr := os.Stat(tar); err == nil && statErr != nil {
			err = command(ctx, "tar", "-C", layer, "--numeric-owner", "-cf", tar, ".")
		}
		var p peer
		if err == nil {
			p, err = open(ctx, filepath.Join(dir, name), tar)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "bench: %s does not work here, run_once goes without it: %v\n", name, err)
			if p.cleanup != nil {
				p.cleanup() //nolint:errcheck // the reason above says more
			}
			continue
		}
		version, err := exec.CommandContext(ctx, name, "--version").Output()
		if err != nil {
			version = []byte(name + " of an unknown version")
		}
		b.report.Machine.Peers = append(b.report.Machine.Peers, strings.TrimSpace(string(version)))
		all = append(all, p)
	}
	return all
}

func command(ctx context.Context, argv ...string) error {
	if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", argv, err, out)
	}
	return nil
}

// podman uses storage of its own, and runc, because Debian's crun refuses hybrid cgroups.
// Its limits are limits that every host can set.
func podman(ctx context.Context, dir, tar string) (peer, error) {
	base := []string{"podman", "--root", dir + "/root", "--runroot", dir + "/run", "--cgroup-manager", "cgroupfs", "--runtime", "runc"}
	p := peer{
		name: "podman run --rm --network=none",
		run: append(base[:len(base):len(base)], "run", "--rm", "--network=none", "--ulimit", "nofile=1024:1024",
			"--ulimit", "nproc=1024:1024", "bench", "true"),
		faster: [2]float64{2.5, 1},
		cleanup: func() error {
			syscall.Unmount(dir+"/root/overlay", syscall.MNT_DETACH) //nolint:errcheck // podman leaves it mounted
			return os.RemoveAll(dir)
		},
	}
	if err := command(ctx, append(base[:len(base):len(base)], "import", tar, "bench")...); err != nil {
		return p, err
	}
	return p, command(ctx, p.run...)
}

// docker uses an engine of its own in a network namespace of its own, so that its rules do
// not mix with the host's.
func docker(ctx context.Context, dir, tar string) (peer, error) {
	if _, err := exec.LookPath("dockerd"); err != nil {
		return peer{}, errors.New("there is no dockerd")
	}
	run, err := os.MkdirTemp("/run", "sandboxd-bench-docker-") // short, because paths of sockets are limited
	if err != nil {
		return peer{}, err
	}
	log, err := os.Create(filepath.Join(filepath.Dir(dir), "dockerd.log"))
	if err != nil {
		return peer{}, err
	}
	defer log.Close()
	host := "unix://" + run + "/docker.sock"
	engine := exec.Command("dockerd", "--data-root", dir, "--exec-root", run+"/exec", "--pidfile", run+"/pid", "--host", host,
		"--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")
	engine.Stdout, engine.Stderr = log, log
	engine.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Setpgid: true}
	p := peer{
		name:   "docker run --rm --network=none",
		run:    []string{"docker", "--host", host, "run", "--rm", "--network=none", "bench", "true"},
		faster: [2]float64{5, 1 / 0.45},
		cleanup: func() error {
			if engine.Process != nil {
				engine.Process.Signal(syscall.SIGTERM) //nolint:errcheck // Wait returns the result
				engine.Wait()                          //nolint:errcheck // it ends by the signal
			}
			return errors.Join(os.RemoveAll(run), os.RemoveAll(dir))
		},
	}
	if err := engine.Start(); err != nil {
		return p, err
	}
	deadline := time.Now().Add(20 * time.Second)
	for command(ctx, "docker", "--host", host, "version") != nil {
		if time.Now().After(deadline) {
			return p, fmt.Errorf("dockerd does not answer; see %s", log.Name())
		}
		time.Sleep(100 * time.Millisecond) // another program's start has no event
	}
	if err := command(ctx, "docker", "--host", host, "import", tar, "bench"); err != nil {
		return p, err
	}
	return p, command(ctx, p.run...)
}
