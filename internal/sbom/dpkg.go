package sbom

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// The forms of what identifies a package of Debian (Debian policy §5.6.7, §5.6.8, §5.6.12).
// dpkg itself reads versions that begin with a letter.
var (
	debName    = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{0,199}$`)
	debVersion = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z.+~:-]{0,199}$`)
	debArch    = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,49}$`)
)

// readStatus reads dpkg's status file, or a file of status.d, which images without dpkg have.
// It returns the packages whose files are in the image. A paragraph that is no package is a note.
func readStatus(b []byte) (found []Package, notes []string) {
	deb822(b, func(line int, p paragraph, why string) {
		if why == "" && !unpacked(p) {
			return
		}
		pkg := Package{Type: deb, Name: p["package"], Version: p["version"], Arch: p["architecture"], Supplier: clean(p["maintainer"])}
		pkg.Source, pkg.SourceVersion = sourceOf(p["source"])
		if why == "" {
			why = pkg.wrong()
		}
		if why != "" {
			notes = append(notes, fmt.Sprintf("the package at line %d is left out: %s", line, why))
			return
		}
		found = append(found, pkg)
	})
	return found, notes
}

// unpacked reports whether the files of a package are there. The third word of Status is the
// state of the package (dpkg(1)). The files of status.d have no Status.
func unpacked(p paragraph) bool {
	status, ok := p["status"]
	if !ok {
		return true
	}
	words := strings.Fields(status)
	return len(words) != 3 || words[2] != "not-installed" && words[2] != "config-files"
}

// sourceOf takes the field Source apart: "gcc-12 (12.2.0-14)". Both are "" if it is not that.
func sourceOf(value string) (name, version string) {
	name, version, _ = strings.Cut(value, " ")
	version = strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(version), "("), ")")
	if !debName.MatchString(name) {
		return "", ""
	}
	if !debVersion.MatchString(version) {
		version = ""
	}
	return name, version
}

// Bounds of the licences of one package.
const (
	maxLicences = 30
	maxLicence  = 200 // bytes
)

// readCopyright returns the short names of the licences in a copyright file, sorted. They are
// Debian's names, of which few are SPDX's. It returns none if the file is not machine readable:
// https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
func readCopyright(b []byte) (licences []string) {
	first, machine := true, false
	deb822(b, func(_ int, p paragraph, _ string) {
		if first {
			first = false
			machine = strings.Contains(p["format"], "/copyright-format/")
		}
		if name := firstLine(p["license"]); machine && name != "" && len(name) <= maxLicence && len(licences) < maxLicences &&
			!slices.Contains(licences, clean(name)) {
			licences = append(licences, clean(name))
		}
	})
	slices.Sort(licences)
	return licences
}
