package api

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3filter"

	openapi "github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestSamples types every example of /docs at a daemon, by the Unix socket and with a
// key: the daemon knows the route, takes the query and the body, and lets the client in.
func TestSamples(t *testing.T) {
	var doc struct {
		Paths map[string]map[string]json.RawMessage
	}
	if err := json.Unmarshal(openapi.JSON, &doc); err != nil {
		t.Fatal(err)
	}
	n, good := 0, 0
	for path, item := range doc.Paths {
		for method, raw := range item {
			var op struct {
				Tags    []string
				Samples []struct{ Source string } `json:"x-codeSamples"`
			}
			if method == "parameters" {
				continue
			}
			if err := json.Unmarshal(raw, &op); err != nil {
				t.Fatal(err)
			}
			w := newSampleWorld(t)
			for _, s := range op.Samples {
				n++
				c := parseCurl(t, s.Source)
				if c.method != strings.ToUpper(method) {
					t.Errorf("%s %s: %s", method, path, s.Source)
				}
				c.isDescribed(t)
				a := w.typed(c)
				switch code := a.StatusCode; {
				case op.Tags[0] == "Refused" && code == http.StatusBadRequest:
				case strings.Contains(string(a.body), "there is no route"), slices.Contains(misunderstood, code):
					t.Errorf("%s\n%d %s", s.Source, code, a.body)
				case code < 300:
					good++
				} // else it was understood: the fakes do not have what it asks for
			}
		}
	}
	if n < 200 || good < n/2 {
		t.Errorf("%d examples, of which %d were answered by success", n, good)
	}
}

// curl is a command line of it.
type curl struct {
	source, method, url, body string
	socket                    bool
	header                    http.Header
}

// misunderstood are the statuses of a request that the daemon does not take as it is.
var misunderstood = []int{
	http.StatusBadRequest, http.StatusUnauthorized, http.StatusForbidden, http.StatusMethodNotAllowed, http.StatusRequestEntityTooLarge,
}

func parseCurl(t *testing.T, source string) curl {
	t.Helper()
	c := curl{source: source, method: "GET", header: http.Header{}}
	words := shellWords(t, source)
	if words[0] != "curl" {
		t.Fatalf("%s is no curl", source)
	}
	for i := 1; i < len(words); i++ {
		next := func() string { i++; return words[i] }
		switch w := words[i]; w {
		case "--unix-socket":
			c.socket = next() == "/run/sandboxd/sandboxd.sock"
		case "-X":
			c.method = next()
		case "-I":
			c.method = "HEAD"
		case "-H":
			name, value, _ := strings.Cut(next(), ": ")
			c.header.Set(name, strings.ReplaceAll(value, "$OPEN_SANDBOX_API_KEY", testKey))
		case "-d":
			c.body = next()
		case "-T":
			c.body = "what is in " + next()
		case "-F":
			next()
			c.method, c.body = "POST", "--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\na\r\n--x--\r\n"
			c.header.Set("Content-Type", "multipart/form-data; boundary=x")
		case "-o":
			next()
		case "-N", "-i", "--http1.1":
		default:
			if strings.HasPrefix(w, "-") || c.url != "" {
				t.Fatalf("%s: what is %s?", source, w)
			}
			c.url = w
		}
	}
	return c
}

// shellWords splits a line as a shell does.
func shellWords(t *testing.T, line string) (words []string) {
	t.Helper()
	var word strings.Builder
	quote, open := rune(0), false
	for _, r := range line {
		switch {
		case quote == 0 && (r == '\'' || r == '"'), quote == r:
			open = true
			quote ^= r // opened, or closed
		case quote == 0 && r == ' ':
			if open || word.Len() > 0 {
				words = append(words, word.String())
			}
			word.Reset()
			open = false
		case quote == 0 && strings.ContainsRune(`&|;<>()$*?[#~\`+"`", r):
			t.Fatalf("%s: a shell takes the %q for its own", line, r)
		default:
			word.WriteRune(r)
		}
	}
	if quote != 0 {
		t.Fatalf("%s: an open quote", line)
	}
	return append(words, word.String())
}

// isDescribed holds that the document allows the request.
func (c curl) isDescribed(t *testing.T) {
	t.Helper()
	list, err := documents()
	if err != nil {
		t.Fatal(err)
	}
	_, path, _ := strings.Cut(strings.ReplaceAll(c.url, "$OPEN_SANDBOX_DOMAIN", "localhost"), "//localhost")
	r, err := http.NewRequest(c.method, "http://t"+path, strings.NewReader(c.body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header = c.header
	route, params, err := list[0].FindRoute(r)
	if err != nil {
		t.Errorf("%s: %v", c.source, err)
		return
	}
	in := &openapi3filter.RequestValidationInput{
		Request: r, PathParams: params, Route: route,
		Options: &openapi3filter.Options{AuthenticationFunc: openapi3filter.NoopAuthenticationFunc},
	}
	if strings.HasPrefix(c.body, "what is in") || strings.HasPrefix(c.body, "--x") {
		in.Options.ExcludeRequestBody = true
	}
	if err := openapi3filter.ValidateRequest(t.Context(), in); err != nil {
		t.Errorf("%s: %v", c.source, err)
	}
}

// sampleWorld has a sandbox with the name that the examples have.
type sampleWorld struct {
	*world
	socket string
}

func newSampleWorld(t *testing.T) sampleWorld {
	w := newWorld(t, func(c *Config) { c.System, c.Backups = fakeSystem{}, fakeBackups{} })
	sb := w.create()
	w.set(sb.ID, func(r *record.Record) {
		r.Spec.Name, r.State = "lab", record.Running
	})
	w.agent = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	socket := filepath.Join(t.TempDir(), "s")
	w.serve("unix", socket, auth.Listener{})
	return sampleWorld{w, socket}
}

// typed sends what curl would send, and reads the beginning of the answer.
func (w sampleWorld) typed(c curl) answer {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 10*time.Second)
	defer cancel()
	at := strings.Replace(c.url, "http://$OPEN_SANDBOX_DOMAIN", w.url, 1)
	req, err := http.NewRequestWithContext(ctx, c.method, at, strings.NewReader(c.body))
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header = c.header.Clone()
	client := noRedirect
	if c.socket {
		client = overUnix(w.t.(*testing.T), w.socket)
	}
	resp, err := client.Do(req)
	if err != nil {
		w.t.Fatalf("%s: %v", c.source, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode < 300 {
		return answer{resp, nil}
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return answer{resp, b}
}
