package api

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestNetworkFlows: the flow log is there in every state of a sandbox.
func TestNetworkFlows(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	for _, state := range []record.State{record.Running, record.Paused, record.Ended} {
		w.set(sb.ID, func(r *record.Record) { r.State = state })
		var f wire.NetworkFlows
		a := w.do("GET", "/v1/sandboxes/"+sb.ID+"/network/flows", "")
		if err := json.Unmarshal(a.body, &f); err != nil {
			t.Fatalf("%s: %d %s: %v", state, a.StatusCode, a.body, err)
		}
		if len(f.Flows) != 2 || f.Flows[0].Destination != "pypi.org" || f.Flows[0].Allowed != 3 || f.Other == nil {
			t.Errorf("%s: %+v", state, f)
		}
		var s wire.NetworkStats
		a = w.do("GET", "/v1/sandboxes/"+sb.ID+"/network/stats", "")
		if err := json.Unmarshal(a.body, &s); err != nil {
			t.Fatalf("%s: %d %s: %v", state, a.StatusCode, a.body, err)
		}
		if s.RxBytes != 4 || s.TxPackets != 1 || s.Denied != 5 {
			t.Errorf("%s: %+v", state, s)
		}
	}
	for path, status := range map[string]int{"/v1/sandboxes/nope/network/flows": 404, "/v1/sandboxes/" + sb.ID + "/network/x": 404} {
		if a := w.do("GET", path, ""); a.StatusCode != status {
			t.Errorf("GET %s: %d %s", path, a.StatusCode, a.body)
		}
	}
	a := w.do("POST", "/v1/sandboxes/"+sb.ID+"/network/flows", "")
	if a.StatusCode != 405 || !strings.Contains(a.Header.Get("Allow"), "GET") {
		t.Errorf("POST: %d %s", a.StatusCode, a.body)
	}
}
