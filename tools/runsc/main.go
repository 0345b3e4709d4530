// Command runsc is gVisor's runsc at the one version that sandboxd ships, with
// two things that a plain build of the Go module lacks.
//
// The guest sees its limits. runsc learns MemTotal and the number of CPUs from
// the cgroup that it sets up; sandboxd sets up the cgroup itself, runs runsc
// with --ignore-cgroups (16 ms less) and would have every guest see the whole
// host. So the boot process takes both from the bundle here, see guestLimits.
//
// The seccomp filters of sentry and gofer are compiled before, as in gVisor's
// own build, and not in every start, see filters.go.
//
// It is a module of its own, so that gVisor's dependencies never move
// sandboxd's.
package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"gvisor.dev/gvisor/runsc/cli/maincli"
	"gvisor.dev/gvisor/runsc/version"
)

// version.Version is set by the linker; it is linked only where it is used.
var _ = version.Version()

func main() {
	os.Args = guestLimits(os.Args)
	useFilters()
	maincli.Main()
}

// guestLimits returns args, those of `runsc boot`, with the memory and CPUs of
// the bundle's spec in place of the host's. The boot process executes itself
// once more with these, in a root without bundle: then they stay as they are,
// and so does all that it does not understand.
func guestLimits(args []string) []string {
	boot := slices.Index(args, "boot")
	total := slices.Index(args, "--total-memory")
	if boot < 0 || total < boot || total+1 >= len(args) || !slices.Contains(args[:boot], "--ignore-cgroups=true") {
		return args
	}
	var bundle string
	for _, a := range args[boot:] {
		if dir, ok := strings.CutPrefix(a, "--bundle="); ok {
			bundle = dir
		}
	}
	spec, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return args
	}
	var s struct {
		Linux struct {
			Resources struct {
				Memory struct{ Limit uint64 }
				CPU    struct{ Quota, Period int64 }
			}
		}
	}
	if json.Unmarshal(spec, &s) != nil {
		return args
	}
	args = slices.Clone(args)
	host, err := strconv.ParseUint(args[total+1], 10, 64)
	if limit := s.Linux.Resources.Memory.Limit; err == nil && limit > 0 && limit < host {
		args[total+1] = strconv.FormatUint(limit, 10)
	}
	if cpu := s.Linux.Resources.CPU; cpu.Quota > 0 && cpu.Period > 0 {
		// As runsc does from a cgroup: up to whole CPUs, and at least two,
		// because programs drop their locks on one.
		n := max(2, int((cpu.Quota+cpu.Period-1)/cpu.Period))
		args = slices.Insert(args, total,
			"--cpu-num", strconv.Itoa(min(n, runtime.NumCPU())),
			"--cpu-quota", strconv.FormatInt(cpu.Quota, 10), "--cpu-period", strconv.FormatInt(cpu.Period, 10))
	}
	return args
}
