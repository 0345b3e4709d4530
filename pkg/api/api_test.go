package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestStory walks through the life of a sandbox as an SDK does.
func TestStory(t *testing.T) {
	for _, mount := range []string{"", "/v1"} {
		t.Run("at "+mount+"/", func(t *testing.T) {
			w := newWorld(t)
			a := w.do("POST", mount+"/sandboxes", createBody)
			if a.StatusCode != 202 {
				t.Fatalf("create: %d %s", a.StatusCode, a.body)
			}
			sb := a.sandbox(t)
			if sb.Status.State != wire.Running || sb.Image != nil || sb.ExpiresAt == nil || !record.IsID(sb.ID) {
				t.Errorf("create answers %s", a.body)
			}
			if strings.Contains(string(a.body), ":null") || strings.Contains(string(a.body), "agent-token") {
				t.Errorf("create answers %s", a.body)
			}
			at := mount + "/sandboxes/" + sb.ID
			got := w.do("GET", at, "").sandbox(t)
			if got.Status.State != wire.Running || got.Image.URI != "python" || got.Sandboxd.ImageName != "python:latest" ||
				strings.Join(got.Entrypoint, " ") != "tail -f /dev/null" {
				t.Errorf("get: %+v", got)
			}
			for _, port := range []string{"44772", "18080", "8000"} {
				var e wire.Endpoint
				a := w.do("GET", at+"/endpoints/"+port+"?use_server_proxy=True", "")
				if err := json.Unmarshal(a.body, &e); err != nil || a.StatusCode != 200 {
					t.Fatal(err, a.Status)
				}
				if want := strings.TrimPrefix(w.url, "http://") + mount + "/sandboxes/" + sb.ID + "/proxy/" + port; e.Endpoint != want ||
					len(e.Headers) != 1 {
					t.Errorf("endpoint %+v, want %s", e, want)
				}
			}
			if a := w.do("PATCH", at+"/metadata", `{"team":null,"project":"x"}`); a.StatusCode != 200 ||
				a.sandbox(t).Metadata["project"] != "x" || len(a.sandbox(t).Metadata) != 1 {
				t.Errorf("patch: %s", a.body)
			}
			if a := w.do("GET", mount+"/sandboxes?metadata=project%3Dx", ""); !strings.Contains(string(a.body), sb.ID) {
				t.Errorf("the patched label is not found: %s", a.body)
			}
			if a := w.do("POST", at+"/pause", ""); a.StatusCode != 202 || a.ContentLength != 0 {
				t.Errorf("pause: %s", a.Status)
			}
			if a := w.do("POST", at+"/pause", ""); a.StatusCode != 409 || a.error(t).Code != "DOCKER::SANDBOX_NOT_RUNNING" {
				t.Errorf("second pause: %s", a.body)
			}
			if a := w.do("GET", at+"/proxy/44772/ping", ""); a.StatusCode/100 == 2 {
				t.Errorf("ping while paused: %s", a.Status)
			}
			if a := w.do("POST", at+"/resume", ""); a.StatusCode != 202 {
				t.Errorf("resume: %s", a.Status)
			}
			if a := w.do("POST", at+"/resume", ""); a.StatusCode != 409 || a.error(t).Code != "DOCKER::SANDBOX_NOT_PAUSED" {
				t.Errorf("second resume: %s", a.body)
			}
			until := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
			a = w.do("POST", at+"/renew-expiration", fmt.Sprintf(`{"expiresAt":%q}`, until.Format(time.RFC3339)))
			if a.StatusCode != 200 || !w.do("GET", at, "").sandbox(t).ExpiresAt.Equal(until) {
				t.Errorf("renew: %s", a.body)
			}
			for _, ours := range []string{"/stats", "/inspect"} {
				if a := w.do("GET", at+ours, ""); a.StatusCode != 200 || strings.Contains(string(a.body), "agent-token") {
					t.Errorf("%s: %d %s", ours, a.StatusCode, a.body)
				}
			}
			if a := w.do("DELETE", at, ""); a.StatusCode != 204 || len(a.body) > 0 {
				t.Errorf("delete: %s", a.Status)
			}
			for _, m := range []string{"GET", "DELETE"} {
				if a := w.do(m, at, ""); a.StatusCode != 404 || a.error(t).Code != "DOCKER::SANDBOX_NOT_FOUND" {
					t.Errorf("%s after delete: %s", m, a.body)
				}
			}
		})
	}
}

