package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// FuzzRoute: without a key only the open routes are reached, in so many words; and what is
// passed on below a port is the rest of the path as it was sent.
func FuzzRoute(f *testing.F) {
	f.Add("GET", "/v1/sandboxes/a%2fb/proxy/44772/x")
	f.Add("GET", "/sandboxes/../proxy/1")
	f.Add("POST", "/v1/health/")
	f.Add("HEAD", "/sandboxes/x/proxy/80//v1/health?q")
	f.Add("GET", "/v1/v1/docs")
	w := newWorld(f)
	var open []string
	for _, row := range w.s.table() {
		if row.need == anyone {
			open = append(open, row.pattern)
		}
	}
	f.Fuzz(func(t *testing.T, method, raw string) {
		if strings.ContainsAny(method+raw, " \r\n\x00#") || !strings.HasPrefix(raw, "/") {
			return
		}
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(method + " " + raw + " HTTP/1.1\r\nHost: x\r\n\r\n")))
		if err != nil {
			return
		}
		found, path := w.s.routes.find(r), r.URL.EscapedPath()
		switch {
		case found.need == tokens:
			if !strings.HasSuffix(path, found.target.Rest) || !strings.Contains(path, "/"+r.PathValue("id")+"/") {
				t.Fatalf("%q is passed on as %q to %q", raw, found.target.Rest, found.target.ID)
			}
		case found.handle == nil:
			t.Fatalf("%q has neither handler nor proxy", raw)
		case found.need == anyone:
			plain, ok := strings.CutPrefix(path, "/v1/")
			if !ok {
				plain = strings.TrimPrefix(path, "/")
			}
			if !slices.Contains(open, "/"+strings.TrimSuffix(plain, "/")) {
				t.Fatalf("%s %q is open to all", method, raw)
			}
		}
	})
}

// bodies are the routes that read a body or a query and whose answers end by themselves.
var bodies = []string{
	"POST /v1/sandboxes", "PATCH /v1/sandboxes/{id}/limits", "PATCH /v1/sandboxes/{id}/metadata", "POST /v1/sandboxes/{id}/rename",
	"POST /v1/sandboxes/{id}/renew-expiration", "POST /v1/sandboxes/{id}/snapshots", "POST /v1/sandboxes/{id}/commit",
	"PUT /v1/sandboxes/{id}/networkpolicy", "PATCH /v1/sandboxes/{id}/networkpolicy", "DELETE /v1/sandboxes/{id}/networkpolicy",
	"POST /v1/sandboxes/{id}/stop", "GET /v1/sandboxes/{id}/endpoints/8000", "GET /v1/sandboxes/{id}/diagnostics/summary",
	"GET /v1/sandboxes", "GET /v1/snapshots", "GET /v1/diff", "POST /v1/images/pull", "POST /v1/images/build",
	"POST /v1/images/python/tag", "POST /v1/images/prune", "POST /v1/keys", "POST /v1/volumes", "POST /v1/volumes/prune",
	"PUT /v1/system/drain", "GET /v1/stats", "PUT /v1/policies/build",
	"POST /v1/sandboxes/{id}/credential-vault", "PATCH /v1/sandboxes/{id}/credential-vault",
}

