package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pelletier/go-toml/v2"
)

// write writes files below a new directory, and returns the path of config.toml there.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, "config.toml")
}

// TestDropIns: files are read by name over config.toml; a later value wins, tables are merged, tables in
// double brackets are added.
func TestDropIns(t *testing.T) {
	const registry = "[[registries]]\nprefix = '%'\n"
	files := map[string]string{
		"config.toml": "[limits]\nmax_sandboxes = 5\nmax_creating = 3\n[security]\nlevels = ['default', 'compat']\n" +
			"[policies.p]\nrules = ['allow a.example:1']\n[policies.q]\nrules = ['allow a.example:1']\n" +
			strings.Replace(registry, "%", "one.example.com", 1),
		"config.d/10-a.toml": "[limits]\nmax_sandboxes = 6\nretain_ended = '2h'\n" +
			strings.Replace(registry, "%", "two.example.com", 1),
		"config.d/20-b.toml": "[limits]\nmax_sandboxes = 7\n[security]\nlevels = ['default']\n" +
			"[policies.p]\nrules = ['allow b.example:2']\n",
		"config.d/30.conf": "no TOML: it is not read",
	}
	path := write(t, files)
	c, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if c.Limits.MaxSandboxes != 7 || c.Limits.MaxCreating != 3 ||
		c.Limits.RetainEnded != Duration(2*time.Hour) || len(c.Security.Levels) != 1 {
		t.Errorf("%+v, %+v", c.Limits, c.Security)
	}
	if p := c.Policies["p"].Rules; len(p) != 1 || p[0] != "allow b.example:2" || len(c.Policies["q"].Rules) != 1 {
		t.Errorf("policies: %+v", c.Policies)
	}
	if len(c.Registries) != 2 || c.Registries[0].Prefix != "one.example.com" || c.Registries[1].Prefix != "two.example.com" {
		t.Errorf("registries: %+v", c.Registries)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if c, err := Load(path); err != nil || c.Limits.MaxSandboxes != 7 || c.Limits.MaxCreating == 3 {
		t.Errorf("drop-ins alone: %v", err)
	}
	if _, err := Load(filepath.Join(t.TempDir(), "config.toml")); err == nil {
		t.Error("no file is taken for an empty one")
	}
}

// TestDropInProblems: each problem is named with its file and line, also one that only the sum has.
func TestDropInProblems(t *testing.T) {
	path := write(t, map[string]string{
		"config.toml":        "[limits]\nmax_sandbox = 5\n",
		"config.d/10-a.toml": "[log]\nlevel = 'loud'\n[[registries]]\nprefix = 'one.example.com'\nurl = 'x'\n",
		"config.d/20-b.toml": "[limits]\nmax_creating = 'many'\n\nmax_sandboxes = 0\n",
	})
	_, err := Load(path)
	if err == nil {
		t.Fatal("loaded")
	}
	var at int
	dir := strings.TrimSuffix(path, ".toml") + ".d/"
	for _, want := range []string{
		"configuration " + path + ":\nline 2: unknown key limits.max_sandbox; ",
		"\n" + dir + "10-a.toml: line 2: log.level = ", "\n" + dir + "10-a.toml: line 5: unknown key registries[0].url",
		"\n" + dir + "20-b.toml: line 2: limits.max_creating = \"many\"", "\n" + dir + "20-b.toml: line 4: limits.max_sandboxes = 0",
	} {
		i := strings.Index(err.Error()[at:], want)
		if i < 0 {
			t.Errorf("%q is not, or not in its place, in:\n%v", want, err)
			continue
		}
		at += i
	}
}

// TestFormer: a key of an older release is a warning, and its value moves to the key that took its place.
func TestFormer(t *testing.T) {
	defer func(was map[string]former) { formerly = was }(formerly)
	formerly = map[string]former{
		"limits.most":  {now: "limits.max_sandboxes", say: "it has the word of the others"},
		"log.color":    {say: "the journal has colours"},
		"limits.least": {now: "limits.max_creating", say: "it counts the same"},
	}
	path := write(t, map[string]string{
		"config.toml":        "[limits]\nmost = 9\nleast = 4\nmax_creating = 3\n",
		"config.d/10-a.toml": "[log]\ncolor = true\n",
	})
	c, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if c.Limits.MaxSandboxes != 9 || c.Limits.MaxCreating != 3 {
		t.Errorf("%+v", c.Limits)
	}
	for i, want := range []string{
		"line 3: limits.least is a key of an older release, and is now limits.max_creating: it counts the same; " +
			"rename it; it has no effect",
		"line 2: limits.most is a key of an older release, and is now limits.max_sandboxes", "10-a.toml: line 2: log.color is a key",
	} {
		if len(c.Warnings) != 3 || !strings.Contains(c.Warnings[i], want) {
			t.Errorf("warnings %q, want %q", c.Warnings, want)
		}
	}
	if _, err := Load(write(t, map[string]string{"config.toml": "[limits]\nmost = 'x'\n"})); err == nil ||
		!strings.Contains(err.Error(), "line 2: limits.max_sandboxes = \"x\"") {
		t.Errorf("a value of another kind: %v", err)
	}
	for key, was := range formerly { // so that the real table can have no mistake that this one may
		if was.say == "" {
			t.Errorf("%s: nothing is said", key)
		}
	}
}

// TestCommented: the file that packages bring sets nothing, and without the comment signs it is the default.
func TestCommented(t *testing.T) {
	var set map[string]any
	if err := toml.Unmarshal(Commented(), &set); err != nil {
		t.Fatal(err)
	}
	var tables func(m map[string]any, at string)
	tables = func(m map[string]any, at string) {
		for k, v := range m {
			if inner, ok := v.(map[string]any); ok {
				tables(inner, at+k+".")
			} else {
				t.Errorf("%s%s is set", at, k)
			}
		}
	}
	tables(set, "")
	var keys []string
	for line := range strings.Lines(string(Commented())) {
		if rest, ok := strings.CutPrefix(line, "#"); ok && keyLine.MatchString(rest) {
			line = rest
		}
		keys = append(keys, line)
	}
	if strings.Join(keys, "") != string(Default()) {
		t.Error("it is another text than the default")
	}
}
