package e2e_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

type finding struct{ Check, Status, Detail, Protects, Mend string }

func doctor(t *testing.T, config string, args ...string) (found []finding, err error) {
	t.Helper()
	args = append([]string{"doctor", "--config", config, "-o", "json"}, args...)
	out, err := exec.CommandContext(t.Context(), daemontest.Bin("sandboxd"), args...).Output()
	if jerr := json.Unmarshal(out, &found); jerr != nil {
		t.Fatalf("%v: %s", jerr, out)
	}
	return found, err
}

// TestDoctor looks at a host on which everything else here runs, beside a
// daemon with sandboxes: nothing fails, nothing is left, nobody is disturbed.
func TestDoctor(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	var ids []string
	for _, runtime := range runtimes {
		ids = append(ids, h.create(t, spec(runtime)).ID)
	}
	before := h.holds()
	found, err := doctor(t, h.Config)
	if err != nil || len(found) < 30 {
		t.Errorf("%d findings, %v", len(found), err)
	}
	for _, f := range found {
		if f.Status == "fail" || f.Protects == "" || f.Status == "warn" && f.Mend == "" {
			t.Errorf("%+v", f)
		}
	}
	if f := found[0]; f.Check != "configuration" || !strings.Contains(f.Detail, "read "+h.Config) ||
		!strings.Contains(f.Detail, fmt.Sprintf("its daemon runs, pid %d", h.Pid())) {
		t.Errorf("it does not say what it read: %+v", f)
	}
	i := slices.IndexFunc(found, func(f finding) bool { return f.Check == "nofile" })
	if i < 0 || !strings.Contains(found[i].Detail, fmt.Sprintf("pid %d", h.Pid())) {
		t.Errorf("it does not look at the daemon's own limits: %+v", found[i])
	}
	i = slices.IndexFunc(found, func(f finding) bool { return f.Check == "gvisor-age" })
	if i < 0 || !strings.Contains(found[i].Detail, "gVisor of 20") {
		t.Errorf("it does not say how old gVisor is: %+v", found[i])
	}
	i = slices.IndexFunc(found, func(f finding) bool { return f.Check == "advisories" })
	if i < 0 || !strings.Contains(found[i].Detail, "table of 20") {
		t.Errorf("it does not say of which day its table of flaws is: %+v", found[i])
	}
	if info, err := h.api.System().Info(t.Context()); err != nil || len(info.SecretKeys) != 1 {
		t.Errorf("the daemon does not say which key it has: %+v, %v", info, err)
	}
	h.holdsOnly(t, before)
	for _, id := range ids {
		h.answers(t, id)
	}
	left, _ := filepath.Glob(filepath.Join(h.StateDir, "sandboxd-probe-*"))
	if len(left) > 0 {
		t.Errorf("left %v", left)
	}

	text, err := os.ReadFile(h.Config)
	if err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(t.TempDir(), "bad.toml")
	if err := os.WriteFile(bad, []byte(strings.Replace(string(text), daemontest.Bin(""), "/nowhere", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	flaws := filepath.Join(t.TempDir(), "flaws.toml")
	if err := os.WriteFile(flaws, []byte("date = 2026-11-21\n[[flaw]]\npart = \"moon\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	found, err = doctor(t, bad, "--advisories", flaws)
	i = slices.IndexFunc(found, func(f finding) bool { return f.Check == "advisories" && f.Status == "fail" })
	if i < 0 || !strings.Contains(found[i].Detail, flaws+" is not used") || !strings.Contains(found[i].Detail, `line 3: part "moon"`) {
		t.Errorf("with a bad table of flaws: %+v", found)
	}
	i = slices.IndexFunc(found, func(f finding) bool { return f.Check == "programs" && f.Status == "fail" })
	if err == nil || i < 0 || !strings.Contains(found[i].Mend, "libexec_dir") {
		t.Errorf("without programs: %+v, %v", found, err)
	}
}

// TestSupportBundle plants secrets in a sandbox and looks for them in the bundle
// of a daemon that runs.
func TestSupportBundle(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	r := spec("runc", "sh", "-c", "echo PLANTED-output; sleep 1000")
	secret := "PLANTED-environment"
	r.Env = map[string]*string{"KEY": &secret}
	r.Metadata = map[string]string{"team": "PLANTED-label"}
	r.Extensions[wire.ExtName] = "PLANTED-name"
	sb := h.create(t, r)
	ep, err := h.api.Endpoint(t.Context(), sb.ID, 44772)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "bundle.tar.gz")
	if out, err := exec.CommandContext(t.Context(), daemontest.Bin("sandboxd"), "support-bundle", "--config", h.Config,
		"-o", file).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	text, err := exec.CommandContext(t.Context(), "tar", "-xzOf", file).Output()
	if err != nil {
		t.Fatal(err)
	}
	secrets := []string{"PLANTED", daemontest.Key}
	for _, v := range ep.Headers {
		secrets = append(secrets, v)
	}
	for _, s := range secrets {
		if strings.Contains(string(text), s) {
			t.Errorf("%q is in the bundle", s)
		}
	}
	for _, want := range []string{
		sb.ID, "sb-" + sb.ID, h.Instance.Chain("FORWARD"), h.Instance.Set("src"), `"check": "nofile"`,
		`"state": "running"`, "/" + h.Instance.CgroupRoot() + "/" + sb.ID,
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%q is not in the bundle", want)
		}
	}
}
