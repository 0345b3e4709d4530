package api

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// A lasting is a request that goes on until somebody ends it.
type lasting struct {
	net.Conn
	in *bufio.Reader
}

// lasts begins a request by a listener, and waits until its answer has begun, if begins is not empty.
func lasts(t *testing.T, url, head, begins string) *lasting {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	fmt.Fprint(c, strings.ReplaceAll(head, "\n", "\r\n")+"\r\n\r\n")
	l := &lasting{c, bufio.NewReader(c)}
	c.SetReadDeadline(time.Now().Add(30 * time.Second))
	for text := ""; begins != "" && !strings.Contains(text, begins); {
		b, err := l.in.ReadByte()
		if text += string(b); err != nil {
			t.Fatalf("%s: %q, %v", head, text, err)
		}
	}
	return l
}

// ends returns what still comes.
func (l *lasting) ends(t *testing.T) string {
	t.Helper()
	l.SetReadDeadline(time.Now().Add(15 * time.Second))
	b, err := io.ReadAll(l.in)
	if ne, ok := err.(net.Error); ok && ne.Timeout() { //nolint:errorlint // that of the connection
		t.Errorf("it goes on: %.200q", b)
	}
	return string(b)
}

// TestRevoked: what a key began ends with the key, whatever it is, and nothing of another key does.
func TestRevoked(t *testing.T) {
	for _, way := range []string{"removed", "expired", "first"} {
		t.Run(way, func(t *testing.T) {
			asked := make(chan struct{}, 1)
			app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Upgrade") != "" {
					c, buf, err := http.NewResponseController(rw).Hijack()
					if err != nil {
						return
					}
					defer c.Close()
					buf.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\nbegun")
					buf.Flush()
					io.Copy(io.Discard, c) //nolint:errcheck // until it is closed
					return
				}
				if strings.HasSuffix(r.URL.Path, "/silent") {
					asked <- struct{}{}
					<-r.Context().Done()
					return
				}
				rw.Header().Set(agent.CursorHeader, "0")
				io.WriteString(rw, "begun")            //nolint:errcheck // the client says what it got
				http.NewResponseController(rw).Flush() //nolint:errcheck // as above
				<-r.Context().Done()
			}))
			t.Cleanup(app.Close)
			w := newWorld(t, func(c *Config) {
				if way == "first" {
					c.APIKeys, c.Insecure = nil, true
				}
			})
			w.app, w.agentAt = app.Listener, app.Listener
			id := w.create().ID
			var k wire.NewKey
			until, why := time.Now().Add(5*time.Second), "API key ci was removed"
			switch way {
			case "removed":
				k.Secret = w.key(t, "ci", "operator")
			case "expired":
				why = "API key ci expired at"
				a := w.do("POST", "/v1/keys", fmt.Sprintf(`{"name":"ci","role":"operator","expiresAt":%q}`,
					until.UTC().Format(time.RFC3339Nano)))
				if err := json.Unmarshal(a.body, &k); err != nil {
					t.Fatal(err, a.StatusCode)
				}
			case "first":
				k.Secret, why = "", "the first API key"
			}
			as := func(secret, line string) string {
				if secret == "" {
					return line + "\nHost: " + strings.TrimPrefix(w.url, "http://")
				}
				return line + "\nHost: x\n" + wire.HeaderAPIKey + ": " + secret
			}
			proxy := "/sandboxes/" + id + "/proxy/"
			const upgrade = "\nConnection: Upgrade\nUpgrade: x"
			begun := map[string]*lasting{
				"events":                  lasts(t, w.url, as(k.Secret, "GET /events HTTP/1.1"), "\r\n\r\n"),
				"logs":                    lasts(t, w.url, as(k.Secret, "GET /sandboxes/"+id+"/logs?follow=true HTTP/1.1"), "begun"),
				"a page":                  lasts(t, w.url, as(k.Secret, "GET "+proxy+"8000/ HTTP/1.1"), "begun"),
				"a command":               lasts(t, w.url, as(k.Secret, "GET "+proxy+"44772/command HTTP/1.1"), "begun"),
				"a WebSocket":             lasts(t, w.url, as(k.Secret, "GET "+proxy+"8000/ HTTP/1.1"+upgrade), "begun"),
				"a terminal of the agent": lasts(t, w.url, as(k.Secret, "GET "+proxy+"44772/pty HTTP/1.1"+upgrade), "begun"),
			}
			silent := map[string]*lasting{
				"a page that says nothing": lasts(t, w.url, as(k.Secret, "GET "+proxy+"8000/silent HTTP/1.1\nConnection: close"), ""),
				"a body that never comes": lasts(t, w.url, as(k.Secret, "PATCH /sandboxes/"+id+"/metadata HTTP/1.1\n"+
					"Content-Type: application/json\nContent-Length: 9\nConnection: close\nExpect: 100-continue"), "100 Continue"),
			}
			if way != "first" { // the key stands where the agent's token does
				begun["the agent, by the other header"] = lasts(t, w.url, "GET "+proxy+"44772/command HTTP/1.1\nHost: x\n"+
					wire.HeaderAgentToken+": "+k.Secret, "begun")
			}
			<-asked
			other := ""
			if way != "first" {
				other = as(testKey, "GET "+proxy+"8000/ HTTP/1.1")
			}
			var control *lasting
			if other != "" {
				control = lasts(t, w.url, other, "begun")
			}
			switch way {
			case "removed":
				if a := w.do("DELETE", "/v1/keys/ci", ""); a.StatusCode != 204 {
					t.Fatal(a.Status)
				}
			case "first":
				w.key(t, "ci", "admin")
			}
			for name, l := range begun {
				if text := l.ends(t); strings.HasSuffix(text, "0\r\n\r\n") || name == "events" && !strings.Contains(text, why) {
					t.Errorf("%s ended with %q", name, text)
				}
			}
			for name, l := range silent {
				if text := l.ends(t); !strings.Contains(text, " 401 ") || !strings.Contains(text, why) {
					t.Errorf("%s ended with %q", name, text)
				}
			}
			if way != "first" {
				if a := w.do("GET", "/v1/sandboxes", "", wire.HeaderAPIKey, k.Secret); !strings.Contains(string(a.body), why) {
					t.Errorf("who comes again is told %s", a.body)
				}
			}
			if way == "expired" && time.Now().Before(until) {
				t.Error("they ended before the key did")
			}
			if !strings.Contains(w.log.String(), why) {
				t.Error("the log does not say why")
			}
			if control != nil {
				control.SetReadDeadline(time.Now())
				if b, err := io.ReadAll(control.in); err == nil {
					t.Errorf("the stream of another key ended: %q", b)
				}
			}
		})
	}
}

