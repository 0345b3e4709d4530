package overlay_test

import (
	"testing"

	"github.com/sandboxd/sandboxd/pkg/snapshot/snapshottest"
)

func TestMain(m *testing.M) { snapshottest.Main(m) }
