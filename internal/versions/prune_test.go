package versions

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestPrune: a version goes when nothing needs it, and not before.
func TestPrune(t *testing.T) {
	r := makeRoot(t, map[string]string{"2.0.0": "7", "1.9.0": "7", "1.8.0": "7", "1.7.0": "7", "1.6.0": "7", "1.5.0": "7", "1.4.0": "7"})
	list := filepath.Join(t.TempDir(), "sandboxd.list")
	old := dpkgLists
	defer func() { dpkgLists = old }()
	dpkgLists = []string{list}
	if err := os.WriteFile(list, []byte("/.\n"+r.Dir("1.8.0")+"/bin\n"+r.Dir("1.8.0-rc.1")+"/bin\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for l, version := range map[Link]string{Current: "2.0.0", Previous: "1.9.0"} {
		if err := r.Point(l, version); err != nil {
			t.Fatal(err)
		}
	}
	// One that a process runs from.
	program := filepath.Join(r.Dir("1.7.0"), "libexec/sandboxd/runsc")
	if err := os.MkdirAll(filepath.Dir(program), 0o755); err != nil {
		t.Fatal(err)
	}
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", sleep, program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	sentry := exec.Command(program, "infinity")
	if err := sentry.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { sentry.Process.Kill(); sentry.Wait() }() //nolint:errcheck // it is killed
	cut := []string{filepath.Join(string(r), "versions", removing+"1.3.0"), filepath.Join(string(r), "versions", staged+"17")}
	for _, dir := range cut {
		if err := os.MkdirAll(dir+"/bin", 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var looked func()
	prune := func(want ...string) {
		t.Helper()
		removed, err := r.Prune("2.0.0", func(all []string) ([]string, error) {
			if looked != nil {
				looked()
			}
			return slices.DeleteFunc(all, func(v string) bool { return v == "1.6.0" }), nil
		})
		if err != nil || !slices.Equal(removed, want) {
			t.Errorf("removed %q, %v; want %q", removed, err, want)
		}
		for _, v := range want {
			if r.Has(v) {
				t.Errorf("%s is there", v)
			}
		}
	}
	// A change that is under way needs its versions, and nothing is removed while somebody has the lock.
	if err := r.Note(&Journal{Step: Trial, From: "1.4.0", To: "2.0.0", Nonce: "n"}); err != nil {
		t.Fatal(err)
	}
	upgrader := holdLock(t, r)
	prune()
	for _, dir := range cut {
		if _, err := os.Stat(dir); err != nil {
			t.Error("while somebody has the lock:", err)
		}
	}
	upgrader.Kill()      //nolint:errcheck // Wait tells
	if r.Wait() != nil { // it has ended
		t.Fatal("the lock is not free")
	}
	// Nor while a package manager unpacks a version, of which no list has a file yet.
	kept := filepath.Join(string(r), "kept")
	if err := os.Mkdir(kept, 0o755); err != nil {
		t.Fatal(err)
	}
	prune()
	if err := os.Remove(kept); err != nil {
		t.Fatal(err)
	}
	prune("1.5.0")
	for _, dir := range cut {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("the remains %s are there: %v", dir, err)
		}
	}
	if err := r.Note(&Journal{Step: Done, From: "1.4.0", To: "2.0.0", Nonce: "n"}); err != nil {
		t.Fatal(err)
	}
	prune("1.4.0")
	// A look for what may be needed is in nobody's way: it takes no lock.
	looks := 0
	looked = func() {
		looks++
		upgrader := holdLock(t, r)
		upgrader.Kill() //nolint:errcheck // Wait tells
		if err := r.Wait(); err != nil {
			t.Error(err)
		}
	}
	prune()
	if looks != 1 {
		t.Errorf("it looked %d times", looks)
	}
	all, err := r.List()
	var left []string
	for _, v := range all {
		left = append(left, v.Name)
	}
	if got := strings.Join(left, " "); err != nil || got != "2.0.0 1.9.0 1.8.0 1.7.0 1.6.0" {
		t.Errorf("left: %s, %v", got, err)
	}
}
