package egress

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestProbe finds all parts on a host that runs the other tests, leaves nothing
// of them, and is not disturbed by an Engine that holds the real ones.
func TestProbe(t *testing.T) {
	hosttest.Root(t)
	hosttest.Leaks(t, inst)
	for range 2 {
		found, err := Probe(t.Context(), inst)
		if err != nil || len(found) != 3 {
			t.Fatalf("%v, %v", found, err)
		}
		for part, err := range found {
			if err != nil {
				t.Errorf("%s: %v", part, err)
			}
		}
	}
	out, err := exec.Command("iptables-save").CombinedOutput()
	if err != nil || strings.Contains(string(out), inst.Chain("")) {
		t.Errorf("the probe left its chains on the host: %v\n%s", err, out)
	}
}
