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

// gVisor is released weekly and fixes flaws only in its newest release: a pin of more
// than a year is not maintained.
const gvisorOld = 365 * 24 * time.Hour

var versionChecks = []check{
	advisoriesCheck,
	{
		name: "kernel-advisories", protects: "the isolation of runc",
		run: func(_ context.Context, h *host) Finding {
			v, certain := kernelVersion(h.read("/proc/sys/kernel/osrelease"), h.read("/proc/sys/kernel/version"))
			if !certain {
				return skipped("a distribution's kernel: its version does not show its patches; see the advisories of your distribution")
			}
			return h.flawsOf("kernel", v)
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
			return h.flawsOf("runc", v)
		},
	},
	{
		name: "gvisor-age", protects: "the isolation of gVisor",
		run: func(_ context.Context, h *host) Finding {
			day, path, err := h.gvisorDay()
			if err != nil {
				return skipped("%v", err)
			}
			if age := h.now().Sub(day); age > gvisorOld {
				return warn("upgrade sandboxd: it pins gVisor", "%s is gVisor of %s, %d days old; only new releases get fixes", path,
					day.Format(time.DateOnly), int(age.Hours()/24))
			}
			return ok("gVisor of %s", day.Format(time.DateOnly))
		},
	},
	{
		name: "gvisor-advisories", protects: "the isolation of gVisor",
		run: func(_ context.Context, h *host) Finding {
			day, _, err := h.gvisorDay()
			if err != nil {
				return skipped("%v", err)
			}
			return h.flawsOf("gvisor", version{day.Year()*10000 + int(day.Month())*100 + day.Day()})
		},
	},
}

// gvisorDay is the day of the commit of gVisor that runsc was built from.
func (h *host) gvisorDay() (day time.Time, path string, err error) {
	path = filepath.Join(h.cfg.LibexecDir, "runsc")
	text, err := moduleOf(path, "gvisor.dev/gvisor")
	if err != nil {
		return day, path, err
	}
	m := pseudoVersion.FindStringSubmatch(text)
	if m == nil {
		return day, path, fmt.Errorf("%s is gVisor %s, which has no date", path, text)
	}
	if day, err = time.Parse("20060102", m[1]); err != nil {
		return day, path, fmt.Errorf("%s is gVisor %s: %w", path, text, err)
	}
	return day, path, nil
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
