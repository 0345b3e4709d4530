package e2e_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// post asks for a sandbox of base as SDKs do, by a key of its own, and asks again for as
// long as a busy host has not got as far as to say what became of it.
func (l *lab) post(entrypoint []string, header ...string) (a answer, sb wire.Sandbox, key string) {
	l.Helper()
	key = rand.Text()
	eventually(l.T, 30*time.Second, func() error {
		a, sb = l.postAs(key, entrypoint, header...)
		if a.status == 202 && sb.Status.State == wire.Pending && len(header) == 0 {
			return fmt.Errorf("it is %+v", sb.Status)
		}
		return nil
	})
	return a, sb, key
}

// postAs is one request of post.
func (l *lab) postAs(key string, entrypoint []string, header ...string) (a answer, sb wire.Sandbox) {
	l.Helper()
	body, err := json.Marshal(wire.CreateRequest{
		Image: &wire.Image{URI: "base"}, Entrypoint: entrypoint, ResourceLimits: map[string]string{"cpu": "1", "memory": "128Mi"},
		Extensions: map[string]string{wire.ExtRuntime: l.runtime},
	})
	if err != nil {
		l.Fatal(err)
	}
	a = l.request("POST", "/v1/sandboxes", strings.NewReader(string(body)), append(header, wire.HeaderIdempotency, key)...)
	if err := json.Unmarshal([]byte(a.body), &sb); err != nil {
		l.Fatalf("%d %s: %v", a.status, a.body, err)
	}
	return a, sb
}

// tellCreates: a creation that works says Running, and one that fails says why, at once
// and whenever it is repeated.
func tellCreates(t *testing.T, l *lab) {
	t.Run("runs", func(t *testing.T) {
		l := &lab{host: l.host, T: t, runtime: l.runtime}
		for _, entrypoint := range [][]string{{"tail", "-f", "/dev/null"}, {"tail -f '/dev/null'"}} {
			a, sb, _ := l.post(entrypoint)
			if a.status != 202 || sb.Status.State != wire.Running || a.header.Get(wire.HeaderSandbox) != sb.ID ||
				strings.Join(sb.Entrypoint, "|") != strings.Join(entrypoint, "|") {
				t.Fatalf("%q: %d %v %s", entrypoint, a.status, a.header, a.body)
			}
			l.answers(t, sb.ID)
			if i := l.inspect(sb.ID); strings.Join(i.Entrypoint, "|") != strings.Join(entrypoint, "|") {
				t.Errorf("inspect shows %q", i.Entrypoint)
			}
		}
		a, sb, _ := l.post([]string{"true"})
		if a.status != 202 || sb.Status.State != wire.Running && sb.Status.State != wire.Terminated {
			t.Errorf("one that ends well: %d %s", a.status, a.body)
		}
		l.awaitState(t, sb.ID, wire.Terminated, 10*time.Second)
		a, sb, _ = l.post([]string{"tail", "-f", "/dev/null"}, "Prefer", "respond-async")
		if a.status != 202 || sb.Status.State != wire.Pending || a.header.Get("Preference-Applied") != "respond-async" {
			t.Errorf("at once: %d %v %s", a.status, a.header, a.body)
		}
		l.awaitState(t, sb.ID, wire.Running, 30*time.Second)
	})
	for name, c := range map[string]struct {
		entrypoint []string
		status     int
		code, says string
	}{
		"not there":     {[]string{"/no/such/program"}, 400, "DOCKER::INVALID_ENTRYPOINT", `entrypoint "/no/such/program": no such file in the image`},
		"not a program": {[]string{"/etc/passwd"}, 400, "DOCKER::INVALID_ENTRYPOINT", `"/etc/passwd": not executable`},
		"open quote":    {[]string{"tail -f '/dev/null"}, 400, "DOCKER::INVALID_ENTRYPOINT", "a quote in it is not closed"},
		"no such word":  {[]string{"no-such -f"}, 400, "DOCKER::INVALID_ENTRYPOINT", `it is the first word of "no-such -f"`},
	} {
		t.Run(name, func(t *testing.T) {
			l := &lab{host: l.host, T: t, runtime: l.runtime}
			a, _, key := l.post(c.entrypoint)
			l.failed(a, key, c.entrypoint, c.status, c.code, c.says)
		})
	}
	t.Run("fails", func(t *testing.T) {
		l := &lab{host: l.host, T: t, runtime: l.runtime}
		entrypoint := []string{"sh", "-c", "echo cannot open the door; exit 3"}
		for n := 1; ; n++ { // where it is slow to fail, the sandbox has run
			a, sb, key := l.post(entrypoint)
			if a.status != 202 {
				l.failed(a, key, entrypoint, 500, "DOCKER::SANDBOX_START_FAILED",
					"exited with code 3; its last lines:\ncannot open the door")
				return
			}
			l.awaitState(t, sb.ID, wire.Failed, 10*time.Second)
			end := l.request("GET", "/v1/sandboxes/"+sb.ID+"/endpoints/44772", nil)
			if end.status != 409 || !strings.Contains(end.body, "code 3") {
				t.Errorf("its endpoint: %d %s", end.status, end.body)
			}
			if n == 5 {
				t.Fatal("no host is that slow five times")
			}
		}
	})
	t.Run("hang up", func(t *testing.T) {
		l := &lab{host: l.host, T: t, runtime: l.runtime}
		l.hangUp(t)
	})
	// What the shell of a user made one argument is one word.
	l.wants(l.ctl("create", "--runtime", l.runtime, "base", "--", "tail -f /dev/null"), 127, `entrypoint "tail -f /dev/null": no such file`)
}

