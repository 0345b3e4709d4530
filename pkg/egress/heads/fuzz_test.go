package heads

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"time"
	"unicode"
)

// only is a connection from which b can be read, and nothing after it.
type only struct{ b *bytes.Reader }

func (o only) Read(p []byte) (int, error)       { return o.b.Read(p) }
func (o only) Write(p []byte) (int, error)      { return len(p), nil }
func (o only) Close() error                     { return nil }
func (o only) LocalAddr() net.Addr              { return nil }
func (o only) RemoteAddr() net.Addr             { return nil }
func (o only) SetDeadline(time.Time) error      { return nil }
func (o only) SetReadDeadline(time.Time) error  { return nil }
func (o only) SetWriteDeadline(time.Time) error { return nil }

// theirs is the name that crypto/tls reads in b. ok is false if it reads no ClientHello.
func theirs(b []byte) (name string, ok bool) {
	s := tls.Server(only{bytes.NewReader(b)}, &tls.Config{
		MinVersion: tls.VersionTLS10,
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			name, ok = h.ServerName, true
			return nil, errors.New("enough")
		},
	})
	s.Handshake() //nolint:errcheck // it fails
	return name, ok
}

// FuzzServerName: of a ClientHello that both read, crypto/tls reads the same name, however
// its records are cut. What is not all there needs more, and never changes its name by it.
func FuzzServerName(f *testing.F) {
	f.Add(clientHello(f, &tls.Config{ServerName: "allowed.test"}), uint16(7), uint16(100))
	f.Add(clientHello(f, &tls.Config{MaxVersion: tls.VersionTLS12}), uint16(1), uint16(9))
	f.Add(withName(f, "allowed.test\x00.other.test"), uint16(500), uint16(0))
	f.Add([]byte("\x16\x03\x01\x00\x04\x01\x00\x00\x00"), uint16(1), uint16(6))
	f.Fuzz(func(t *testing.T, b []byte, size, cut uint16) {
		name, err := serverName(b)
		other, read := theirs(b)
		switch {
		case err == nil && read && name != other:
			t.Fatalf("here %q, crypto/tls %q", name, other)
		case errors.Is(err, errMore) && read:
			t.Fatalf("more is wanted, but crypto/tls reads %q", other)
		}
		short, serr := serverName(b[:min(int(cut), len(b))])
		if serr == nil && (err != nil || short != name) {
			t.Fatalf("a part has the name %q, the whole %q (%v)", short, name, err)
		}
		if err != nil {
			return
		}
		msg, used, err := handshake(b)
		if err != nil || used > len(b) || len(msg) > MaxHead || len(name) > len(msg) {
			t.Fatalf("%d bytes in %d, %v", len(msg), used, err)
		}
		part := max(int(size)%len(msg)+1, (len(msg)+maxRecords-1)/maxRecords)
		var again []byte
		for rest := msg; len(rest) > 0; {
			n := min(part, len(rest))
			again = append(append(again, 22, 3, 1, byte(n>>8), byte(n)), rest[:n]...)
			rest = rest[n:]
		}
		if got, err := serverName(again); err != nil || got != name {
			t.Fatalf("in records of %d bytes: %q, %v; want %q", part, got, err, name)
		}
	})
}

// pythons reports whether Python's http.server reads the first line of s as a request: it
// splits ISO 8859-1 at any space (BaseHTTPRequestHandler.parse_request).
func pythons(s string) bool {
	line, _, ok := strings.Cut(s, "\n")
	words := strings.FieldsFunc(latin(line), func(c rune) bool {
		return unicode.IsSpace(c) || 0x1c <= c && c <= 0x1f
	})
	switch {
	case !ok || len(words) < 2 || strings.ContainsFunc(words[0], func(c rune) bool { return c <= ' ' || c > '~' }):
		return false
	case len(words) == 2:
		return words[0] == "GET" && strings.HasPrefix(words[1], "/")
	}
	return len(words) == 3 && strings.HasPrefix(words[2], "HTTP/")
}

func latin(s string) string {
	var b strings.Builder
	for i := range len(s) {
		b.WriteRune(rune(s[i]))
	}
	return b.String()
}