// FuzzBody: whatever a client sends, the answer is one that the document of the API has,
// never one of a fault of this daemon, and what was refused changed nothing.
func FuzzBody(f *testing.F) {
	for i, body := range []string{
		createBody, `{"resourceLimits":{"memory":"1Gi"}}`, `{"team":null,"a":"b"}`, `{"name":"lab"}`,
		`{"expiresAt":"2030-01-02T15:04:05+24:00"}`,
		`{"name":"s"}`, `{"image":"mine:1"}`, `{"egress":[{"action":"allow","target":"203.0.113.0/24"}]}`,
		`[{"action":"deny","target":"1.1.1.1","ports":[443,"1-2"]}]`, `["1.1.1.1"]`, "", "", "", "", "", "", `{"uri":"python"}`,
		`{"name":"python"}`, `{"tag":"x:1"}`, `{"all":true}`, `{"name":"k","role":"viewer"}`, `{"name":"v","size":"1.5Gi"}`, "{}", "", "",
		`{"defaultAction":"allow","egress":[{"action":"deny","target":"203.0.113.0/24"}]}`,
		vaultBody, `{"expectedRevision":1,"credentials":{"replace":[{"name":"old","source":{"value":"x"}}]},"bindings":{"delete":["b"]}}`,
	} {
		f.Add(uint8(i), "", []byte(body))
	}
	f.Add(uint8(7), "", []byte(`{"egress":[{"action":"allow","target":"a.example","http":{"methods":["GET"],"paths":["/v1/*"]}}]}`))
	f.Add(uint8(10), "timeout=1e3&wait=True", []byte("null"))
	f.Add(uint8(11), "expires=99999999999&use_server_proxy=x", []byte{})
	f.Add(uint8(12), "since=-5m&tail=0&event_limit=501", []byte{})
	f.Add(uint8(13), "metadata=a%3Db&page=2147483648&state=x", []byte{})
	made := newWorld(f)
	id := made.createInspected()
	old, err := vault.Create([]byte(`{"credentials":[{"name":"old","source":{"value":"` + planted + `"}}]}`))
	if err != nil {
		f.Fatal(err)
	}
	first := made.recs[id] // to create one for each input would take most of the time
	f.Fuzz(func(t *testing.T, which uint8, query string, body []byte) {
		if _, err := url.Parse("http://x/?" + query); err != nil || strings.ContainsAny(query, "# \x7f") {
			return // no client can send it
		}
		w := newWorld(t)
		w.build = func(io.Writer) (record.Image, error) { return pythonImage(), nil }
		first.Created, first.Expires = time.Now(), time.Now().Add(first.Spec.Timeout)
		w.recs[id] = first
		if strings.HasPrefix(bodies[int(which)%len(bodies)], "PATCH") {
			w.vaults.all[id] = old
		}
		before := len(w.recs)
		method, path, _ := strings.Cut(bodies[int(which)%len(bodies)], " ")
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		target := "http://t" + strings.Replace(path, "{id}", id, 1) + "?" + query
		req := httptest.NewRequest(method, target, bytes.NewReader(body)).WithContext(ctx)
		req.Header.Set(wire.HeaderAPIKey, testKey)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Lenient", "1")
		late := time.AfterFunc(15*time.Second, func() { // a handler may not look at its context
			panic(fmt.Sprintf("%s %s?%s %q is not answered", method, path, query, body))
		})
		defer late.Stop()
		rec := httptest.NewRecorder()
		fl := flushes{rec, make(chan struct{}, 1)}
		w.s.ServeHTTP(fl, req.WithContext(context.WithValue(ctx, flushes{}, fl)))
		resp := rec.Result()
		if ctx.Err() != nil {
			t.Fatalf("%s %s?%s %q takes over ten seconds", method, path, query, body)
		}
		if rec.Code >= 500 && rec.Code != http.StatusNotImplemented || strings.Contains(w.log.String(), "panic in a handler") {
			t.Fatalf("%s %s?%s %q: %d %s\n%s", method, path, query, body, rec.Code, rec.Body, w.log)
		}
		if strings.Contains(w.log.String()+rec.Body.String(), planted) && !bytes.Contains(body, []byte(planted)) {
			t.Fatalf("%s %s %q tells a value: %s\n%s", method, path, body, rec.Body, w.log)
		}
		validate(t, req, string(body), resp, rec.Body.Bytes())
		if rec.Code < 400 {
			return
		}
		if e := (answer{resp, rec.Body.Bytes()}).error(t); len(e.Message) > 8<<10 {
			t.Fatalf("a refusal of %d bytes", len(e.Message))
		}
		if method == http.MethodPost && path == "/v1/sandboxes" && len(w.recs) != before {
			t.Fatalf("%q is refused, and a sandbox was made", body)
		}
	})
}

// FuzzStamper: whatever an agent says of the times of an output, each line begins with one
// time of the length that clients count on, and the rest is the output.
func FuzzStamper(f *testing.F) {
	f.Add([]byte(`{"end":9,"marks":[[0,1800000000000],[4,9223372036854775807]]}`), []byte("one\ntwo\n\nthree"), int64(0), uint8(3))
	f.Add([]byte(`{"end":9223372036854775807,"marks":[[-1,-9223372036854775808],[-5,1]]}`), []byte("\n"), int64(5), uint8(0))
	f.Fuzz(func(t *testing.T, said, text []byte, off int64, step uint8) {
		var times agent.OutputTimes
		if json.Unmarshal(said, &times) != nil || off < 0 {
			return
		}
		var out bytes.Buffer
		s := &stamper{w: &out, times: times, off: off}
		for rest := text; len(rest) > 0; {
			n := min(int(step)+1, len(rest))
			if _, err := s.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		var plain []byte
		for line := range bytes.Lines(out.Bytes()) {
			at, rest, ok := bytes.Cut(line, []byte(" "))
			if _, err := time.Parse(time.RFC3339Nano, string(at)); !ok || err != nil || len(at) != len("2006-01-02T15:04:05.000000000Z") {
				t.Fatalf("a line begins with %q", line)
			}
			plain = append(plain, rest...)
		}
		if !bytes.Equal(plain, text) {
			t.Fatalf("%q becomes %q", text, out.Bytes())
		}
	})
}
