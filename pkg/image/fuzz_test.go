package image

import (
	"encoding/json"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// FuzzRecipe: a recipe is refused with a reason, or what it says can neither be taken for
// an option of the programs that build from it nor end a line of theirs.
func FuzzRecipe(f *testing.F) {
	found, err := filepath.Glob("../../rootfs/*/recipe.toml")
	if err != nil || len(found) == 0 {
		f.Fatal(found, err)
	}
	for _, name := range found {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte("packages = [\"-x\"]\nexclude = [\"/a'\"]\nworkdir = \"/a/..\"\nsuite = \"\"\n"))
	dir := f.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "x"), 0o700); err != nil {
		f.Fatal(err)
	}
	s := &Store{cfg: Config{RecipesDir: dir}}
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := os.WriteFile(filepath.Join(dir, "x", "recipe.toml"), b, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := s.recipe("x")
		if err != nil {
			if !errs.Is(err, errs.Invalid) {
				t.Fatalf("%q: %v", b, err)
			}
			return
		}
		for _, w := range append([]string{r.Suite, r.Variant}, r.Packages...) {
			if strings.HasPrefix(w, "-") || strings.ContainsAny(w, " \t\n,/'\"\\\x00") {
				t.Fatalf("%q has the word %q", b, w)
			}
		}
		for _, p := range append(r.Exclude, r.Include...) {
			if !path.IsAbs(p) || strings.ContainsAny(p, "\n'\x00") {
				t.Fatalf("%q has the path %q", b, p)
			}
		}
		c := r.config()
		if err := checkConfig(&c); err != nil && !strings.Contains(err.Error(), "at most") {
			t.Fatalf("%q makes an image that cannot be started: %v", b, err)
		}
	})
}

// FuzzImageConfig: the config of an image that may be kept starts a program: bounded words
// without NUL, variables with names, a clean directory.
func FuzzImageConfig(f *testing.F) {
	f.Add([]byte(`{"env":["A=1"],"workdir":"/","user":"1:1","entrypoint":["sh"],"cmd":["-c"],"labels":{"a":"b"}}`))
	f.Add([]byte(`{"env":["=1","A","B=\u0000"],"workdir":"/a/../b","user":"x\ny"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var c record.ImageConfig
		if json.Unmarshal(b, &c) != nil {
			return
		}
		if err := checkConfig(&c); err != nil {
			if !errs.Is(err, errs.Invalid) || len(err.Error()) > 4<<10 {
				t.Fatalf("%q: %v", b, err)
			}
			return
		}
		for _, kv := range c.Env {
			if name, _, ok := strings.Cut(kv, "="); !ok || !record.IsVariable(name) || strings.ContainsRune(kv, 0) {
				t.Fatalf("%q sets %q", b, kv)
			}
		}
		clean := c.Workdir == "/" || c.Workdir[0] == '/' && path.Clean(c.Workdir) == c.Workdir
		if strings.ContainsRune(strings.Join(c.Command(nil), "")+c.User+c.Workdir, 0) || !clean {
			t.Fatalf("%q is %+v", b, c)
		}
	})
}
