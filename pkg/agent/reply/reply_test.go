package reply

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/fields"
	"github.com/sandboxd/sandboxd/pkg/agent"
)

// TestMisspelledField: as in pkg/api.
func TestMisspelledField(t *testing.T) {
	read := func(body, client string) (unknown string, err error) {
		w, r := httptest.NewRecorder(), httptest.NewRequest("POST", "/command", strings.NewReader(body))
		r.Header.Set("User-Agent", client)
		err = ReadJSON(w, r, &agent.CommandRequest{})
		return w.Header().Get(fields.Header), err
	}
	if _, err := read(`{"command":"sleep 9","timout":1}`, "curl/8"); err == nil || !strings.Contains(err.Error(), "did you mean timeout?") {
		t.Errorf("timout: %v", err)
	}
	if unknown, err := read(`{"command":"sleep 9","timout":1}`, "OpenSandbox-Python-SDK/1.1.1"); err != nil || unknown != "timout" {
		t.Errorf("timout of an SDK: %v, %q", err, unknown)
	}
	if unknown, err := read(`{"command":"true","timeout":1,"shell":"zsh"}`, "curl/8"); err != nil || unknown != "shell" {
		t.Errorf("shell: %v, %q", err, unknown)
	}
}
