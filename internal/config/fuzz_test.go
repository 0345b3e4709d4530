package config

import (
	"bytes"
	"fmt"
	"math"
	"testing"
	"time"
)

// FuzzConfig: a file is no TOML, or every problem in it has a line of the file, and what
// fits is read alike each time.
func FuzzConfig(f *testing.F) {
	f.Add(defaults)
	f.Add([]byte("[limits]\nmax_sandboxes = \"x\"\nunknown = 1\n[[registries]]\nprefix = 5\n"))
	f.Add([]byte("a.b.c = {d = [1, {e = 2}]}\n\"\" = 1"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var c, again Config
		got, err := decode(b, "x.toml", &c)
		if err != nil {
			return
		}
		for _, p := range got.problems {
			if p.line < 0 || p.line > 1+bytes.Count(b, []byte("\n")) || p.err == nil {
				t.Fatalf("%q has a problem in line %d: %v", b, p.line, p.err)
			}
		}
		same, err := decode(b, "x.toml", &again)
		if err != nil || len(same.problems) != len(got.problems) || fmt.Sprintf("%+v", c) != fmt.Sprintf("%+v", again) {
			t.Fatalf("%q is read as %+v and as %+v, %v", b, c, again, err)
		}
	})
}

// FuzzValues: a value is refused, or is not negative and is read back as it would be written.
func FuzzValues(f *testing.F) {
	for _, s := range []string{"512Mi", "4611686018427387904", "1Ti", "500m", "0.5", "1e3", "90s", "NaN", "Inf", "0x1p5", "+1", "-0"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var s, s2 Size
		if s.UnmarshalText(b) == nil && (s < 0 || s2.UnmarshalText(fmt.Append(nil, int64(s))) != nil || s2 != s) {
			t.Fatalf("size %q is %d, then %d", b, s, s2)
		}
		var c, c2 CPU
		if c.UnmarshalText(b) == nil && (c < 0 || c > math.MaxInt32 ||
			c > 0 && (c2.UnmarshalText(fmt.Appendf(nil, "%dm", int64(c))) != nil || c2 != c)) {
			t.Fatalf("cpu %q is %d, then %d", b, c, c2)
		}
		var d, d2 Duration
		if d.UnmarshalText(b) == nil && (d < 0 || d2.UnmarshalText([]byte(time.Duration(d).String())) != nil || d2 != d) {
			t.Fatalf("duration %q is %d, then %d", b, d, d2)
		}
	})
}
