package systemd

import (
	"os"
	"path/filepath"
	"testing"
)

// TestStands: a scope with a process anywhere in it stands, as v2 says in one
// file, and v1 in none.
func TestStands(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string // below the scope's cgroup
		want  bool
	}{
		"none":              {nil, false},
		"v2 with processes": {map[string]string{"cgroup.events": "populated 1\nfrozen 0\n", "cgroup.procs": ""}, true},
		"v2 without":        {map[string]string{"cgroup.events": "populated 0\nfrozen 0\n", "cgroup.procs": ""}, false},
		"v1 without":        {map[string]string{"cgroup.procs": "", "holder/cgroup.procs": "", "aaaa/run/cgroup.procs": "\n"}, false},
		"v1 with processes": {map[string]string{"cgroup.procs": "", "holder/cgroup.procs": "", "aaaa/run/cgroup.procs": "4711\n"}, true},
		"v1 with a holder":  {map[string]string{"cgroup.procs": "", "holder/cgroup.procs": "12\n"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := &Scope{name: "sandboxd-x.scope", mount: t.TempDir()}
			for file, text := range c.files {
				path := filepath.Join(s.dir(), file)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if got := s.Stands(); got != c.want {
				t.Errorf("stands: %v", got)
			}
		})
	}
}
