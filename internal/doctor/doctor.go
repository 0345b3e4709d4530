// Package doctor looks at a host as sandboxd needs it, and says of each thing
// that is not so what it puts at risk and the command that mends it.
//
//	table ─▶ check ─▶ Finding {ok, warn, fail, skipped; what is; what mends it}
//	             └──▶ Mend: sysctls and modules, the two that are safe to set
//
// The daemon asks the same table at its start for those few checks that are
// cheap and without which nothing can run (Start), so there is one list of what
// a host must have.
//
// What surprises: features of the kernel are tried, not read off its version: a
// distribution backports and leaves out. A check that cannot tell says
// "skipped", never "ok".
package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sandboxd/sandboxd/internal/config"
)

// Status is how a check ended.
type Status string

// The statuses. Only Fail makes the doctor's exit status 1.
const (
	OK      Status = "ok"
	Warn    Status = "warn"    // it runs, but not in every case or not as safely
	Fail    Status = "fail"    // it does not run, or not safely
	Skipped Status = "skipped" // it could not be told; Detail says why
)

// A Finding is what one check found.
type Finding struct {
	Check    string `json:"check"`
	Status   Status `json:"status"`
	Detail   string `json:"detail"`         // what is
	Protects string `json:"protects"`       // what it is good for
	Mend     string `json:"mend,omitempty"` // a command, or what to do
	Fixed    string `json:"fixed,omitempty"`

	sysctl  *setting // what Mend may set,
	modules []string // and load
}

// Fixable reports whether Mend can do something about it.
func (f *Finding) Fixable() bool { return f.sysctl != nil || f.modules != nil }

// A check is one row of the table.
type check struct {
	name     string
	protects string
	root     bool // only root can tell
	start    bool // cheap, and nothing runs without: the daemon asks it at every start
	run      func(context.Context, *host) Finding
}

// probeLimit bounds one check: a wedged iptables must not wedge the doctor.
const probeLimit = 20 * time.Second

// table is everything the doctor knows, in the order in which it is shown: what
// is missing, what the kernel can, what the host allows, what it keeps from
// attackers, what is around.
func table() []check {
	var all []check
	for _, part := range [][]check{
		programChecks, kernelChecks, packetChecks, storageChecks, limitChecks(), hardeningChecks(), aroundChecks,
		versionChecks,
	} {
		all = append(all, part...)
	}
	return all
}

// Examine runs every check, in order.
func Examine(ctx context.Context, cfg *config.Config) []Finding {
	return examine(ctx, newHost(cfg), table())
}

func examine(ctx context.Context, h *host, checks []check) []Finding {
	found := make([]Finding, 0, len(checks))
	for _, c := range checks {
		found = append(found, c.ask(ctx, h))
	}
	return found
}

func (c check) ask(ctx context.Context, h *host) Finding {
	if c.root && !h.isRoot {
		return Finding{Check: c.name, Protects: c.protects, Status: Skipped, Detail: "only root can tell: run it with sudo"}
	}
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	f := c.run(ctx, h)
	f.Check, f.Protects = c.name, c.protects
	return f
}

// Start asks what must be so before a daemon touches anything. Its error names
// everything that is missing, each with what to do.
func Start(cfg *config.Config) error { return start(newHost(cfg), table()) }

func start(h *host, checks []check) error {
	var missing []error
	for _, c := range checks {
		if !c.start {
			continue
		}
		if f := c.ask(context.Background(), h); f.Status != OK {
			missing = append(missing, fmt.Errorf("%s: %s", f.Detail, f.Mend))
		}
	}
	if missing != nil {
		return fmt.Errorf("this host cannot run sandboxd:\n%w", errors.Join(missing...))
	}
	return nil
}

// host is what the checks look at.
type host struct {
	cfg    *config.Config
	isRoot bool
	root   string // "", or a directory that tests have instead of /
	now    func() time.Time

	trial
}

func newHost(cfg *config.Config) *host {
	return &host{cfg: cfg, isRoot: os.Geteuid() == 0, now: time.Now}
}

// read returns a file of the host, empty if there is none or it is closed to us.
func (h *host) read(path string) string {
	b, err := os.ReadFile(h.root + path)
	if err != nil {
		return ""
	}
	return string(b)
}

func ok(format string, a ...any) Finding {
	return Finding{Status: OK, Detail: fmt.Sprintf(format, a...)}
}

func skipped(format string, a ...any) Finding {
	return Finding{Status: Skipped, Detail: fmt.Sprintf(format, a...)}
}

func warn(mend, format string, a ...any) Finding {
	return Finding{Status: Warn, Mend: mend, Detail: fmt.Sprintf(format, a...)}
}

func fail(mend, format string, a ...any) Finding {
	return Finding{Status: Fail, Mend: mend, Detail: fmt.Sprintf(format, a...)}
}
