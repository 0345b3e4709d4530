// Package deploy holds deploy/ to the configuration that it writes and to the programs that read
// it. The story test/vm/deploy.sh applies the role and the user data for real.
package deploy

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/pelletier/go-toml/v2"
	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/hosttest"
)

const (
	top  = "../../"
	role = top + "deploy/ansible/roles/sandboxd/"
)

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// parse reads a YAML file with one document. A key that is there twice is an error.
func parse(t *testing.T, path string) (doc any) {
	t.Helper()
	d := yaml.NewDecoder(strings.NewReader(read(t, path)))
	if err := d.Decode(&doc); err != nil {
		t.Errorf("%s: %v", path, err)
	} else if err := d.Decode(new(any)); err != io.EOF {
		t.Errorf("%s has a second document: %v", path, err)
	}
	return doc
}

// convert has the role's filter write values as TOML.
func convert(t *testing.T, values any) []byte {
	t.Helper()
	in, err := json.Marshal(values)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("python3", "to_toml_test.py", "convert")
	var said bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("to_toml: %v: %s", err, said.String())
	}
	return out
}

// load has sandboxd read a configuration.
func load(t *testing.T, text []byte) *config.Config {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := config.Load(path)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return c
}

// again writes a configuration with all that the daemon made of it.
func again(t *testing.T, c *config.Config) string {
	t.Helper()
	b, err := toml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestFilter: Python's own reader of TOML reads what the filter writes.
func TestFilter(t *testing.T) {
	if out, err := exec.Command("python3", "to_toml_test.py").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// TestEveryKey: each key of the configuration survives the way from a dict of Ansible to the daemon,
// those of the examples in the comments too.
func TestEveryKey(t *testing.T) {
	text := config.Default()
	uncommented := regexp.MustCompile(`(?m)^#   (\[|[a-z_]+ += )`).ReplaceAll(text, []byte("$1"))
	uncommented = regexp.MustCompile(`(?m)^(ca|credentials) += .*$`).ReplaceAll(uncommented, nil) // files that are not there
	for name, text := range map[string][]byte{"default": text, "examples": uncommented} {
		var want, got map[string]any
		if err := toml.Unmarshal(text, &want); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, text)
		}
		out := convert(t, want)
		if err := toml.Unmarshal(out, &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v: want %v, got %v of\n%s", name, err, want, got, out)
		}
		if a, b := again(t, load(t, out)), again(t, load(t, text)); a != b {
			t.Errorf("%s: the daemon reads another configuration of\n%s", name, out)
		}
		if name == "examples" && (len(load(t, out).Registries) != 1 || len(load(t, out).Pools) != 1 || len(load(t, out).Policies) != 1) {
			t.Errorf("the comments of default.toml have no examples any more:\n%s", out)
		}
	}
}

// TestExamples: sandboxd takes the configurations of the examples, and all YAML can be read.
func TestExamples(t *testing.T) {
	plays := parse(t, top+"deploy/ansible/playbook.yml").([]any)
	settings := plays[0].(map[string]any)["roles"].([]any)[0].(map[string]any)["vars"].(map[string]any)
	if c := load(t, convert(t, settings["sandboxd_config"])); c.Listen.TCP == "" || len(c.Policies) == 0 {
		t.Errorf("the playbook configures %+v", c)
	}
	known := parse(t, role+"defaults/main.yml").(map[string]any)
	for name := range settings {
		if _, ok := known[name]; !ok {
			t.Errorf("the playbook sets %s, which the role does not know", name)
		}
	}
	data, err := filepath.Glob(top + "deploy/cloud-init/*.yaml")
	if err != nil || len(data) != 2 {
		t.Fatalf("examples for cloud-init: %q, %v", data, err)
	}
	for _, path := range data {
		if !strings.HasPrefix(read(t, path), "#cloud-config\n") {
			t.Errorf("%s: cloud-init takes it for a script", path)
		}
		found := false
		for _, f := range parse(t, path).(map[string]any)["write_files"].([]any) {
			file := f.(map[string]any)
			if file["path"] == "/etc/sandboxd/config.toml" {
				found = true
				load(t, []byte(file["content"].(string)))
			}
		}
		if !found {
			t.Errorf("%s writes no configuration", path)
		}
	}
	rest, err := filepath.Glob(role + "*/*.yml")
	if err != nil || len(rest) < 9 {
		t.Fatalf("YAML of the role: %q, %v", rest, err)
	}
	for _, path := range rest {
		parse(t, path)
	}
}

// TestSettings: a setting of the role has a default, a type and a line in the README.
func TestSettings(t *testing.T) {
	specs := parse(t, role+"meta/argument_specs.yml").(map[string]any)["argument_specs"].(map[string]any)
	options := slices.Sorted(maps.Keys(specs["main"].(map[string]any)["options"].(map[string]any)))
	if defaults := slices.Sorted(maps.Keys(parse(t, role+"defaults/main.yml").(map[string]any))); !slices.Equal(options, defaults) {
		t.Errorf("argument_specs.yml has %q, and defaults/main.yml %q", options, defaults)
	}
	text := read(t, role+"README.md")
	for _, o := range options {
		if !strings.Contains(text, "`"+o+"`") {
			t.Errorf("the role's README.md does not name %s", o)
		}
	}
}

// TestWords: the role knows by its words that an installation has left nothing but the images to do.
func TestWords(t *testing.T) {
	m := regexp.MustCompile(`'([^']+)' not in __sandboxd_installed.stderr`).FindStringSubmatch(read(t, role+"tasks/apply.yml"))
	if m == nil || !strings.Contains(read(t, top+"internal/appliance/appliance.go"), m[1]) {
		t.Errorf("internal/appliance does not say %q", m)
	}
}

// TestSyntax: Ansible takes the playbook, with the role that it names.
func TestSyntax(t *testing.T) {
	hosttest.Root(t)
	cmd := exec.Command("ansible-playbook", "--syntax-check", "--inventory", "localhost,", top+"deploy/ansible/playbook.yml")
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "PYTHONDONTWRITEBYTECODE=1", "ANSIBLE_LOCAL_TEMP="+t.TempDir())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s(scripts/deps.sh test installs ansible-core)", err, out)
	}
}
