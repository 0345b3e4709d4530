package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	at "github.com/sandboxd/sandboxd/pkg/image/archive/archivetest"
)

// TestKeys makes keys while the daemon runs: each opens what its role may, until
// it is removed, also after a restart, and none stands on the disk.
func TestKeys(t *testing.T) {
	h := newHost(t, daemontest.Options{Config: []string{"[images.aliases]", `"e2e/keys:*" = "e2e-later"`}})
	l := &lab{host: h, T: t, runtime: "runc"}
	secrets := map[string]string{}
	for _, role := range []string{"viewer", "operator", "admin"} {
		l.ctl("key", "rm", "e2e-"+role) // of a run that failed
		secrets[role] = strings.TrimSpace(l.ok("key", "create", "e2e-"+role, "--role", role, "--expires", "1h"))
	}
	id := l.make("base", "--", "sh", "-c", "echo begun; exec sleep 3600")
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
	const exists, kept = "exists on this host with other content", "its name is kept: it is "
	for _, c := range []struct{ name, role, file, refused string }{
		{"e2e-keys:latest", "operator", "a", ""},
		{"e2e-keys:latest", "operator", "b", exists},
		{"e2e-keys:latest", "operator", "a", ""},
		{"e2e-keys:latest", "admin", "b", ""},
		{"e2e-keys:latest", "operator", "a", exists},
		{"e2e/keys:1", "operator", "a", kept + "an alias of e2e-later"},
		{"e2e-later:latest", "operator", "a", kept + "the image of the alias e2e/keys:*"},
		{"e2e-later:latest", "admin", "a", ""},
		{"e2e/keys:1", "operator", "b", exists},
	} {
		a := l.request("POST", "/v1/images?name="+c.name, bytes.NewReader(at.Tar(t, at.File(c.file))), "OPEN-SANDBOX-API-KEY",
			secrets[c.role])
		named := a.status == 200 && !strings.Contains(a.body, exists) && !strings.Contains(a.body, kept)
		if named != (c.refused == "") || !named && !strings.Contains(a.body, "image "+c.name+" ") || !strings.Contains(a.body, c.refused) {
			t.Errorf("%s with file %s as %s: %d %s", c.name, c.file, c.role, a.status, a.body)
		}
	}
	l.ok("image", "rm", "e2e-keys")
	l.ok("image", "rm", "e2e-later")
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
		var open []*exec.Cmd
		if role == "operator" {
			open = l.lasting(secrets[role], id)
		}
		l.ok("key", "rm", "e2e-"+role)
		for _, c := range open {
			err := c.Wait()
			if text := fmt.Sprint(c.Stderr); err == nil || !strings.Contains(text, "API key e2e-operator was removed") {
				t.Errorf("after its key is gone, %q: %v, %q", c.Args[3:], err, text)
			}
		}
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

// lasting begins with a key, by TCP, what goes on until somebody ends it, and waits until it is under way.
func (l *lab) lasting(key, id string) (all []*exec.Cmd) {
	l.Helper()
	for _, args := range [][]string{
		{"exec", id, "--", "sh", "-c", "echo begun; sleep 600"}, {"logs", "-f", id},
	} {
		ctx, cancel := context.WithTimeout(l.Context(), patience)
		l.Cleanup(cancel)
		cmd := exec.CommandContext(ctx, daemontest.Bin("sandboxctl"), append([]string{"--host", "http://" + l.TCP}, args...)...)
		cmd.Env, cmd.Stderr = append(os.Environ(), "OPEN_SANDBOX_API_KEY="+key), &bytes.Buffer{}
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			l.Fatal(err)
		}
		if _, err := out.Read(make([]byte, 1)); err != nil {
			l.Fatalf("%q says nothing: %v, %v", args, err, cmd.Stderr)
		}
		all = append(all, cmd)
	}
	return all
}
