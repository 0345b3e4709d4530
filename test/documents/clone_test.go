package documents

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// alone are packages whose tests read files of the checkout and take only seconds.
var alone = []string{"./api", "./internal/archtest", "./test/install", "./test/summary"}

// TestClone runs tests in a clone, with nothing beside it and with an empty home: what is
// committed is enough to build and test. TestInside, in internal/archtest, holds that no
// test or script names a path outside of the checkout.
func TestClone(t *testing.T) {
	hosttest.Root(t)
	dir, env := clone(t)
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"test", "-count=1", "-vet=off", "-trimpath"}, alone...)...)
	cmd.Dir, cmd.Env = dir, env
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v in an empty directory: %v\n%s", cmd.Args, err, out)
	}
}

// clone clones what is committed into an empty directory, and returns an environment with
// an empty home and Go's caches.
func clone(t *testing.T) (dir string, env []string) {
	t.Helper()
	from, err := filepath.Abs(top)
	if err != nil {
		t.Fatal(err)
	}
	empty := t.TempDir()
	home := filepath.Join(empty, "home")
	if err := os.Mkdir(home, 0o755); err != nil {
		t.Fatal(err)
	}
	// The checkout may be another user's, as in a container.
	safe := filepath.Join(home, ".gitconfig")
	if err := os.WriteFile(safe, []byte("[safe]\n\tdirectory = *\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	env = homeless(t, home)
	dir = filepath.Join(empty, "sandboxd")
	cmd := exec.CommandContext(t.Context(), "git", "clone", "--quiet", "--depth=1", "file://"+from, dir)
	cmd.Dir, cmd.Env = empty, env
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	return dir, env
}

// homeless is the environment of a new user of this host. It has nothing of the test run
// and of its user, except the places of Go's caches.
func homeless(t *testing.T, home string) (env []string) {
	t.Helper()
	out, err := exec.Command("go", "env", "-json", "GOCACHE", "GOENV", "GOMODCACHE", "GOPATH").Output()
	if err != nil {
		t.Fatal(err)
	}
	set := map[string]string{}
	if err := json.Unmarshal(out, &set); err != nil {
		t.Fatal(err)
	}
	maps.Copy(set, map[string]string{"HOME": home, "CI": "true", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""})
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		if _, ours := set[name]; !ours && !strings.HasPrefix(name, "SANDBOXD_") && !strings.HasPrefix(name, "GIT_") &&
			!strings.HasPrefix(name, "MAKE") {
			env = append(env, v)
		}
	}
	for name, value := range set {
		if value != "" {
			env = append(env, name+"="+value)
		}
	}
	return env
}
