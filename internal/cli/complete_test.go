package cli

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// complete asks for candidates as a shell does.
func (d *daemon) complete(t *testing.T, args ...string) (words []string, directive string) {
	t.Helper()
	r := d.run(t, append([]string{"__complete"}, args...)...)
	if r.code != 0 || strings.Contains(r.errout, "rror") {
		t.Fatalf("complete %q: %+v", args, r)
	}
	for line := range strings.Lines(r.out) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, ":") {
			return words, line
		}
		word, _, _ := strings.Cut(line, "\t")
		words = append(words, word)
	}
	return words, ""
}

func TestComplete(t *testing.T) {
	d := newDaemon(t)
	for tries := 1; ; tries++ { // a busy host may take too long for one, not for ten
		got, _ := d.complete(t, "rm", "l")
		if slices.Equal(got, []string{"lab"}) {
			break
		}
		if got != nil || tries == 10 {
			t.Fatalf("within %v: %q", command.CompletionLimit, got)
		}
	}
	t.Setenv("COMPLETION_LIMIT", "30s") // what is completed, however long it takes
	for args, want := range map[string][]string{
		"rm |":                  {"lab", testID},
		"rm l|":                 {"lab"},
		"rm lab |":              {testID},
		"inspect x|":            nil,
		"exec |":                {"lab", testID},
		"exec lab |":            nil,
		"fork l|":               {"lab"},
		"fork lab |":            nil,
		"tree |":                nil,
		"cp |":                  {"lab:", testID + ":"},
		"create |":              {"python"},
		"run py|":               {"python"},
		"image rm |":            {"python"},
		"rmi |":                 {"python"},
		"tag |":                 {"python"},
		"restart l|":            {"lab"},
		"kill |":                {"lab", testID},
		"wait |":                {"lab", testID},
		"bench --image |":       {"python"},
		"command logs |":        {"lab", testID},
		"egress patch |":        {"lab", testID},
		"diagnostics logs -s |": {"container", "lifecycle", "all"},
		"egress rm lab |":       nil,
		"ps -o |":               {"table", "json", "name"},
		"ps --format |":         {"json", "table"},
		"create --runtime |":    {"runsc", "runc"},
		"create python a b |":   nil,
	} {
		words := strings.Fields(args)
		words[len(words)-1] = strings.TrimSuffix(words[len(words)-1], "|")
		if got, directive := d.complete(t, words...); !slices.Equal(got, want) || directive == "" || directive == ":0" {
			t.Errorf("%s: %q, want %q (%s)", args, got, want, directive)
		}
	}
}

// TestCompleteInBash: the script for bash completes without the package bash-completion,
// which no bash here loads, and prints nothing else into the line.
func TestCompleteInBash(t *testing.T) {
	d := newDaemon(t)
	dir := t.TempDir()
	if err := os.Symlink(os.Args[0], filepath.Join(dir, "sandboxctl")); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]string{
		"sandboxctl rm l":                  "lab",
		"sandboxctl rm lab ":               testID,
		"sandboxctl create --runtime=runs": "runsc",
		"sandboxctl cp lab":                "lab:",
	} {
		c := d.cmd()
		c.Path, c.Args = "/bin/bash", []string{"bash", "--norc", "--noprofile", "-c", `compopt() { :; } # bash has it at a Tab only
source <(sandboxctl completion bash)
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
__start_sandboxctl
printf '%s\n' "${COMPREPLY[@]%% *}"`, "bash", line}
		c.Env = append(c.Env, "PATH="+dir+":"+os.Getenv("PATH"), "COMPLETION_LIMIT=30s")
		var out, errout strings.Builder
		c.Stdout, c.Stderr = &out, &errout
		if err := c.Run(); err != nil || strings.TrimSpace(out.String()) != want || errout.Len() > 0 {
			t.Errorf("%q: %q %q, %v; want %q", line, out.String(), errout.String(), err, want)
		}
	}
}

// TestCompleteSilent holds that a daemon that is not there, hangs or refuses
// leaves no word on the line of who types, and takes half a second of theirs.
func TestCompleteSilent(t *testing.T) {
	d := newDaemon(t)
	released := make(chan struct{})
	defer close(released)
	d.before = func(r *http.Request) {
		select {
		case <-released:
		case <-r.Context().Done():
		}
	}
	took, err := hosttest.Soonest(5*time.Second, func() error {
		if got, _ := d.complete(t, "rm", ""); got != nil {
			return fmt.Errorf("words %q", got)
		}
		return nil
	})
	if err != nil || took < command.CompletionLimit || took > 5*time.Second {
		t.Errorf("a daemon that hangs: %v after %v", err, took)
	}
	d.url = "unix:///nowhere.sock"
	if got, _ := d.complete(t, "rm", ""); got != nil {
		t.Errorf("no daemon: %q", got)
	}
}
