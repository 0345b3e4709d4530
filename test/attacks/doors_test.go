package attacks_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Why there is no proof.
var (
	ownBounds = unproven("the bound is one of net/http")
	noDial    = unproven("the address is made of the record and a number")
)

// slow is longer than a client may take for the head of a request.
const slow = 15 * time.Second

// second is a request behind one with two ends.
const second = "GET /v1/version HTTP/1.1\r\nHost: x\r\n\r\n"

// doorAttacks use the way in: requests that programs read differently, addresses, bodies,
// answers of guests, and clients that take their time.
var doorAttacks = []attack{
	smuggling("two lengths of a request", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", without(weak.Framing)),
	smuggling("a length on a folded line", "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", without(weak.Framing)),
	smuggling("chunks of HTTP/1.0", "", without(weak.Framing)),
	smuggling("two different lengths", "Content-Length: 0\r\nContent-Length: 5\r\n\r\nabcde", ownBounds),
	smuggling("chunked, twice", "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", ownBounds),
	smuggling("chunked with a space", "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", ownBounds),

	// server-side requests
	{
		name: "another host by its name", wall: "the daemon dials the address of the record", held: words{"not-reached"}, daemon: noDial,
		ask: func(t *testing.T, w *target) string {
			_, number, _ := net.SplitHostPort(w.canary)
			return w.reached(func() {
				for _, path := range []string{
					port(w.a, 8000, "echo"), "http://" + w.canary + "/", "/v1/sandboxes/" + w.a.ID + "/proxy/127.0.0.1:" + number + "/",
					"/v1/sandboxes/" + w.a.ID + "/proxy/8000@" + w.canary + "/", "/v1/sandboxes/" + w.a.ID + "/proxy/8000%40127.0.0.1/",
					"/v1/sandboxes/127.0.0.1/proxy/" + number + "/", "/v1/sandboxes/" + w.a.ID + "/proxy/" + number + "/",
				} {
					w.ask(t, "GET", path, daemontest.Key, nil, "Host", w.canary, "X-Forwarded-Host", w.canary)
				}
				w.raw(t, "CONNECT "+w.canary+" HTTP/1.1\r\nHost: "+w.canary+"\r\nConnection: close\r\n\r\n")
				w.raw(t, "GET http://"+w.canary+"/ HTTP/1.1\r\nHost: "+w.canary+"\r\nConnection: close\r\n\r\n")
			})
		},
	},
	{
		name: "another host by a redirect of a guest", wall: "no redirect is followed", held: words{"not-reached"},
		daemon: unproven("the proxy's transport cannot follow one"),
		ask: func(t *testing.T, w *target) string {
			return w.reached(func() { w.ask(t, "GET", port(w.a, 8000, "redirect/"+w.canary), daemontest.Key, nil) })
		},
	},
	{
		name: "another host by a redirect of a guest on gVisor", wall: "no redirect is followed", held: words{"not-reached"},
		daemon: unproven("the proxy's transport cannot follow one"),
		ask: func(t *testing.T, w *target) string {
			sb := w.create(t, "runsc", nil)
			w.background(t, sb.ID, "serve", "8000")
			w.await(t, sb.ID, 8000)
			status := 0
			got := w.reached(func() { status = w.ask(t, "GET", port(sb, 8000, "redirect/"+w.canary), daemontest.Key, nil).status })
			if status/100 != 3 { // the guest was asked, and redirects
				return fmt.Sprint(status)
			}
			return got
		},
	},
	{
		name: "another host as a registry", wall: "registries are those of the configuration", held: words{"not-reached"},
		daemon: unproven("pkg/image dials what the configuration names"),
		ask: func(t *testing.T, w *target) string {
			return w.reached(func() {
				w.asAdmin(t, "POST", "/v1/images/pull", fmt.Sprintf(`{"name":%q}`, w.canary+"/x:latest"))
				w.asAdmin(t, "POST", "/v1/sandboxes", strings.Replace(creation(`"timeout":60`), `"base"`, fmt.Sprintf("%q", w.canary+"/x"), 1))
			})
		},
	},
	{
		name: "a port that is none", wall: "a port is a number", held: words{"400", "404"}, daemon: noDial,
		ask: func(t *testing.T, w *target) string {
			for _, n := range []string{"0", "65536", "-1", "0x1f40", "8000.0", "%38000x", "", "+8000"} {
				a := w.ask(t, "GET", "/v1/sandboxes/"+w.a.ID+"/proxy/"+n+"/echo", daemontest.Key, nil)
				if a.status != 400 && a.status != 404 {
					return a.word() + " of " + n
				}
			}
			return "400"
		},
	},

	// sizes
	{
		name: "a body of 17 MiB", wall: "bodies have a size", held: words{"413", "closed"}, got: words{"404"}, daemon: without(weak.Bodies),
		ask: func(t *testing.T, w *target) string {
			return w.asAdmin(t, "POST", "/v1/sandboxes", absent(`"`+strings.Repeat("a", 17<<20)+`"`))
		},
	},
	{
		name: "a body of 150 levels", wall: "bodies have a depth", held: words{"400"}, got: words{"404"}, daemon: without(weak.Bodies),
		ask: func(t *testing.T, w *target) string {
			return w.asAdmin(t, "POST", "/v1/sandboxes", absent(strings.Repeat("[", 150)+strings.Repeat("]", 150)))
		},
	},
	{
		name: "a head of 1 MiB", wall: "heads have a size", held: words{"431", "closed"}, daemon: ownBounds,
		ask: func(t *testing.T, w *target) string {
			return w.raw(t, "GET /v1/version HTTP/1.1\r\nHost: x\r\nX-A: "+strings.Repeat("a", 1<<20)+"\r\n\r\n")
		},
	},

	// answers of guests
	answering("endless-head"), answering("endless-line"), answering("endless-interim"), answering("two-lengths"), answering("garbage"),

	// clients that take their time, or all there is
	{
		name: "a slow head", wall: "a head has ten seconds", all: true, held: words{"closed"}, got: words{"open"},
		daemon: without(weak.SlowClients), ask: func(t *testing.T, w *target) string {
			c, err := net.Dial("tcp", w.TCP)
			must(t, err)
			defer c.Close()
			_, err = io.WriteString(c, "GET /v1/version HTTP/1.1\r\nHost: x\r\n")
			must(t, err)
			must(t, c.SetReadDeadline(time.Now().Add(hosttest.Patient(slow))))
			if _, err := io.Copy(io.Discard, c); err != nil { // the deadline
				return "open"
			}
			return "closed"
		},
	},
	{
		name: "a slow body", wall: "a body has a minute", all: true, held: words{"400", "closed"},
		daemon: unproven("TestSlowBody of pkg/api shows it in a second"), ask: func(t *testing.T, w *target) string {
			c, err := net.Dial("tcp", w.TCP)
			must(t, err)
			defer c.Close()
			_, err = fmt.Fprintf(c, "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Length: 100\r\n\r\n{",
				wire.HeaderAPIKey, daemontest.Key)
			must(t, err)
			must(t, c.SetReadDeadline(time.Now().Add(hosttest.Patient(90*time.Second))))
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if e, ok := err.(net.Error); ok && e.Timeout() {
				return "open"
			}
			if err != nil {
				return "closed"
			}
			defer resp.Body.Close()
			return fmt.Sprint(resp.StatusCode)
		},
	},
	{
		name: "connections", wall: "an address has 512; the oldest idle one is closed", held: words{"closed"}, got: words{"open"},
		daemon: without(weak.Connections), ask: func(t *testing.T, w *target) string {
			var all []net.Conn
			defer func() {
				for _, c := range all {
					c.Close()
				}
			}()
			for range 600 {
				c, err := net.Dial("tcp", w.TCP)
				must(t, err)
				all = append(all, c)
			}
			if a := w.ask(t, "GET", "/v1/sandboxes", daemontest.Key, nil); a.status != 200 {
				return "starved " + a.word()
			}
			must(t, all[0].SetReadDeadline(time.Now().Add(hosttest.Patient(2*time.Second))))
			if _, err := io.Copy(io.Discard, all[0]); err != nil { // the deadline
				if e, ok := err.(net.Error); ok && e.Timeout() {
					return "open"
				}
			}
			return "closed"
		},
	},
	{
		name: "streams that nobody reads", wall: "a stream's buffer has an end", held: words{"answers"},
		daemon: unproven("pkg/api tests one stream; here all others must go on"),
		ask: func(t *testing.T, w *target) string {
			for range 100 {
				c, err := net.Dial("tcp", w.TCP)
				must(t, err)
				defer c.Close()
				_, err = fmt.Fprintf(c, "GET /v1/events HTTP/1.1\r\nHost: x\r\n%s: %s\r\n\r\n", wire.HeaderAPIKey, daemontest.Key)
				must(t, err)
			}
			for range 5 {
				must(t, w.api.Delete(t.Context(), w.create(t, "runc", nil).ID))
			}
			return "answers"
		},
	},
	{
		name: "commands", wall: "one sandbox's requests do not wait for another's", held: words{"answers"},
		daemon: unproven("nothing is to be taken down"),
		ask: func(t *testing.T, w *target) string {
			var all sync.WaitGroup
			for range 100 {
				all.Go(func() { w.exec(t, w.a.ID, 0, []string{"sleep", "1"}) })
			}
			g := w.exec(t, w.b.ID, 0, []string{"/attack", "nothing"})
			all.Wait()
			if g.word != "ok" {
				return g.String()
			}
			return "answers"
		},
	},
	{
		name: "output", wall: "the agent keeps 16 MiB of a command", held: words{"bounded"},
		daemon: unproven("pkg/agent/output tests the ring"),
		ask: func(t *testing.T, w *target) string {
			p, err := w.api.Start(t.Context(), w.a.ID, client.Command{Argv: []string{"/attack", "print", "64"}, Background: true})
			must(t, err)
			must(t, p.Close())
			for limit := time.Now().Add(hosttest.Patient(time.Minute)); ; time.Sleep(50 * time.Millisecond) { // it is not watched
				st, err := w.api.Commands(w.a.ID).Status(t.Context(), p.ID)
				must(t, err)
				if !st.Running {
					break
				}
				if time.Now().After(limit) {
					return "endless"
				}
			}
			u, err := w.api.Stats(t.Context(), w.a.ID)
			must(t, err)
			if u.DiskBytes > 40<<20 {
				return fmt.Sprintf("%d bytes", u.DiskBytes)
			}
			return "bounded"
		},
	},
}

// smuggling sends a request with two ends, and another behind it: that must not be
// served. rest is what follows the request's line and Host.
func smuggling(name, rest string, p *proof) attack {
	return attack{
		name: name, wall: "a request says clearly where it ends", held: words{"400", "closed", "501"},
		got: words{"200+200", "200+400"}, daemon: p,
		ask: func(t *testing.T, w *target) string {
			head := "POST /v1/version HTTP/1.1\r\nHost: x\r\n" + rest
			if rest == "" {
				head = "POST /v1/version HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
			}
			return w.raw(t, strings.Replace(head, "POST /v1/version", "GET /v1/version", 1)+second)
		},
	}
}

// absent is the body of a request for a sandbox of an image that does not exist, with a
// field that no request has.
func absent(value string) string {
	return strings.Replace(creation(`"x-attack":`+value), `"base"`, `"attack-absent"`, 1)
}

// answering has a guest answer like that: the client is told so, and soon.
func answering(how string) attack {
	return attack{
		name: "a guest's answer: " + how, wall: "answers have bounds", held: words{"502"}, daemon: ownBounds,
		ask: func(t *testing.T, w *target) string {
			c, err := net.Dial("tcp", w.TCP)
			must(t, err)
			defer c.Close()
			must(t, c.SetDeadline(time.Now().Add(hosttest.Patient(20*time.Second))))
			_, err = fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n%s: %s\r\n\r\n", port(w.a, 8000, how), wire.HeaderAPIKey, daemontest.Key)
			must(t, err)
			for from := bufio.NewReader(c); ; {
				resp, err := http.ReadResponse(from, nil)
				if err != nil {
					return "no answer: " + err.Error()
				}
				if resp.StatusCode >= 200 { // those before it are interim
					return fmt.Sprint(resp.StatusCode)
				}
			}
		},
	}
}

// statusOf is the word for the error of a client.
func statusOf(t *testing.T, err error) string {
	t.Helper()
	if errs.Is(err, errs.Invalid) || errs.Is(err, errs.Unsupported) {
		return "400"
	}
	return err.Error()
}
