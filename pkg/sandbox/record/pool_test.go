package record

import (
	"reflect"
	"strings"
	"testing"
)

// memberSpec is what a member is made from.
func memberSpec(runtime string) Spec {
	return Spec{
		Runtime: runtime, Image: Image{Digest: "sha256:1", Layers: []string{"sha256:2"}},
		Limits: Limits{MemoryBytes: 1 << 28, CPUMillis: 1000, Pids: 64, DiskBytes: 1 << 30},
	}
}

// TestUnfit: each thing that a member cannot take is a reason of its own, and what it can
// take is none.
func TestUnfit(t *testing.T) {
	type change struct {
		want   func(*Spec)
		reason string // part of it; empty: it fits
	}
	both := map[string]change{
		"nothing":      {func(*Spec) {}, ""},
		"environment":  {func(s *Spec) { s.Env = map[string]string{"A": "1"} }, ""},
		"labels":       {func(s *Spec) { s.Labels = map[string]string{"a": "b"} }, ""},
		"entrypoint":   {func(s *Spec) { s.Entrypoint, s.Literal = []string{"sleep"}, true }, ""},
		"timeout":      {func(s *Spec) { s.Timeout = 1 }, ""},
		"policy":       {func(s *Spec) { s.Network.Mode = NetworkOpen }, ""},
		"ports":        {func(s *Spec) { s.Publish = []Publish{{Port: 80}} }, ""},
		"restart":      {func(s *Spec) { s.Restart.Policy = RestartAlways }, ""},
		"probe":        {func(s *Spec) { s.Ready.Port = 80 }, ""},
		"once":         {func(s *Spec) { s.OneShot = true }, ""},
		"disk":         {func(s *Spec) { s.DiskBytes = 1 << 29 }, ""},
		"I/O":          {func(s *Spec) { s.IOReadBps = 1 << 20 }, ""},
		"shares":       {func(s *Spec) { s.CPUShares = 512 }, ""},
		"snapshot":     {func(s *Spec) { s.Snapshot = "snap" }, "snapshot"},
		"pull":         {func(s *Spec) { s.Image, s.ImageURI = Image{}, "far:1" }, "image"},
		"image":        {func(s *Spec) { s.Image.Digest = "sha256:3" }, "image"},
		"layers":       {func(s *Spec) { s.Image.Layers = []string{"sha256:3"} }, "image"},
		"runtime":      {func(s *Spec) { s.Runtime = "other" }, "runtime"},
		"security":     {func(s *Spec) { s.Security = SecurityStrict }, "security"},
		"default":      {func(s *Spec) { s.Security = SecurityDefault }, ""}, // said, and not said
		"read-only":    {func(s *Spec) { s.ReadOnly = true }, "read-only"},
		"tmpfs":        {func(s *Spec) { s.Tmpfs = []Tmpfs{{Path: "/x"}} }, "memory"},
		"volume":       {func(s *Spec) { s.Volumes = []VolumeMount{{Path: "/x"}} }, "volumes"},
		"inspect":      {func(s *Spec) { s.Inspect = true }, "inspected"},
		"shm":          {func(s *Spec) { s.ShmBytes = 1 << 20 }, "/dev/shm"},
		"output":       {func(s *Spec) { s.LogBytes = 1 << 20 }, "output"},
		"no disk":      {func(s *Spec) { s.DiskBytes = 0 }, "disk"},
		"contexts":     {func(s *Spec) { s.Prestart = []string{"python"} }, "contexts"},
		"its contexts": {func(s *Spec) { s.Prestart = nil }, ""},
	}
	own := map[string]map[string]change{"runc": {
		"memory": {func(s *Spec) { s.MemoryBytes = 1 << 27 }, ""}, "cpu": {func(s *Spec) { s.CPUMillis = 1 }, ""},
		"pids": {func(s *Spec) { s.Pids = 1 }, ""}, "name": {func(s *Spec) { s.Name = "lab" }, ""},
		"hostname": {func(s *Spec) { s.Hostname = "lab" }, ""},
	}, "runsc": {
		"memory": {func(s *Spec) { s.MemoryBytes = 1 << 27 }, "memory"}, "cpu": {func(s *Spec) { s.CPUMillis = 1 }, "CPU"},
		"pids": {func(s *Spec) { s.Pids = 1 }, "processes"}, "name": {func(s *Spec) { s.Name = "lab" }, "hostname"},
		"hostname": {func(s *Spec) { s.Hostname = "lab" }, "hostname"},
	}}
	for runtime, more := range own {
		for _, all := range []map[string]change{both, more} {
			for name, c := range all {
				m, want := memberSpec(runtime), memberSpec(runtime)
				c.want(&want)
				if got := m.Unfit(&want); (got == "") != (c.reason == "") || !strings.Contains(got, c.reason) {
					t.Errorf("%s, %s: %q, want %q", runtime, name, got, c.reason)
				}
			}
		}
	}
	m, want := memberSpec("runc"), memberSpec("runc")
	m.Prestart = []string{"python"}
	if got := m.Unfit(&want); got != "" {
		t.Errorf("a pool with contexts, and a creation without: %q", got)
	}
}

// bound are the fields of a Spec that Unfit need not know: they are bound when a member is
// taken, or only shown.
var bound = []string{
	"ImageURI", "ImageNote", "Env", "Entrypoint", "Literal", "ImageCommand", "Labels", "Timeout", "OneShot", "Network", "Publish",
	"SecureAccess", "Restart", "Ready", "Request", "ResourceLimits", "Platform", "Extensions", "NetworkPolicy", "Policy", "Pool",
	"Idle", "StopSignal",
	"Memory", "Fork", // with a Snapshot only
}

// unfit are those that it knows.
var unfit = []string{
	"Name", "Hostname", "Image", "Snapshot", "Runtime", "Security", "Limits", "ReadOnly", "Tmpfs", "Volumes", "Prestart", "Inspect",
}

// TestUnfitKnowsAll: whoever adds a field to Spec decides whether a member can take it.
func TestUnfitKnowsAll(t *testing.T) {
	known := map[string]bool{}
	for _, name := range append(append([]string{}, bound...), unfit...) {
		known[name] = true
	}
	for i := range reflect.TypeFor[Spec]().NumField() {
		if name := reflect.TypeFor[Spec]().Field(i).Name; !known[name] {
			t.Errorf("can a member of a pool take %s of another sandbox? if it cannot, Unfit says so; name it here", name)
		}
	}
}

func TestCapacity(t *testing.T) {
	for _, c := range []struct {
		Capacity
		ok bool
	}{
		{Capacity{BufferMin: 1, BufferMax: 2, PoolMin: 0, PoolMax: 3}, true},
		{Capacity{BufferMax: 1, PoolMax: 1}, true},
		{Capacity{}, false},
		{Capacity{BufferMin: -1, BufferMax: 1, PoolMax: 1}, false},
		{Capacity{BufferMin: 2, BufferMax: 1, PoolMax: 3}, false},
		{Capacity{BufferMax: 4, PoolMax: 3}, false},
		{Capacity{BufferMax: 1, PoolMin: 4, PoolMax: 3}, false},
	} {
		if why := c.Check(); (why == "") != c.ok {
			t.Errorf("%+v: %q", c.Capacity, why)
		}
	}
	p := Pool{Template: []byte("{}")}
	a, same, b := memberSpec("runc"), memberSpec("runc"), memberSpec("runc")
	b.Image.Digest = "sha256:9"
	if p.Revision(&a) == p.Revision(&b) || p.Revision(&a) != p.Revision(&same) {
		t.Error("another image is no other revision")
	}
}
