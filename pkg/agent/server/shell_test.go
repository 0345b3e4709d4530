package server

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// TestDirectIsLikeTheShell runs plain lines both ways; quotes force the shell.
func TestDirectIsLikeTheShell(t *testing.T) {
	e := newEnv(t)
	if err := os.Symlink("/usr", e.dir+"/link"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(e.dir+"/noshebang", []byte("echo script $0\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(e.dir+"/notexec", []byte("x\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	// ps by a name that no other test's processes have.
	ps := fmt.Sprintf("%s/ps%d", e.dir, os.Getpid())
	program, err := exec.LookPath("ps")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(program, ps); err != nil {
		t.Fatal(err)
	}
	for _, envs := range []map[string]string{
		nil,
		{"SHLVL": "5"},
		{"PWD": "/nope"},
		{"OLDPWD": "/usr"},
		{"PATH": "/nope:/bin:/usr/bin"},
		{"PATH": "bin:/bin"},
		{"PATH": ""},
		{"BASH_ENV": "/nope"},
		{"BASH_FUNC_ls%%": "() { echo mine; }"},
		{"_": "x"},
		{"SHLVL": "x"},
	} {
		for _, cwd := range []string{"", "link"} {
			if cwd != "" && envs != nil {
				continue
			}
			for _, line := range []string{
				"env", "ls -d /usr", "false", "echo a", "./noshebang", "./notexec", "./nope", "nope-x a", "/",
				ps + " -o pid=,pgid=,sid=,args= -C " + filepath.Base(ps),
			} {
				first, rest, _ := strings.Cut(line, " ")
				quoted := "'" + first + "' " + rest
				a := e.run(agent.CommandRequest{Command: line, Envs: envs, Cwd: cwd})
				b := e.run(agent.CommandRequest{Command: quoted, Envs: envs, Cwd: cwd})
				if a != b {
					t.Errorf("%q with %v in %q:\n%s\nthrough the shell:\n%s", line, envs, cwd, a, b)
				}
			}
		}
	}
}

// run returns the sorted events of a command, pids left out.
func (e *env) run(req agent.CommandRequest) string {
	lines := strings.Split(e.events(req), "\n")
	for i, l := range lines {
		if f := strings.Fields(strings.Trim(strings.TrimPrefix(l, "stdout "), `"`)); len(f) > 3 && strings.Contains(f[3], "/ps") {
			lines[i] = fmt.Sprint("ps ", f[0] == f[1], f[1] == f[2])
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
