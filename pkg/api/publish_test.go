package api

import (
	"encoding/json"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// TestPublish: the request's words come back as ports, and do not go with secureAccess.
func TestPublish(t *testing.T) {
	w := newWorld(t)
	body := func(more string) string {
		return `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"extensions":{"sandboxd.publish":"8080:80,[::1]:9:9"}` +
			more + `}`
	}
	sb := w.do("POST", "/v1/sandboxes", body("")).sandbox(t)
	b, _ := json.Marshal(sb.Sandboxd.Ports)
	want := `[{"hostIp":"127.0.0.1","hostPort":8080,"port":80,"protocol":"tcp"},` +
		`{"hostIp":"::1","hostPort":9,"port":9,"protocol":"tcp"}]`
	if string(b) != want {
		t.Errorf("%s", b)
	}
	if got := w.recs[sb.ID].Spec.Publish; len(got) != 2 {
		t.Errorf("kept: %v", got)
	}
	w.do("POST", "/v1/sandboxes", body(`,"secureAccess":true`)).wants(t, 400, "SANDBOX::INVALID_PARAMETER")
	w.fail = errs.New(errs.Exists, "publish 127.0.0.1:8080: sandbox x has that port")
	w.do("POST", "/v1/sandboxes", body("")).wants(t, 409, "SANDBOX::ALREADY_EXISTS")
}
