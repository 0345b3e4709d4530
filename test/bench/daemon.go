package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/client"
)

const (
	inst  = instance.Instance('b')
	image = "base"
)

// A daemon is a real sandboxd of instance b.
type daemon struct {
	bin, dir string
	pid      int
	cl       *client.Client
}

func (d *daemon) config() string { return filepath.Join(d.dir, "config.toml") }
func (d *daemon) host() string   { return "unix://" + filepath.Join(inst.RunDir(), "sandboxd.sock") }

func (d *daemon) program(name string) string {
	return filepath.Join(d.bin, name)
}

// startDaemon starts a daemon that serves when this returns, with the image
// built if it is not there.
func startDaemon(ctx context.Context, bin, recipes, dir string) (*daemon, error) {
	d := &daemon{bin: bin, dir: dir}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	text := fmt.Sprintf("instance = %q\nlibexec_dir = %q\nrecipes_dir = %q\n[listen]\nsocket_group = \"root\"\n[storage]\npool_size = \"8Gi\"\n", inst, bin, recipes)
	if err := os.WriteFile(d.config(), []byte(text), 0o600); err != nil {
		return nil, err
	}
	pidFile := filepath.Join(dir, "pid")
	cmd := exec.CommandContext(ctx, d.program("sandboxd"), "serve", "--config", d.config(), "--detach",
		"--pid-file", pidFile, "--log-file", filepath.Join(dir, "sandboxd.log"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("start sandboxd: %w: %s", err, out)
	}
	b, err := os.ReadFile(pidFile)
	if err != nil {
		return nil, err
	}
	if d.pid, err = strconv.Atoi(strings.TrimSpace(string(b))); err != nil {
		return nil, err
	}
	if d.cl, err = client.New(d.host(), ""); err != nil {
		return d, err
	}
	images, err := d.cl.Images(ctx)
	if err != nil {
		return d, err
	}
	for _, im := range images {
		if im.Name == image {
			return d, nil
		}
	}
	fmt.Fprintf(os.Stderr, "bench: building the image %s (once)\n", image)
	_, err = d.cl.BuildImage(ctx, image, func(string) {})
	return d, err
}

// stop ends the daemon and gives back all it holds, its images kept.
func (d *daemon) stop() error {
	fd, err := unix.PidfdOpen(d.pid, 0)
	if err == nil {
		defer unix.Close(fd)
		if err := unix.PidfdSendSignal(fd, syscall.SIGTERM, nil, 0); err != nil {
			return fmt.Errorf("stop sandboxd: %w", err)
		}
		unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 20_000) //nolint:errcheck // teardown says if it lives
	}
	if out, err := exec.Command(d.program("sandboxd"), "teardown", "--config", d.config()).CombinedOutput(); err != nil {
		return fmt.Errorf("teardown: %w: %s", err, out)
	}
	return nil
}

// request asks for an idle sandbox of the defaults.
func request(runtime string) client.CreateRequest {
	return client.CreateRequest{
		Image:      &client.Image{URI: image},
		Extensions: map[string]string{client.ExtRuntime: runtime, client.ExtIdle: "true", client.ExtOneShot: "true"},
	}
}

func (d *daemon) create(ctx context.Context, runtime string) (client.Sandbox, error) {
	sb, err := d.cl.Create(ctx, request(runtime), true)
	if err == nil && sb.Status.State != client.Running {
		err = fmt.Errorf("sandbox %s is %s: %s", sb.ID, sb.Status.State, sb.Status.Message)
	}
	return sb, err
}

// first notes when its first byte is written.
type first struct{ at time.Time }

func (f *first) Write(p []byte) (int, error) {
	if f.at.IsZero() && len(p) > 0 {
		f.at = time.Now()
	}
	return len(p), nil
}

// exec runs a command to its end and returns when its first output came.
func (d *daemon) exec(ctx context.Context, id string, argv ...string) (time.Time, error) {
	p, err := d.cl.Start(ctx, id, client.Command{Argv: argv})
	if err != nil {
		return time.Time{}, err
	}
	var out first
	var words bytes.Buffer
	exit, err := p.Wait(&out, &words)
	if err == nil && exit.Code != 0 {
		err = fmt.Errorf("%v: exit status %d: %s", argv, exit.Code, words.Bytes())
	}
	return out.at, err
}

// settle waits until nothing carries the name of id: what is cleaned up in the
// background must not be paid for by the next measurement.
func settle(id string) error {
	deadline := time.Now().Add(10 * time.Second)
	for len(left(id)) > 0 {
		if time.Now().After(deadline) {
			return fmt.Errorf("10 s after its deletion there is still %v", left(id))
		}
		time.Sleep(2 * time.Millisecond) // four kinds of things, no event for all of them
	}
	return nil
}

// left lists what the host still holds of id: link, mounts, cgroups, files.
func left(id string) (all []string) {
	if _, err := os.Lstat("/sys/class/net/sb-" + id); err == nil {
		all = append(all, "link")
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	if bytes.Contains(mounts, []byte(id)) {
		all = append(all, "mount")
	}
	for _, pattern := range []string{
		"/sys/fs/cgroup/sandboxd-?/" + id, "/sys/fs/cgroup/*/sandboxd-?/" + id,
		"/run/sandboxd-?/" + id, "/run/sandboxd-?/*/" + id, "/run/sandboxd-?/*/" + id + "_*",
		"/var/lib/sandboxd-?/pool/" + id,
	} {
		found, _ := filepath.Glob(pattern)
		all = append(all, found...)
	}
	return all
}

// leaks is what the host still holds of both instances.
func leaks() error {
	var held []string
	for _, i := range []instance.Instance{inst, bareInstance} {
		held = append(held, hosttest.Held(i)...)
	}
	if len(held) > 0 {
		return errors.New("left on the host after teardown:\n" + strings.Join(held, "\n"))
	}
	return nil
}
