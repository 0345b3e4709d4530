package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestGuestLimits(t *testing.T) {
	dir := t.TempDir()
	spec := `{"linux":{"resources":{"memory":{"limit":268435456},"cpu":{"quota":150000,"period":100000}}}}`
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(spec), 0o600); err != nil {
		t.Fatal(err)
	}
	boot := func(bundle string) []string {
		return strings.Fields("runsc-sandbox --root=/r --ignore-cgroups=true boot --bundle=" + bundle +
			" --total-host-memory 8589934592 --total-memory 8589934592 id")
	}
	got := strings.Join(guestLimits(boot(dir)), " ")
	for _, want := range []string{
		"--total-host-memory 8589934592 ", "--total-memory 268435456 id",
		"--cpu-num ", "--cpu-quota 150000 --cpu-period 100000 ",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in %q", want, got)
		}
	}
	// Executed again in a root without the bundle, and commands that are not boot.
	for _, args := range [][]string{
		boot("/nowhere"),
		strings.Fields("runsc --root=/r --ignore-cgroups run --bundle=" + dir + " id"),
		strings.Fields("runsc-sandbox boot --bundle=" + dir + " --total-memory 8589934592 id"), // it has a cgroup
		{"runsc"},
	} {
		if got := guestLimits(args); !slices.Equal(got, args) {
			t.Errorf("%q became %q", args, got)
		}
	}
}
