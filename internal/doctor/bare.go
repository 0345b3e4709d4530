package doctor

import (
	"context"
	"errors"
	"os/exec"
	"slices"

	"github.com/sandboxd/sandboxd/internal/config"
)

// Bare returns what fails on a host before sandboxd's packages are installed, and what they do not
// mend: programs of other packages, features of the kernel, and what the pool needs. A module that
// the kernel has is none of it: the packages load it.
func Bare(ctx context.Context, cfg *config.Config) []Finding {
	loadable := func(module string) bool {
		err := exec.CommandContext(ctx, "modprobe", "--dry-run", "--quiet", module).Run()
		return err == nil || errors.Is(err, exec.ErrNotFound) // the packages also bring modprobe
	}
	return unmended(examine(ctx, newHost(cfg), bareChecks()), loadable)
}

// brought are the checks of what the packages bring.
var brought = []string{"programs", "agent-files", "access"}

func bareChecks() []check {
	all := slices.Concat(programChecks, kernelChecks, packetChecks, storageChecks)
	return slices.DeleteFunc(all, func(c check) bool { return slices.Contains(brought, c.name) })
}

// unmended keeps the findings that fail and that no sysctl and no module mends.
func unmended(found []Finding, loadable func(module string) bool) []Finding {
	return slices.DeleteFunc(found, func(f Finding) bool {
		mended := f.Fixable() && !slices.ContainsFunc(f.modules, func(m string) bool { return !loadable(m) })
		return f.Status != Fail || mended
	})
}
