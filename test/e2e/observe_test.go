package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// adminSocket is where a test daemon shows its numbers.
func adminSocket(d *daemontest.Daemon) string {
	return filepath.Join(d.Instance.RunDir(), "admin.sock")
}

// ask gets a path from a Unix socket.
func ask(t testing.TB, socket, path string, header ...string) (status int, body string) {
	t.Helper()
	return askBy(t, http.MethodGet, socket, path, header...)
}

// askBy is ask with another method.
func askBy(t testing.TB, method, socket, path string, header ...string) (status int, body string) {
	t.Helper()
	c := http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://sandboxd"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// scrape reads the metrics of a daemon.
func scrape(t testing.TB, d *daemontest.Daemon) string {
	t.Helper()
	status, text := ask(t, adminSocket(d), "/metrics")
	if status != http.StatusOK {
		t.Fatalf("scrape: %d %s", status, text)
	}
	return text
}

// operation returns the line of the log that tells of an operation on a sandbox.
func operation(t testing.TB, h host, op, id string) string {
	t.Helper()
	var line string
	settles(t, func() error { // a deletion is over when the kernel has let go of it
		re := regexp.MustCompile(`(?m)^.*msg=operation op=` + op + ` sandbox=` + id + ` .*$`)
		if line = re.FindString(h.Log()); line == "" {
			return os.ErrNotExist
		}
		return nil
	})
	return line
}

// TestWatched lives through a sandbox's life and reads what is left of it in
// the log and in the metrics.
func TestWatched(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	const secret = "value-that-no-log-may-hold"
	var ids []string
	for _, runtime := range runtimes {
		s := spec(runtime)
		v := secret
		s.Env = map[string]*string{"PASSWORD": &v}
		sb := h.create(t, s)
		ids = append(ids, sb.ID)
		if _, err := h.exec(t.Context(), sb.ID, "sh", "-c", "echo $PASSWORD"); err != nil {
			t.Fatal(err)
		}
		stop := func(ctx context.Context, id string) error { return h.api.Stop(ctx, id, 0) }
		start := func(ctx context.Context, id string) error { _, err := h.api.Restart(ctx, id, true); return err }
		for _, f := range []func(context.Context, string) error{h.api.Pause, h.api.Resume, stop, start, h.api.Delete} {
			if err := f(t.Context(), sb.ID); err != nil {
				t.Fatal(err)
			}
		}
		for op, want := range map[string][]string{
			"create": {"image=base:latest", "step_rootfs=", "step_agent="},
			"exec":   {"image=base:latest", "start=", "status=200"},
			"pause":  nil,
			"resume": nil,
			"start":  {"step_agent="},
			"delete": {"step_disk="},
		} {
			line := operation(t, h, op, sb.ID)
			for _, w := range append(want, "runtime="+runtime, "outcome=ok", "dur=", "request=", `actor="uid=0 pid=`) {
				if !strings.Contains(line, w) {
					t.Errorf("%s: no %s in %s", op, w, line)
				}
			}
			if strings.Count(line, "request=") != 1 {
				t.Errorf("%s names its request twice: %s", op, line)
			}
		}
	}
	if strings.Contains(h.Log(), secret) {
		t.Error("the log holds the value of a variable, or the output of a command")
	}
	text := scrape(t, h.Daemon)
	for _, runtime := range runtimes {
		for _, line := range []string{
			`sandboxd_operations_total{op="create",outcome="ok",runtime="` + runtime + `"} 1`,
			`sandboxd_operations_total{op="delete",outcome="ok",runtime="` + runtime + `"} 1`,
			`sandboxd_step_seconds_count{runtime="` + runtime + `",step="runtime",way="up"} 2`, // created, and started anew
			`sandboxd_step_seconds_count{runtime="` + runtime + `",step="disk",way="down"} 1`,
			`sandboxd_execs_total{outcome="ok",runtime="` + runtime + `"} 1`,
			`sandboxd_sandboxes{runtime="` + runtime + `",state="running"} 0`,
		} {
			if !strings.Contains(text, line) {
				t.Errorf("no %s", line)
			}
		}
	}
	for _, id := range ids {
		if strings.Contains(text, id) {
			t.Errorf("the metrics name a sandbox: %s", id)
		}
	}
}

// TestAdminSocket holds that metrics and profiles are root's alone, and that
// no part of them is on the API.
func TestAdminSocket(t *testing.T) {
	const tcp = "127.0.0.1:19109"
	d := daemontest.Prepare(t, daemontest.Options{})
	conf, err := os.ReadFile(d.Config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.Config, []byte(strings.Replace(string(conf), "[listen]\n", "[listen]\nmetrics = \""+tcp+"\"\n", 1)),
		0o600); err != nil {
		t.Fatal(err)
	}
	d.Start()
	fi, err := os.Stat(adminSocket(d))
	if err != nil || fi.Mode() != os.ModeSocket|0o600 {
		t.Fatalf("%v, %v", fi, err)
	}
	for _, path := range []string{"/metrics", "/debug/pprof/", "/v1/metrics"} {
		if status, body := ask(t, d.Socket, path); status != http.StatusNotFound {
			t.Errorf("the API answers %s: %d %.80s", path, status, body)
		}
	}
	if status, body := ask(t, adminSocket(d), "/debug/pprof/goroutine?debug=1"); status != http.StatusOK ||
		!strings.Contains(body, "goroutine profile") {
		t.Errorf("profile: %d %.80s", status, body)
	}
	if status, body := askBy(t, http.MethodPost, adminSocket(d), "/sweep"); status != http.StatusNoContent {
		t.Errorf("sweep: %d %.80s", status, body)
	}
	if text := scrape(t, d); !strings.Contains(text, "\nsandboxd_sweep_seconds_count 1\n") {
		t.Error("the sweep that was asked for is not counted")
	}
	if status, _ := askBy(t, http.MethodPost, d.Socket, "/sweep"); status != http.StatusNotFound {
		t.Errorf("the API answers POST /sweep: %d", status)
	}
	for _, path := range []string{"/sandboxes", "/v1/sandboxes"} {
		if status, _ := ask(t, adminSocket(d), path, wire.HeaderAPIKey, daemontest.Key); status != http.StatusNotFound {
			t.Errorf("the admin socket answers %s: %d", path, status)
		}
	}
	for path, want := range map[string]int{"/metrics": 200, "/debug/pprof/": 404, "/sandboxes": 404} {
		resp, err := http.Get("http://" + tcp + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("listen.metrics answers %s: %s", path, resp.Status)
		}
	}
	h := connect(t, d)
	daemontest.Image(t, h.Daemon, "base")
	s := spec("runc")
	s.Extensions[wire.ExtNetwork] = "open"
	sb := h.create(t, s)
	// A flow that no policy opens, and one a rule would have to.
	// Datagrams: a SYN is sent, and counted, again where the verdict is late.
	_, _ = h.exec(t.Context(), sb.ID, "bash", "-c", "echo >/dev/udp/169.254.169.254/80; echo >/dev/udp/10.99.1.1/80")
	for _, line := range []string{
		`sandboxd_egress_flows_total{cause="blocked",verdict="deny"} 1`,
		`sandboxd_egress_flows_total{cause="private_range",verdict="deny"} 1`,
		`sandboxd_sandboxes{runtime="runc",state="running"} 1`,
		`sandboxd_egress_queue_packets 0`,
	} {
		settles(t, func() error {
			if !strings.Contains(scrape(t, d), line) {
				return fmt.Errorf("no %s", line)
			}
			return nil
		})
	}
}

// TestDiagnosed asks what is wrong with a sandbox: while it runs, paused, after
// a restart of the daemon, and after its end.
func TestDiagnosed(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		sb := h.create(t, spec(runtime, "sh", "-c", "echo first; echo last; exec sleep infinity"))
		tell := func(path string) wire.Diagnostic {
			t.Helper()
			status, body := ask(t, h.Socket, "/v1/sandboxes/"+sb.ID+"/diagnostics/"+path)
			var d wire.Diagnostic
			if err := json.Unmarshal([]byte(body), &d); err != nil || status != http.StatusOK {
				t.Fatalf("%s: %d %s", path, status, body)
			}
			return d
		}
		has := func(d wire.Diagnostic, texts ...string) {
			t.Helper()
			for _, text := range texts {
				if !strings.Contains(d.Content+strings.Join(d.Warnings, "\n"), text) {
					t.Errorf("%s: no %q in %+v", runtime, text, d)
				}
			}
		}
		eventually(t, 5*time.Second, func() error {
			if d := tell("logs?scope=container"); d.Content != "first\nlast\n" {
				return fmt.Errorf("logs: %+v", d)
			}
			return nil
		})
		// Nothing but the gateway's resolver is reached; /dev/tcp is bash's.
		_, _ = h.exec(t.Context(), sb.ID, "bash", "-c", "echo >/dev/tcp/169.254.169.254/80")
		eventually(t, 5*time.Second, func() error {
			if d := tell("events?scope=network"); !strings.Contains(d.Content, "denied tcp 169.254.169.254:80: closed to every sandbox") {
				return fmt.Errorf("network: %+v", d)
			}
			return nil
		})
		l := &lab{host: h, T: t, runtime: runtime}
		if out := l.ok("diagnostics", "events", "-s", "network", sb.ID) + l.ok("diagnostics", "summary", "-n", "1",
			sb.ID); !strings.Contains(out, "metadata service") || !strings.Contains(out, "== logs\nlast\n") {
			t.Errorf("sandboxctl diagnostics printed %s", out)
		}
		has(tell("events?scope=all"), "lifecycle creating\n", "lifecycle running\n", "runtime create: ok in ", "; namespaces ",
			"agent ", "network denied")
		if err := h.api.Pause(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		has(tell("logs?scope=all"), "the sandbox is Paused", "pause: ok")
		status, text := ask(t, h.Socket, "/sandboxes/"+sb.ID+"/diagnostics/summary")
		if status != http.StatusOK || !strings.Contains(text, `"id": "`+sb.ID+`"`) || !strings.Contains(text, "lifecycle paused") ||
			strings.Contains(text, "\"token\"") {
			t.Errorf("summary: %d %s", status, text)
		}
		if err := h.api.Resume(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		h.Kill()
		h.Start()
		d := tell("events?scope=all")
		has(d, "lifecycle created\n", "lifecycle running\n", "sandboxd was started at")
		if strings.Contains(d.Content, "paused") {
			t.Errorf("a new daemon remembers what only the old one knew: %+v", d)
		}
		has(tell("logs?scope=container"), "first\nlast\n")
		if _, err := h.exec(t.Context(), sb.ID, "sh", "-c", "kill -TERM $(pgrep -x sleep)"); err != nil {
			t.Log(err) // its end may be faster than the answer
		}
		h.awaitState(t, sb.ID, wire.Failed, patience)
		has(tell("logs?scope=container"), "first\nlast\n", "the sandbox has ended (killed)")
		eventually(t, 5*time.Second, func() error { // its state is seen before the event is told
			if d := tell("events?scope=lifecycle"); !strings.Contains(d.Content, "lifecycle ended (killed)") {
				return fmt.Errorf("events: %+v", d)
			}
			return nil
		})
		if err := h.api.Delete(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		if status, _ := ask(t, h.Socket, "/sandboxes/"+sb.ID+"/diagnostics/events"); status != http.StatusNotFound {
			t.Errorf("diagnostics of a deleted sandbox: %d", status)
		}
	}
}
