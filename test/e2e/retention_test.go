package e2e_test

import (
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestSnapshotsKept: older snapshots go when a limit is met, and say so; what somebody made
// an image of leaves the host, comes back under another name and runs on both runtimes; and
// what nobody uses is pruned.
func TestSnapshotsKept(t *testing.T) {
	hosttest.Root(t)
	h := newHost(t, daemontest.Options{Config: []string{"[snapshots]", "max_per_sandbox = 2"}})
	l := &lab{host: h, T: t, runtime: "runc"}
	id := l.make("--name", "kept", "base")
	take := func(name string) string {
		t.Helper()
		l.ok("exec", "kept", "--", "sh", "-c", "echo "+name+" >/note")
		return strings.TrimSpace(l.ok("snapshot", "create", "kept", "--name", name))
	}
	names := func() []string { return strings.Fields(l.ok("snapshot", "ls", "--format", "{{.name}}")) }
	first := take("first")
	l.ok("commit", "first", "kept/image:1")
	take("second")
	take("third")
	eventually(t, patience, func() error {
		if got := names(); !slices.Equal(got, []string{"third", "second"}) {
			return fmt.Errorf("snapshots are %q", got)
		}
		return nil
	})
	eventually(t, patience, func() error { // the history is written after the snapshot is gone
		if out := l.ok("diagnostics", "events", "kept"); !strings.Contains(out, first+" removed: it was beyond snapshots.max_per_sandbox") {
			return fmt.Errorf("events of the source:\n%s", out)
		}
		return nil
	})
	if status, body := askBy(t, http.MethodPost, adminSocket(h.Daemon), "/sweep"); status != http.StatusNoContent {
		t.Errorf("sweep: %d %.80s", status, body)
	}
	if got := names(); len(got) != 2 {
		t.Errorf("after a sweep snapshots are %q", got)
	}
	if text := scrape(t, h.Daemon); !strings.Contains(text, "\nsandboxd_snapshots_removed_total{limit=\"max_per_sandbox\"} 1\n") {
		t.Error("the removal is not counted")
	}

	file := filepath.Join(t.TempDir(), "image.tar")
	l.ok("image", "save", "kept/image:1", "-o", file)
	l.ok("rmi", "kept/image:1")
	l.ok("image", "import", "--format", "oci", file, "back/image:2")
	for _, runtime := range runtimes {
		if out := l.ok("run", "--runtime", runtime, "back/image:2", "cat", "/note"); out != "first\n" {
			t.Errorf("on %s it has %q", runtime, out)
		}
	}

	ended := l.make("--name", "over", "back/image:2", "--", "true")
	l.ok("wait", ended)
	if out := l.ok("system", "df"); !strings.Contains(out, "Sandboxes   2       1") || !strings.Contains(out, "Snapshots   2       0") {
		t.Errorf("df:\n%s", out)
	}
	if out := l.ok("system", "prune", "-f", "--filter", "until=24h"); strings.Contains(out, "Deleted Sandboxes") {
		t.Errorf("of what is younger than a day: %s", out)
	}
	if out := l.ok("system", "prune", "-f"); !strings.Contains(out, "Deleted Sandboxes:\n"+ended+"\n") ||
		!strings.Contains(out, "Total reclaimed space: ") {
		t.Errorf("prune: %s", out)
	}
	if out := l.ok("ps", "-aq"); strings.TrimSpace(out) != id || len(names()) != 2 {
		t.Errorf("sandboxes %q, snapshots %q are left", out, names())
	}
	l.ok("image", "rm", "back/image:2")
	l.ok("rm", "-f", "kept")
	h.deleteSnapshots(t)
	h.deleteAll(t)
}
