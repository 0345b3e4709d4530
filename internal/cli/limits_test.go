package cli

import (
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestLimitFlags: docker's flags and ours become what the API takes.
func TestLimitFlags(t *testing.T) {
	d := newDaemon(t)
	r := d.run(t, "create", "--memory", "1g", "--cpu-shares", "2048", "--io-read-bps", "10m", "--io-write-bps", "max",
		"--io-write-iops", "100", "--shm-size", "128m", "--read-only", "--tmpfs", "/tmp", "--tmpfs", "/run:size=8m,exec",
		"--security", "strict", "--prestart", "python,bash", "--prestart", "java", "--log-opt", "max-size=10m", "python")
	if r.code != 0 {
		t.Fatalf("%+v", r)
	}
	want := map[string]string{
		"memory": "1Gi", "cpuShares": "2048", "ioReadBps": "10Mi", "ioWriteBps": "max", "ioWriteIops": "100", "shm": "128Mi",
		"logSize": "10Mi",
	}
	if got := d.create.ResourceLimits; !maps.Equal(got, want) {
		t.Errorf("resourceLimits %v, want %v", got, want)
	}
	if e := d.create.Extensions; e[wire.ExtReadOnly] != "true" || e[wire.ExtTmpfs] != "/tmp;/run:size=8m,exec" ||
		e[wire.ExtPrestart] != "python,bash,java" || e[wire.ExtSecurity] != "strict" {
		t.Errorf("extensions %v", e)
	}
	for _, args := range [][]string{
		{"create", "--log-opt", "max-file=3", "python"},
		{"create", "--log-opt", "max-size=1m", "--log-max-size", "1m", "python"},
		{"create", "--cpu", "1", "--cpus", "1", "python"},
		{"update", "lab"},
		{"update", "--cpu", "1", "--cpus", "1", "lab"},
		{"update", "--cpu", "1"},
	} {
		if r := d.run(t, args...); r.code != 125 {
			t.Errorf("%v: %+v", args, r)
		}
	}
}

// TestUpdate: limits and labels go to routes of their own, limits first.
func TestUpdate(t *testing.T) {
	d := newDaemon(t)
	var bodies []string
	d.before = func(r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		bodies = append(bodies, strings.TrimSpace(string(b)))
	}
	for args, want := range map[string][]string{
		"update --cpu 2 --label team=b --label-rm owner lab": {
			"PATCH /sandboxes/lab/limits", `{"resourceLimits":{"cpu":"2"}}`,
			"PATCH /sandboxes/" + testID + "/metadata", `{"owner":null,"team":"b"}`,
		},
		"update -l empty= lab": {"PATCH /sandboxes/lab/metadata", `{"empty":""}`},
		"update -m 1g lab":     {"PATCH /sandboxes/lab/limits", `{"resourceLimits":{"memory":"1Gi"}}`},
	} {
		before := len(bodies)
		if r := d.run(t, strings.Fields(args)...); r.code != 0 || r.out != "lab\n" || r.errout != "" {
			t.Errorf("%s: %+v", args, r)
		}
		var got []string
		for i, b := range bodies[before:] {
			got = append(got, d.asked()[before+i], b)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s asked %q, want %q", args, got, want)
		}
	}
	for args, says := range map[string]string{
		"update lab":                           "nothing to change",
		"update --label =x lab":                "KEY=VALUE",
		"update --label a=x --label-rm a lab":  "both name",
		"update --label-rm a":                  "SANDBOX",
		"create --renew-on-access soon python": "600 or 10m",
		"create --renew-on-access 1ms python":  "600 or 10m",
	} {
		before := len(bodies)
		if r := d.run(t, strings.Fields(args)...); r.code != 125 || !strings.Contains(r.errout, says) || len(bodies) != before {
			t.Errorf("%s: %+v", args, r)
		}
	}
}

// TestCreateAccess: what a create says of how a sandbox is reached.
func TestCreateAccess(t *testing.T) {
	d := newDaemon(t)
	for _, c := range []struct {
		flags, renew string
		secure       bool
	}{
		{"", "", false},
		{"--secure-access", "", true},
		{"--renew-on-access 600", "600", false},
		{"--renew-on-access 10m --secure-access", "600", true},
	} {
		args := append(append([]string{"create"}, strings.Fields(c.flags)...), "python")
		if r := d.run(t, args...); r.code != 0 || d.create.SecureAccess != c.secure || d.create.Extensions[wire.ExtRenew] != c.renew {
			t.Errorf("%q: %+v, %+v", c.flags, r, d.create)
		}
	}
}

// TestLimitIsNamed: a command that failed at a limit says which, and the flag.
func TestLimitIsNamed(t *testing.T) {
	d := newDaemon(t)
	d.exec = func(w io.Writer, _ <-chan string) {
		frame(w, agent.FrameEnd, `{"exit_code":1,"reason":"disk_full","hint":"the disk limit of the sandbox, 64Mi,\u001b[2J is reached"}`)
	}
	r := d.run(t, "exec", "lab", "--", "dd")
	if r.code != 1 || !strings.Contains(r.errout, "(disk_full): the disk limit of the sandbox, 64Mi") ||
		!strings.Contains(r.errout, "--disk") || strings.Contains(r.errout, "\x1b") {
		t.Errorf("%+v", r)
	}
	d.exec = func(w io.Writer, _ <-chan string) { frame(w, agent.FrameEnd, `{"exit_code":2,"reason":"exited"}`) }
	if r := d.run(t, "exec", "lab", "--", "false"); r.code != 2 || r.errout != "" {
		t.Errorf("%+v", r)
	}
}

// TestUpdatePrintsTheName: the name is printed as it was given.
func TestUpdatePrintsTheName(t *testing.T) {
	d := newDaemon(t)
	for _, name := range []string{"lab", testID} {
		if r := d.run(t, "update", "--memory", "1Gi", "--label", "team=b", name); r.code != 0 || r.out != name+"\n" {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// TestLanguages: what is completed is what the agent knows.
func TestLanguages(t *testing.T) {
	d := newDaemon(t)
	if got, _ := d.complete(t, "eval", "-l", ""); !slices.Equal(got, agent.CodeLanguages) {
		t.Errorf("%v, and the agent has %v", got, agent.CodeLanguages)
	}
}

// TestNotes: what is unexpected about a new sandbox is a line each on standard error, and
// does not touch what scripts read.
func TestNotes(t *testing.T) {
	d := newDaemon(t)
	d.notes = []string{"image python:3.13 is python:latest", "too much\x1b memory"}
	const said = "sandboxctl: note: image python:3.13 is python:latest\nsandboxctl: note: too much\\x1b memory\n"
	for args, want := range map[string]string{
		"create python:3.13":           testID + "\n",
		"create --no-wait python:3.13": testID + "\n",
		"run -d python:3.13 -- sleep":  testID + "\n",
		"run python:3.13 -- true":      "",
		"update --memory 1t lab":       "lab\n",
	} {
		if r := d.run(t, strings.Fields(args)...); r.code != 0 || r.out != want || r.errout != said {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if r := d.run(t, "update", "--cpu", "2", "lab"); r.code != 0 || r.errout != "" {
		t.Errorf("an update of something else: %+v", r)
	}
}
