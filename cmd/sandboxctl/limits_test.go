package main

import (
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// TestLimitFlags: docker's flags and ours become what the API takes.
func TestLimitFlags(t *testing.T) {
	d := newDaemon(t)
	r := d.run(t, "create", "--memory", "1g", "--cpu-shares", "2048", "--io-read-bps", "10m", "--io-write-bps", "max", "--io-write-iops", "100",
		"--shm-size", "128m", "--read-only", "--tmpfs", "/tmp", "--tmpfs", "/run:size=8m,exec", "--prestart", "python,bash", "--prestart", "java", "--log-opt", "max-size=10m", "python")
	if r.code != 0 {
		t.Fatalf("%+v", r)
	}
	want := map[string]string{
		"memory": "1Gi", "cpuShares": "2048", "ioReadBps": "10Mi", "ioWriteBps": "max", "ioWriteIops": "100", "shm": "128Mi", "logSize": "10Mi",
	}
	if got := d.create.ResourceLimits; !maps.Equal(got, want) {
		t.Errorf("resourceLimits %v, want %v", got, want)
	}
	if e := d.create.Extensions; e[client.ExtReadOnly] != "true" || e[client.ExtTmpfs] != "/tmp;/run:size=8m,exec" || e[client.ExtPrestart] != "python,bash,java" {
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

// TestLimitIsNamed: a command that failed at a limit says which, and the flag.
func TestLimitIsNamed(t *testing.T) {
	d := newDaemon(t)
	d.exec = func(w io.Writer, _ <-chan string) {
		frame(w, agent.FrameEnd, `{"exit_code":1,"reason":"disk_full","hint":"the disk limit of the sandbox, 64Mi,\u001b[2J is reached"}`)
	}
	r := d.run(t, "exec", "lab", "--", "dd")
	if r.code != 1 || !strings.Contains(r.errout, "(disk_full): the disk limit of the sandbox, 64Mi") || !strings.Contains(r.errout, "--disk") || strings.Contains(r.errout, "\x1b") {
		t.Errorf("%+v", r)
	}
	d.exec = func(w io.Writer, _ <-chan string) { frame(w, agent.FrameEnd, `{"exit_code":2,"reason":"exited"}`) }
	if r := d.run(t, "exec", "lab", "--", "false"); r.code != 2 || r.errout != "" {
		t.Errorf("%+v", r)
	}
}

// TestLanguages: what is completed is what the agent knows.
func TestLanguages(t *testing.T) {
	if !slices.Equal(languages, agent.CodeLanguages) {
		t.Errorf("%v, and the agent has %v", languages, agent.CodeLanguages)
	}
}
