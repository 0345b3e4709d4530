package runsc_test

import (
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/oci/runsc"
	"github.com/sandboxd/sandboxd/pkg/oci/runtimetest"
)

func open(t testing.TB, h *runtimetest.Host) runtimetest.Runtime {
	t.Helper()
	return openBuild(t, h, h.Bin, h.Libexec)
}

// openBuild opens the driver of the runsc in a directory, beside others that are installed.
func openBuild(t testing.TB, h *runtimetest.Host, dir string, installed ...string) runtimetest.Runtime {
	t.Helper()
	d, err := runsc.New(runsc.Config{
		Binary: filepath.Join(dir, "runsc"), Installed: func() []string { return installed },
		Root: h.Root, Bundle: h.Bundle, StartInCgroup: h.StartInCgroup, Processes: h.Processes,
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestConformance(t *testing.T) { runtimetest.Run(t, oci.Runsc, open) }

func TestLiveFork(t *testing.T) { runtimetest.LiveFork(t, oci.Runsc, open) }

func TestOtherBuild(t *testing.T) { runtimetest.OtherBuild(t, oci.Runsc, openBuild) }

func BenchmarkStart(b *testing.B) { runtimetest.Bench(b, oci.Runsc, open) }
