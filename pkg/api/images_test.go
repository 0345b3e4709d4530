package api

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func TestImageRoutes(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		method, path string
		status       int
		says         string
	}{
		{"GET", "/v1/images/python", 200, `"layers":["sha256:bbb`},
		{"GET", "/v1/images/nope", 404, "IMAGE::NOT_FOUND"},
		{"GET", "/v1/images/python/export", 200, "a tar of python:latest"},
		{"GET", "/v1/images/no%2Fpe/export", 404, "no/pe"},
		{"POST", "/v1/images/prune", 200, `{"images":[],"layers":["sha256:1"],"bytesReclaimed":7}`},
		{"POST", "/v1/images/prune?all=true", 200, `"images":["python:latest"]`},
		{"POST", "/v1/images/prune?all=perhaps", 400, "all"},
		{"PUT", "/v1/images/python", 405, "allowed"},
		{"DELETE", "/v1/images/python:latest", 200, `{"images":["python:latest"],"layers":["sha256:1"],"bytesReclaimed":7}`},
	} {
		if a := w.do(c.method, c.path, ""); a.StatusCode != c.status || !strings.Contains(string(a.body), c.says) {
			t.Errorf("%s %s: %d %s; want %d and %s", c.method, c.path, a.StatusCode, a.body, c.status, c.says)
		}
	}
	for body, want := range map[string]struct {
		status int
		says   string
	}{
		`{"name":"mine/py:1"}`: {200, `{"name":"mine/py","tag":"1"`},
		`{"name":"taken"}`:     {200, `{"name":"taken"`}, // the key of these tests is an admin's
		`{"name":"Bad"}`:       {400, "Bad"},
		`{}`:                   {400, "name"},
	} {
		if a := w.do("POST", "/v1/images/python/tag", body); a.StatusCode != want.status || !strings.Contains(string(a.body), want.says) {
			t.Errorf("tag %s: %d %s; want %d and %s", body, a.StatusCode, a.body, want.status, want.says)
		}
	}
	if a := w.do("POST", "/v1/images/nope/tag", `{"name":"x"}`); a.StatusCode != 404 || !strings.Contains(string(a.body), "IMAGE::NOT_FOUND") {
		t.Errorf("tag what is not there: %d %s", a.StatusCode, a.body)
	}
	tar := []string{"Content-Type", "application/octet-stream"}
	for body, want := range map[string]struct {
		query  string
		status int
		says   string
	}{
		"fine":  {"?name=x", 200, `{"image":{"name":"python"`},
		"slow":  {"?name=x", 200, `{"progress":{"stage":"receive","bytes":4,"total":4}}` + "\n" + `{"image":`},
		"late":  {"?name=x", 200, `{"error":{"code":"SANDBOX::INVALID_PARAMETER","message":"layer 3 is bad"}}`},
		"full":  {"", 503, "the disk is full"},
		"odd":   {"?name=Bad", 400, "Bad"},
		"odder": {"?format=zip", 400, "zip"},
	} {
		if a := w.do("POST", "/v1/images"+want.query, body, tar...); a.StatusCode != want.status ||
			!strings.Contains(string(a.body), want.says) {
			t.Errorf("import %s: %d %s; want %d and %s", body, a.StatusCode, a.body, want.status, want.says)
		}
	}
}

// What fails in the middle of an export must not look like an archive.
func TestExportBreaks(t *testing.T) {
	w := newWorld(t)
	w.exportFails = errors.New("a layer is gone")
	req, err := http.NewRequest("GET", w.url+"/v1/images/python/export", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("OPEN-SANDBOX-API-KEY", testKey)
	resp, err := noRedirect.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("read %q to its end", b)
	}
}

