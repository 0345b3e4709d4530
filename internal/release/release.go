// Package release says which version of sandboxd a program is, in the form of
// https://semver.org. The Makefile gives it what `git describe` says of the tree:
//
//	git describe          version
//	v1.2.3-0-g620b32b     1.2.3
//	v1.2.3-5-g620b32b     1.2.4-dev+620b32b
//	620b32b-dirty         0.1.0-dev+620b32b.dirty   (there is no tag)
//
// A program that was built without the Makefile asks Go, which notes the commit, too.
package release

import (
	"cmp"
	"regexp"
	"runtime/debug"
	"strconv"
	"strings"
)

// first is the version that is being made while there are no tags.
const first = "0.1.0"

var described string // set by the linker

// Version returns the version of this program.
func Version() string { return parse(cmp.Or(described, stamp(debug.ReadBuildInfo()))) }

// parse turns the output of `git describe --tags --always --long --dirty` into a version.
func parse(text string) string {
	// Compiled here: "runc init", in which each sandbox begins, never asks for a version.
	tagged := regexp.MustCompile(`^v(\d+\.\d+\.)(\d+)(-[0-9A-Za-z.-]+)?-(\d+)-g([0-9a-f]+)(-dirty)?$`)
	bare := regexp.MustCompile(`^([0-9a-f]{7,40})(-dirty)?$`)
	if m := bare.FindStringSubmatch(text); m != nil {
		return first + "-dev+" + build(m[1], m[2])
	}
	m := tagged.FindStringSubmatch(text)
	if m == nil {
		return first + "-dev"
	}
	series, patch, pre, since, dirty := m[1], m[2], m[3], m[4], m[6]
	switch {
	case since == "0" && dirty == "":
		return series + patch + pre
	case pre != "": // what follows 1.2.3-rc.1 comes before 1.2.3
		return series + patch + pre + ".dev+" + build(m[5], dirty)
	}
	n, err := strconv.ParseUint(patch, 10, 32)
	if err != nil {
		return first + "-dev"
	}
	return series + strconv.FormatUint(n+1, 10) + "-dev+" + build(m[5], dirty)
}

// build is the metadata of a version that is not a release.
func build(commit, dirty string) string {
	return commit[:min(len(commit), 12)] + strings.Replace(dirty, "-", ".", 1)
}

// stamp is what Go notes of the tree, in the form of git describe; "" is nothing.
func stamp(info *debug.BuildInfo, ok bool) (text string) {
	if !ok {
		return ""
	}
	of := map[string]string{}
	for _, s := range info.Settings {
		of[s.Key] = s.Value
	}
	if text = of["vcs.revision"]; text != "" && of["vcs.modified"] == "true" {
		text += "-dirty"
	}
	return text
}
