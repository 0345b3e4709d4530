package spec

import (
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
)

// Bounds that hold on every host. The official SDK's tests do not go below 64 Mi of
// memory either, and PID 1 needs a dozen threads.
const (
	minMemory = 64 << 20
	minDisk   = 16 << 20
	minMillis = 10
	minPids   = 16
	maxPids   = 4194304 // PID_MAX_LIMIT, linux/threads.h
	maxAmount = 64      // characters, with which any of them can be written
	minShares = 2
	maxShares = 262144
	minIOBps  = 64 << 10 // below it a single page of a program takes seconds
	minIOPS   = 10
	maxIOPS   = 1 << 30
	maxIOBps  = 1 << 40
	minShm    = 64 << 10
	minLog    = 64 << 10
)

// MaxLog is the most that an agent may keep of the output of an entrypoint, in bytes.
const MaxLog = 256 << 20

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
		return 0, httperr.Invalid("%q is not a size; want a whole number with an optional unit, such as 536870912, 512Mi, 1Gi or 500M",
			httperr.Clip(s, 40))
	}
	unit, ok := units[strings.ToLower(m[2])]
	if !ok {
		return 0, httperr.Invalid("%q has the unknown unit %q; the units are k, M, G, T (powers of 1000) and Ki, Mi, Gi, Ti "+
			"(powers of 1024)", httperr.Clip(s, 40), httperr.Clip(m[2], 20))
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	if err != nil || n > math.MaxInt64/unit {
		return 0, httperr.Invalid("%q is more bytes than any machine has", httperr.Clip(s, 40))
	}
	return n * unit, nil
}

// parseCPU reads "500m", "1" or "0.5" into thousandths of a core.
func parseCPU(s string) (int64, error) {
	m := cpuForm.FindStringSubmatch(s)
	if m == nil || m[2] != "" && m[3] != "" {
		return 0, httperr.Invalid("%q is not an amount of CPU; want cores such as 1 or 0.5, or thousandths of a core such as 500m",
			httperr.Clip(s, 40))
	}
	f, err := strconv.ParseFloat(m[1]+m[2], 64)
	if err != nil || f > 1e9 {
		return 0, httperr.Invalid("%q is more CPU than any machine has", httperr.Clip(s, 40))
	}
	if m[3] == "" {
		f *= 1000
	}
	return int64(math.Round(f)), nil
}

func parseCount(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || strings.HasPrefix(s, "+") {
		return 0, httperr.Invalid("%q is not a whole number", httperr.Clip(s, 40))
	}
	return n, nil
}
