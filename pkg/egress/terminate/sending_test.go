package terminate

import (
	"crypto/tls"
	"io"
	"net"
	"net/http/httptrace"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/net/http2"
)

// TestReplaced: when settings are replaced, nothing leaves any more that waits, and what has left
// goes on.
func TestReplaced(t *testing.T) {
	conf := &settings{}
	var waiting []*sending
	for range 100 {
		waiting = append(waiting, &sending{r: request(t, "POST", "https://"+host+"/", nil), conf: conf, left: 1})
	}
	left := &sending{r: request(t, "POST", "https://"+host+"/", nil), conf: conf, left: 1}
	conn, far := pair()
	defer conn.Close()
	defer far.Close()
	out := left.request()
	left.got(conn)
	for _, s := range waiting {
		s.r = s.request()
	}
	conf.replace()
	for i, s := range waiting {
		if s.r.Context().Err() == nil || s.end() != errChanged {
			t.Errorf("the request %d waits on", i)
		}
	}
	if refused := left.end(); out.Context().Err() != nil || refused != nil || len(conf.sent) > 0 {
		t.Errorf("one that has left: %v, %v; %d stay", out.Context().Err(), refused, len(conf.sent))
	}
}

// TestLastMoment: a request whose settings are replaced when Transport has looked at the context for
// the last time takes its connection with it.
func TestLastMoment(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		near, far := pair()
		defer near.Close()
		defer far.Close()
		conn := near
		if h2 {
			c := tls.Client(near, &tls.Config{RootCAs: public().Pool(), ServerName: host, NextProtos: []string{"h2"}})
			shaken := make(chan error, 1)
			go func() {
				shaken <- tls.Server(far, &tls.Config{Certificates: []tls.Certificate{certOf()}, NextProtos: []string{"h2"}}).Handshake()
			}()
			if err := c.Handshake(); err != nil {
				t.Fatal(err)
			}
			if err := <-shaken; err != nil {
				t.Fatal(err)
			}
			conn = c
		}
		conf := &settings{}
		s := &sending{r: request(t, "POST", "https://"+host+"/", nil), conf: conf, left: 1}
		trace := httptrace.ContextClientTrace(s.request().Context())
		if h2 {
			trace.GotConn(httptrace.GotConnInfo{Conn: conn})
		}
		conf.replace()
		if !h2 { // which Transport does not look at between this and the head
			trace.GotConn(httptrace.GotConnInfo{Conn: conn})
		}
		trace.WroteHeaderField(":authority", []string{host})
		if _, err := io.WriteString(conn, "head"); err == nil || s.end() != errChanged {
			t.Errorf("HTTP/2 %v: it leaves", h2)
		}
	}
}

// TestSentAndReplaced: a guest is not told to send a request again that the server has, because its
// settings are replaced before Transport sends it once more.
func TestSentAndReplaced(t *testing.T) {
	var d *desk
	var came atomic.Int32
	dial := func() (net.Conn, error) {
		near, far := pair()
		go func() {
			c := tls.Server(far, &tls.Config{Certificates: []tls.Certificate{certOf()}, NextProtos: []string{"h2"}})
			defer c.Close()
			if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
				return
			}
			f := http2.NewFramer(c, c)
			f.WriteSettings() //nolint:errcheck // the answer says
			for {
				frame, err := f.ReadFrame()
				if err != nil {
					return
				}
				if h, ok := frame.(*http2.HeadersFrame); ok {
					came.Add(1)
					if err := (Config{Roots: public().PEM(), Judge: []byte(secret)}).Send(t.Context(), d.line); err != nil {
						t.Error(err)
					}
					f.WriteRSTStream(h.StreamID, http2.ErrCodeProtocol) //nolint:errcheck // likewise
				}
			}
		}()
		return near, nil
	}
	d = newDesk(t, (&clerk{}).maker, dial)
	for i, method := range []string{"POST", "GET"} {
		resp, answer := get(t, d.client(true), request(t, method, "https://"+host+"/", nil))
		if n := came.Load(); resp.StatusCode != 502 || !strings.Contains(answer, "does not send the request again") || int(n) != i+1 {
			t.Errorf("%s: %d %s; the server got %d", method, resp.StatusCode, answer, n)
		}
	}
}
