package attacks_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// A target is the API of a daemon: two sandboxes that serve on port 8000 (see the program
// guest), keys of each role, and a server of the host that nobody may reach.
type target struct {
	*field
	a, b wire.Sandbox
	keys map[string]string // by role

	canary string       // its address
	caught atomic.Int64 // how many connections reached it
}

// target makes a target.
func (f *field) target(t *testing.T) *target {
	t.Helper()
	w := &target{field: f, keys: map[string]string{"none": "", "wrong": "wrong", "configured": daemontest.Key}}
	secure := func(r *wire.CreateRequest) { r.SecureAccess = true }
	w.a, w.b = f.create(t, "runc", secure), f.create(t, "runc", secure)
	for _, sb := range []wire.Sandbox{w.a, w.b} {
		f.background(t, sb.ID, "serve", "8000")
		f.await(t, sb.ID, 8000)
	}
	for _, role := range []string{"viewer", "operator", "admin", "removed"} {
		made := role
		if role == "removed" {
			made = "admin"
		}
		k, err := f.api.Keys().Create(t.Context(), "attack-"+role, made, time.Time{})
		must(t, err)
		w.keys[role] = k.Secret
		t.Cleanup(func() { f.api.Keys().Remove(context.Background(), "attack-"+role) }) //nolint:errcheck // one is removed already
	}
	must(t, f.api.Keys().Remove(t.Context(), "attack-removed"))
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { l.Close() })
	w.canary = l.Addr().String()
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			w.caught.Add(1)
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n") //nolint:errcheck // that it came is enough
			c.Close()
		}
	}()
	return w
}

// reached is "ok" if f made the daemon connect to the server of the host.
func (w *target) reached(f func()) string {
	before := w.caught.Load()
	f()
	if w.caught.Load() > before {
		return "ok"
	}
	return "not-reached"
}

// An answer is one of the API.
type answer struct {
	status int
	header http.Header
	body   string
}

// straight follows no redirect, and keeps no connection.
var straight = &http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

// ask sends a request with a key by TCP; header are pairs. The path is sent as it is.
func (w *target) ask(t *testing.T, method, path, key string, body io.Reader, header ...string) answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), hosttest.Patient(30*time.Second))
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, "http://"+w.TCP, body)
	must(t, err)
	r.URL.Opaque = path
	if key != "" {
		r.Header.Set(wire.HeaderAPIKey, key)
	}
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			r.Host = header[i+1]
		}
		r.Header.Set(header[i], header[i+1])
	}
	resp, err := straight.Do(r)
	if err != nil {
		return answer{body: err.Error()}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return answer{body: err.Error()}
	}
	return answer{resp.StatusCode, resp.Header, string(b)}
}

// word is the status of an answer: "200"; "closed" if there is none.
func (a answer) word() string {
	if a.status == 0 {
		return "closed"
	}
	return fmt.Sprint(a.status)
}

// asAdmin is the word for a request of an admin with a JSON body.
func (w *target) asAdmin(t *testing.T, method, path, body string) string {
	t.Helper()
	return w.ask(t, method, path, daemontest.Key, strings.NewReader(body), "Content-Type", "application/json").word()
}

// raw sends bytes, and returns the statuses of all answers that come, joined by "+".
func (w *target) raw(t *testing.T, send string) string {
	t.Helper()
	c, err := net.Dial("tcp", w.TCP)
	must(t, err)
	defer c.Close()
	must(t, c.SetDeadline(time.Now().Add(hosttest.Patient(3*time.Second))))
	if _, err := io.WriteString(c, send); err != nil {
		return "closed"
	}
	var all []string
	for from := bufio.NewReader(c); ; {
		resp, err := http.ReadResponse(from, nil)
		if err != nil {
			break
		}
		all = append(all, fmt.Sprint(resp.StatusCode))
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			break
		}
		resp.Body.Close()
	}
	if len(all) == 0 {
		return "closed"
	}
	return strings.Join(all, "+")
}

// port is the path of the port of a sandbox.
func port(sb wire.Sandbox, n int, rest string) string {
	return fmt.Sprintf("/v1/sandboxes/%s/proxy/%d/%s", sb.ID, n, rest)
}

// tokens are the headers that open the port of a sandbox, in pairs.
func (w *target) tokens(t *testing.T, sb wire.Sandbox, n uint16) (pairs []string) {
	t.Helper()
	e, err := w.api.Endpoint(t.Context(), sb.ID, n)
	must(t, err)
	for k, v := range e.Headers {
		pairs = append(pairs, k, v)
	}
	if len(pairs) == 0 {
		t.Fatalf("the endpoint of port %d has no token", n)
	}
	return pairs
}

// image sends an archive as an image, and removes what becomes of it.
func (w *target) image(t *testing.T, archive []byte) answer {
	t.Helper()
	a := w.ask(t, "POST", "/v1/images?name=attack", daemontest.Key, bytes.NewReader(archive))
	w.ask(t, "DELETE", "/v1/images/attack", daemontest.Key, nil)
	return a
}
