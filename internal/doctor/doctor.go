// Package doctor checks that a host has what sandboxd needs. For each problem it
// reports what the problem puts at risk and the command that mends it.
//
//	table ─▶ check ─▶ Finding {ok, warn, fail, skipped; the state; the command}
//	             └──▶ Mend: sysctls and modules, the two that are safe to set
//
// The daemon runs some checks of the same table at each start (Start): those that
// are cheap and without which nothing can run. So there is one list of what a host
// must have.
//
// One thing surprises: the doctor tries features of the kernel and does not infer
// them from its version, because distributions backport some and leave out others. A
// check that cannot decide reports "skipped", never "ok".
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
	Warn    Status = "warn"    // sandboxd runs, but not in every case or not as safely
	Fail    Status = "fail"    // sandboxd does not run, or not safely
	Skipped Status = "skipped" // the check could not decide; Detail says why
)

// A Finding is what one check found.
type Finding struct {
	Check    string `json:"check"`
	Status   Status `json:"status"`
	Detail   string `json:"detail"`         // the state that was found
	Protects string `json:"protects"`       // what the check protects
	Mend     string `json:"mend,omitempty"` // a command, or advice
	Fixed    string `json:"fixed,omitempty"`

	sysctl  *setting // the sysctl that Mend may set
	modules []string // the modules that Mend may load
}

// Fixable reports whether Mend can fix the finding.
func (f *Finding) Fixable() bool { return f.sysctl != nil || f.modules != nil }

// A check is one row of the table.
type check struct {
	name     string
	protects string
	root     bool // only root can run it
	start    bool // cheap and indispensable: the daemon runs it at every start
	run      func(context.Context, *host) Finding
}

// probeLimit bounds one check: a wedged iptables must not wedge the doctor.
const probeLimit = 20 * time.Second

// table is all checks, in the order in which they are shown: programs, the kernel's
// features, packets, storage, limits, hardening, other software, versions.
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

// Examine runs every check, in order. The table of known flaws is the file advisories;
// if that is empty, it is AdvisoriesFile, or the built-in table.
func Examine(ctx context.Context, cfg *config.Config, advisories string) []Finding {
	h := newHost(cfg)
	h.advisoriesFile = advisories
	return examine(ctx, h, table())
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
		return Finding{Check: c.name, Protects: c.protects, Status: Skipped, Detail: "needs root: run it with sudo"}
	}
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	f := c.run(ctx, h)
	f.Check, f.Protects = c.name, c.protects
	return f
}

// Start runs the checks that must pass before a daemon touches anything. Its error
// names everything that is missing, each with its remedy.
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

// host is the host that the checks examine.
type host struct {
	cfg    *config.Config
	isRoot bool
	root   string // "", or a directory that tests use instead of /
	now    func() time.Time

	advisoriesFile string // empty: AdvisoriesFile, if it exists

	trial
}

func newHost(cfg *config.Config) *host {
	return &host{cfg: cfg, isRoot: os.Geteuid() == 0, now: time.Now}
}

// read returns a file of the host; empty if it is absent or unreadable.
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
