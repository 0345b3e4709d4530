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
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
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
	version  int
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
}

// newBox starts a daemon with the image base in it.
func newBox(t *testing.T, o daemontest.Options, b *box) *box {
	t.Helper()

	o.Programs, o.StateDir = b.versions[0].dir, filepath.Join(o.Instance.StateDir(), "year")
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

// upgrade runs the other version from now on.
func (b *box) upgrade(ctx context.Context) error {
	b.down.Lock()
	defer b.down.Unlock()
	b.deaths.Add(1)
	b.version = 1 - b.version
	b.Stop()
	b.Use(b.versions[b.version].dir)
	if err := b.TryStart(); err != nil {
		return fmt.Errorf("start %s after an upgrade: %w; it said:\n%s", b.versions[b.version].name, err, b.tail())
	}
	v, err := b.api.Version(ctx)
	if err == nil && v.Version != b.versions[b.version].name {
		err = fmt.Errorf("after an upgrade to %s the daemon is %s", b.versions[b.version].name, v.Version)
	}
	return err
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
