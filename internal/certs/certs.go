// Package certs serves a TLS certificate from two files and takes up what they
// become.
//
// The files are looked at when a client connects, not watched: certbot and
// Kubernetes swap symbolic links or directories, of which a watch on a file
// hears nothing and a watch on its directory not always, and two stat(2) cost
// less than a thousandth of a handshake. What cannot be used changes nothing:
// the certificate before it is served on, and Err says why.
package certs

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"
)

// retry is how soon files that could not be used are read again though they
// seem the same: who is written in place, and within one tick of the file
// system's clock, looks no different when it is whole.
const retry = time.Second

// Pair is a certificate and its key.
type Pair struct {
	cert, key string
	log       *slog.Logger

	mu   sync.Mutex
	now  *tls.Certificate // guarded by mu, as all below
	seen [2]state         // of the files, when they were last read
	read time.Time        // when that was
	err  error            // why what was read then is not in use
}

// state tells one content of a file from another without reading it.
type state struct {
	dev, ino     uint64
	size         int64
	mtime, ctime syscall.Timespec
}

// Load reads a certificate, with those that lead to its root behind it, and its
// key, both PEM. Only this first time is it an error if they cannot be used.
func Load(cert, key string, log *slog.Logger) (*Pair, error) {
	p := &Pair{cert: cert, key: key, log: log}
	if p.check(); p.err != nil {
		return nil, p.err
	}
	return p, nil
}

// Config is what listeners serve the pair with.
func (p *Pair) Config() *tls.Config {
	return &tls.Config{
		NextProtos:     []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.current(), nil },
	}
}

// Err looks at the files and returns why what they hold is not what is served,
// or that what is served has expired; nil if all is well.
func (p *Pair) Err() error {
	c := p.current()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil && time.Now().After(c.Leaf.NotAfter) {
		return fmt.Errorf("the certificate in %s expired at %s: clients refuse it; renew it", p.cert,
			c.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return p.err
}

func (p *Pair) current() *tls.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.check()
	return p.now
}

// check takes up what the files have become. Preconditions: mu is held, or
// nobody else knows p yet.
func (p *Pair) check() {
	var seen [2]state
	for i, name := range []string{p.cert, p.key} {
		seen[i] = look(name) // the zero state of what is not there differs from any other
	}
	now := time.Now()
	if seen == p.seen && (p.now != nil && p.err == nil || now.Sub(p.read) < retry) {
		return
	}
	again := seen == p.seen
	p.seen, p.read = seen, now // before they are read: what changes meanwhile is looked at again
	c, err := tls.LoadX509KeyPair(p.cert, p.key)
	if err == nil && now.After(c.Leaf.NotAfter) && p.now != nil && now.Before(p.now.Leaf.NotAfter) {
		err = fmt.Errorf("it expired at %s, and the one before it has not", c.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	if err != nil {
		p.err = fmt.Errorf("read the certificate %s and its key %s: %w; both must be PEM and belong together", p.cert, p.key, err)
		if p.now != nil && !again {
			p.log.Error("a new certificate cannot be used; the one before it is served on", "err", p.err)
		}
		return
	}
	if p.now != nil {
		p.log.Info("serving a new certificate", "file", p.cert, "expires", c.Leaf.NotAfter)
	}
	p.now, p.err = &c, nil
}

// look follows links: what counts is the file at their end.
func look(name string) state {
	fi, err := os.Stat(name)
	if err != nil {
		return state{}
	}
	st := fi.Sys().(*syscall.Stat_t)
	return state{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}
}
