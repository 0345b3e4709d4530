package api

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestHostileAnswers: whatever answers in a sandbox, at a port or in the agent's place,
// an answer and the interim ones before it speak for that port alone.
func TestHostileAnswers(t *testing.T) {
	hostile := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		h := rw.Header()
		set := func() {
			h["Set-Cookie"] = []string{"a=1; Domain=example.com", "sandboxd_token_8000=x"}
			h["Location"] = []string{r.Header.Get("X-To"), "/v1/keys"}
			h["Refresh"] = []string{"0; url=/v1/keys", "0; url=/v1/keys"}
			h.Set("Clear-Site-Data", `"*"`)
			h.Set("Strict-Transport-Security", "max-age=1")
			h.Set(wire.HeaderRequestID, "theirs")
		}
		set()
		rw.WriteHeader(http.StatusEarlyHints)
		set()
		rw.WriteHeader(http.StatusTemporaryRedirect)
	})
	app := httptest.NewServer(hostile)
	defer app.Close()
	w := newWorld(t)
	w.app, w.agentAt = app.Listener, app.Listener
	id := w.create().ID
	for _, port := range []string{"8000", "44772"} {
		base := "/sandboxes/" + id + "/proxy/" + port
		for to, want := range map[string]string{
			"/v1/sandboxes/" + id: base + "/v1/sandboxes/" + id, "http://localhost:" + port + "/x": base + "/x", base + "/y": base + "/y",
			"https://example.com/":  map[string]string{"8000": "https://example.com/"}[port],
			"//example.com/":        map[string]string{"8000": "//example.com/"}[port],
			"/\\example.com/":       map[string]string{"8000": base + "/\\example.com/", "44772": base + "/\\example.com/"}[port],
			"http:example.com/":     map[string]string{"8000": "http:example.com/"}[port],
			"\\\\example.com/steal": map[string]string{"8000": "\\\\example.com/steal"}[port],
		} {
			c, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(c, "GET %s/ HTTP/1.1\r\nHost: x\r\n%s: %s\r\nX-Request-ID: ours\r\nX-To: %s\r\n\r\n", base,
				wire.HeaderAPIKey, testKey, to)
			r := bufio.NewReader(c)
			for _, status := range []int{http.StatusEarlyHints, http.StatusTemporaryRedirect} {
				resp, err := http.ReadResponse(r, nil)
				if err != nil {
					t.Fatal(err)
				}
				h := resp.Header
				if resp.StatusCode != status || fmt.Sprint(h["Set-Cookie"]) != "[a=1]" ||
					h.Get("Location") != want || len(h["Location"]) > 1 ||
					fmt.Sprint(h["Refresh"]) != "[0; url="+base+"/v1/keys]" || h.Get("Clear-Site-Data") != "" ||
					h.Get("Strict-Transport-Security") != "" || h.Get(wire.HeaderRequestID) == "theirs" {
					t.Errorf("port %s, to %s: %s %v, want Location %q", port, to, resp.Status, h, want)
				}
				if status == http.StatusTemporaryRedirect && h.Get(wire.HeaderRequestID) != "ours" {
					t.Errorf("port %s: the request's id is %q", port, h.Get(wire.HeaderRequestID))
				}
			}
			c.Close()
		}
	}
	// What a guest's server says behind the agent's own proxy goes where it wants.
	a := w.do("GET", "/sandboxes/"+id+"/proxy/44772/proxy/8000/", "", "X-To", "https://example.com/")
	if to := a.Header.Get("Location"); to != "https://example.com/" {
		t.Errorf("behind the agent's proxy: %q", to)
	}
}

// TestHostileHints: the agent's place is allowed as few interim answers as a port.
func TestHostileHints(t *testing.T) {
	w := newWorld(t)
	agent := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		for range 100 {
			rw.WriteHeader(http.StatusEarlyHints)
		}
	}))
	defer agent.Close()
	w.agentAt = agent.Listener
	if a := w.do("GET", "/sandboxes/"+w.create().ID+"/proxy/44772/ping", ""); a.StatusCode != http.StatusBadGateway {
		t.Errorf("%s %s", a.Status, a.body)
	}
}

// TestLongErrors: an app that answers no HTTP does not fill the log with what it sends.
func TestLongErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			http.ReadRequest(bufio.NewReader(c))                                 //nolint:errcheck // it is ours
			fmt.Fprint(c, "HTTP/1.1 "+strings.Repeat("\x01", 60<<10)+"\r\n\r\n") //nolint:errcheck // it may have closed
			c.Close()
		}
	}()
	w := newWorld(t)
	w.app = l
	if a := w.do("GET", "/sandboxes/"+w.create().ID+"/proxy/8000/", ""); a.StatusCode != http.StatusBadGateway {
		t.Errorf("status %d, %s", a.StatusCode, a.body)
	}
	for line := range strings.Lines(w.log.String()) {
		if len(line) > 3*maxLogged {
			t.Errorf("a line of the log has %d bytes: %.300s", len(line), line)
		}
	}
}
