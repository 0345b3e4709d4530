package daemon

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/secrets"
)

var _ sandbox.Egress = firewall{}

// openSecrets opens the key of this host's secrets and what keeps them. A missing key keeps
// nothing but what needs it from working.
func (d *Daemon) openSecrets(ctx context.Context) error {
	all, unreadable, err := d.store.Secrets(ctx)
	if err != nil {
		return err
	}
	// A new key opens nothing that another one has sealed.
	mayMake := len(all)+len(unreadable) == 0
	file := filepath.Join(d.cfg.StateDir, sealed.Credential)
	key, err := sealed.Open(os.Getenv("CREDENTIALS_DIRECTORY"), file, mayMake)
	if err != nil {
		d.log.Error("the key of this host's secrets cannot be used: sandboxes with inspected hosts do not start", "err", err)
	}
	d.secrets = secrets.New(secrets.Config{
		Store:  d.store,
		Key:    key,
		KeyErr: err,
		Host:   d.cfg.Egress.Host,
		Apply:  func(ctx context.Context, id string) error { return sandbox.Reregister(ctx, d.manager, id) },
		Logger: d.log,
	})
	for _, line := range d.secrets.Problems(ctx) {
		d.log.Error(line)
	}
	return nil
}

// firewall is the egress with the secrets of sandboxes, as the Manager's Egress.
type firewall struct {
	*egress.Engine
	secrets *secrets.Keeper
}

// Register puts policy and secrets of r in force together.
func (f firewall) Register(ctx context.Context, r *record.Record, addr netip.Addr) error {
	i, err := f.secrets.Inspection(ctx, r)
	if err != nil {
		return fmt.Errorf("read the secrets of sandbox %s: %w", r.ID, err)
	}
	return f.Engine.Register(ctx, r.ID, addr, r.Spec.Network, (*egress.Inspection)(i))
}

// authority returns the certificate of the authority of a sandbox that is about to start.
func (d *Daemon) authority(ctx context.Context, r *record.Record) ([]byte, error) {
	a, err := d.secrets.Authority(ctx, r, true)
	if err != nil {
		return nil, err
	}
	return a.Certificate(), nil
}

// inspected are the variables that a sandbox with inspected hosts gets beside its own: those
// by which its programs find what to trust, and placeholders of credentials.
func (d *Daemon) inspected(r *record.Record, trusted func(id string) (map[string]string, error)) (map[string]string, error) {
	env, err := trusted(r.ID)
	if err != nil {
		return nil, err
	}
	placeholders, err := d.secrets.Environment(context.Background(), r)
	if err != nil {
		return nil, fmt.Errorf("read the placeholders of sandbox %s: %w", r.ID, err)
	}
	maps.Copy(env, placeholders)
	return env, nil
}
