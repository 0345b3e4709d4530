package doctor

import (
	"context"
	"debug/buildinfo"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// An advisory is a known flaw and the versions that fix it. Versions have the flaw
// from since on. It is fixed from the entry of fixed that has the same first two
// numbers on; without such an entry, from the last entry on.
type advisory struct {
	id    string
	what  string
	since version
	fixed []version // ascending
	// source of the numbers
	source string
}

// advisoriesOf is the table of known flaws, as of 21 November 2026. It lists only flaws
// that a guest could use, in the parts that sandboxd starts: nobody reads a doctor that
// cries wolf. docs/design/hardening.md ("Which known flaws were considered?") lists the
// other defences.
var advisoriesOf = map[string][]advisory{
	"runc": {
		{
			"CVE-2025-31133, CVE-2025-52565, CVE-2025-52881", "races on masked paths and /dev/console: a guest writes to the host's /proc",
			version{},
			[]version{{1, 2, 8}, {1, 3, 3}, {1, 4, 0}},
			"github.com/opencontainers/runc/security/advisories/GHSA-9493-h29p-rfm2",
		},
		{"CVE-2024-21626", "a leaked descriptor gives a guest the host's files", version{}, []version{{1, 1, 12}}, "GHSA-xr7r-f8xq-vfvv"},
	},
	"kernel": {
		{
			"CVE-2024-1086", "any user becomes root through nf_tables in a user namespace",
			version{3, 15},
			[]version{{6, 1, 76}, {6, 6, 15}, {6, 7, 3}, {6, 8}},
			"git.kernel.org f342de4e2f33",
		},
		{
			"CVE-2023-0386", "any user becomes root, because overlayfs copies up set-user-id files",
			version{5, 11},
			[]version{{6, 1, 9}, {6, 2}},
			"git.kernel.org 4f11ada10d0a",
		},
	},
}

// affects reports whether v has the flaw.
func (a advisory) affects(v version) bool {
	if v.before(a.since) {
		return false
	}
	for _, f := range a.fixed {
		if v[0] == f[0] && v[1] == f[1] {
			return v.before(f)
		}
	}
	return v.before(a.fixed[len(a.fixed)-1])
}

func known(what string, v version) Finding {
	for _, a := range advisoriesOf[what] {
		if a.affects(v) {
			var fixed []string
			for _, f := range a.fixed {
				fixed = append(fixed, f.String())
			}
			return warn(fmt.Sprintf("upgrade %s to %s", what, strings.Join(fixed, ", ")), "%s %s has %s (%s); see %s", what, v, a.id,
				a.what, a.source)
		}
	}
	return ok("%s %s: no known flaw", what, v)
}

// gVisor is released weekly and fixes flaws only in its newest release: a pin of more
// than a year is not maintained.
const gvisorOld = 365 * 24 * time.Hour

var versionChecks = []check{
	{
		name: "kernel-advisories", protects: "the isolation of runc",
		run: func(_ context.Context, h *host) Finding {
			v, certain := kernelVersion(h.read("/proc/sys/kernel/osrelease"), h.read("/proc/sys/kernel/version"))
			if !certain {
				return skipped("a distribution's kernel: its version does not show its patches; see the advisories of your distribution")
			}
			return known("kernel", v)
		},
	},
	{
		name: "runc-advisories", protects: "the isolation of runc",
		run: func(_ context.Context, h *host) Finding {
			path := filepath.Join(h.cfg.LibexecDir, "sandboxd-runc")
			text, err := moduleOf(path, "github.com/opencontainers/runc")
			if err != nil {
				return skipped("%v", err)
			}
			v, yes := parseVersion(text)
			if !yes || strings.Contains(text, "-") { // a release candidate or an untagged commit
				return skipped("%s links libcontainer %s, which is not a release", path, text)
			}
			return known("runc", v)
		},
	},
	{
		name: "gvisor-age", protects: "the isolation of gVisor",
		run: func(_ context.Context, h *host) Finding {
			path := filepath.Join(h.cfg.LibexecDir, "runsc")
			text, err := moduleOf(path, "gvisor.dev/gvisor")
			if err != nil {
				return skipped("%v", err)
			}
			m := pseudoVersion.FindStringSubmatch(text)
			if m == nil {
				return skipped("%s is gVisor %s, which has no date", path, text)
			}
			day, err := time.Parse("20060102", m[1])
			if err != nil {
				return skipped("%s is gVisor %s: %v", path, text, err)
			}
			if age := h.now().Sub(day); age > gvisorOld {
				return warn("upgrade sandboxd: it pins gVisor", "%s is gVisor of %s, %d days old; only new releases get fixes", path,
					day.Format(time.DateOnly), int(age.Hours()/24))
			}
			return ok("gVisor of %s", day.Format(time.DateOnly))
		},
	},
}

// pseudoVersion is Go's form for a commit: v0.0.0-20260905035102-160fafc42237.
var pseudoVersion = regexp.MustCompile(`^v\d+\.\d+\.\d+-(?:0\.)?(\d{8})\d{6}-[0-9a-f]{12}`)

// moduleOf is the version of a module that a Go program was built with.
func moduleOf(path, module string) (string, error) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read the build info of %s: %w", path, err)
	}
	for _, d := range info.Deps {
		if d.Path != module {
			continue
		}
		if d.Replace != nil && strings.HasPrefix(d.Replace.Version, "v") { // otherwise a directory: that version, patched
			d = d.Replace
		}
		return d.Version, nil
	}
	return "", fmt.Errorf("%s was not built with %s", path, module)
}

// debianKernel matches the version text of Debian's kernels. Their release has only the
// ABI: "6.1.0-18-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.76-1 (…)".
var debianKernel = regexp.MustCompile(`Debian (\d+\.\d+\.\d+)-`)

// kernelVersion is the upstream version of a kernel. It is certain for Debian's kernels
// and for kernels whose release has the three numbers of a stable release.
func kernelVersion(release, text string) (v version, certain bool) {
	if m := debianKernel.FindStringSubmatch(text); m != nil {
		return parseVersion(m[1])
	}
	v, yes := parseVersion(strings.TrimSpace(release))
	return v, yes && v[2] > 0
}
