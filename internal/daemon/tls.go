package daemon

import (
	"crypto/tls"
	"net"

	"github.com/sandboxd/sandboxd/internal/certs"
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
