package daemon

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"time"

	openapi "github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func (d *Daemon) newServer(version string) (*api.Server, error) {
	keys, err := d.cfg.APIKeys()
	if err != nil {
		return nil, err
	}
	secret, err := readSecret(filepath.Join(d.cfg.StateDir, "endpoint-secret"))
	if err != nil {
		return nil, err
	}
	_, pool, err := d.disks.PoolSpace()
	if err != nil {
		return nil, err
	}
	def := d.cfg.Defaults
	return api.New(api.Config{
		APIKeys:      keys,
		Insecure:     d.cfg.Listen.Insecure == config.Insecure,
		Secret:       secret,
		ExternalHost: d.cfg.Listen.PublicAddress,
		Runtime:      d.cfg.Runtime.Default,
		Network:      record.NetworkMode(def.Network),
		MemoryBytes:  int64(def.Memory),
		CPUMillis:    int64(def.CPU),
		Pids:         def.Pids,
		DiskBytes:    int64(def.Disk),
		MaxDiskBytes: pool,
		MaxTimeout:   time.Duration(d.cfg.Limits.MaxTimeout),
		Runtimes:     []string{oci.Runsc, oci.Runc},
		NoDisk:       !d.disks.Limits(),
		ParseRule:    egress.ParseRule,
		ParsePolicy:  egress.FromPolicy,
		Host:         d.hostNames,
		OpenAPI:      openapi.JSON,
		Version: wire.Version{
			Version: version, Go: runtime.Version(), Instance: d.cfg.Instance.String(),
			Runtimes: []string{oci.Runsc, oci.Runc},
		},
		Log: d.log,
	}, &admitted{Manager: d.manager, max: d.cfg.Limits.MaxSandboxes}, d.images, d.agents, &stats{d.cgroups, d.disks}), nil
}

// hostNames says what r is called on this host.
func (d *Daemon) hostNames(r record.Record) map[string]string {
	return map[string]string{
		"address": d.cfg.Addr(r.Slot).String(),
		"link":    netns.Link(r.ID),
		"netns":   d.ns.NetPath(r.ID),
		"cgroup":  d.cgroups.CgroupsPath(r.ID),
		"rootfs":  d.disks.RootfsDir(r.ID),
		"slot":    strconv.Itoa(r.Slot),
	}
}

// readSecret returns what signs endpoint tokens, drawn at the first start.
func readSecret(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err == nil && len(b) >= 32 {
		return b, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the secret of endpoint tokens: %w", err)
	}
	b = make([]byte, 32)
	rand.Read(b) //nolint:errcheck // never fails since Go 1.24
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return nil, fmt.Errorf("keep the secret of endpoint tokens: %w", err)
	}
	return b, os.Rename(path+".new", path)
}

var (
	_ api.Sandboxes = (*admitted)(nil)
	_ api.Images    = (*image.Store)(nil)
)

// admitted is the Manager as the API wants it, behind the host's limit.
type admitted struct {
	*sandbox.Manager
	max int

	mu    sync.Mutex
	going int // creates that are not in the list yet, or just came into it
}

// Create refuses what would be one sandbox too many.
func (a *admitted) Create(ctx context.Context, s record.Spec) (record.Record, error) {
	if err := a.enter(ctx); err != nil {
		return record.Record{}, err
	}
	defer a.leave()
	return a.Manager.Create(ctx, s)
}

func (a *admitted) enter(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	all, err := a.List(ctx)
	if err != nil {
		return err
	}
	if len(all)+a.going >= a.max {
		return errs.New(errs.Exhausted, "create a sandbox: this host has its %d (limits.max_sandboxes); delete some, ended ones with `sandboxctl rm` too", a.max)
	}
	a.going++
	return nil
}

func (a *admitted) leave() {
	a.mu.Lock()
	a.going--
	a.mu.Unlock()
}

// Steps returns the steps of a creation in the API's words.
func (a *admitted) Steps(id string) (steps []api.Step) {
	for _, s := range a.Manager.Steps(id) {
		steps = append(steps, api.Step(s))
	}
	return steps
}

// Subscribe returns events in the API's words.
func (a *admitted) Subscribe(ctx context.Context) <-chan wire.Event {
	out := make(chan wire.Event)
	in := a.Manager.Subscribe(ctx)
	go func() {
		defer close(out)
		for e := range in {
			select {
			case out <- wire.Event(e):
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}
