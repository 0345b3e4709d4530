// Package certs serves a TLS certificate from two files and reloads them when they
// change.
//
// It checks the files when a client connects and does not watch them: certbot and
// Kubernetes swap symbolic links or directories. A watch on a file misses that, and a
// watch on its directory does not always see it. Two stat(2) cost less than a
// thousandth of a handshake. If the new files cannot be used, the old certificate stays
// in use, and Err says why.
package certs

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// retry is how soon unusable files are read again although they seem unchanged, and how long
// after its last change a file may be written again and look the same: its file system counts in
// ticks of its own. On vfat they are longer, of two seconds.
const retry = time.Second

// Pair is a certificate and its key.
type Pair struct {
	cert, key string
	log       *slog.Logger

	mu   sync.Mutex
	now  *tls.Certificate // guarded by mu, as are all below
	seen [2]state         // of the files, when they were last read
	read time.Time        // when that was
	err  error            // why the files as last read are not in use
}

// state identifies one content of a file without reading it.
type state struct {
	dev, ino     uint64
	size         int64
	mtime, ctime syscall.Timespec
}

// Load reads a certificate, followed by those that lead to its root, and its key, both
// PEM. Only this first time unusable files are an error.
func Load(cert, key string, log *slog.Logger) (*Pair, error) {
	p := &Pair{cert: cert, key: key, log: log}
	if p.check(); p.err != nil {
		return nil, p.err
	}
	return p, nil
}

// Config is the TLS configuration of listeners that serve the pair.
func (p *Pair) Config() *tls.Config {
	return &tls.Config{
		NextProtos:     []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.current(), nil },
	}
}

// Err checks the files and returns why their content is not in use, or that the
// certificate in use has expired; nil if all is well.
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

// Chain is the certificate in use, followed by those that lead to its root, as DER.
func (p *Pair) Chain() [][]byte { return p.current().Certificate }

func (p *Pair) current() *tls.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.check()
	return p.now
}

// check reads the files if they have changed.
// Preconditions: mu is held, or no other goroutine has p yet.
func (p *Pair) check() {
	var seen [2]state
	for i, name := range []string{p.cert, p.key} {
		seen[i] = look(name) // a missing file has the zero state, which differs from any other
	}
	now := time.Now()
	if seen == p.seen && !p.racy() && (p.now != nil && p.err == nil || now.Sub(p.read) < retry) {
		return
	}
	again := seen == p.seen && p.err != nil
	p.seen, p.read = seen, now // before they are read: a change in between is seen the next time
	c, err := tls.LoadX509KeyPair(p.cert, p.key)
	if err != nil {
		err = fmt.Errorf("%w; both must be PEM, and the key must belong to the certificate", err)
	} else if now.After(c.Leaf.NotAfter) && p.now != nil && now.Before(p.now.Leaf.NotAfter) {
		err = fmt.Errorf("it expired at %s, and the previous certificate has not", c.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	if err != nil {
		p.err = fmt.Errorf("read the certificate %s and its key %s: %w", p.cert, p.key, err)
		if p.now != nil && !again {
			p.log.Error("a new certificate cannot be used; still serving the previous one", "err", p.err)
		}
		return
	}
	if p.now != nil && (p.err != nil || !slices.EqualFunc(p.now.Certificate, c.Certificate, bytes.Equal)) {
		p.log.Info("serving a new certificate", "file", p.cert, "expires", c.Leaf.NotAfter)
	}
	p.now, p.err = &c, nil
}

// racy reports whether a file was read so soon after its last change that a later one may have its time.
func (p *Pair) racy() bool {
	for _, s := range p.seen {
		if age := p.read.Sub(time.Unix(s.ctime.Unix())); age > -retry && age < retry {
			return true
		}
	}
	return false
}

// look follows links: only the file at their end matters.
func look(name string) state {
	fi, err := os.Stat(name)
	if err != nil {
		return state{}
	}
	st := fi.Sys().(*syscall.Stat_t)
	return state{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}
}
