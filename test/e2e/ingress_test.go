package e2e_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// dialAlways connects to addr, whatever is asked for.
func dialAlways(addr string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
}

// guestServer answers every request with what it was asked, on 0.0.0.0:8000, and
// on 127.0.0.1:9000 where others of the host cannot come.
const guestServer = `
import http.server, threading
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        b = ("%s %s\n%s" % (self.server.server_address[1], self.path, self.headers)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(b)))
        self.send_header("Set-Cookie", "a=1; Domain=sandboxes.test")
        self.end_headers()
        self.wfile.write(b)
    do_DELETE = do_GET
    def log_message(self, *a): pass
for at in (("127.0.0.1", 9000), ("0.0.0.0", 8000)):
    s = http.server.ThreadingHTTPServer(at, H)
    threading.Thread(target=s.serve_forever).start()
`

// serving makes a sandbox in which guestServer answers.
func (h host) serving(t *testing.T, runtime string, change func(*wire.CreateRequest)) wire.Sandbox {
	t.Helper()
	r := spec(runtime, "python3", "-c", guestServer)
	r.Image.URI = "python"
	r.Extensions[wire.ExtReadyPort] = "8000"
	if change != nil {
		change(&r)
	}
	return h.create(t, r)
}

// TestGateway reaches ports of sandboxes in each way, by TLS, and finds shut what
// is not its own.
func TestGateway(t *testing.T) {
	ca := newAuthority(t)
	ca.serve("gateway")
	addr := hosttest.FreePort(t).String()
	_, port, _ := net.SplitHostPort(addr)
	h := newHost(t, daemontest.Options{Config: append([]string{
		"[gateway]", fmt.Sprintf("listen = %q", addr), fmt.Sprintf("domain = %q", domain), `public = "no"`,
	}, ca.config()...)})
	daemontest.Image(t, h.Daemon, "python")
	https := ca.client(addr)
	get := func(url string, headers map[string]string) (int, string, http.Header) {
		t.Helper()
		req, err := http.NewRequest("GET", url, nil)
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range headers {
			req.Header.Set(k, v)
		}
		resp, err := https.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b), resp.Header
	}
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			sb := h.serving(t, runtime, nil)
			other := h.create(t, spec(runtime))
			defer h.deleteAll(t)
			e, err := h.api.Endpoint(t.Context(), sb.ID, 8000)
			if err != nil || e.Endpoint != sb.ID+"-8000."+domain+":"+port {
				t.Fatalf("%+v, %v", e, err)
			}
			inside, err := h.api.Endpoint(t.Context(), sb.ID, 9000)
			if err != nil {
				t.Fatal(err)
			}
			signed, err := h.api.SignedEndpoint(t.Context(), sb.ID, 8000, time.Now().Add(time.Hour))
			if err != nil || len(signed.Headers) > 0 {
				t.Fatalf("%+v, %v", signed, err)
			}
			to := func(e wire.Endpoint, more ...string) map[string]string {
				m := map[string]string{}
				for k, v := range e.Headers {
					m[k] = v
				}
				for i := 0; i < len(more); i += 2 {
					m[more[i]] = more[i+1]
				}
				return m
			}
			for what, c := range map[string]struct {
				url     string
				headers map[string]string
				status  int
				begins  string
			}{
				"by host":            {"https://" + e.Endpoint + "/a%2Fb?q", to(e), 200, "8000 /a%2Fb?q\n"},
				"by header":          {"https://" + addr + "/x", to(e, "OpenSandbox-Ingress-To", sb.ID+"-8000"), 200, "8000 /x\n"},
				"by path":            {"https://" + addr + "/" + sb.ID + "/8000/x", to(e), 200, "8000 /x\n"},
				"on loopback inside": {"https://" + inside.Endpoint + "/", to(inside), 200, "9000 /\n"},
				"signed":             {"https://" + signed.Endpoint + "/s", nil, 200, "8000 /s\n"},
				"without a token":    {"https://" + e.Endpoint + "/", nil, 401, ""},
				"with another's":     {"https://" + e.Endpoint + "/", to(inside), 401, ""},
				"another sandbox":    {"https://" + other.ID + "-8000." + domain + "/", to(e), 401, ""},
				"the agent":          {"https://" + sb.ID + "-44772." + domain + "/ping", to(e), 401, ""},
				"the API": {
					"https://" + addr + "/v1/sandboxes",
					map[string]string{"OPEN-SANDBOX-API-KEY": daemontest.Key},
					400, "",
				},
				"the host": {"https://" + addr + "/127.0.0.1/22/", nil, 404, ""},
				"nothing listens": {
					"https://" + sb.ID + "-7." + domain + "/",
					map[string]string{"OPEN-SANDBOX-API-KEY": daemontest.Key},
					502, "",
				},
				"the agent, by its own": {
					"https://" + sb.ID + "-44772." + domain + "/ping",
					map[string]string{"OPEN-SANDBOX-API-KEY": daemontest.Key},
					200, "",
				},
			} {
				status, body, header := get(c.url, c.headers)
				if status != c.status || !strings.HasPrefix(body, c.begins) {
					t.Errorf("%s: %d %.200q", what, status, body)
				}
				if status != 200 || c.begins == "" {
					continue
				}
				for _, v := range c.headers {
					if v != sb.ID+"-8000" && strings.Contains(body, v) {
						t.Errorf("%s: the guest saw %s in %s", what, v, body)
					}
				}
				if strings.Contains(header.Get("Set-Cookie"), "Domain") {
					t.Errorf("%s: a cookie for others: %s", what, header.Get("Set-Cookie"))
				}
			}
			// The terminal of the agent is a WebSocket.
			agent, err := h.api.Endpoint(t.Context(), sb.ID, 44772)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			ws, resp, err := websocket.Dial(ctx, "wss://"+agent.Endpoint+"/pty/nobody/ws",
				&websocket.DialOptions{
					HTTPClient: https,
					HTTPHeader: http.Header{"X-Execd-Access-Token": {agent.Headers["X-EXECD-ACCESS-TOKEN"]}},
				})
			if err == nil {
				ws.CloseNow() //nolint:errcheck // it should not be there
			}
			if resp == nil || resp.StatusCode != 404 {
				t.Errorf("a WebSocket to a terminal that is not there: %v, %v", resp, err)
			}
		})
	}
}

