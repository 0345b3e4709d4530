package release

import (
	"regexp"
	"runtime/debug"
	"testing"
)

// semver is the pattern that semver.org suggests.
var semver = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)` +
	`(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?$`)

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"v1.2.3-0-g620b32b":             "1.2.3",
		"v1.2.3-5-g620b32b":             "1.2.4-dev+620b32b",
		"v1.2.3-0-g620b32b-dirty":       "1.2.4-dev+620b32b.dirty",
		"v0.9.0-rc.1-0-g620b32b":        "0.9.0-rc.1",
		"v0.9.0-rc.1-7-g620b32b":        "0.9.0-rc.1.dev+620b32b",
		"v0.9.0-rc-1-7-g620b32b-dirty":  "0.9.0-rc-1.dev+620b32b.dirty",
		"620b32b":                       "0.1.0-dev+620b32b",
		"0000000-dirty":                 "0.1.0-dev+0000000.dirty",
		"620b32b3a1b25e9f00aa11bb22cc3": "0.1.0-dev+620b32b3a1b2",
		"":                              "0.1.0-dev",
		"unknown":                       "0.1.0-dev",
		"nightly-5-g620b32b":            "0.1.0-dev", // a tag that is no version
		"v1.2.99999999999-1-g620b32b":   "0.1.0-dev",
	} {
		got := parse(text)
		if got != want || !semver.MatchString(got) {
			t.Errorf("%q is %q, want %q, a semantic version", text, got, want)
		}
	}
	if v := Version(); !semver.MatchString(v) {
		t.Errorf("this program has the version %q", v)
	}
}

func TestStamp(t *testing.T) {
	info := &debug.BuildInfo{Settings: []debug.BuildSetting{
		{Key: "vcs.revision", Value: "620b32b3a1b25e9f00aa11bb22cc3"}, {Key: "vcs.modified", Value: "true"},
	}}
	if got := parse(stamp(info, true)); got != "0.1.0-dev+620b32b3a1b2.dirty" {
		t.Error(got)
	}
	for _, ok := range []bool{true, false} {
		if got := parse(stamp(&debug.BuildInfo{}, ok)); got != "0.1.0-dev" {
			t.Errorf("%v: %s", ok, got)
		}
	}
}
