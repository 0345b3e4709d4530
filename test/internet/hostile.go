package internet

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path"
	"strings"
	"sync"
)

// The hosts of attacks on credentials. A value of a credential has a mark in it, see Mark. Each
// of these hosts looks for that mark in all that it gets, and keeps what was wrong about it.
const (
	BoundHost   = "bound.example"   // gets the value in Authorization, or in the query, below /v1/; nothing may come below /admin/
	RepeatHost  = "repeat.example"  // gets the value, and answers with what it got
	MovedHost   = "moved.example"   // gets the value; its owner lost it to Thief
	WatchedHost = "watched.example" // may not have it
	ThiefHost   = "thief.example"   // likewise
)

// Thief is an address whose servers have the certificate of ThiefHost, whatever name a client
// asks for.
var Thief = netip.MustParseAddr("203.0.113.245")

// hostile are the hosts of attacks on credentials.
type hostile struct {
	mu    sync.Mutex
	mark  string
	leaks []string
}

// Mark tells the hosts of attacks what the values of credentials have in them.
func (in *Internet) Mark(text string) {
	in.hostile.mu.Lock()
	defer in.hostile.mu.Unlock()
	in.hostile.mark = text
}

// Leaks are what was wrong since the last call: a value where it may not be, or a request that
// may not be.
func (in *Internet) Leaks() []string {
	in.hostile.mu.Lock()
	defer in.hostile.mu.Unlock()
	all := in.hostile.leaks
	in.hostile.leaks = nil
	return all
}

func (h *hostile) handlers() map[string]http.Handler {
	all := map[string]http.Handler{}
	for _, name := range []string{BoundHost, RepeatHost, MovedHost, WatchedHost, ThiefHost} {
		all[name] = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { h.serve(rw, r, name) })
	}
	return all
}

// A visit is a request with its body.
type visit struct {
	*http.Request
	name, body string
}

func (h *hostile) serve(rw http.ResponseWriter, r *http.Request, name string) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	v := visit{r, name, string(body)}
	h.mu.Lock()
	places := v.places(h.mark)
	wrong := v.wrong(places)
	if wrong != "" {
		h.leaks = append(h.leaks, fmt.Sprintf("%s %s %s: %s", r.Method, name, r.URL, wrong))
	}
	h.mu.Unlock()
	to, redirects := strings.CutPrefix(r.URL.Path, "/v1/to/")
	switch {
	case err != nil:
		return
	case name == RepeatHost:
		v.echo(rw)
	case redirects:
		http.Redirect(rw, r, "https://"+to, http.StatusTemporaryRedirect)
	case r.URL.Path == "/v1/upgrade" && strings.EqualFold(r.Header.Get("Upgrade"), "websocket"):
		h.tunnel(rw, r)
	default:
		said := "without a value"
		if len(places) > 0 {
			said = "with a value"
		}
		fmt.Fprintf(rw, "this is %s, %s\n", name, said) //nolint:errcheck // the client sees what is missing
	}
}

// places are where in a request the mark is.
func (v visit) places(mark string) (all []string) {
	look := func(place, text string) {
		if mark != "" && strings.Contains(text, mark) {
			all = append(all, place)
		}
	}
	look("path", v.URL.Path)
	look("query", v.URL.RawQuery)
	look("body", v.body)
	for name, values := range v.Header {
		look("header "+name, strings.Join(values, " "))
		for _, value := range values {
			_, coded, _ := strings.Cut(value, " ")
			plain, _ := base64.StdEncoding.DecodeString(coded) //nolint:errcheck // then it is none
			look("base64 in "+name, string(plain))
		}
	}
	for name, values := range v.Trailer {
		look("trailer "+name, strings.Join(values, " "))
	}
	return all
}

// movers are headers by which a server may take another request than the one that was judged.
var movers = []string{"X-Original-Url", "X-Rewrite-Url", "X-Forwarded-Host", "X-Http-Method-Override", "X-Host", "Forwarded"}