// A refusal reaches a client that is still sending, early and late, and ends
// what it sends.
func TestImportRefused(t *testing.T) {
	w := newWorld(t)
	c, err := client.New(w.url, testKey)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	for kind, want := range map[string]errs.Code{"full": errs.Exhausted, "late": errs.Invalid} {
		sent := &pouring{start: strings.NewReader(kind)}
		start := time.Now()
		_, err := c.Images().Import(t.Context(), client.Archive{Name: "x", Body: sent}, nil)
		if !errs.Is(err, want) {
			t.Errorf("%s: %v, want %s", kind, err, want)
		}
		if took := time.Since(start); took > refusalTime {
			t.Errorf("%s: the refusal took %v", kind, took)
		}
	}
	broken := io.MultiReader(strings.NewReader("slow"), breaking{})
	if _, err := c.Images().Import(t.Context(), client.Archive{Name: "x", Body: broken}, nil); err == nil ||
		!strings.Contains(err.Error(), "the disk of the client") {
		t.Errorf("an archive that cannot be read: %v", err)
	}
	silent, never := io.Pipe() // nothing comes any more, and the daemon hangs up
	go func() { _, _ = never.Write([]byte("full")) }()
	if _, err := c.Images().Import(t.Context(), client.Archive{Name: "x", Body: silent}, nil); !errs.Is(err, errs.Exhausted) {
		t.Errorf("a refusal to who sends nothing more: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	silent, never = io.Pipe()
	go func() { _, _ = never.Write([]byte("slow")) }()
	if _, err := c.Images().Import(ctx, client.Archive{Name: "x", Body: silent}, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("given up while nothing came: %v", err)
	}
	var steps []wire.ImportProgress
	im, err := c.Images().Import(t.Context(), client.Archive{Name: "x", Size: 7, Body: strings.NewReader("slow...")},
		func(p wire.ImportProgress) { steps = append(steps, p) })
	if err != nil || im.Name != "python" || len(steps) != 1 || steps[0].Total != 7 {
		t.Errorf("%+v, %v, steps %+v", im, err, steps)
	}
	var out bytes.Buffer
	if err := c.Images().Export(t.Context(), "python", &out); err != nil || out.String() != "a tar of python:latest" {
		t.Errorf("export: %q, %v", out.String(), err)
	}
	if i, err := c.Images().Inspect(t.Context(), "python"); err != nil || len(i.Layers) != 1 {
		t.Errorf("inspect: %+v, %v", i, err)
	}
	if p, err := c.Images().Prune(t.Context(), true); err != nil || p.BytesReclaimed != 7 || len(p.Images) != 1 {
		t.Errorf("prune: %+v, %v", p, err)
	}
}

// pouring never ends.
type pouring struct{ start io.Reader }

func (p *pouring) Read(b []byte) (int, error) {
	if n, err := p.start.Read(b); err == nil {
		return n, nil
	}
	return len(b), nil
}

type breaking struct{}

func (breaking) Read([]byte) (int, error) { return 0, errors.New("the disk of the client is broken") }

// TestImagesNotReplaced: an operator gives no name to another image, in whichever way
// images get names; an admin does.
func TestImagesNotReplaced(t *testing.T) {
	w := newWorld(t)
	w.taken = true
	w.build = func(io.Writer) (record.Image, error) { return pythonImage(), nil }
	operator, admin := w.key(t, "op", "operator"), w.key(t, "adm", "admin")
	for _, c := range []struct{ path, body, names string }{
		{"/v1/images?name=python:latest", "tar...", "python"},
		{"/v1/images/build", `{"name":"python"}`, "python"},
		{"/v1/images/pull", `{"name":"registry.example.com/python:denied"}`, "registry.example.com/python"},
	} {
		ask := func(key string) answer {
			t.Helper()
			req, err := http.NewRequest("POST", w.url+c.path, strings.NewReader(c.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set(wire.HeaderAPIKey, key)
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			return answer{resp, b}
		}
		a := ask(operator)
		if e := a.error(t); a.StatusCode != http.StatusForbidden || e.Code != "SANDBOX::FORBIDDEN" ||
			!strings.Contains(e.Message, "image "+c.names+":latest exists on this host with other content") ||
			!strings.Contains(e.Message, "use another name") || !strings.Contains(e.Message, "an admin's key") {
			t.Errorf("%s as an operator: %s %s", c.path, a.Status, a.body)
		}
		if a := ask(admin); strings.Contains(string(a.body), "exists on this host") {
			t.Errorf("%s as an admin: %s %s", c.path, a.Status, a.body)
		}
	}
}
