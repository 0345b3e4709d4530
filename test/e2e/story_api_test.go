package e2e_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
)

// tellAPI: bad input from the network gets a clear answer, and the daemon
// lives on.
func tellAPI(t *testing.T, l *lab) {
	const header = "X-Request-Id"
	check := func(a answer, status int, texts ...string) {
		t.Helper()
		var e struct{ Code, Message string }
		if a.status != status || json.Unmarshal([]byte(a.body), &e) != nil || e.Code == "" || e.Message == "" ||
			a.header.Get(header) == "" {
			t.Errorf("%d with request id %q: %.500s; want %d", a.status, a.header.Get(header), a.body, status)
		}
		for _, text := range texts {
			if !strings.Contains(e.Message, text) {
				t.Errorf("no %q in %.500q", text, e.Message)
			}
		}
	}
	create := func(more string) answer {
		t.Helper()
		body := `{"image":{"uri":"base"},"entrypoint":["true"],"resourceLimits":{"cpu":"1","memory":"128Mi"}` + more + `}`
		return l.request("POST", "/v1/sandboxes", strings.NewReader(body))
	}

	check(l.request("GET", "/v1/sandboxes", nil, "OPEN-SANDBOX-API-KEY", "wrong"), 401, "key")
	for _, id := range []string{"taaaaaaaaaaa", "nobody", "x%00y", strings.Repeat("a", 5000)} {
		check(l.request("GET", "/v1/sandboxes/"+id, nil), 404)
	}
	for _, path := range []string{
		"/v1/sandboxes/../../etc/passwd", "/v1/sandboxes/..", "/v1/sandboxes/%2e%2e", "/v1/sandboxes/a%2fb", "/v1/sandboxes/..%2f..%2fetc",
		"/sandboxes//", "/v1/sandboxes/../proxy/44772/ping", "/v1/nothing",
	} {
		for _, method := range []string{"GET", "DELETE"} {
			if a := l.request(method, path, nil); a.status != 404 && a.status != 400 && a.status != 405 {
				t.Errorf("%s %s: %d %.300s", method, path, a.status, a.body)
			}
		}
	}

	// 64 MiB of JSON: with a length, which is refused unread, and without.
	huge := append(append([]byte(`{"image":{"uri":"`), bytes.Repeat([]byte("a"), 64<<20)...), `"}}`...)
	if a, err := l.large(huge); err != nil || a.status != 413 {
		t.Errorf("64 MiB: %d %.200s %v", a.status, a.body, err)
	}
	if a, err := l.large(huge, "chunked"); err != nil || a.status != 413 {
		t.Errorf("64 MiB in chunks: %d %.200s %v", a.status, a.body, err)
	}
	check(l.request("POST", "/v1/sandboxes", strings.NewReader(strings.Repeat("[", 200000))), 400)
	check(l.request("POST", "/v1/sandboxes", strings.NewReader(`{"image":`)), 400)
	check(l.request("POST", "/v1/sandboxes", strings.NewReader(`[]`)), 400)
	check(l.request("POST", "/v1/sandboxes", nil), 400)

	labels := make([]string, 10000)
	for i := range labels {
		labels[i] = fmt.Sprintf(`"k%d":"v"`, i)
	}
	check(create(`,"metadata":{`+strings.Join(labels, ",")+`}`), 400, "metadata")
	check(create(`,"metadata":{"k":"`+strings.Repeat("v", 1<<20)+`"}`), 400, "metadata")
	for _, limits := range []string{
		`"memory":"-1"`, `"memory":"0"`, `"memory":"NaN"`, `"memory":"1e30"`, `"memory":"99999999999999999999"`, `"memory":"9Ti"`,
		`"memory":""`,
		`"cpu":"-1"`, `"cpu":"0"`, `"cpu":"NaN"`, `"cpu":"Infinity"`, `"cpu":"1000000"`, `"cpu":"0x10"`,
		`"pids":"-1"`, `"pids":"0"`, `"pids":"1.5"`, `"pids":"99999999999"`,
		`"disk":"-1"`, `"disk":"0"`, `"disk":"9999999Ti"`, `"dsk":"1Gi"`, `"memory":null`, `"memory":512`,
	} {
		body := `{"image":{"uri":"base"},"entrypoint":["true"],"resourceLimits":{` + limits + `}}`
		a := l.request("POST", "/v1/sandboxes", strings.NewReader(body))
		check(a, 400)
		if a.status == 202 {
			t.Errorf("%s was taken", limits)
		}
	}
	for _, more := range []string{
		`,"timeout":-1`, `,"timeout":0`, `,"timeout":1e300`, `,"timeout":"soon"`, `,"extensions":{"sandboxd.runtime":"kata"}`,
		`,"extensions":{"sandboxd.name":"../x"}`, `,"extensions":{"sandboxd.nothing":"x"}`, `,"env":{"A=B":"x"}`,
		`,"networkPolicy":{"defaultAction":"maybe"}`,
	} {
		check(create(more), 400)
	}
	check(l.request("POST", "/v1/sandboxes", strings.NewReader(`{"image":{"uri":"nope"},"entrypoint":["true"],"resourceLimits":{"cpu":"1","memory":"128Mi"}}`)), 404, "image ls")
	if a := l.request("GET", "/docs", nil, "OPEN-SANDBOX-API-KEY", ""); a.status != 200 ||
		!strings.Contains(a.body, "/sandboxes/{sandboxId}/renew-expiration") {
		t.Errorf("/docs: %d %.200s", a.status, a.body)
	}
	for _, path := range []string{"/openapi.json", "/v1/openapi.json"} {
		var doc struct {
			OpenAPI string         `json:"openapi"`
			Paths   map[string]any `json:"paths"`
		}
		if a := l.request("GET", path, nil); a.status != 200 || json.Unmarshal([]byte(a.body), &doc) != nil || doc.OpenAPI == "" ||
			len(doc.Paths) < 5 {
			t.Errorf("%s: %d %.200s", path, a.status, a.body)
		}
	}
	if ps := l.ok("ps", "-a", "-q"); ps != "" {
		t.Errorf("bad requests made sandboxes: %s", ps)
	}
}

// large posts a body whose sending the server may cut off.
func (l *lab) large(body []byte, chunked ...string) (a answer, err error) {
	var r io.Reader = bytes.NewReader(body)
	if len(chunked) > 0 {
		r = struct{ io.Reader }{r} // hides the length
	}
	return l.try("POST", "/v1/sandboxes", r)
}
