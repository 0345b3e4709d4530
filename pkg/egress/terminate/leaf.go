package terminate

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
)

const (
	maxLeaves = 128             // of names; of more, one is asked for again
	leafLimit = 5 * time.Second // for the daemon to make one
	leafSpare = 5 * time.Minute // before its end, a leaf is asked for again
)

// leaves keeps the certificates that the daemon has made.
type leaves struct {
	mu     sync.Mutex
	byName map[string]*leaf
}

// A leaf is asked for once, however many flows wait for it.
type leaf struct {
	done chan struct{} // closed when what follows is there
	cert *tls.Certificate
	err  error
}

// of returns the certificate for a name.
func (l *leaves) of(ctx context.Context, line *child.Conn, name string) (*tls.Certificate, error) {
	l.mu.Lock()
	c := l.byName[name]
	if c == nil || c.old(time.Now()) {
		if l.byName == nil {
			l.byName = map[string]*leaf{}
		}
		for other := range l.byName { // whichever: a sandbox has few marked names
			if len(l.byName) < maxLeaves {
				break
			}
			delete(l.byName, other)
		}
		c = &leaf{done: make(chan struct{})}
		l.byName[name] = c
		go l.ask(c, line, name)
	}
	l.mu.Unlock()
	select {
	case <-c.done:
		return c.cert, c.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// old reports whether a leaf is to be asked for again: it ends soon, or the clock was set back
// to before it begins.
func (c *leaf) old(now time.Time) bool {
	select {
	case <-c.done:
		return now.Before(c.cert.Leaf.NotBefore) || now.After(c.cert.Leaf.NotAfter.Add(-leafSpare))
	default:
		return false
	}
}

func (l *leaves) ask(c *leaf, line *child.Conn, name string) {
	ctx, cancel := context.WithTimeout(context.Background(), leafLimit)
	defer cancel()
	if c.cert, c.err = ask(ctx, line, name); c.err != nil {
		c.err = fmt.Errorf("get a certificate for %s of the daemon: %w", name, c.err)
		l.mu.Lock()
		if l.byName[name] == c {
			delete(l.byName, name)
		}
		l.mu.Unlock()
	}
	close(c.done)
}

func ask(ctx context.Context, line *child.Conn, name string) (*tls.Certificate, error) {
	m, err := line.Call(ctx, KindLeaf, []byte(name), nil)
	if err != nil {
		return nil, err
	}
	l, err := ParseLeaf(m.Body)
	if err != nil {
		return nil, err
	}
	if len(l.Chain) == 0 {
		return nil, errors.New(l.Text)
	}
	key, err := x509.ParsePKCS8PrivateKey(l.Key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(l.Chain[0])
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: l.Chain, PrivateKey: key, Leaf: cert}, nil
}
