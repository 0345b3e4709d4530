package judge

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
)

// fuzzMark is in all values of FuzzFields.
const fuzzMark = "sEcr3T-"

// An exit takes what the Judge sends on, and looks at it with a second reader.
type exit struct {
	judge terminate.Judge

	mu     sync.Mutex
	faults []string
}

// RoundTrip judges a request, and writes it as net/http does.
func (x *exit) RoundTrip(r *http.Request) (*http.Response, error) {
	r.URL.Scheme, r.URL.Host = "https", host
	to := terminate.Destination{Scheme: "https", Name: host, Port: 443, Addr: server}
	if _, err := x.judge.Request(r, to); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err := r.Write(&out)
	if why := odd(out.Bytes(), err == nil); why != "" {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.faults = append(x.faults, fmt.Sprintf("%s: %q", why, out.Bytes()))
	}
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: http.NoBody, Request: r}, nil
}

// odd says what is wrong about a request that was sent, or is empty. One that is not whole was
// broken off in its body.
func odd(sent []byte, whole bool) string {
	if len(sent) == 0 {
		return ""
	}
	all := bufio.NewReader(bytes.NewReader(sent))
	r, err := http.ReadRequest(all)
	if err != nil {
		return err.Error()
	}
	body, err := io.ReadAll(r.Body)
	if rest, _ := io.ReadAll(all); whole && (err != nil || len(rest) > 0) { //nolint:errcheck // of memory
		return fmt.Sprintf("%v, and %d bytes behind it", err, len(rest))
	}
	if said := strings.TrimSuffix(strings.ToLower(r.Host), ":443"); strings.TrimSuffix(said, ".") != host {
		return "it is for " + r.Host
	}
	// A servlet container cuts off what follows a semicolon, and then reads the dots.
	var segments []string
	for segment := range strings.SplitSeq(r.URL.EscapedPath(), "/") {
		segment, _, _ = strings.Cut(segment, ";")
		segments = append(segments, segment)
	}
	plain, err := url.PathUnescape(strings.Join(segments, "/"))
	if err != nil {
		return err.Error()
	}
	bound := true
	for _, reading := range []string{path.Clean(r.URL.Path), path.Clean(plain)} {
		v1 := strings.HasPrefix(reading+"/", "/v1/")
		if bound = bound && v1; !v1 && !strings.HasPrefix(reading, "/open") {
			return "no rule allows its path, which is read as " + reading
		}
	}
	bound = bound && slices.Contains([]string{"GET", "POST", "PUT", "PATCH", "DELETE"}, r.Method)
	has := func(text string) bool { return strings.Contains(text, fuzzMark) }
	for name, values := range r.Header {
		switch mine := bound && name == "Authorization"; {
		case mine && (len(values) != 1 || values[0] != "Bearer "+fuzzMark+"token"):
			return "it has another credential"
		case !mine && has(strings.Join(values, "")+name):
			return "a value is in " + name
		}
	}
	switch {
	case bound && len(r.Header["Authorization"]) == 0:
		return "it has no credential"
	case has(r.URL.Path), has(string(body)), has(fmt.Sprint(r.Trailer)), !bound && has(r.URL.RawQuery):
		return "a value is where it may not be"
	case bytes.Contains(sent, []byte("sbxph_")) && whole && placeholder(string(sent)):
		return "a placeholder was sent"
	}
	return ""
}

// placeholder reports whether a text has something that looks like one.
func placeholder(s string) bool {
	for _, rest := range strings.Split(s, "sbxph_")[1:] {
		if len(rest) >= 26 && strings.Trim(rest[:26], "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == "" {
			return true
		}
	}
	return false
}

// A pipe is a listener without a network.
type pipe chan net.Conn

func (p pipe) Accept() (net.Conn, error) { return <-p, nil }
func (p pipe) Close() error              { return nil }
func (p pipe) Addr() net.Addr            { return &net.TCPAddr{} }