// failed checks the answer to a creation that failed, what is left of it, and that it is
// answered so again.
func (l *lab) failed(a answer, key string, entrypoint []string, status int, code, says string) {
	l.Helper()
	var e wire.Error
	id := a.header.Get(wire.HeaderSandbox)
	if err := json.Unmarshal([]byte(a.body), &e); err != nil || a.status != status || e.Code != code || id == "" ||
		!strings.Contains(e.Message, id) || !strings.Contains(e.Message, says) {
		l.Fatalf("%d %s, id %q, %v; want %d %s and %q", a.status, a.body, id, err, status, code, says)
	}
	again, _ := l.postAs(key, entrypoint)
	if again.status != status || again.body != a.body || again.header.Get(wire.HeaderReplayed) != "true" {
		l.Errorf("again: %d %v %s", again.status, again.header, again.body)
	}
	if i := l.inspect(id); i.Status.State != wire.Failed {
		l.Errorf("it is %+v", i.Status)
	}
	end := l.request("GET", "/v1/sandboxes/"+id+"/endpoints/44772", nil)
	if err := json.Unmarshal([]byte(end.body), &e); err != nil || end.status != 409 || !strings.Contains(e.Message, says) {
		l.Errorf("its endpoint: %d %s", end.status, end.body)
	}
	program, _, _ := strings.Cut(entrypoint[0], " ")
	line := operation(l.T, l.host, "create", id)
	if !strings.Contains(line, " entrypoint="+program+" ") || strings.Contains(line, "the door") {
		l.Errorf("the log says %s", line)
	}
	if a := l.request("DELETE", "/v1/sandboxes/"+id, nil); a.status != 204 {
		l.Errorf("delete: %d %s", a.status, a.body)
	}
}

// hangUp gives up a creation once it has begun; the sandbox runs all the same.
func (l *lab) hangUp(t *testing.T) {
	t.Helper()
	name := "left-" + l.runtime
	body := fmt.Sprintf(`{"image":{"uri":"base"},"entrypoint":["tail","-f","/dev/null"],"resourceLimits":{"memory":"128Mi"},`+
		`"extensions":{"sandboxd.name":%q,"sandboxd.runtime":%q}}`, name, l.runtime)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "POST", "http://"+l.TCP+"/v1/sandboxes", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(wire.HeaderAPIKey, daemontest.Key)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if resp, err := http.DefaultClient.Do(r); err == nil {
			resp.Body.Close()
		}
	}()
	eventually(t, 10*time.Second, func() error { _, err := l.api.Get(t.Context(), name); return err })
	cancel()
	<-gone
	l.awaitState(t, name, wire.Running, 30*time.Second)
	l.answers(t, name)
}
