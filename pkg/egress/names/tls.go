package names

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	// MaxStreams is how many connections to one server the daemon keeps for DNS over TLS.
	MaxStreams = 16
	// streamIdle is how long a connection is used again: servers close idle ones after some
	// seconds (RFC 7858, section 3.4).
	streamIdle = 5 * time.Second
	maxRoots   = 4 << 20 // bytes of certificates
)

// pool has the idle connections to one server that is asked by TLS.
type pool struct {
	config *tls.Config

	mu   sync.Mutex
	idle []idle
}

type idle struct {
	conn  *tls.Conn
	until time.Time
}

// readRoots reads the certificates of authorities.
func readRoots(f *os.File) (*x509.CertPool, error) {
	defer f.Close()
	pem, err := io.ReadAll(io.NewSectionReader(f, 0, maxRoots)) // every child begins at the beginning
	if err != nil {
		return nil, fmt.Errorf("read the certificates of authorities: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	return roots, nil
}

// openPools makes a pool for each server that is asked by TLS.
func (s *setup) openPools(roots *x509.CertPool) {
	s.tls = make([]*pool, len(s.Upstreams))
	if roots == nil {
		roots = x509.NewCertPool() // trusts nobody; nil would be the host's
	}
	for i, u := range s.Upstreams {
		if u.TLS == "" {
			continue
		}
		s.tls[i] = &pool{config: &tls.Config{
			ServerName: u.TLS, RootCAs: roots, MinVersion: tls.VersionTLS12,
			ClientSessionCache: tls.NewLRUClientSessionCache(4),
		}}
	}
}

// ready reports whether a connection waits to be used.
func (p *pool) ready(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.idle) > 0 && now.Before(p.idle[len(p.idle)-1].until)
}

func (p *pool) take(now time.Time) *tls.Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.idle) > 0 {
		last := p.idle[len(p.idle)-1]
		p.idle = p.idle[:len(p.idle)-1]
		if now.Before(last.until) {
			return last.conn
		}
		last.conn.Close()
	}
	return nil
}

func (p *pool) give(c *tls.Conn, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.idle) >= MaxStreams {
		c.Close()
		return
	}
	p.idle = append(p.idle, idle{c, now.Add(streamIdle)})
}

// ask asks by a connection that is open, or by a new one.
func (p *pool) ask(x *exchange, n int, file *os.File, q *dns.Msg, b []byte, until time.Time) (*dns.Msg, error) {
	if file == nil {
		if c := p.take(time.Now()); c != nil {
			if a, err := byStream(c, q, b, until); err == nil {
				p.give(c, time.Now())
				return a, nil
			}
			c.Close() // the server has closed it
		}
		var err error
		if file, err = x.socket(n, true); err != nil {
			return nil, err
		}
	}
	c := tls.Client(fileConn{file}, p.config)
	a, err := byStream(c, q, b, until)
	if err != nil {
		c.Close()
		return nil, err
	}
	p.give(c, time.Now())
	return a, nil
}
