package terminate

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"sync"
)

// settings are a Config that is in use.
type settings struct {
	judge    Judge
	roots    *x509.CertPool
	sessions tls.ClientSessionCache

	mu   sync.Mutex
	old  bool              // others are in use
	sent map[*sending]bool // what is on its way
}

// replace ends the use of settings: when it returns, nothing leaves any more that they let pass.
func (c *settings) replace() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.old = true
	for s := range c.sent {
		if !s.leaves {
			s.revoke()
		}
	}
}

func (c *settings) replaced() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.old
}

// A sending is a request on its way. Transport may try more than once.
type sending struct {
	r      *http.Request
	a      Answerer  // or nil
	conf   *settings // which let it pass
	left   int       // how many connections of HTTP/2 it may still have; less than 0: it wanted one more
	cancel context.CancelFunc

	// Of these, conf.mu is held.
	conn    net.Conn // of this try
	leaves  bool     // its head is written, in this try
	ever    bool     // leaves, in this try or before
	revoked bool     // it wanted to leave, or to leave again, when its settings were replaced
}

// request is the one that is to be sent. Transport calls GotConn before each try, and over HTTP/2
// sends nothing when the context has ended before it writes the first field. Over HTTP/1.1 it then
// looks at no context, but writes at once. ReverseProxy has a hook for answers 1xx, which is called
// after this one, with the same header.
func (s *sending) request() *http.Request {
	ctx, cancel := context.WithCancel(s.r.Context()) // which ends with the guest's request
	s.conf.mu.Lock()
	defer s.conf.mu.Unlock()
	if s.conf.sent == nil {
		s.conf.sent = map[*sending]bool{}
	}
	s.cancel, s.conf.sent[s] = cancel, true
	ctx = context.WithValue(ctx, sendingKey{}, s)
	return s.r.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn:          func(info httptrace.GotConnInfo) { s.got(info.Conn) },
		WroteHeaderField: func(string, []string) { s.leave() },
		Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			if s.a == nil {
				return nil
			}
			resp := &http.Response{StatusCode: code, Header: http.Header(header), Body: http.NoBody, Request: s.r}
			err := s.a.Response(resp)
			changed := maps.Clone(resp.Header) // it may be another map
			clear(header)
			if err == nil {
				maps.Copy(header, textproto.MIMEHeader(changed))
			}
			return nil
		},
	}))
}

// A sendingKey is that of a sending in the context of its dials.
type sendingKey struct{}

// spent reports whether a dial is for a request that may not be sent on another connection. Transport
// does not ask: it opens the connection first, and two if the one that died is handed out once more.
func spent(dial context.Context) bool {
	s, ok := dial.Value(sendingKey{}).(*sending)
	if !ok {
		return false
	}
	s.conf.mu.Lock()
	defer s.conf.mu.Unlock()
	return s.left <= 0
}

// end is called when Transport tries no more. If it has failed, refused is why, or nil.
func (s *sending) end() (refused *Refusal) {
	s.conf.mu.Lock()
	defer s.conf.mu.Unlock()
	delete(s.conf.sent, s)
	switch {
	case s.revoked && !s.ever:
		return errChanged
	case s.revoked, s.left < 0:
		return errNotAgain
	}
	return nil
}

// got begins a try.
func (s *sending) got(conn net.Conn) {
	c, ok := conn.(*tls.Conn)
	h2 := ok && c.ConnectionState().NegotiatedProtocol == "h2"
	s.conf.mu.Lock()
	s.conn, s.leaves = conn, false
	switch {
	case !h2: // see leave
	case s.conf.old:
		s.revoke()
	default:
		if s.left--; s.left < 0 {
			s.cancel()
		}
	}
	s.conf.mu.Unlock()
	if !h2 {
		s.leave()
	}
}

// leave is called before a field of the head is written. If it may not leave, the connection is
// closed: nothing else would stop it. Over HTTP/2 that hits the guest's other requests on it, but
// only if the settings are replaced between this and Transport's last look at the context.
func (s *sending) leave() {
	s.conf.mu.Lock()
	conn, may := s.conn, s.leaves || !s.conf.old
	if may {
		s.leaves, s.ever = true, true
	} else {
		s.revoke()
	}
	s.conf.mu.Unlock()
	if may {
		return
	}
	if c, ok := conn.(*tls.Conn); ok {
		conn = c.NetConn() // tls.Conn would write to it
	}
	conn.Close()
}

// revoke ends a try that has not left.
//
// Preconditions: conf.mu is held.
func (s *sending) revoke() {
	s.revoked = true
	s.cancel()
}
