package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes, written as "512Mi".
type Size int64

// UnmarshalText reads a whole number with an optional Ki, Mi, Gi or Ti.
func (s *Size) UnmarshalText(b []byte) error {
	text, unit := string(b), int64(1)
	for suffix, u := range map[string]int64{"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40} {
		if t, ok := strings.CutSuffix(text, suffix); ok {
			text, unit = t, u
		}
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || n > (1<<62)/unit {
		return fmt.Errorf("size %q: want a whole number with Ki, Mi, Gi or Ti", b)
	}
	*s = Size(n * unit)
	return nil
}

// CPU is thousandths of a core, written as "500m", "1" or "0.5".
type CPU int64

// UnmarshalText reads cores, or thousandths of one with the suffix m.
func (c *CPU) UnmarshalText(b []byte) error {
	text, unit := string(b), 1000.0
	if t, ok := strings.CutSuffix(text, "m"); ok {
		text, unit = t, 1
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || !(f > 0) || f*unit > 1e6 {
		return fmt.Errorf("cpu %q: want cores such as 1 or 0.5, or thousandths such as 500m", b)
	}
	*c = CPU(f * unit)
	return nil
}

// Duration is a time.Duration, written as "90s".
type Duration time.Duration

// UnmarshalText reads Go's form of a duration.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil || v < 0 {
		return fmt.Errorf("duration %q: want a duration such as 90s, 30m or 1h", b)
	}
	*d = Duration(v)
	return nil
}