// TestBadCreate is what the issue names under bad input, as far as it reaches the API.
func TestBadCreate(t *testing.T) {
	with := func(field string) string {
		return `{"image":{"uri":"python"},"entrypoint":["true"],"resourceLimits":{}` + field + `}`
	}
	limit := func(k, v string) string {
		return fmt.Sprintf(`{"image":{"uri":"python"},"entrypoint":["true"],"resourceLimits":{%q:%q}}`, k, v)
	}
	many := func(n int, format string) string {
		var b strings.Builder
		for i := range n {
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	w := newWorld(t)
	for name, c := range map[string]struct {
		body, says string
		status     int
	}{
		"unknown image":        {`{"image":{"uri":"nope"},"entrypoint":["x"],"resourceLimits":{}}`, "image ls", 404},
		"no image":             {`{"entrypoint":["x"],"resourceLimits":{}}`, "image is missing", 400},
		"empty image":          {`{"image":{"uri":""},"entrypoint":["x"]}`, "image.uri is empty", 400},
		"image and snapshot":   {with(`,"snapshotId":"s"`), "leave one out", 400},
		"no such snapshot":     {`{"snapshotId":"s"}`, `no snapshot "s"`, 404},
		"no entrypoint":        {`{"image":{"uri":"python"}}`, "entrypoint is missing", 400},
		"empty program":        {`{"image":{"uri":"python"},"entrypoint":[""]}`, "entrypoint[0]", 400},
		"NUL in entrypoint":    {`{"image":{"uri":"python"},"entrypoint":["a\u0000b"]}`, "NUL", 400},
		"huge entrypoint":      {`{"image":{"uri":"python"},"entrypoint":["` + strings.Repeat("x", 200<<10) + `"]}`, "at most", 400},
		"unknown runtime":      {with(`,"extensions":{"sandboxd.runtime":"kata"}`), "runsc, runc", 400},
		"unknown extension":    {with(`,"extensions":{"sandboxd.runtme":"runc"}`), "unknown", 400},
		"unknown resource":     {limit("memroy", "1Gi"), "memroy", 400},
		"gpu":                  {limit("gpu", "1"), "GPU", 400},
		"memory MiB":           {limit("memory", "512MiB"), "unknown unit", 400},
		"memory word":          {limit("memory", "lots"), "not a size", 400},
		"memory negative":      {limit("memory", "-1"), "not a size", 400},
		"memory zero":          {limit("memory", "0"), "too small", 400},
		"memory NaN":           {limit("memory", "NaN"), "not a size", 400},
		"memory tiny":          {limit("memory", "1Mi"), "64Mi", 400},
		"memory absurd":        {limit("memory", "9999Ti"), "more than this host", 400},
		"memory overflow":      {limit("memory", "99999999999999999999Ti"), "more bytes", 400},
		"memory overflow unit": {limit("memory", "9223372036854775807Ki"), "more bytes", 400},
		"memory fraction":      {limit("memory", "1.5Gi"), "whole number", 400},
		"cpu NaN":              {limit("cpu", "NaN"), "not an amount", 400},
		"cpu Inf":              {limit("cpu", "Inf"), "not an amount", 400},
		"cpu exponent":         {limit("cpu", "1e3"), "not an amount", 400},
		"cpu negative":         {limit("cpu", "-500m"), "not an amount", 400},
		"cpu zero":             {limit("cpu", "0"), "too small", 400},
		"cpu absurd":           {limit("cpu", "1000000"), "more than this host", 400},
		"cpu overflow":         {limit("cpu", strings.Repeat("9", 60)), "more CPU", 400},
		"cpu of many digits":   {limit("cpu", strings.Repeat("0", 64)+"1"), "no amount", 400},
		"1,001 arguments":      {`{"image":{"uri":"python"},"entrypoint":["a"` + strings.Repeat(`,"a"`, 1000) + `]}`, "at most 1000", 400},
		"65 extensions":        {with(`,"extensions":{` + many(65, `"k%d":"v"`) + `}`), "at most 64", 400},
		"extensions of 65 KiB": {with(`,"extensions":{"a":"` + strings.Repeat("x", 65<<10) + `"}`), "64 KiB", 400},
		"allow of 64 KiB":      {with(`,"extensions":{"sandboxd.allow":"1.1.1.1` + strings.Repeat(" ", 64<<10) + `"}`), "64 KiB", 400},
		"1,025 allowed": {
			with(`,"extensions":{"sandboxd.allow":"1.1.1.1` + strings.Repeat(",1.1.1.1", 1024) + `"}`),
			"more than 1024", 400,
		},
		"policy of 2 MiB": {with(`,"networkPolicy":{"defaultAction":"` + strings.Repeat(`\u0061`, 400000) +
			`","defaultAction":"deny"}`), "are allowed", 400},
		"pids zero":          {limit("pids", "0"), "too small", 400},
		"pids negative":      {limit("pids", "-5"), "too small", 400},
		"pids absurd":        {limit("pids", "99999999"), "more than", 400},
		"disk tiny":          {limit("disk", "1"), "too small", 400},
		"limit not a string": {with(`,"env":{"A":1}`), "string", 400},
		"timeout short":      {with(`,"timeout":59`), "60", 400},
		"timeout fraction":   {with(`,"timeout":60.5`), "timeout", 400},
		"timeout string":     {with(`,"timeout":"60"`), "timeout", 400},
		"timeout absurd":     {with(`,"timeout":9223372036854775807`), "hundred years", 400},
		"prestart":           {with(`,"extensions":{"sandboxd.prestart":"python,cobol"}`), "cobol", 400},
		"timeout ext":        {with(`,"extensions":{"sandboxd.timeout":"0.5s"}`), "at least 1s", 400},
		"timeout twice":      {with(`,"timeout":60,"extensions":{"sandboxd.timeout":"5s"}`), "leave one out", 400},
		"10,000 labels":      {with(`,"metadata":{` + many(10000, `"k%d":"v"`) + `}`), "at most 64", 400},
		"label value":        {with(`,"metadata":{"a":"b c"}`), "metadata value", 400},
		"label reserved":     {with(`,"metadata":{"opensandbox.io/x":"y"}`), "reserved", 400},
		"label long":         {with(`,"metadata":{"a":"` + strings.Repeat("x", 64) + `"}`), "63", 400},
		"label prefix":       {with(`,"metadata":{"A_B/x":"y"}`), "DNS", 400},
		"1,001 env":          {with(`,"env":{` + many(1001, `"k%d":"v"`) + `}`), "at most 1000", 400},
		"env of 2 MiB":       {with(`,"env":{"A":"` + strings.Repeat("x", 2<<20) + `"}`), "256 KiB", 400},
		"env just too large": {with(`,"env":{"A":"` + strings.Repeat("x", 256<<10-2) + `"}`), "256 KiB", 400},
		"all together too large": {
			with(`,"env":{"A":"` + strings.Repeat("x", 250<<10) + `"},"networkPolicy":{"defaultAction":"deny","egress":[` +
				strings.Repeat(`{"action":"allow","target":"`+strings.Repeat("part-of-it.", 20)+`example.com"},`, 3600) +
				`{"action":"allow","target":"example.com"}]}`), "of the daemon's state", 400,
		},
		"env name":          {with(`,"env":{"A=B":"x"}`), "name of a variable", 400},
		"env name, newline": {with(`,"env":{"A\nB":"x"}`), "name of a variable", 400},
		"env name, NUL":     {with(`,"env":{"A\u0000B":"x"}`), "name of a variable", 400},
		"env name, empty":   {with(`,"env":{"":"x"}`), "name of a variable", 400},
		"env NUL":           {with(`,"env":{"A":"\u0000"}`), "NUL", 400},
		"name of an id":     {with(`,"extensions":{"sandboxd.name":"tabcdefghijk"}`), "looks like the id", 400},
		"name with a slash": {with(`,"extensions":{"sandboxd.name":"a/b"}`), "want 1 to 63", 400},
		"name dots":         {with(`,"extensions":{"sandboxd.name":"a..b"}`), "two dots", 400},
		"platform half":     {with(`,"platform":{"os":"linux"}`), "both", 400},
		"platform other":    {with(`,"platform":{"os":"windows","arch":"amd64"}`), "cannot run", 400},
		"secureAccess":      {with(`,"secureAccess":"yes"`), "secureAccess", 400},
		"credentialProxy":   {with(`,"credentialProxy":{"enabled":"yes"}`), "credentialProxy.enabled: got a JSON string", 400},
		"pool":              {with(`,"extensions":{"poolRef":"p"}`), "poolRef", 400},
		"policy action":     {with(`,"networkPolicy":{"defaultAction":"maybe"}`), "allow or deny", 400},
		"policy IPv6":       {with(`,"networkPolicy":{"egress":[{"action":"allow","target":"2001:db8::/32"}]}`), "IPv6", 400},
		"policy host address": {with(
			`,"networkPolicy":{"egress":[{"action":"allow","target":"192.0.2.99","ports":[443]}]}`), "never reaches its host", 400},
		"allow host address": {with(`,"extensions":{"sandboxd.allow":"1.1.1.1,192.0.2.99:22"}`), "never reaches its host", 400},
		"policy host bits": {with(
			`,"networkPolicy":{"egress":[{"action":"allow","target":"10.0.0.5/8","ports":[443],"protocol":"tcp"}]}`), "10.0.0.0/8", 400},
		"policy bad port":      {with(`,"networkPolicy":{"egress":[{"action":"allow","target":"1.1.1.1","ports":["x"]}]}`), "ports", 400},
		"policy protocol":      {with(`,"networkPolicy":{"egress":[{"action":"allow","target":"1.1.1.1","protocol":"tpc"}]}`), "tpc", 400},
		"policy unknown field": {with(`,"networkPolicy":{"egress":[{"action":"allow","target":"1.1.1.1","port":443}]}`), "port", 400},
		"policy long target": {
			with(`,"networkPolicy":{"egress":[{"action":"allow","target":"` + strings.Repeat("1", 100000) + `"}]}`),
			"no name is that long", 400,
		},
		"policy rule action":  {with(`,"networkPolicy":{"egress":[{"action":"x","target":"1.1.1.1"}]}`), "action", 400},
		"policy twice":        {with(`,"networkPolicy":{},"extensions":{"sandboxd.network":"open"}`), "use one of them", 400},
		"network mode":        {with(`,"extensions":{"sandboxd.network":"host"}`), "none, rules or open", 400},
		"allow without rules": {with(`,"extensions":{"sandboxd.network":"none","sandboxd.allow":"1.1.1.1"}`), "allows nothing", 400},
		"allow rule":          {with(`,"extensions":{"sandboxd.allow":"1.1.1.1,exam ple.com"}`), "exam ple.com", 400},
		"renew extension":     {with(`,"extensions":{"access.renew.extend.seconds":"299"}`), "300 to 86400", 400},
		"not JSON":            {`{"image":`, "not JSON", 400},
		"trailing":            {with("") + "x", "not JSON", 400},
		"array":               {`[]`, "JSON object", 400},
		"deep":                {with(`,"x":` + strings.Repeat("[", 101) + strings.Repeat("]", 101)), "nested", 400},
		"empty":               {"", "empty", 400},
	} {
		t.Run(name, func(t *testing.T) {
			w.t = t
			a := w.do("POST", "/v1/sandboxes", c.body)
			e := a.error(t)
			if a.StatusCode != c.status || !strings.Contains(e.Message, c.says) {
				t.Errorf("%d %s: %s, want %d and %q", a.StatusCode, e.Code, e.Message, c.status, c.says)
			}
			if len(e.Message) > 600 {
				t.Errorf("the message echoes %d bytes", len(e.Message))
			}
		})
	}
	if len(w.recs) != 0 {
		t.Errorf("%d sandboxes were made by bad requests", len(w.recs))
	}
}

// endless is a body of n bytes that is never held in memory.
type endless struct{ n int64 }

func (e *endless) Read(p []byte) (int, error) {
	if e.n <= 0 {
		return 0, fmt.Errorf("the server read it all")
	}
	n := min(int64(len(p)), e.n)
	for i := range p[:n] {
		p[i] = ' '
	}
	e.n -= n
	return int(n), nil
}

func TestHugeBody(t *testing.T) {
	w := newWorld(t)
	for _, length := range []int64{64 << 20, -1} { // announced, and chunked
		req, err := http.NewRequest("POST", w.url+"/v1/sandboxes", &endless{64 << 20})
		if err != nil {
			t.Fatal(err)
		}
		req.ContentLength = length
		req.Header.Set(wire.HeaderAPIKey, testKey)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 413 {
			t.Errorf("length %d: %s", length, resp.Status)
		}
	}
}

// TestContentType: what is no JSON is refused before anything reads it as JSON.
func TestContentType(t *testing.T) {
	w := newWorld(t)
	for kind, want := range map[string]int{
		"multipart/form-data": 415, "Multipart/mixed; boundary=x": 415, "application/x-www-form-urlencoded": 202, "": 202,
		"text/plain; charset=utf-8": 415, "application/JSON;charset=utf-8": 202, "application/merge-patch+json": 202,
	} {
		req, err := http.NewRequest("POST", w.url+"/v1/sandboxes", strings.NewReader(`{"image":{"uri":"python"},"entrypoint":["x"]}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set(wire.HeaderAPIKey, testKey)
		req.Header.Set("Content-Type", kind)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%q: %s, want %d", kind, resp.Status, want)
		}
	}
}

func TestRename(t *testing.T) {
	w := newWorld(t)
	id := w.create().ID
	w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],"extensions":{"sandboxd.name":"taken"}}`)
	for _, c := range []struct {
		path, body string
		status     int
		says       string
	}{
		{id, `{"name":"lab"}`, 200, `"name":"lab"`},
		{"lab", `{"name":"lab"}`, 200, `"name":"lab"`},
		{"lab", `{"name":"taken"}`, 409, "SANDBOX::ALREADY_EXISTS"},
		{"lab", `{"name":""}`, 400, "want 1 to 63 characters"},
		{"lab", `{"name":"a b"}`, 400, "want 1 to 63 characters"},
		{"lab", `{"name":"taaaaaaaaaaa"}`, 400, "looks like the id"},
		{"nope", `{"name":"x"}`, 404, "nope"},
	} {
		a := w.do("POST", "/v1/sandboxes/"+c.path+"/rename", c.body)
		if a.StatusCode != c.status || !strings.Contains(string(a.body), c.says) {
			t.Errorf("%s %s: %d %s", c.path, c.body, a.StatusCode, a.body)
		}
	}
}

// TestImageCommand: the image's own command is run only for a client that asks for it.
func TestImageCommand(t *testing.T) {
	w := newWorld(t)
	const own = `"extensions":{"sandboxd.image-command":"true"}`
	for body, want := range map[string]string{
		`"entrypoint":["x"]`:            `"entrypoint":["x"]`,
		own:                             `"entrypoint":["/entry","serve"]`,
		`"entrypoint":["x","y"],` + own: `"entrypoint":["/entry","x","y"]`,
		`"extensions":{"sandboxd.image-command":"false"}`:          "entrypoint is missing",
		`"extensions":{"sandboxd.image-command":"perhaps"}`:        "want true or false",
		strings.Replace(own, "{", `{"sandboxd.idle":"true",`, 1):   "exclude each other",
		`"entrypoint":["x"],"extensions":{"sandboxd.hostname":""}`: "hostname",
	} {
		if a := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},`+body+`}`); !strings.Contains(string(a.body), want) {
			t.Errorf("%s: %d %s; want %s", body, a.StatusCode, a.body, want)
		}
	}
	a := w.do("GET", "/v1/images/python", "")
	if !strings.Contains(string(a.body), `"entrypoint":["/entry"],"cmd":["serve"]`) {
		t.Errorf("%s", a.body)
	}
}

func TestGoodCreate(t *testing.T) {
	w := newWorld(t)
	a := w.do("POST", "/sandboxes?wait=true", `{"image":{"uri":"python"},
		"resourceLimits":{"memory":"64Mi","cpu":"0.5","pids":"100","disk":"1G"},
		"env":{"A":"b"},"platform":{"os":"linux","arch":"amd64"},"metadata":{"example.com/a":"","b":"c-d_e.f"},
		"extensions":{"sandboxd.idle":"true","sandboxd.name":"lab","sandboxd.hostname":"build.example","sandboxd.runtime":"runc",
			"sandboxd.allow":"203.0.113.0/24","sandboxd.timeout":"90s","other":"x"}}`)
	if a.StatusCode != 202 {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	if st := a.Header.Get("Server-Timing"); st != "rootfs;dur=1.500, runtime;dur=20.000" {
		t.Errorf("Server-Timing %q", st)
	}
	sb := a.sandbox(t)
	if sb.Status.State != wire.Running || sb.Extensions["other"] != "x" {
		t.Errorf("%s", a.body)
	}
	r := w.recs[sb.ID].Spec
	if r.MemoryBytes != 64<<20 || r.CPUMillis != 500 || r.Pids != 100 || r.DiskBytes != 1e9 || r.Name != "lab" || r.Runtime != "runc" ||
		r.Timeout != 90*time.Second || len(r.Network.Rules) != 1 || r.Network.Rules[0].String() != "allow 203.0.113.0/24" ||
		r.Env["A"] != "b" || len(r.Entrypoint) != 0 || r.Hostname != "build.example" {
		t.Errorf("spec %+v", r)
	}
	if a := w.do("GET", "/v1/sandboxes/lab", ""); a.sandbox(t).ID != sb.ID {
		t.Errorf("by name: %s", a.body)
	}
	if a := w.do("POST", "/v1/sandboxes",
		`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"extensions":{"sandboxd.name":"lab"}}`); a.StatusCode != 409 {
		t.Errorf("a taken name: %d %s", a.StatusCode, a.body)
	}
	// null: as Python's SDK says "not set"
	a = w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"timeout":null,"env":{"A":null}}`,
		"X-Lenient", "1")
	if a.StatusCode != 202 || a.sandbox(t).ExpiresAt != nil {
		t.Errorf("%s", a.body)
	}
	spec := w.recs[a.sandbox(t).ID].Spec
	if spec.MemoryBytes != 512<<20 || spec.Network.Mode != record.NetworkRules || spec.Runtime != "runsc" || len(spec.Env) != 0 {
		t.Errorf("defaults: %+v", spec)
	}
	for _, v := range []string{"true", "false"} {
		a = w.do("POST", "/v1/sandboxes",
			`{"image":{"uri":"python"},"entrypoint":["a 'b"],"resourceLimits":{},"extensions":{"sandboxd.literal":"`+v+`"}}`)
		sb := a.sandbox(t)
		if r := w.recs[sb.ID].Spec; strings.Join(sb.Entrypoint, "|") != "a 'b" || r.Literal != (v == "true") {
			t.Errorf("literal %s: %s, %+v", v, a.body, r)
		}
	}
	w.failed = true
	a = w.do("POST", "/v1/sandboxes", createBody, "Prefer", "wait")
	if sb := a.sandbox(t); a.StatusCode != 202 || sb.Status.State != wire.Failed || sb.Status.Reason != "create_failed" ||
		!strings.Contains(sb.Status.Message, "/nope") {
		t.Errorf("a failed create: %s", a.body)
	}
	w.failed, w.fail = false, errs.Retry(errs.New(errs.Exhausted, "all 2000 slots are taken; remove a sandbox"), 2500*time.Millisecond)
	if a := w.do("POST", "/v1/sandboxes", createBody, "X-Lenient", "1"); a.StatusCode != 503 || a.Header.Get("Retry-After") != "3" {
		t.Errorf("no slot: %d %s", a.StatusCode, a.body)
	}
}

func TestManualCleanupCannotRenew(t *testing.T) {
	w := newWorld(t)
	sb := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{}}`).sandbox(t)
	at := "/v1/sandboxes/" + sb.ID + "/renew-expiration"
	for body, want := range map[string]int{
		`{"expiresAt":"2099-01-01T00:00:00Z"}`: 409,
		`{"expiresAt":"2001-01-01T00:00:00Z"}`: 400,
		`{"expiresAt":"tomorrow"}`:             400,
		`{"expiresAt":"9999-01-01T00:00:00Z"}`: 400,
		`{}`:                                   400,
	} {
		if a := w.do("POST", at, body); a.StatusCode != want || a.error(t).Code != "DOCKER::INVALID_EXPIRATION" {
			t.Errorf("%s: %d %s", body, a.StatusCode, a.body)
		}
	}
}

// TestPaths is about ids and paths that mean harm; none may reach anything.
func TestPaths(t *testing.T) {
	w := newWorld(t)
	for _, p := range []string{
		"/v1/sandboxes/non-existent-1234", "/v1/sandboxes/..", "/v1/sandboxes/%2e%2e", "/v1/sandboxes/a%2fb", "/v1/sandboxes/..%2f..%2fetc",
		"/v1/sandboxes/a%00b", "/v1/sandboxes/" + strings.Repeat("x", 3000), "/v1/sandboxes/%zz", "/nope", "/v1", "/v1/v1/sandboxes",
		"/v1/sandboxes/x/nope", "/v1/sandboxes/../health", "/.//health", "/v1/sandboxes//pause",
	} {
		req, err := http.NewRequest("GET", w.url+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.URL.Opaque = p // sent as it is
		req.Header.Set(wire.HeaderAPIKey, testKey)
		resp, err := noRedirect.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 404 && resp.StatusCode != 400 && resp.StatusCode != 405 {
			t.Errorf("%.60s: %s", p, resp.Status)
		}
	}
	if a := w.do("PUT", "/v1/sandboxes", "{}"); a.StatusCode != 405 || a.Header.Get("Allow") != "GET, POST" {
		t.Errorf("PUT: %s, Allow %q", a.Status, a.Header.Get("Allow"))
	}
	for p, want := range map[string]int{
		"/v1/snapshots": 200, "/v1/pools": 400, "/v1/pools/x": 400, "/templates": 400, "/v1/templates/tpl_1": 400,
		"/v1/sandboxes/x/diagnostics/logs": 404, "/v1/stats": 200, "/health": 200, "/openapi.json": 200, "/v1/version": 200,
	} {
		if a := w.do("GET", p, ""); a.StatusCode != want {
			t.Errorf("%s: %s", p, a.Status)
		}
	}
	if a := w.do("POST", "/v1/metrics/events", "{}"); a.StatusCode != 204 {
		t.Errorf("telemetry: %s", a.Status)
	}
}

func TestList(t *testing.T) {
	w := newWorld(t)
	for i := range 45 {
		sb := w.create()
		w.set(sb.ID, func(r *record.Record) {
			r.Created = time.Unix(int64(i), 0)
			r.Spec.Labels = map[string]string{"n": fmt.Sprint(i % 3), "note": "a b"}
			if i%9 == 0 {
				r.State = record.Paused
			}
			if i == 44 {
				r.State = record.Deleting
			}
		})
	}
	list := func(q string) (l wire.List) {
		a := w.do("GET", "/v1/sandboxes"+q, "")
		if a.StatusCode != 200 {
			t.Fatalf("%s: %s", q, a.body)
		}
		if err := json.Unmarshal(a.body, &l); err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := list("")
	if len(l.Items) != 20 || l.Pagination != (wire.Pagination{Page: 1, PageSize: 20, TotalItems: 44, TotalPages: 3, HasNextPage: true}) {
		t.Errorf("%+v of %d", l.Pagination, len(l.Items))
	}
	if !l.Items[0].CreatedAt.After(l.Items[1].CreatedAt) {
		t.Error("not newest first")
	}
	for q, want := range map[string]int{
		"?page=3": 4, "?page=4": 0, "?pageSize=200": 44, "?state=paused&pageSize=100": 5, "?state=Paused&state=RUNNING&pageSize=100": 44,
		"?metadata=n%3D1&pageSize=100": 15, "?metadata=n%3D1%26note%3Da%2520b&pageSize=100": 15, "?metadata=n%3D7": 0, "?state=Nope": 0,
	} {
		if got := len(list(q).Items); got != want {
			t.Errorf("%s: %d, want %d", q, got, want)
		}
	}
	for _, q := range []string{
		"?page=0", "?page=x", "?pageSize=201", "?pageSize=-1", "?metadata=nonsense", "?page=99999999999999999999",
		"?metadata=%25zz%3D1", "?a=%zz",
	} {
		if a := w.do("GET", "/v1/sandboxes"+q, ""); a.StatusCode != 400 {
			t.Errorf("%s: %s", q, a.Status)
		}
	}
}

func TestEnded(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	w.set(sb.ID, func(r *record.Record) {
		code := 3
		r.State, r.Reason, r.Message, r.ExitCode, r.LastOutput = record.Ended, record.Exited, "the entrypoint exited with 3", &code, "bye\n"
	})
	at := "/v1/sandboxes/" + sb.ID
	got := w.do("GET", at, "").sandbox(t)
	if got.Status.State != wire.Failed || got.Status.Reason != "exited" || *got.Sandboxd.ExitCode != 3 {
		t.Errorf("%+v", got)
	}
	if a := w.do("GET", at+"/logs", ""); string(a.body) != "bye\n" {
		t.Errorf("logs %q", a.body)
	}
	if a := w.do("GET", at+"/proxy/44772/ping", ""); a.StatusCode != 409 {
		t.Errorf("ping: %s", a.Status)
	}
	if a := w.do("GET", at+"/stats", ""); a.StatusCode != 409 {
		t.Errorf("stats: %s", a.Status)
	}
	w.set(sb.ID, func(r *record.Record) { code := 0; r.ExitCode = &code })
	if got := w.do("GET", at, "").sandbox(t); got.Status.State != wire.Terminated {
		t.Errorf("exit 0 is %s", got.Status.State)
	}
}

func TestInternalErrorsDoNotLeak(t *testing.T) {
	w := newWorld(t)
	w.fail = fmt.Errorf("mount /var/lib/sandboxd/secret: permission denied")
	a := w.do("POST", "/v1/sandboxes", createBody, wire.HeaderRequestID, "my-request")
	e := a.error(t)
	if a.StatusCode != 500 || strings.Contains(e.Message, "/var/lib") || !strings.Contains(e.Message, "my-request") {
		t.Errorf("%d %s", a.StatusCode, e.Message)
	}
	if !strings.Contains(w.log.String(), "/var/lib/sandboxd/secret") {
		t.Errorf("the log does not know: %s", w.log)
	}
}

// TestDeleteAgain deletes what a first DELETE condemned and could not kill: it
// is gone for every other route.
func TestDeleteAgain(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	w.set(sb.ID, func(r *record.Record) { r.State = record.Deleting })
	at := "/v1/sandboxes/" + sb.ID
	for _, want := range []struct {
		method string
		status int
	}{{"GET", 404}, {"DELETE", 204}, {"DELETE", 404}} {
		if a := w.do(want.method, at, ""); a.StatusCode != want.status {
			t.Errorf("%s answers %s %s, want %d", want.method, a.Status, a.body, want.status)
		}
	}
}
