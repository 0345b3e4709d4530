package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"time"

	"github.com/sandboxd/sandboxd/internal/certs"
	"github.com/sandboxd/sandboxd/internal/metrics"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/validity"
)

// openCerts reads the certificates of the configuration.
func (d *Daemon) openCerts() (err error) {
	if l := d.cfg.Listen; l.TLSCert != "" {
		if d.cert, err = certs.Load(l.TLSCert, l.TLSKey, d.log); err != nil {
			return err
		}
	}
	d.gatewayCert = d.cert
	if g := d.cfg.Gateway; g.TLSCert != "" {
		d.gatewayCert, err = certs.Load(g.TLSCert, g.TLSKey, d.log)
	}
	return err
}

// secured returns l, with TLS if the configuration names a certificate for it.
func secured(l net.Listener, p *certs.Pair) net.Listener {
	if p == nil {
		return l
	}
	return tls.NewListener(l, p.Config())
}

// impaired is the fault that /health reports to everybody. Path and reason are only in
// the log.
func (d *Daemon) impaired() string {
	for _, p := range []*certs.Pair{d.cert, d.gatewayCert} {
		if p != nil && p.Err() != nil {
			return "the files of a certificate cannot be used; see the daemon's log"
		}
	}
	return ""
}

// openEnds makes what watches the ends of certificates and keys.
func openEnds(d *Daemon) {
	d.ends = &validity.Watch{
		Quick: func(ctx context.Context, now time.Time) ([]validity.End, error) { return configuredEnds(ctx, d, now) },
		Slow:  func(ctx context.Context, _ time.Time) ([]validity.End, error) { return authorityEnds(ctx, d) },
		Tell: func(e validity.End, text string) {
			sandbox.Tell(d.manager, events.Expires, e.What, text)
		},
		Log: d.log,
	}
}

// configuredEnds are the ends of certificates of the configuration and of API keys. Of a certificate that
// is served, the one in use counts.
func configuredEnds(ctx context.Context, d *Daemon, now time.Time) (all []validity.End, err error) {
	served := map[string]*certs.Pair{"listen.tls_cert": d.cert, "gateway.tls_cert": d.gatewayCert}
	var failed []error
	for _, f := range d.cfg.Certificates() {
		var e validity.End
		if p := served[f.Key]; p != nil {
			e, err = f.Of(p.Chain(), now)
		} else {
			e, err = f.End(now)
		}
		if err == nil {
			all = append(all, e)
		}
		failed = append(failed, err)
	}
	keys, err := d.store.Keys(ctx)
	return append(all, validity.Keys(keys, now)...), errors.Join(append(failed, err)...)
}

// authorityEnds are the ends of the authorities that guests trust which run. The others get a new one
// when they start.
func authorityEnds(ctx context.Context, d *Daemon) (all []validity.End, err error) {
	boxes, err := d.manager.List(ctx)
	failed := []error{err}
	for _, r := range boxes {
		if !r.Spec.Inspect || r.State != record.Running && !r.State.Still() {
			continue
		}
		at, err := d.secrets.AuthorityEnd(ctx, r.ID)
		switch {
		case err == nil:
			all = append(all, validity.Sandbox(r.ID, at))
		case !errs.Is(err, errs.NotFound):
			failed = append(failed, err)
		}
	}
	return all, errors.Join(failed...)
}

// lookAhead adds what is still to come to metrics: the ends of certificates and keys, full disks.
func lookAhead(d *Daemon, l *metrics.Look) {
	for _, e := range d.ends.Left() {
		l.Ends = append(l.Ends, metrics.End(e))
	}
	l.Pressure = map[string]int{}
	for space, rung := range d.ladder.Rungs() {
		l.Pressure[space] = int(rung)
	}
}
