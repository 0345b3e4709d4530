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
	"time"

	openapi "github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/pools"
	"github.com/sandboxd/sandboxd/pkg/pressure"
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
	offer, err := offerOf(d)
	if err != nil {
		return nil, err
	}
	return api.New(api.Config{
		APIKeys:           keys,
		Keys:              d.store,
		Volumes:           pressure.Volumes{Volumes: sandbox.VolumesOf(d.manager), Ladder: d.ladder},
		Policies:          sandbox.PoliciesOf(d.manager),
		Pools:             d.pools,
		Vaults:            d.secrets,
		Flows:             flows{d.egress.FlowLog},
		Insecure:          d.cfg.Listen.Insecure,
		Secret:            secret,
		ExternalHost:      d.cfg.Listen.PublicAddress,
		Gateway:           d.announcedGateway(),
		ListenAddress:     d.cfg.Listen.TCP,
		TrustedProxies:    d.cfg.Listen.Proxies,
		RequestsPerSecond: d.cfg.Limits.RequestsPerSecond,

		Offer: offer,
		Host:  d.hostNames,
		Notes: d.notes,

		Differences: differences,

		Health:     d.healthOf,
		AwaitReady: d.watcher.Await,
		Use:        useHeld(d),
		Hold:       d.hold.Await,
		Trying:     d.hold.Trying,
		Impaired:   d.impaired,
		OpenAPI:    openapi.JSON,
		Docs:       openapi.Docs,
		Version: wire.Version{
			Version: version, Go: runtime.Version(), Instance: d.cfg.Instance.String(),
			Runtimes: []string{oci.Runsc, oci.Runc},
		},
		Forks:       d.forks,
		KeepsMemory: func(name string) bool { return name == oci.Runsc },
		System:      &system{Daemon: d, version: version, started: time.Now(), layers: map[string]int64{}},
		Backups:     backups{d.backups},
		Log:         d.log,
		History:     d.history,
		Left:        d.agents.openOutput,
		Network:     network{d},
		OnAnswer:    d.onAnswer,
	}, newAdmitted(d), pressure.Snapshots{Snapshots: d.manager.Snapshots(), Ladder: d.ladder},
		diffs{d.files}, pressure.Images{Store: d.images, Ladder: d.ladder}, d.agents, &stats{d.cgroups, d.files.Disks, d.agents})
}

// offerOf is what requests may ask for on this host, and what they get if they do not ask.
func offerOf(d *Daemon) (o spec.Offer, err error) {
	_, pool, err := d.files.Pool.Space()
	if err != nil {
		return o, err
	}
	total, err := memory("MemTotal")
	if err != nil {
		return o, err
	}
	canIO, _ := d.cgroups.LimitsIO()
	def := d.cfg.Defaults
	return spec.Offer{
		Runtime:      d.cfg.Runtime.Default,
		Security:     record.Security(def.Security),
		Network:      record.NetworkMode(def.Network),
		MemoryBytes:  int64(def.Memory),
		CPUMillis:    int64(def.CPU),
		Pids:         def.Pids,
		DiskBytes:    int64(def.Disk),
		LogBytes:     int64(def.LogSize),
		VolumeBytes:  int64(d.cfg.Storage.VolumeSize),
		MaxDiskBytes: pool,
		MaxTimeout:   time.Duration(d.cfg.Limits.MaxTimeout),
		Runtimes:     []string{oci.Runsc, oci.Runc},

		SecurityLevels: d.cfg.Security.Offered(),

		NoDisk:      !d.files.Pool.Limits(),
		NoIO:        !canIO,
		ParseRule:   policy.ParseRule,
		ParsePolicy: policy.FromJSON,
		NormalName:  policy.NormalName,
		HostAddress: d.egress.HostAddress,

		HostMemoryBytes: total,
	}, nil
}

// newPools makes the keeper of pools. It refuses one of which no member can be made.
func newPools(d *Daemon, member func(context.Context, record.Pool) (record.Spec, error)) *pools.Keeper {
	return &pools.Keeper{Store: d.store, Stock: sandbox.StockOf(d.manager), Check: func(ctx context.Context, p record.Pool) error {
		_, err := member(ctx, p)
		return err
	}}
}

// memberOf returns what makes of the template of a pool the specification of its members.
func memberOf(d *Daemon) (func(context.Context, record.Pool) (record.Spec, error), error) {
	o, err := offerOf(d)
	if err != nil {
		return nil, err
	}
	o.Complete()
	return func(ctx context.Context, p record.Pool) (record.Spec, error) {
		s, name, err := o.Member(&p)
		if err != nil {
			return s, err
		}
		ref, err := image.ParseReference(name)
		if err != nil {
			return s, err
		}
		i, err := d.images.Resolve(ctx, ref)
		if err != nil {
			return s, err
		}
		s.TakeImage(i)
		s.ImageURI = name
		return s, nil
	}, nil
}

// hostNames returns the names of r's resources on this host.
func (d *Daemon) hostNames(r record.Record) map[string]string {
	return map[string]string{
		"address": d.cfg.Addr(r.Slot).String(),
		"link":    netns.Link(r.ID),
		"netns":   d.ns.NetPath(r.ID),
		"cgroup":  d.cgroups.CgroupsPath(r.ID),
		"rootfs":  d.files.Mounts.RootfsDir(r.ID),
		"slot":    strconv.Itoa(r.Slot),
	}
}

// notes says where a limit of r does less than its name says.
func (d *Daemon) notes(r record.Record) (notes []string) {
	if _, writeback := d.cgroups.LimitsIO(); r.Spec.LimitsIO() && !writeback {
		if r.Spec.Runtime == oci.Runsc {
			notes = append(notes, "cgroup v1 limits reads and synced writes; writeback of the page cache is not limited, and gVisor "+
				"writes through the page cache, even if a program asks for direct writes (O_DIRECT)")
		} else {
			notes = append(notes,
				"cgroup v1 limits reads, direct writes and synced writes; writeback of the page cache is not limited")
		}
	}
	if r.Spec.Runtime == oci.Runsc && !r.Updated.IsZero() {
		notes = append(notes,
			"limits were changed while it ran: gVisor still shows the guest the memory and CPUs it started with; the new limits apply")
	}
	if !d.files.Pool.Limits() {
		notes = append(notes, "the storage pool is a plain directory: what this sandbox writes is not limited")
	}
	return notes
}

// readSecret returns the key that signs endpoint tokens, made at the first start.
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
	if err := durable.Write(path, b, 0o600); err != nil {
		return nil, fmt.Errorf("store the secret of endpoint tokens: %w", err)
	}
	return b, nil
}

var (
	_ api.Snapshots = pressure.Snapshots{}
	_ api.Volumes   = pressure.Volumes{}
	_ api.Policies  = (*sandbox.Policies)(nil)
	_ api.Images    = pressure.Images{}
)