// TestOwnKeyRemoved: a key may remove itself, and its answer is whole.
func TestOwnKeyRemoved(t *testing.T) {
	w := newWorld(t)
	secret := w.key(t, "ci", "admin")
	if a := w.do("DELETE", "/v1/keys/ci", "", wire.HeaderAPIKey, secret); a.StatusCode != 204 {
		t.Errorf("%s %s", a.Status, a.body)
	}
}

// TestSignedAddressEnds: a signed address admits a stream until it expires, and no longer.
func TestSignedAddressEnds(t *testing.T) {
	g := newGate(t, auth.Listener{})
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		io.WriteString(rw, "begun")            //nolint:errcheck // the client says what it got
		http.NewResponseController(rw).Flush() //nolint:errcheck // as above
		<-r.Context().Done()
	}))
	t.Cleanup(app.Close)
	g.fake.apps = func(string, uint16) net.Listener { return app.Listener }
	until := time.Now().Unix() + 2
	host := g.sign(g.one, 8000, until).label(g.one, "8000") + "." + gateDomain
	l := lasts(t, g.addr, "GET / HTTP/1.1\nHost: "+host, "begun")
	forever := lasts(t, g.addr, "GET / HTTP/1.1\nHost: "+g.one+"-8000."+gateDomain+"\n"+wire.HeaderEndpointToken+": "+
		g.s.gateway.Token(g.one, 8000), "begun")
	if text := l.ends(t); strings.HasSuffix(text, "0\r\n\r\n") {
		t.Errorf("it seems complete: %q", text)
	}
	if now := time.Now().Unix(); now < until {
		t.Errorf("it ended at %d, before %d", now, until)
	}
	forever.SetReadDeadline(time.Now())
	if b, err := io.ReadAll(forever.in); err == nil {
		t.Errorf("the stream by a token ended: %q", b)
	}
}
