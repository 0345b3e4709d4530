package command

import (
	"strings"
	"testing"
)

func TestArguments(t *testing.T) {
	for use, want := range map[string]string{
		"ps":                     "",
		"rm [-f] SANDBOX...":     "SANDBOX...",
		"stats [SANDBOX...]":     "SANDBOX...",
		"renew SANDBOX DURATION": "SANDBOX DURATION",
		"create [flags] IMAGE [-- COMMAND [ARG...]]":       "IMAGE COMMAND ARG...",
		"exec [flags] SANDBOX [--] COMMAND [ARG...]":       "SANDBOX COMMAND ARG...",
		"bench [--runtime RUNTIME] [--image IMAGE] [-n N]": "",
		"cp SANDBOX:PATH PATH | PATH SANDBOX:PATH":         "SANDBOX:PATH PATH",
		"x SANDBOX|SNAPSHOT NAME":                          "SANDBOX|SNAPSHOT NAME",
		"x [--from SNAPSHOT|IMAGE] [-q] SANDBOX [FILE]":    "SANDBOX FILE",
	} {
		if got := strings.Join(arguments(use), " "); got != want {
			t.Errorf("%q: %q, want %q", use, got, want)
		}
	}
	for n, want := range map[int]string{0: "SANDBOX", 1: "FILE", 5: "FILE"} {
		if got := argument(arguments("x SANDBOX [FILE...]"), n); got != want {
			t.Errorf("argument %d: %q", n, got)
		}
	}
}
