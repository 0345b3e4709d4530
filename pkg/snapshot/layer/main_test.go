package layer

import (
	"os"
	"testing"

	"github.com/sandboxd/sandboxd/internal/confine"
)

// TestMain lets the test binary be the child that unpacks.
func TestMain(m *testing.M) {
	confine.MainOfTest(map[string]confine.Verb{UnpackVerb: Unpack})
	os.Exit(m.Run())
}
