package cli

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestSnapshotName: sandboxctl asks for a name that no other snapshot has.
func TestSnapshotName(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var req wire.CreateSnapshotRequest
		json.NewDecoder(r.Body).Decode(&req) //nolint:errcheck // the test sees what is missing
		w.Header().Set("Content-Type", "application/json")
		status, answer := 202, any(wire.Snapshot{ID: "snap-" + testID, Status: wire.Status{State: wire.SnapshotReady}})
		if (req.Name != nil) != r.URL.Query().Has("unique") {
			status, answer = 400, wire.Error{Code: "X", Message: "asked with " + r.URL.RawQuery}
		} else if req.Name != nil && *req.Name == "taken" {
			status, answer = 409, wire.Error{Code: "SNAPSHOT::ALREADY_EXISTS", Message: "it is taken"}
		}
		w.WriteHeader(status)
		json.NewEncoder(w).Encode(answer) //nolint:errcheck // the client sees it
	}))
	t.Cleanup(s.Close)
	d := &daemon{url: s.URL}
	for args, want := range map[string]result{
		"snapshot create lab":              {0, "snap-" + testID + "\n", ""},
		"snapshot create lab --name free":  {0, "snap-" + testID + "\n", ""},
		"snapshot create lab --name taken": {125, "", "it is taken"},
	} {
		if r := d.run(t, strings.Fields(args)...); r.code != want.code || r.out != want.out || !strings.Contains(r.errout, want.errout) {
			t.Errorf("%s: %+v, want %+v", args, r, want)
		}
	}
}