// plain is a path as some servers read it: without what follows a semicolon, and without dots.
func plain(p string) string {
	var all []string
	for segment := range strings.SplitSeq(p, "/") {
		segment, _, _ = strings.Cut(segment, ";")
		all = append(all, segment)
	}
	return path.Clean(strings.Join(all, "/"))
}

// wrong says why a request may not have come as it did, or is empty.
func (v visit) wrong(places []string) string {
	at, _ := v.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	clean := plain(v.URL.Path)
	switch {
	case v.name == BoundHost && strings.HasPrefix(clean+"/", "/admin/"):
		return "a path that a rule denies"
	case len(places) == 0:
		return ""
	case v.name == WatchedHost || v.name == ThiefHost:
		return fmt.Sprint("a value came to a host that it is not for, in ", places)
	case v.TLS == nil:
		return "a value came in clear text"
	case v.TLS.ServerName != v.name || at == nil || at.AddrPort().Addr().Unmap() == Thief:
		return fmt.Sprintf("a value came to %v, by TLS for %s", at, v.TLS.ServerName)
	case v.Method == http.MethodTrace || v.Method == http.MethodConnect:
		return "a value came with " + v.Method
	case !strings.HasPrefix(clean, "/v1/") || clean != v.URL.EscapedPath() && clean+"/" != v.URL.EscapedPath():
		return "a value came by a path that it is not for"
	}
	for _, place := range places {
		if place != "header Authorization" && place != "query" {
			return "a value came in " + place
		}
	}
	for _, name := range movers {
		if v.Header.Get(name) != "" {
			return "a value came with " + name
		}
	}
	return ""
}

// echo answers with the request. By its path it does so byte by byte, in hexadecimal, or in an
// answer 1xx, in headers, their names and trailers; for a client that asks for that, compressed.
func (v visit) echo(rw http.ResponseWriter) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s %s\n", v.Method, v.URL, v.Proto)
	v.Header.Write(&b) //nolint:errcheck // to memory
	b.WriteString(v.body)
	rw.Header().Set("Content-Type", "text/plain")
	switch {
	case v.URL.Path == "/v1/hex":
		io.WriteString(rw, hex.EncodeToString(b.Bytes())) //nolint:errcheck // the client sees what is missing
	case v.URL.Path == "/v1/drip":
		for _, c := range b.Bytes() {
			rw.Write([]byte{c})                    //nolint:errcheck // likewise
			http.NewResponseController(rw).Flush() //nolint:errcheck // likewise
		}
	case v.URL.Path == "/v1/head":
		said := v.Header.Get("Authorization")
		rw.Header().Set("X-Early", said)
		rw.WriteHeader(http.StatusEarlyHints)
		rw.Header().Set("X-"+strings.ReplaceAll(said, " ", ""), "a name")
		rw.Header().Set("Trailer", "X-Late")
		rw.Write([]byte("behind it")) //nolint:errcheck // likewise
		rw.Header().Set("X-Late", said)
	case strings.Contains(v.Header.Get("Accept-Encoding"), "gzip"):
		rw.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(rw)
		z.Write(b.Bytes()) //nolint:errcheck // likewise
		z.Close()          //nolint:errcheck // likewise
	default:
		rw.Write(b.Bytes()) //nolint:errcheck // likewise
	}
}

// tunnel is a WebSocket (RFC 6455) that takes what comes as it is.
func (h *hostile) tunnel(rw http.ResponseWriter, r *http.Request) {
	c, buffered, err := http.NewResponseController(rw).Hijack()
	if err != nil {
		return
	}
	defer c.Close()
	io.WriteString(c, switched(r)) //nolint:errcheck // the client sees what is missing
	b, _ := io.ReadAll(buffered)   //nolint:errcheck // what came before it counts
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mark != "" && bytes.Contains(b, []byte(h.mark)) {
		h.leaks = append(h.leaks, "a value came behind a change of protocols")
	}
}
