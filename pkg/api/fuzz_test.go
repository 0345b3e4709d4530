package api

import (
	"bufio"
	"net/http"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// FuzzCreate: a body either becomes a spec within the limits or an error of
// the request; nothing panics.
func FuzzCreate(f *testing.F) {
	f.Add([]byte(createBody))
	f.Add([]byte(`{"image":{"uri":"python"},"networkPolicy":{"egress":[{"action":"allow","target":"::ffff:1.2.3.4"}]},"extensions":{"sandboxd.idle":"true","sandboxd.allow":"10.0.0.0/8,"}}`))
	f.Add([]byte(`{"image":{"uri":"python"},"resourceLimits":{"cpu":"0.0000001","memory":"9223372036854775807","pids":"+5"}}`))
	s, err := New(Config{ParseRule: egress.ParseRule, ParsePolicy: egress.FromPolicy}, nil, nil, nil, nil, nil, nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var req wire.CreateRequest
		err := unmarshal(body, &req)
		if err == nil {
			spec, serr := s.toSpec(&req)
			err = serr
			if err == nil {
				if spec.MemoryBytes < minMemory || spec.CPUMillis < minMillis || spec.Pids < minPids || len(spec.Labels) > maxLabels || len(spec.Env) > maxEnv || spec.Timeout < 0 {
					t.Fatalf("out of bounds: %+v", spec)
				}
				return
			}
		}
		if c := errs.CodeOf(err); c != errs.Invalid && c != errs.Unsupported {
			t.Fatalf("%s: %v", c, err)
		}
		if len(err.Error()) > 2000 {
			t.Fatalf("the error echoes %d bytes", len(err.Error()))
		}
	})
}

func FuzzLabelFilter(f *testing.F) {
	f.Add("a=b&c=d%26e")
	f.Add("%zz")
	f.Fuzz(func(t *testing.T, q string) {
		m, err := parseLabelFilter(q, nil)
		if err == nil && len(m) > maxLabels {
			t.Fatalf("%d pairs", len(m))
		}
		if _, err := parseFilter("metadata=" + q); err != nil && errs.CodeOf(err) != errs.Invalid {
			t.Fatal(err)
		}
	})
}

func FuzzResources(f *testing.F) {
	for _, s := range []string{"512Mi", "1", "0.5", "500m", "NaN", "1e9", "-1", "", "9223372036854775807Ti"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := parseSize(s); err == nil && n < 0 {
			t.Fatalf("size %q is %d", s, n)
		}
		if n, err := parseCPU(s); err == nil && (n < 0 || n > 1e12) {
			t.Fatalf("cpu %q is %d", s, n)
		}
	})
}

// FuzzRoute: no path reaches a handler with an id that is neither id nor name.
func FuzzRoute(f *testing.F) {
	f.Add("/v1/sandboxes/a%2fb/proxy/44772/x")
	f.Add("/sandboxes/../proxy/1")
	w := newWorld(f)
	f.Fuzz(func(t *testing.T, raw string) {
		if strings.ContainsAny(raw, " \r\n\x00#") || !strings.HasPrefix(raw, "/") {
			return
		}
		r, err := newRequest(raw)
		if err != nil {
			return
		}
		h, rt := w.s.route(r)
		if h == nil && !rt.proxy {
			t.Fatalf("%q has neither handler nor proxy", raw)
		}
	})
}

func newRequest(raw string) (*http.Request, error) {
	return http.ReadRequest(bufio.NewReader(strings.NewReader("GET " + raw + " HTTP/1.1\r\nHost: x\r\n\r\n")))
}
