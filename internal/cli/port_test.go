package cli

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestPorts: what port and endpoint print, and what create asks for.
func TestPorts(t *testing.T) {
	var asked []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.RequestURI())
		var v any = wire.Sandbox{ID: testID, Status: wire.Status{State: wire.Running}, Sandboxd: &wire.Info{Ports: []wire.PublishedPort{
			{HostIP: "127.0.0.1", HostPort: 8080, Port: 80, Protocol: "tcp"},
			{HostIP: "::1", HostPort: 81, Port: 80, Protocol: "tcp"},
			{HostIP: "0.0.0.0", HostPort: 9, Port: 9, Protocol: "tcp"},
		}}}
		if strings.Contains(r.URL.Path, "/endpoints/") {
			v = wire.Endpoint{Endpoint: "h:1/sandboxes/x/proxy/80", Headers: map[string]string{"X-B": "2", "X-A": "1\x1b[2J"}}
		}
		json.NewEncoder(w).Encode(v) //nolint:errcheck // the test sees what is missing
	}))
	defer s.Close()
	d := &daemon{url: s.URL}
	for _, c := range []struct {
		args, out, stderr string
		code              int
	}{
		{"port lab", "80/tcp -> 127.0.0.1:8080\n80/tcp -> [::1]:81\n9/tcp -> 0.0.0.0:9\n", "", 0},
		{"port lab 80", "127.0.0.1:8080\n[::1]:81\n", "", 0},
		{"port lab 9/tcp", "0.0.0.0:9\n", "", 0},
		{
			"port -o json lab 9",
			"[\n  {\n    \"hostIp\": \"0.0.0.0\",\n    \"hostPort\": 9,\n    \"port\": 9,\n    \"protocol\": \"tcp\"\n  }\n]\n",
			"", 0,
		},
		{"port lab 7", "", "does not publish port 7", 125},
		{"port lab 0", "", "from 1 to 65535", 125},
		{"port lab 80/udp", "", "from 1 to 65535", 125},
		{"endpoint lab 80", "h:1/sandboxes/x/proxy/80\nX-A: 1\\x1b[2J\nX-B: 2\n", "", 0},
		{"endpoint -q lab 80", "h:1/sandboxes/x/proxy/80\n", "", 0},
		{"endpoint lab 80 --expires 1h -o name", "h:1/sandboxes/x/proxy/80\n", "", 0},
		{"endpoint lab 80 --expires 0s", "", "want at least 1s", 125},
		{"endpoint lab http", "", "from 1 to 65535", 125},
	} {
		r := d.run(t, strings.Fields(c.args)...)
		if r.out != c.out || r.code != c.code || !strings.Contains(r.errout, c.stderr) {
			t.Errorf("%s: %d %q %q", c.args, r.code, r.out, r.errout)
		}
	}
	if all := strings.Join(asked, "\n"); !strings.Contains(all, "/endpoints/80?expires=1") || strings.Contains(all, "/endpoints/http") {
		t.Errorf("asked: %s", all)
	}
	f := newDaemon(t)
	if r := f.run(t, "create", "-p", "8080:80", "--publish", "0.0.0.0:9:9/tcp", "python"); r.code != 0 ||
		f.create.Extensions["sandboxd.publish"] != "8080:80,0.0.0.0:9:9/tcp" {
		t.Errorf("%+v asked for %q", r, f.create.Extensions)
	}
}
