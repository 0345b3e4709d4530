package api

import (
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// The least that makes sense. Below 64 Mi not even the official SDK's tests
// go, and PID 1 needs a dozen threads.
const (
	minMemory = 64 << 20
	minDisk   = 16 << 20
	minMillis = 10
	minPids   = 16
	maxPids   = 4194304 // PID_MAX_LIMIT, linux/threads.h
	maxAmount = 64      // characters, with which any of them can be written
)

var (
	sizeForm = regexp.MustCompile(`^([0-9]+)([a-zA-Z]*)$`)
	cpuForm  = regexp.MustCompile(`^([0-9]+)(\.[0-9]+)?(m?)$`)
	units    = map[string]int64{
		"": 1, "b": 1,
		"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12,
		"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
		"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40,
	}
)

// parseSize reads bytes as OpenSandbox does: a whole number and a unit in any
// case; Mi is 2^20, M and MB are 10^6, none is bytes.
func parseSize(s string) (int64, error) {
	m := sizeForm.FindStringSubmatch(s)
	if m == nil {
		return 0, invalid("%q is not a size; want a whole number with an optional unit, as 536870912, 512Mi, 1Gi or 500M", clip(s, 40))
	}
	unit, ok := units[strings.ToLower(m[2])]
	if !ok {
		return 0, invalid("%q has the unknown unit %q; known are k, M, G, T (powers of 1000) and Ki, Mi, Gi, Ti (powers of 1024)", clip(s, 40), clip(m[2], 20))
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	if err != nil || n > math.MaxInt64/unit {
		return 0, invalid("%q is more bytes than any machine has", clip(s, 40))
	}
	return n * unit, nil
}

// parseCPU reads "500m", "1" or "0.5" into thousandths of a core.
func parseCPU(s string) (int64, error) {
	m := cpuForm.FindStringSubmatch(s)
	if m == nil || m[2] != "" && m[3] != "" {
		return 0, invalid("%q is not an amount of CPU; want cores as 1 or 0.5, or thousandths of a core as 500m", clip(s, 40))
	}
	f, err := strconv.ParseFloat(m[1]+m[2], 64)
	if err != nil || f > 1e9 {
		return 0, invalid("%q is more CPU than any machine has", clip(s, 40))
	}
	if m[3] == "" {
		f *= 1000
	}
	return int64(math.Round(f)), nil
}

// applyLimits puts resourceLimits, over the defaults, into spec.
func (s *Server) applyLimits(spec *record.Spec, limits map[string]string) error {
	spec.MemoryBytes, spec.CPUMillis, spec.Pids, spec.DiskBytes = s.cfg.MemoryBytes, s.cfg.CPUMillis, s.cfg.Pids, s.cfg.DiskBytes
	if s.cfg.NoDisk {
		spec.DiskBytes = 0
	}
	for _, key := range slices.Sorted(maps.Keys(limits)) {
		v := limits[key]
		if len(v) > maxAmount {
			return invalid("resourceLimits.%s has %d characters; no amount needs more than %d", clip(key, 40), len(v), maxAmount)
		}
		var err error
		switch key {
		case "memory":
			spec.MemoryBytes, err = bounded(key, v, parseSize, minMemory, s.cfg.MaxMemoryBytes, "64Mi")
		case "cpu":
			spec.CPUMillis, err = bounded(key, v, parseCPU, minMillis, s.cfg.MaxCPUMillis, "10m")
		case "pids":
			spec.Pids, err = bounded(key, v, parseCount, minPids, maxPids, "16")
		case "disk":
			if s.cfg.NoDisk {
				return errs.New(errs.Unsupported, "resourceLimits.disk: the storage pool of this host is a plain directory and can not limit disks; leave disk out, or give the daemon a btrfs or xfs pool")
			}
			spec.DiskBytes, err = bounded(key, v, parseSize, minDisk, s.cfg.MaxDiskBytes, "16Mi")
		case "gpu":
			return errs.New(errs.Unsupported, "resourceLimits.gpu: this daemon lends no GPUs; leave gpu out")
		default:
			return invalid("resourceLimits.%s is not a resource here; there are cpu, memory, pids and disk", clip(key, 40))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func parseCount(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || strings.HasPrefix(s, "+") {
		return 0, invalid("%q is not a whole number", clip(s, 40))
	}
	return n, nil
}

func bounded(key, v string, parse func(string) (int64, error), least, most int64, leastText string) (int64, error) {
	n, err := parse(v)
	switch {
	case err != nil:
		return 0, invalid("resourceLimits.%s: %s", key, err.Error())
	case n < least:
		return 0, invalid("resourceLimits.%s: %q is too little; the least is %s", key, clip(v, 40), leastText)
	case n > most:
		return 0, invalid("resourceLimits.%s: %q is more than this host gives one sandbox (at most %d in %s)", key, clip(v, 40), most,
			map[string]string{"memory": "bytes", "disk": "bytes", "cpu": "thousandths of a core", "pids": "processes"}[key])
	}
	return n, nil
}
