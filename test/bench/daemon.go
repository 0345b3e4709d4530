package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
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
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

const (
	inst  = instance.Instance('x')
	image = "base"
	key   = "key-of-the-bench" // of the TCP listener

	poolSize = "8Gi"
)

// A daemon is a real sandboxd of instance x. No test uses that, so no test has left a pool
// of another size.
type daemon struct {
	bin, dir string
	pool     string // size of its pool, if there is none yet
	tcp      string // address:port of its TCP listener
	pid      int
	cl       *client.Client
}

func (d *daemon) config() string  { return filepath.Join(d.dir, "config.toml") }
func (d *daemon) recipes() string { return filepath.Join(d.dir, "recipes") }
func (d *daemon) host() string    { return "unix://" + filepath.Join(inst.RunDir(), "sandboxd.sock") }

func (d *daemon) program(name string) string {
	return filepath.Join(d.bin, name)
}

// startDaemon starts a daemon, and builds the image if it is absent. The daemon serves when
// startDaemon returns.
func startDaemon(ctx context.Context, bin, recipes, dir string) (*daemon, error) {
	d := &daemon{bin: bin, dir: dir, pool: poolSize}
	if err := d.linkRecipes(recipes, filepath.Join("test", "bench", "recipes")); err != nil {
		return nil, err
	}
	if err := os.Rename(keptPool, pool.Image(inst.StateDir())); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err // of a run that was killed
	}
	keyFile := filepath.Join(dir, "key")
	if err := os.WriteFile(keyFile, []byte(key+"\n"), 0o600); err != nil {
		return nil, err
	}
	var err error
	if d.tcp, err = freePort(); err != nil {
		return nil, err
	}
	if err := d.configure(0); err != nil {
		return nil, err
	}
	if err := d.start(ctx); err != nil {
		return nil, err
	}
	if d.cl, err = client.New(d.host(), ""); err != nil {
		return d, err
	}
	return d, d.ensureImage(ctx, image)
}

// linkRecipes makes one directory of recipes of several: a daemon has one.
func (d *daemon) linkRecipes(from ...string) error {
	if err := errors.Join(os.RemoveAll(d.recipes()), os.MkdirAll(d.recipes(), 0o755)); err != nil {
		return err
	}
	for _, dir := range from {
		all, err := filepath.Glob(filepath.Join(dir, "*", "recipe.toml"))
		if err != nil {
			return err
		}
		for _, recipe := range all {
			at, err := filepath.Abs(filepath.Dir(recipe))
			if err != nil {
				return err
			}
			if err := os.Symlink(at, filepath.Join(d.recipes(), filepath.Base(at))); err != nil {
				return err
			}
		}
	}
	return nil
}

// configure writes the configuration. Only rows about prepared slots have some.
func (d *daemon) configure(prepared int) error {
	text := fmt.Sprintf(`instance = %q
libexec_dir = %q
recipes_dir = %q
[listen]
socket_group = "root"
tcp = %q
api_key_file = %q
[storage]
pool_size = %q
[limits]
max_sandboxes = 1500
[prepared]
runsc = %d
runc = %d
`, inst, d.bin, d.recipes(), d.tcp, filepath.Join(d.dir, "key"), d.pool, prepared, prepared)
	return os.WriteFile(d.config(), []byte(text), 0o600)
}

// restart starts the daemon again, with so many prepared slots of each runtime.
func (d *daemon) restart(ctx context.Context, prepared int) error {
	if err := errors.Join(d.end(), d.configure(prepared)); err != nil {
		return err
	}
	return d.start(ctx)
}

// freePort returns a loopback address on which nothing listens.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// ensureImage builds an image unless an earlier run has built it.
func (d *daemon) ensureImage(ctx context.Context, name string) error {
	images, err := d.cl.Images().List(ctx)
	if err != nil {
		return err
	}
	for _, im := range images {
		if im.Name == name {
			return nil
		}
	}
	fmt.Fprintf(os.Stderr, "bench: building the image %s (once)\n", name)
	last := ""
	if _, err := d.cl.Images().Build(ctx, name, func(line string) { last = line }); err != nil {
		return fmt.Errorf("build the image %s: %w (its last line: %s)", name, err, last)
	}
	return nil
}

// start starts the program. The daemon serves when start returns.
func (d *daemon) start(ctx context.Context) error {
	pidFile := filepath.Join(d.dir, "pid")
	cmd := exec.CommandContext(ctx, d.program("sandboxd"), "serve", "--config", d.config(), "--detach",
		"--pid-file", pidFile, "--log-file", filepath.Join(d.dir, "sandboxd.log"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("start sandboxd: %w: %s", err, out)
	}
	b, err := os.ReadFile(pidFile)
	if err != nil {
		return err
	}
	d.pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
	return err
}

// end ends the daemon's process; its sandboxes go on.
func (d *daemon) end() error {
	fd, err := unix.PidfdOpen(d.pid, 0)
	if err != nil {
		return nil // it has ended
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, syscall.SIGTERM, nil, 0); err != nil {
		return fmt.Errorf("stop sandboxd: %w", err)
	}
	_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 20_000)
	return err
}

// stop ends the daemon and frees everything that it holds, except its images.
func (d *daemon) stop() error {
	if err := d.end(); err != nil {
		return err
	}
	if out, err := exec.Command(d.program("sandboxd"), "teardown", "--config", d.config()).CombinedOutput(); err != nil {
		return fmt.Errorf("teardown: %w: %s", err, out)
	}
	return nil
}

// request asks for an idle sandbox with default limits.
func request(runtime string) wire.CreateRequest {
	return wire.CreateRequest{
		Image:      &wire.Image{URI: image},
		Extensions: map[string]string{wire.ExtRuntime: runtime, wire.ExtIdle: "true", wire.ExtOneShot: "true"},
	}
}

func (d *daemon) create(ctx context.Context, runtime string) (wire.Sandbox, error) {
	return d.createOf(ctx, request(runtime))
}

// createOf creates a sandbox and returns it when it runs.
func (d *daemon) createOf(ctx context.Context, r wire.CreateRequest) (wire.Sandbox, error) {
	sb, err := d.cl.Create(ctx, r, true)
	if err == nil && sb.Status.State != wire.Running {
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
	return d.run(ctx, id, client.Command{Argv: argv})
}

// run runs a command and returns when its first output came.
func (d *daemon) run(ctx context.Context, id string, c client.Command) (time.Time, error) {
	p, err := d.cl.Start(ctx, id, c)
	if err != nil {
		return time.Time{}, err
	}
	var out first
	var words bytes.Buffer
	exit, err := p.Wait(&out, &words)
	if err == nil && exit.Code != 0 {
		err = fmt.Errorf("%v%s: exit status %d: %s", c.Argv, c.Shell, exit.Code, words.Bytes())
	}
	return out.at, err
}

// settle waits until nothing on the host has the name of id, so that the next measurement
// does not pay for a cleanup in the background.
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

// leaks lists what the host still holds of both instances.
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
