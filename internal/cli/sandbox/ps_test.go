package sandbox

import (
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestDockerStates: a filter takes docker's words for states that have other names here.
func TestDockerStates(t *testing.T) {
	for filter, want := range map[string][]string{
		"status=exited": {wire.Terminated, wire.Failed}, "status=dead": {wire.Failed}, "state=created": {wire.Pending},
		"status=running": {wire.Running}, "status=PAUSED": {wire.Paused},
	} {
		if f, _, err := parseFilters([]string{filter}); err != nil || !slices.Equal(f.States, want) {
			t.Errorf("%s: %v, %v; want %v", filter, f.States, err, want)
		}
	}
}
