package e2e_test

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

//go:embed testdata/guest/names.py
var namesProgram string

// TestFileNames: renames, links and removals of files, open ones too, are in a sandbox what they
// are on the host: on its disk and on a volume, and after the sandbox stood still. On gVisor that
// is a hibernation, and a fork with memory has them as well.
func TestFileNames(t *testing.T) {
	h := newHost(t, daemontest.Options{Pool: pool.BtrfsLoop})
	h.deleteVolumes(t) // of an earlier run that was killed
	daemontest.Image(t, h.Daemon, "python")
	out, err := exec.CommandContext(t.Context(), "python3", "-c", namesProgram, t.TempDir(), os.DevNull).CombinedOutput()
	if err != nil {
		t.Fatalf("on the host: %v\n%s", err, out)
	}
	want := string(out)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: runtime}
			defer h.deleteVolumes(t)
			defer h.deleteAll(t)
			r := spec(runtime, "sh", "-c", `mkfifo /srv/go /srv/end; mkdir /srv/n
python3 -c "$0" /srv/n /srv/go >/srv/out 2>&1; echo ended >/srv/end; exec sleep infinity`, namesProgram)
			r.Volumes = []wire.VolumeMount{{Name: "v", MountPath: "/v", PVC: &wire.PVC{ClaimName: "names"}}}
			r.Image.URI, r.Extensions[wire.ExtName] = "python", "lab"
			h.create(t, r)
			same(t, "on a volume", want, l.ok("exec", "lab", "--", "python3", "-c", namesProgram, "/v", "/dev/null"))
			eventually(t, patience, func() error { // the last line before it waits
				if out := l.sh("lab", "cat /srv/out"); !strings.Contains(out, "\na removed directory") {
					return fmt.Errorf("it has printed %q", out)
				}
				return nil
			})
			goOn := []string{"exec", "lab", "--", "sh", "-c", "echo >/srv/go; cat /srv/end /srv/out"}
			if runtime == "runsc" {
				l.ok("fork", "lab", "--memory", "--name", "copy")
				l.ok("hibernate", "lab")
				goOn[1] = "copy"
				same(t, "in a copy", "ended\n"+want, l.ok(goOn...))
				goOn[1] = "lab"
			} else {
				l.ok("pause", "lab")
			}
			l.ok("resume", "lab")
			same(t, "on the disk", "ended\n"+want, l.ok(goOn...))
		})
	}
}

// same compares what was printed with what the host printed, line by line.
func same(t *testing.T, where, want, got string) {
	t.Helper()
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(w), len(g)) {
		at := func(all []string) string {
			if i < len(all) {
				return all[i]
			}
			return "nothing"
		}
		if at(w) != at(g) {
			t.Errorf("%s, line %d: it printed\n%s\nand the host\n%s", where, i+1, at(g), at(w))
		}
	}
}
