package cgroups

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// testInspecting: what decrypts for sandboxes has a limit of memory, together, and no swap.
func testInspecting(t *testing.T, e *env) {
	o := e.Inspecting(64 << 20)
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for range 2 {
		if err := o.Add(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
	}
	h := e.layout.of["memory"]
	files := map[string]string{"memory.limit_in_bytes": fmt.Sprint(64 << 20), "memory.swappiness": "0"}
	if h.v2 {
		files = map[string]string{"memory.max": fmt.Sprint(64 << 20)}
		if e.flavours["memory"].swap {
			files["memory.swap.max"] = "0"
		}
	}
	for file, want := range files {
		if path := e.rootDir(h) + "/" + inspecting + "/" + file; !reads(path, want) {
			text, err := readFile(path)
			t.Errorf("%s is %q, %v; want %s", path, text, err, want)
		}
	}
	if list, err := o.Processes(); err != nil || !slices.Equal(list, []int{cmd.Process.Pid}) {
		t.Errorf("%v, %v", list, err)
	}
	if ids, err := e.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("it counts as sandboxes %v, %v", ids, err)
	}
	e.must(o.Remove(t.Context()))
	<-ended
}

// testOutliving: a process that outlives the daemon leaves the daemon's cgroups, is no
// sandbox, and ends when its cgroup is removed.
func testOutliving(t *testing.T, e *env) {
	o := e.Outliving()
	if list, err := o.Processes(); err != nil || len(list) != 0 {
		t.Errorf("before: %v, %v", list, err)
	}
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for range 2 {
		if err := o.Add(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
	}
	in, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", cmd.Process.Pid))
	if err != nil || strings.Count(string(in), "/"+e.root+"/"+outliving+"\n") != len(o.in()) {
		t.Errorf("it is in %s, %v; want %v", in, err, o.in())
	}
	if list, err := o.Processes(); err != nil || !slices.Equal(list, []int{cmd.Process.Pid}) {
		t.Errorf("%v, %v", list, err)
	}
	if ids, err := e.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("it counts as sandboxes %v, %v", ids, err)
	}
	closed, err := open(Config{Instance: inst}, e.layout)
	if err != nil {
		t.Fatal(err)
	}
	e.must(closed.Close()) // as a teardown does: nothing may need it when this ends
	for range 2 {
		if err := closed.Outliving().Remove(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	<-ended
	for _, dir := range o.in() {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", dir, err)
		}
	}
	if err := o.Add(cmd.Process.Pid); err == nil {
		t.Error("a process that has ended was moved")
	}
	if err := o.Remove(t.Context()); err != nil {
		t.Error(err)
	}
}
