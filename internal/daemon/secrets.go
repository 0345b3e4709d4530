package daemon

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/history"
	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/secrets"
)

var _ sandbox.Egress = firewall{}

// inspectShare is the part of the host's memory that all children which decrypt for sandboxes
// may use together.
const inspectShare = 4

// rootsOf reads the certificates by which servers are verified; nil: those of the host.
func rootsOf(cfg *config.Config) func() ([]byte, error) {
	if cfg.Network.Roots == "" {
		return nil
	}
	return cfg.Network.ReadRoots
}

// openKey opens the key of this host's secrets.
func openKey(cfg *config.Config, mayMake bool) (*sealed.Key, error) {
	return sealed.Open(os.Getenv("CREDENTIALS_DIRECTORY"), filepath.Join(cfg.StateDir, sealed.Credential), mayMake)
}

// openSecrets opens the key of this host's secrets and what keeps them. A missing key keeps
// nothing but what needs it from working.
func openSecrets(ctx context.Context, d *Daemon) error {
	all, unreadable, err := d.store.Secrets(ctx)
	if err != nil {
		return err
	}
	// A new key opens nothing that another one has sealed.
	mayMake := len(all)+len(unreadable) == 0
	key, err := openKey(d.cfg, mayMake)
	if err != nil {
		d.log.Error("the key of this host's secrets cannot be used: sandboxes with inspected hosts do not start", "err", err)
	}
	d.secrets = secrets.New(secrets.Config{
		Store:  d.store,
		Key:    key,
		KeyErr: err,
		Host:   d.cfg.Egress.Host,
		Apply: func(ctx context.Context, id string) error {
			d.agents.changed(id)
			return sandbox.Reregister(ctx, d.manager, id)
		},
		Mask:   d.cfg.Egress.MaskSecrets,
		Try:    func(ctx context.Context, id string) (bool, error) { return sandbox.TryReregister(ctx, d.manager, id) },
		Logger: d.log,
	})
	return checkSecrets(ctx, d, key)
}

// checkSecrets logs which secrets do not open, and seals anew what an older key has sealed.
func checkSecrets(ctx context.Context, d *Daemon, key *sealed.Key) error {
	if key != nil && len(key.IDs()) > 1 {
		n, left, err := backup.Reseal(ctx, d.store, key)
		if err != nil {
			return fmt.Errorf("seal secrets with the new key: %w", err)
		}
		d.log.Info("secrets are sealed with the first key", "key", key.ID(), "n", n, "left", left)
	}
	s, err := backup.CheckSecrets(ctx, d.store, key)
	if err != nil {
		return err
	}
	for _, line := range s.Problems(key) {
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
	return f.Engine.Register(ctx, r.ID, addr, r.Spec.Network, i)
}

// vaultOfCopies is fork.Config.Vault. A policy that the copies have by name counts as it is now.
func vaultOfCopies(d *Daemon) func(context.Context, *record.Record, *record.Spec) (bool, error) {
	return func(ctx context.Context, source *record.Record, copies *record.Spec) (bool, error) {
		if !source.Spec.Inspect { // it can have none
			return false, nil
		}
		n, use := copies.Network, copies.Policy
		if use.Uses(use.Name) {
			p, err := sandbox.PoliciesOf(d.manager).Get(ctx, use.Name)
			if err != nil {
				return false, err
			}
			v := p.Newest()
			if use.Pinned {
				v, _ = p.Version(use.Version) // one that is not kept is refused when the first copy is created
			}
			n = v.Network
		}
		return d.secrets.CheckCopy(ctx, source, n)
	}
}

// authorityOf returns the certificate of the authority of a sandbox that is about to start.
func authorityOf(k *secrets.Keeper) func(context.Context, *record.Record) ([]byte, error) {
	return func(ctx context.Context, r *record.Record) ([]byte, error) {
		a, err := k.Authority(ctx, r, true)
		if err != nil {
			return nil, err
		}
		return a.Certificate(), nil
	}
}

// noteInspected is called with what is noticed in decrypted connections: a sandbox causes few.
// The Engine has logged it.
func noteInspected(d *Daemon, e egress.InspectEvent) {
	now := time.Now()
	text := inspected(e)
	if d.history.Note(e.ID, history.Network, now, text) && d.denials.allow(e.ID, now) {
		d.denials.tellReaders(e.ID, text)
	}
	if e.Kind == egress.InspectRule {
		d.denials.note(e.ID, wire.Denial{Time: now.UTC(), Protocol: "http", Name: e.Host, Rule: e.Text, By: egress.ByPolicy, Reason: text})
	}
}

// inspected says in words what an event is.
func inspected(e egress.InspectEvent) string {
	host := cmp.Or(e.Host, "no host")
	placeholder := "denied: the placeholder of " + e.Credential
	text := map[string]string{
		egress.InspectRule:        "denied " + e.Method + " to " + host,
		egress.InspectForeign:     "denied: a placeholder that is none of this sandbox was sent to " + host,
		egress.InspectWrongHost:   placeholder + " was sent to " + host + ", where it is not bound",
		egress.InspectWrongPlace:  placeholder + " is in the " + e.Place + " of a request to " + host + ", where it is not bound",
		egress.InspectMalformed:   "denied: a request to " + host + " that servers could read in different ways",
		egress.InspectUnavailable: "denied: the value of " + e.Credential + " for " + host + " cannot be had",
		egress.InspectEcho:        "the value of " + e.Credential + " is in an answer of " + host,
		egress.InspectUntrusted:   "a program does not trust the authority of this sandbox, so it does not reach " + host,
		egress.InspectHandshake:   "TLS of a program failed on the way to " + host,
		egress.InspectLeft:        "a program got the certificate of this sandbox's authority for " + host + ", and sent no request",
		egress.InspectUnverified:  "the certificate of " + host + " cannot be verified, so nothing is sent there",
		egress.InspectWantsClient: host + " wants a certificate of its client, and sandboxd has none",
		egress.InspectNoChild:     "no child that decrypts for this sandbox runs, so its connections by name are reset",
	}[e.Kind]
	switch {
	case e.Kind == egress.InspectRule:
		text += ": " + egress.Denial{By: egress.ByPolicy, Rule: e.Text}.Reason()
	case e.Text != "":
		text += ": " + e.Text
	}
	return text
}