// FuzzFields: whatever fields, body and trailers a guest sends by HTTP/2, what is sent on is one
// request for a second reader, to the host of the connection, and by a path that a rule allows in
// each of its readings; and a value stands in it only where the binding puts it.
func FuzzFields(f *testing.F) {
	v := vaultOf(f, inline("token", fuzzMark+"token")+","+inline("key", fuzzMark+"key"),
		`{"name":"b","match":{"hosts":["`+host+`"],"paths":["/v1/*"]},"auth":{"type":"bearer","credential":"token","substitutions":[
			{"credential":"key","placeholder":"KEY-OF-GUEST","in":["query"]}]}}`)
	const start = ":method\x00POST\x01:scheme\x00https\x01:path\x00/v1/a\x01:authority\x00" + host
	for _, s := range []string{
		"",
		"\x01authorization\x00TOKEN", "\x01authorization\x00x\x01authorization\x00y", "\x01x-other\x00KEY", "\x01host\x00other.example.com",
		"\x01content-length\x003", "\x01x-original-url\x00/admin", "\x01trailer\x00authorization", "\x01proxy_authorization\x00TOKEN",
		"\x01cookie\x00a=TOKEN\x01cookie\x00b=c",
	} {
		f.Add([]byte(start+s), []byte("abc"), []byte{})
	}
	for _, p := range []string{
		"/v1/../admin", "/v1/..;a/open", "/v1/%2e%2e/open", "/open/..%2fv1/a", "//v1/a", "/v1/TOKEN", "/v1/a?k=KEY-OF-GUEST&t=TOKEN",
	} {
		f.Add([]byte(strings.Replace(start, "/v1/a", p, 1)), []byte{}, []byte{})
	}
	f.Add([]byte(start), []byte("a TOKEN b"), []byte("authorization\x00TOKEN\x01x-t\x00KEY"))
	f.Add([]byte(strings.Replace(start, host, "other.example.com", 1)), []byte{}, []byte{})
	c := Config{Source: source, Network: network("rules", "allow "+host+" - /v1/*,/open*"), Vault: v.Encode()}
	j, err := Make(c.Encode(), deaf{}, nil)
	if err != nil {
		f.Fatal(err)
	}
	x := &exit{judge: j}
	quiet := log.New(io.Discard, "", 0)
	s := &http.Server{
		Protocols: new(http.Protocols), ErrorLog: quiet, DisableGeneralOptionsHandler: true,
		Handler: &httputil.ReverseProxy{
			Rewrite:   func(p *httputil.ProxyRequest) { p.Out.Host = p.In.Host },
			Transport: x, ErrorHandler: heads.TellFailed, ErrorLog: quiet,
		},
	}
	s.Protocols.SetUnencryptedHTTP2(true)
	conns := make(pipe)
	go s.Serve(conns) //nolint:errcheck // it ends with the process
	words := strings.NewReplacer(
		"TOKEN", v.Credential("token").Placeholder, "KEY-OF-GUEST", "KEY-OF-GUEST", "KEY", v.Credential("key").Placeholder,
	)
	f.Fuzz(func(t *testing.T, fields, body, trailers []byte) {
		if whole := bytes.Join([][]byte{fields, body, trailers}, nil); bytes.Contains(whole, []byte(fuzzMark[:6])) || len(whole) > 16<<10 {
			return // the guest would know it
		}
		send(t, conns, words.Replace(string(fields)), words.Replace(string(body)), words.Replace(string(trailers)))
		x.mu.Lock()
		defer x.mu.Unlock()
		for _, fault := range x.faults {
			t.Error(fault)
		}
		x.faults = nil
	})
}

// deaf is a Daemon that is told of events, and has no value.
type deaf struct{}

func (deaf) Value(context.Context, string) ([]byte, error) { return nil, errors.New("none") }
func (deaf) Event(terminate.Event)                         {}
func (deaf) Replaced() bool                                { return false }

// send sends one request, and returns when it has its answer.
func send(t *testing.T, conns pipe, fields, body, trailers string) {
	t.Helper()
	near, far := net.Pipe()
	defer near.Close()
	conns <- far
	var out, block bytes.Buffer
	out.WriteString(http2.ClientPreface)
	f, enc := http2.NewFramer(&out, near), hpack.NewEncoder(&block)
	head := func(text string, last bool) error {
		block.Reset()
		for field := range strings.SplitSeq(text, "\x01") {
			name, value, _ := strings.Cut(field, "\x00")
			enc.WriteField(hpack.HeaderField{Name: name, Value: value}) //nolint:errcheck // to memory
		}
		return f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: last})
	}
	err := errors.Join(f.WriteSettings(), head(fields, body == "" && trailers == ""))
	if body != "" {
		err = errors.Join(err, f.WriteData(1, trailers == "", []byte(body)))
	}
	if trailers != "" {
		err = errors.Join(err, head(trailers, true))
	}
	if err != nil {
		return // too large for a frame
	}
	go near.Write(out.Bytes()) //nolint:errcheck // it may be refused
	for ended := false; !ended; {
		g, err := f.ReadFrame()
		if err != nil {
			return
		}
		_, away := g.(*http2.GoAwayFrame)
		_, reset := g.(*http2.RSTStreamFrame)
		ended = away || reset || g.Header().StreamID == 1 && g.Header().Flags.Has(http2.FlagDataEndStream)
	}
}