// TestPublish has ports of sandboxes served by the host, across a daemon that is
// killed, and for as long as the sandbox runs.
func TestPublish(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	daemontest.Image(t, h.Daemon, "python")
	get := func(addr string) (string, error) {
		c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
		resp, err := c.Get("http://" + addr + "/x")
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return string(b), err
	}
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			addr, other := hosttest.FreePort(t).String(), hosttest.FreePort(t).String()
			publish := func(list string) func(*wire.CreateRequest) {
				return func(r *wire.CreateRequest) { r.Extensions[wire.ExtPublish] = list }
			}
			sb := h.serving(t, runtime, publish(addr+":8000,"+other+":7"))
			defer h.deleteAll(t)
			serves := func() {
				t.Helper()
				if b, err := get(addr); err != nil || !strings.HasPrefix(b, "8000 /x\n") {
					t.Errorf("%.100q, %v", b, err)
				}
			}
			serves()
			if _, err := get(other); err == nil {
				t.Error("a port that nothing listens at answers")
			}

			// What is taken is refused, and nothing is made: by a sandbox, by the
			// daemon itself, and at an address that is not ours.
			r := spec(runtime)
			for what, c := range map[string]struct {
				list, says string
				code       errs.Code
			}{
				"another sandbox's":  {hosttest.FreePort(t).String() + ":1," + addr + ":1", sb.ID, errs.Exists},
				"another program's":  {h.TCP + ":1", "another program", errs.Exists},
				"nobody's":           {"192.0.2.1:1:1", "does not have the address", errs.Invalid},
				"no port":            {"127.0.0.1:0:1", "from 1 to 65535", errs.Invalid},
				"the agent's inside": {hosttest.FreePort(t).String() + ":44772", "belongs to sandboxd", errs.Invalid},
			} {
				r.Extensions[wire.ExtPublish] = c.list
				if _, err := h.api.Create(t.Context(), r, true); !errs.Is(err, c.code) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("%s: %v", what, err)
				}
			}
			if all, err := h.api.List(t.Context(), client.Filter{}); err != nil || len(all) != 1 {
				t.Errorf("%d sandboxes, %v", len(all), err)
			}

			h.Kill()
			if _, err := get(addr); err == nil {
				t.Error("a dead daemon serves")
			}
			h.Start()
			serves()
			if got, err := h.api.Get(t.Context(), sb.ID); err != nil || len(got.Sandboxd.Ports) != 2 || got.Sandboxd.Ports[0].Port != 8000 {
				t.Errorf("%+v, %v", got.Sandboxd, err)
			}

			// Stopped, the port is free; what has taken it meanwhile keeps it.
			if err := h.api.Stop(t.Context(), sb.ID, time.Second); err != nil {
				t.Fatal(err)
			}
			l, err := net.Listen("tcp", addr)
			if err != nil {
				t.Fatalf("the port of a stopped sandbox is taken: %v", err)
			}
			got, err := h.api.Restart(t.Context(), sb.ID, true)
			if err != nil || got.Status.State != wire.Failed || !strings.Contains(got.Status.Message, "ports") {
				t.Errorf("started beside another: %+v, %v", got.Status, err)
			}
			l.Close()
			if got, err = h.api.Restart(t.Context(), sb.ID, true); err != nil || got.Status.State != wire.Running {
				t.Fatalf("started again: %+v, %v", got.Status, err)
			}
			settles(t, func() error { _, err := get(addr); return err })
			serves()
			if err := h.api.Delete(t.Context(), sb.ID); err != nil {
				t.Fatal(err)
			}
			if l, err = net.Listen("tcp", addr); err != nil { // at once: the next sandbox may want it
				t.Fatalf("the port of a deleted sandbox is taken: %v", err)
			}
			l.Close()
		})
	}
}
