//go:build all

package year

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// A box is a daemon that lives a year, and what a client knows of it.
type box struct {
	*daemontest.Daemon
	name     string
	hands    bool // somebody kills and upgrades the daemon each day; else one process lives all year
	api      *client.Client
	clock    *clock
	versions [2]version
	version  int // that runs
	root     versions.Root
	restart  string // a command for the shell
	registry string // host:port
	backups  string // directory
	random   *rand.Rand
	lives    []*counter // sandboxes that live all year
	took     time.Duration
	logged   int // bytes of the log that were read

	complaints map[string]int // warnings and errors of the log, and how often they came

	deaths atomic.Int64 // how often the daemon was killed or upgraded; it is counted before
	down   sync.RWMutex // held for writing while there is no daemon
}

// A counter is a sandbox with a command that counts.
type counter struct {
	id, name, command string
	cursor            int64
	last              int // number that was read
	asleep            bool
	session           string // "": none
}

// newBox starts a daemon with the image base in it.
func newBox(t *testing.T, o daemontest.Options, b *box) *box {
	t.Helper()

	b.root, b.restart = install(t, b.versions), b.restarts(t)
	o.Root, o.StateDir = string(b.root), filepath.Join(o.Instance.StateDir(), "year")
	b.backups, b.complaints = t.TempDir(), map[string]int{}
	o.Config = append(o.Config,
		"[limits]", `retain_ended = "20h"`,
		"[snapshots]", `max_age = "60h"`,
		"[backup]", fmt.Sprintf("target = %q", b.backups), `every = "24h"`, fmt.Sprintf("keep = %d", cycle), `drill = "72h"`)
	t.Cleanup(func() { os.RemoveAll(o.StateDir) }) // after the teardown
	b.Daemon = daemontest.Prepare(t, o)
	if err := os.RemoveAll(o.StateDir); err != nil { // of a run that was killed
		t.Fatal(err)
	}
	b.Start()
	daemontest.Image(t, b.Daemon, "base")
	var err error
	if b.api, err = client.New("unix://"+b.Socket, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.api.Close)
	return b
}

// do tries f. If the daemon went away meanwhile, do tries f again with the next one: f finds then
// what the try before has left.
func (b *box) do(ctx context.Context, what string, f func(context.Context) error) error {
	for {
		b.down.RLock()
		deaths := b.deaths.Load()
		b.down.RUnlock()
		err := f(ctx)
		if err == nil {
			return nil
		}
		if b.deaths.Load() == deaths || ctx.Err() != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
}

// kill kills the daemon and starts it again.
func (b *box) kill() error {
	b.down.Lock()
	defer b.down.Unlock()
	b.deaths.Add(1)
	b.Kill()
	if err := b.TryStart(); err != nil {
		return fmt.Errorf("start after kill -9: %w; it said:\n%s", err, b.tail())
	}
	return nil
}

// upgrade changes to the other version, as an operator does.
func (b *box) upgrade(ctx context.Context) error {
	b.down.Lock()
	defer b.down.Unlock()
	b.deaths.Add(1)
	b.version = 1 - b.version
	to := b.versions[b.version].name
	cmd := exec.CommandContext(ctx, filepath.Join(string(b.root), "current/bin/sandboxd"), "rollback", to, "--root", string(b.root),
		"--config", b.Config, "--restart", b.restart, "--gate", "10m")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("change to %s: %w: %s; the daemon said:\n%s", to, err, out, b.tail())
	}
	v, err := b.api.Version(ctx)
	if err == nil && v.Version != to {
		err = fmt.Errorf("after a change to %s the daemon is %s", to, v.Version)
	}
	return err
}

// restarts returns a command for the shell that restarts the daemon, which is a child of this process.
// It asks by one pipe and is answered by another.
func (b *box) restarts(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	ask, told := filepath.Join(dir, "ask"), filepath.Join(dir, "told")
	if err := errors.Join(unix.Mkfifo(ask, 0o600), unix.Mkfifo(told, 0o600)); err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			if _, err := os.ReadFile(ask); err != nil { // it waits for somebody who asks
				return // the test is over
			}
			b.Stop()
			said := "ok"
			if err := b.TryStart(); err != nil {
				said = strings.ReplaceAll(err.Error(), "\n", " ")
			}
			if err := os.WriteFile(told, []byte(said+"\n"), 0); err != nil {
				return
			}
		}
	}()
	return fmt.Sprintf(`echo >%s; read -r said <%s; [ "$said" = ok ] || { echo "$said" >&2; exit 1; }`, ask, told)
}

// tail is the end of the daemon's log.
func (b *box) tail() string {
	log := b.Log()
	return log[max(0, len(log)-1500):]
}

// exec runs a command to its end and returns what it wrote to stdout.
func (b *box) exec(ctx context.Context, id, shell string) (string, error) {
	p, err := b.api.Start(ctx, id, client.Command{Shell: shell})
	if err != nil {
		return "", err
	}
	var out, words bytes.Buffer
	exit, err := p.Wait(&out, &words)
	if err == nil && exit.Code != 0 {
		err = fmt.Errorf("%s in %s exited with %d: %s%s", shell, id, exit.Code, words.String(), exit.Error)
	}
	return out.String(), err
}

// spec is a sandbox of base that idles.
func spec(runtime, name string) wire.CreateRequest {
	return wire.CreateRequest{
		Image:          &wire.Image{URI: "base"},
		ResourceLimits: map[string]string{"memory": "128Mi", "cpu": "1"},
		Extensions:     map[string]string{wire.ExtRuntime: runtime, wire.ExtIdle: "true", wire.ExtName: name},
	}
}

// eventually tries f until it succeeds.
func eventually(ctx context.Context, f func() error) error {
	for limit := time.Now().Add(hosttest.Patient(20 * time.Second)); ; time.Sleep(20 * time.Millisecond) {
		err := f()
		if err == nil || time.Now().After(limit) {
			return err
		}
		if ctx.Err() != nil {
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// admin is a client of the socket for operators.
func (b *box) admin() *http.Client {
	return &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(b.Instance.RunDir(), "admin.sock"))
		},
	}}
}
