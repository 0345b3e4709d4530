package api

import (
	"bytes"
	"io"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"

	openapi "github.com/sandboxd/sandboxd/api"
)

var documents = sync.OnceValues(func() (list []routers.Router, err error) {
	add := func(doc *openapi3.T, err error) error {
		if err != nil {
			return err
		}
		doc.Servers = openapi3.Servers{{URL: "http://t/v1"}}
		r, err := gorillamux.NewRouter(doc)
		if err == nil {
			list = append(list, r)
		}
		return err
	}
	if err := add(openapi3.NewLoader().LoadFromData(openapi.JSON)); err != nil {
		return nil, err
	}
	err = add(openapi3.NewLoader().LoadFromFile(filepath.Join(specs, "lifecycle.yaml")))
	return list, err
})

// specs is where OpenSandbox's own documents lie; api/copies_test.go holds them to be theirs.
const specs = "../../api/opensandbox"

func TestMain(m *testing.M) {
	openapi3filter.RegisterBodyDecoder("text/event-stream", openapi3filter.PlainBodyDecoder)
	openapi3filter.RegisterBodyDecoder("text/html", openapi3filter.PlainBodyDecoder)
	openapi3filter.RegisterBodyDecoder("application/x-ndjson", openapi3filter.PlainBodyDecoder)
	m.Run()
}

// TestAgainstLifecycleSpec holds that the other tests validate against OpenSandbox's
// document, too.
func TestAgainstLifecycleSpec(t *testing.T) {
	list, err := documents()
	if err != nil || len(list) != 2 {
		t.Fatalf("%d documents, %v", len(list), err)
	}
}

// validate checks an exchange against the documents that know its route: the one that is
// served and, where it has the route, OpenSandbox's own. Only answers are checked when
// the request was bad on purpose.
func validate(t testing.TB, req *http.Request, body string, resp *http.Response, respBody []byte) {
	t.Helper()
	list, err := documents()
	if err != nil {
		t.Fatal(err)
	}
	p := req.URL.EscapedPath()
	if !strings.HasPrefix(p, "/v1/") {
		p = "/v1" + p
	}
	if strings.Contains(p, "/proxy/") {
		return // the agent of these tests is none
	}
	r, err := http.NewRequest(req.Method, "http://t"+p+"?"+req.URL.RawQuery, strings.NewReader(body))
	if err != nil {
		return
	}
	r.URL = &url.URL{Scheme: "http", Host: "t", Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: req.URL.RawQuery}
	r.Header = req.Header
	for _, doc := range list {
		rt, params, err := doc.FindRoute(r)
		if err != nil {
			continue
		}
		in := &openapi3filter.RequestValidationInput{
			Request: r, PathParams: params, Route: rt,
			Options: &openapi3filter.Options{AuthenticationFunc: openapi3filter.NoopAuthenticationFunc, IncludeResponseStatus: true},
		}
		if resp.StatusCode < 300 && req.Header.Get("X-Lenient") != "1" {
			if err := openapi3filter.ValidateRequest(t.Context(), in); err != nil {
				t.Errorf("request %s %s: %v", req.Method, p, err)
			}
		}
		if resp.StatusCode == http.StatusMethodNotAllowed || resp.StatusCode == http.StatusRequestEntityTooLarge ||
			req.Method == http.MethodHead {
			return
		}
		out := &openapi3filter.ResponseValidationInput{
			RequestValidationInput: in, Status: resp.StatusCode, Header: resp.Header, Body: io.NopCloser(bytes.NewReader(respBody)),
			Options: in.Options,
		}
		err = openapi3filter.ValidateResponse(t.Context(), out)
		if err != nil && strings.Contains(err.Error(), "status is not supported") {
			// OpenSandbox documents none of these; the shape is that of all errors.
			switch resp.StatusCode {
			case http.StatusForbidden, http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests, http.StatusServiceUnavailable,
				http.StatusNotImplemented:
				answer{resp, respBody}.error(t)
				continue
			}
		}
		if err != nil {
			t.Errorf("answer to %s %s (%d): %v\n%s", req.Method, p, resp.StatusCode, err, respBody)
		}
	}
}
