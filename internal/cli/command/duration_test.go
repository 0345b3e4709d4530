package command

import (
	"testing"
	"time"

	"github.com/spf13/pflag"
)

func TestDuration(t *testing.T) {
	for s, want := range map[string]time.Duration{
		"5": 5 * time.Second, "0": 0, "-1": -time.Second, "1h30m": 90 * time.Minute, "250ms": 250 * time.Millisecond,
	} {
		var d time.Duration
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		DurationFlag(f, &d, "timeout", "t", time.Hour, "")
		if d != time.Hour {
			t.Errorf("the default is %s", d)
		}
		if err := f.Parse([]string{"-t", s}); err != nil || d != want {
			t.Errorf("%s: %s, %v; want %s", s, d, err, want)
		}
	}
	for _, s := range []string{"", "5x", "soon", "1.5", "99999999999", "m"} {
		if d, err := Duration(s); err == nil {
			t.Errorf("%q is %s", s, d)
		}
	}
}
