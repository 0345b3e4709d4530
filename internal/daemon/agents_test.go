package daemon

import (
	"maps"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestReservedVariables: they reach no guest, also from an image or an old record.
func TestReservedVariables(t *testing.T) {
	r := &record.Record{Spec: record.Spec{
		Image: record.Image{Config: record.ImageConfig{Env: []string{"A=image", "B=image", "OPENSANDBOX_EGRESS_TOKEN=image"}}},
		Env:   map[string]string{"B": "sandbox", "OPENSANDBOX_EGRESS_MODE": "x", "OPENSANDBOX_LIFECYCLE": "{}", "OPENSANDBOX_X": "x"},
	}}
	want := map[string]string{"A": "image", "B": "sandbox", "OPENSANDBOX_X": "x"}
	if got := environment(r); !maps.Equal(got, want) {
		t.Errorf("the guest gets %v, want %v", got, want)
	}
}
