package e2e_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	at "github.com/sandboxd/sandboxd/pkg/image/archive/archivetest"
)

// TestKeys makes keys while the daemon runs: each opens what its role may, until
// it is removed, also after a restart, and none stands on the disk.
func TestKeys(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	l := &lab{host: h, T: t, runtime: "runc"}
	secrets := map[string]string{}
	for _, role := range []string{"viewer", "operator", "admin"} {
		secrets[role] = strings.TrimSpace(l.ok("key", "create", "e2e-"+role, "--role", role, "--expires", "1h"))
	}
	id := l.make("base")
	ask := func(role, method, path, body string) int {
		t.Helper()
		return l.request(method, path, strings.NewReader(body), "OPEN-SANDBOX-API-KEY", secrets[role]).status
	}
	const create = `{"image":{"uri":"base"},"entrypoint":["true"],"resourceLimits":{"memory":"64Mi"}}`
	for range 2 { // before a restart and after it
		for _, c := range []struct {
			method, path, body string
			want               map[string]int
		}{
			{"GET", "/v1/sandboxes/" + id, "", map[string]int{"viewer": 200, "operator": 200, "admin": 200}},
			{"GET", "/v1/sandboxes/" + id + "/endpoints/44772", "", map[string]int{"viewer": 403, "operator": 200, "admin": 200}},
			{"GET", "/v1/sandboxes/" + id + "/proxy/44772/ping", "", map[string]int{"viewer": 403, "operator": 200, "admin": 200}},
			{"POST", "/v1/sandboxes", create, map[string]int{"viewer": 403, "operator": 202, "admin": 202}},
			{"GET", "/v1/keys", "", map[string]int{"viewer": 403, "operator": 403, "admin": 200}},
			{"DELETE", "/v1/images/none", "", map[string]int{"viewer": 403, "operator": 403, "admin": 404}},
			{"PUT", "/v1/system/drain", "", map[string]int{"viewer": 403, "operator": 403, "admin": 403}}, // on the host only
		} {
			for role, want := range c.want {
				if got := ask(role, c.method, c.path, c.body); got != want {
					t.Errorf("%s %s as %s: %d, want %d", c.method, c.path, role, got, want)
				}
			}
		}
		h.Kill()
		if err := h.TryStart(); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		role, file string
		named      bool
	}{{"operator", "a", true}, {"operator", "b", false}, {"operator", "a", true}, {"admin", "b", true}, {"operator", "a", false}} {
		a := l.request("POST", "/v1/images?name=e2e-keys", bytes.NewReader(at.Tar(t, at.File(c.file))), "OPEN-SANDBOX-API-KEY",
			secrets[c.role])
		refused := strings.Contains(a.body, "image e2e-keys:latest exists on this host with other content")
		if refused == c.named || !refused && a.status != 200 {
			t.Errorf("the image with file %s as %s: %d %s", c.file, c.role, a.status, a.body)
		}
	}
	l.ok("image", "rm", "e2e-keys")
	var list []struct{ Name, Role, Source string }
	if err := json.Unmarshal([]byte(l.ok("key", "ls", "-o", "json")), &list); err != nil || len(list) != 4 ||
		list[0].Source != "configuration" {
		t.Errorf("%v %+v", err, list)
	}
	state, err := os.ReadFile(filepath.Join(h.StateDir, "sandboxd.db"))
	if err != nil {
		t.Fatal(err)
	}
	for role, secret := range secrets {
		if bytes.Contains(state, []byte(secret)) || strings.Contains(h.Log(), secret) {
			t.Errorf("the key of %s stands in the state file or in the log", role)
		}
		l.ok("key", "rm", "e2e-"+role)
		if got := ask(role, "GET", "/v1/sandboxes", ""); got != 401 {
			t.Errorf("the removed key of %s: %d", role, got)
		}
	}
	l.wants(l.ctl("key", "rm", "e2e-viewer"), 125, "key ls")
	l.wants(l.ctl("key", "rm", "configuration-1"), 125, "api_key_file")
	l.wants(l.ctl("key", "create", "x", "--role", "root"), 125, "viewer, operator or admin")
	l.wants(l.ctl("key", "create", "x", "--expires", "-1h"), 125, "--expires")
	h.deleteAll(t)
}
