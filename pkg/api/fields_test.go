package api

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/sandboxd/sandboxd/internal/fields"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// sdks are the User-Agents of OpenSandbox's SDKs, as their sources have them.
var sdks = []string{
	"OpenSandbox-Python-SDK/1.1.1", "OpenSandbox-Python-SDK/0.1.15", "OpenSandbox-JS-SDK/0.1.11", "OpenSandbox-Go-SDK/0.1.0",
	"OpenSandbox-Kotlin-SDK/1.0.19", "OpenSandbox-CSharp-SDK/0.1.5",
}

// TestMisspelledField: a field that is one edit from one that could be meant is refused
// before anything is made, except from an SDK, which may know more. Other unknown
// fields are named in the answer.
func TestMisspelledField(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	at := "/v1/sandboxes/" + sb.ID
	const good = `"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{}`
	for _, c := range []struct{ method, path, body, meant string }{
		{"POST", "/v1/sandboxes", `{` + good + `,"timout":60}`, "timeout"},
		{"POST", "/v1/sandboxes", `{"imag":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{}}`, "image"},
		{"POST", "/v1/sandboxes", `{` + good + `,"metdata":{"a":"b"}}`, "metadata"},
		{"POST", at + "/renew-expiration", `{"expireAt":"2100-01-01T00:00:00Z"}`, "expiresAt"},
		{"POST", at + "/snapshots", `{"nmae":"x"}`, "name"},
		{"PATCH", at + "/limits", `{"resourceLimit":{"cpu":"1"}}`, "resourceLimits"},
		{"POST", "/v1/keys", `{"name":"k","rol":"viewer"}`, "role"},
		{"POST", "/v1/volumes", `{"name":"v","sise":"1Gi"}`, "size"},
		{"POST", "/v1/images/build", `{"nam":"python"}`, "name"},
		{"POST", "/v1/images/pull", `{"nam":"python"}`, "name"},
	} {
		a := w.do(c.method, c.path, c.body, "X-Lenient", "1")
		if a.StatusCode != http.StatusBadRequest || !strings.Contains(a.error(t).Message, "did you mean "+c.meant+"?") {
			t.Errorf("%s %s %s: %d %s", c.method, c.path, c.body, a.StatusCode, a.body)
		}
	}
	if n := len(w.recs); n != 1 {
		t.Errorf("%d sandboxes, want the one from before", n)
	}
	for _, sdk := range sdks {
		a := w.do("POST", "/v1/sandboxes", `{`+good+`,"timout":60,"resourceRequests":{}}`, "User-Agent", sdk)
		if got := a.Header.Get(fields.Header); a.StatusCode != http.StatusAccepted || got != "resourceRequests, timout" {
			t.Errorf("%s: %d, unknown %q", sdk, a.StatusCode, got)
		}
	}
	for body, want := range map[string]string{
		`{` + good + `}`:                          "",
		`{` + good + `,"resourceRequests":{}}`:    "resourceRequests",
		`{` + good + `,"timeout":60,"timout":60}`: "timout", // the field that is meant is there
		`{` + good + `,"b\r\nSet-Cookie: x=y":1}`: "b%0D%0ASet-Cookie%3A+x%3Dy",
	} {
		a := w.do("POST", "/v1/sandboxes", body, "User-Agent", "curl/8")
		if got := a.Header.Get(fields.Header); a.StatusCode != http.StatusAccepted || got != want {
			t.Errorf("%s: %d, unknown %q, want %q", body, a.StatusCode, got, want)
		}
	}
	w.set(sb.ID, func(r *record.Record) { r.State = record.Running })
	if a := w.do("PATCH", at+"/metadata", `{"nam":"x","name":null}`); a.StatusCode != http.StatusOK || a.Header.Get(fields.Header) != "" {
		t.Errorf("labels have any name: %d %s", a.StatusCode, a.body)
	}
}

// TestLimitsOfOthers: limits that only other hosts have are ignored and named, as unknown fields are.
func TestLimitsOfOthers(t *testing.T) {
	w := newWorld(t)
	for limits, want := range map[string]string{
		`"ephemeral-storage":"1Gi","memory":"128Mi"`:                 "",
		`"hugepages-2Mi":"1","disk":"1Gi","ephemeral-storage":"2Gi"`: "resourceLimits.ephemeral-storage, resourceLimits.hugepages-2Mi",
		`"nvidia.com/gpu":"1"`:                                       "resourceLimits.nvidia.com%2Fgpu",
	} {
		a := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{`+limits+`}}`)
		if got := a.Header.Get(fields.Header); a.StatusCode != http.StatusAccepted || got != want {
			t.Errorf("%s: %d, unknown %q, want %q", limits, a.StatusCode, got, want)
		}
	}
	disks := 0
	for _, rec := range w.recs {
		if rec.Spec.DiskBytes == 1<<30 {
			disks++
		}
	}
	if disks != 2 {
		t.Errorf("%d sandboxes have a disk of 1 GiB, want 2", disks)
	}
}

// TestDocumentedFieldsAreNoMisspellings: no field that OpenSandbox's document has is taken
// for another one.
func TestDocumentedFieldsAreNoMisspellings(t *testing.T) {
	w := newWorld(t)
	doc, err := openapi3.NewLoader().LoadFromFile(specs + "/lifecycle.yaml")
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			if op.RequestBody == nil || op.RequestBody.Value.Content["application/json"] == nil {
				continue
			}
			path := strings.NewReplacer("{sandboxId}", w.create().ID).Replace(path)
			for name := range op.RequestBody.Value.Content["application/json"].Schema.Value.Properties {
				body, err := json.Marshal(map[string]any{name: nil})
				if err != nil {
					t.Fatal(err)
				}
				asked++
				if a := w.do(method, "/v1"+path, string(body), "X-Lenient", "1"); strings.Contains(string(a.body), "did you mean") {
					t.Errorf("%s %s %s: %s", method, path, body, a.body)
				}
			}
		}
	}
	if asked < 10 {
		t.Errorf("only %d fields were asked for", asked)
	}
}