// FuzzBeginning: what crypto/tls reads as a ClientHello, and net/http or Python as a request,
// is never taken for another protocol, and neither is its beginning. Its Host has the name
// that net/url reads.
func FuzzBeginning(f *testing.F) {
	f.Add("GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n", uint16(3))
	f.Add("POST http://Allowed.test:80/ HTTP/1.0\r\nHost: other.test\r\n\r\n", uint16(20))
	f.Add(preface+"\r\nSM\r\n\r\n", uint16(10))
	f.Add("\r\n\r\nGET\t/ http/1.1\r\n\r\n", uint16(5))
	f.Add("SSH-2.0-x\r\n", uint16(4))
	f.Add("GET\x1c/\xe0\xa0bc\x85HTTP/1.1\r\n\r\n", uint16(9))
	f.Add("GET\r/\rHTTP/1.1\r\n\r\n", uint16(6))
	f.Add("GET /\x01\x7f HTTP/1.1\r\n\r\n", uint16(6))
	f.Add("G\"T / HTTP/1.1\r\n\r\n", uint16(2))
	f.Add("GET /\r\nHost: other.test\r\n\r\n", uint16(6))
	f.Add("\x16\x02\x00"+string(withName(f, "a.test")[3:]), uint16(4))
	f.Add("\x15\x0f\xff\x00\x02\x01\x5a"+string(withName(f, "a.test")), uint16(4))
	f.Add("\x80\x2e\x01\x03\x03", uint16(2))
	f.Fuzz(func(t *testing.T, s string, cut uint16) {
		begins := beginning([]byte(s))
		if begins < more || begins > other {
			t.Fatal(begins)
		}
		part := beginning([]byte(s[:min(int(cut), len(s))]))
		if part != more && part != begins {
			t.Fatalf("a part begins as %d, the whole as %d", part, begins)
		}
		if _, read := theirs([]byte(s)); read && begins != isTLS {
			t.Fatalf("crypto/tls reads a ClientHello, here it is %d", begins)
		}
		if pythons(s) && begins != isHTTP && begins != isH2 {
			t.Fatalf("Python reads a request, here it is %d", begins)
		}
		q, err := http.ReadRequest(bufio.NewReader(strings.NewReader(s)))
		if err != nil {
			return
		}
		if begins != isHTTP && begins != isH2 {
			t.Fatalf("net/http reads %s %s for %q here %d", q.Method, q.RequestURI, q.Host, begins)
		}
		name := HostName(q.Host)
		if PlainName(name) != name {
			t.Fatalf("%q is not in normal form", name)
		}
		u, err := url.Parse("http://" + q.Host + "/")
		if name == "" || err != nil {
			return
		}
		if want := strings.TrimSuffix(strings.ToLower(u.Hostname()), "."); name != want {
			t.Fatalf("%q is %q here, %q for net/url", q.Host, name, want)
		}
	})
}

// FuzzTarget: a request that is sent on says one host only, the one that was judged.
func FuzzTarget(f *testing.F) {
	f.Add("GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n")
	f.Add("GET http:http://other.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n")
	f.Add("GET http://allowed.test/a?b HTTP/1.1\r\nHost: other.test\r\n\r\n")
	f.Add("GET //other.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n")
	f.Add("OPTIONS * HTTP/1.1\r\nHost: allowed.test\r\n\r\n")
	f.Fuzz(func(t *testing.T, s string) {
		q, err := http.ReadRequest(bufio.NewReader(strings.NewReader(s)))
		if err != nil || q.Method == http.MethodConnect || !PlainTarget(q, "http") {
			return
		}
		judged := HostName(q.Host)
		p := &httputil.ProxyRequest{In: q, Out: q.Clone(t.Context())}
		rewrite(p)
		if host := p.Out.URL.Hostname(); host != judged && (judged != "" || host != nameless) {
			t.Fatalf("%q is sent to %q, and %q was judged", s, host, judged)
		}
		p.Out.Body, p.Out.ContentLength, p.Out.TransferEncoding = nil, 0, nil
		var out bytes.Buffer
		if err := p.Out.Write(&out); err != nil {
			return // it is not sent
		}
		again, err := http.ReadRequest(bufio.NewReader(&out))
		if err != nil {
			return // no server reads it
		}
		target, host := again.RequestURI, HostName(again.Host)
		if again.Host == nameless { // net/http puts it where a request has no Host
			host = ""
		}
		if !strings.HasPrefix(target, "/") && target != "*" || host != judged {
			t.Fatalf("%q arrives as %s of %q; %q was judged", s, target, again.Host, judged)
		}
	})
}

// FuzzMessages: what a child sends is refused, or is written again as it came.
func FuzzMessages(f *testing.F) {
	f.Add(Open{7, TLS, "allowed.test"}.Append(nil))
	f.Add(Closed{7, 1}.Append(nil))
	f.Add([]byte("\x00\x00\x00\x00\x00\x00\x00\x00\x02Allowed.test"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if o, err := ParseOpen(b); err == nil && (!bytes.Equal(o.Append(nil), b) || o.Name != PlainName(o.Name) || len(o.Name) > 253) {
			t.Fatalf("%v", o)
		}
		if c, err := ParseClosed(b); err == nil && !bytes.Equal(c.Append(nil), b) {
			t.Fatalf("%v", c)
		}
	})
}

// TestNames has the forms of names that clients send.
func TestNames(t *testing.T) {
	for host, want := range map[string]string{
		"allowed.test": "allowed.test", "ALLOWED.Test.": "allowed.test", "allowed.test:8080": "allowed.test",
		"allowed.test.:": "allowed.test",
		"":               "", ".": "", "127.0.0.1": "", "127.0.0.1:80": "", "[::1]:80": "", "::1": "", "127.1": "", "0x7f.0x1": "",
		"2130706433": "",
		"a..b":       "", "a b": "",
		"user@allowed.test": "", "allowed.test/": "", "allowed.test\x00": "", "bücher.test": "",
		"xn--bcher-kva.test": "xn--bcher-kva.test", "_sip.allowed.test": "_sip.allowed.test", strings.Repeat("a", 64) + ".test": "",
		strings.Repeat("a.", 127) + "b": "", "allowed.test:80:80": "",
	} {
		if got := HostName(host); got != want {
			t.Errorf("%q: %q, want %q", host, got, want)
		}
	}
}
