package sbom

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// The types of packages, as in package URLs.
const (
	deb  = "deb"
	pypi = "pypi"
	npm  = "npm"
)

// forms are the forms of names and versions, by type of package. They are also those of package
// URLs: what has such a form can be written down as it is.
var forms = map[string]struct{ name, version *regexp.Regexp }{
	deb:  {debName, debVersion},
	pypi: {pythonName, pythonVersion},
	npm:  {npmName, npmVersion},
}

// Package is a package that an image has.
type Package struct {
	Type          string   `json:"type"`
	Name          string   `json:"name"`
	Version       string   `json:"version"`
	Arch          string   `json:"arch,omitempty"` // of a Debian package, as the next two
	Source        string   `json:"source,omitempty"`
	SourceVersion string   `json:"sourceVersion,omitempty"`
	Supplier      string   `json:"supplier,omitempty"`
	Licences      []string `json:"licences,omitempty"` // as the package has them
	At            string   `json:"at,omitempty"`       // the file that says so
}

// maxText bounds a text for people, in bytes.
const maxText = 300

// clean makes text of an image fit for a document: printable, on one line, not too long.
func clean(s string) string {
	if len(s) > 4*maxText {
		s = s[:4*maxText]
	}
	between := func(r rune) bool { return !unicode.IsGraphic(r) || r == ' ' }
	s = strings.Join(strings.FieldsFunc(strings.ToValidUTF8(s, "\uFFFD"), between), " ")
	if len(s) > maxText {
		s = strings.TrimSpace(strings.ToValidUTF8(s[:maxText], ""))
	}
	return s
}

// wrong says what is wrong with what an image says of a package; "" is nothing.
func (p Package) wrong() string {
	form := forms[p.Type]
	switch {
	case form.name == nil:
		return fmt.Sprintf("%.20q is no type of package", p.Type)
	case !form.name.MatchString(p.Name):
		return fmt.Sprintf("%.80q is no name of a package", p.Name)
	case !form.version.MatchString(p.Version):
		return fmt.Sprintf("%.80q is no version of the package %s", p.Version, p.Name)
	case p.Type == deb && !debArch.MatchString(p.Arch):
		return fmt.Sprintf("%.80q is no architecture of the package %s", p.Arch, p.Name)
	case p.Type != deb && p.Arch+p.Source+p.SourceVersion != "",
		p.Source != "" && !debName.MatchString(p.Source), p.SourceVersion != "" && !debVersion.MatchString(p.SourceVersion):
		return "it has no such source"
	case p.Supplier != clean(p.Supplier) || p.At != clean(p.At) || len(p.Licences) > maxLicences ||
		slices.ContainsFunc(p.Licences, func(l string) bool { return l == "" || len(l) > maxLicence || l != clean(l) }):
		return "it has text that is not printable, or too much of it"
	}
	return ""
}
