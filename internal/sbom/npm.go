package sbom

import (
	"encoding/json"
	"regexp"
	"slices"
)

// The forms of what identifies an npm package: old names have capitals; versions are semantic.
var (
	npmName    = regexp.MustCompile(`^(?:@[0-9A-Za-z~-][0-9A-Za-z._~-]{0,99}/)?[0-9A-Za-z~_-][0-9A-Za-z._~-]{0,199}$`)
	npmVersion = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z.+-]{0,199}$`)
)

// readPackageJSON reads the package.json of an npm package. why says why it is none.
func readPackageJSON(b []byte) (pkg Package, why string) {
	// A struct would also take the fields of names in capitals, which npm does not.
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(b, &fields); err != nil {
		return Package{}, "it is not a JSON object"
	}
	pkg = Package{Type: npm, Name: text(fields["name"]), Version: text(fields["version"]), Licences: npmLicences(fields["license"])}
	if len(pkg.Licences) == 0 {
		pkg.Licences = npmLicences(fields["licenses"])
	}
	return pkg, pkg.wrong()
}

// text is a JSON string; "" if it is something else.
func text(b json.RawMessage) (s string) {
	if json.Unmarshal(b, &s) != nil {
		return ""
	}
	return s
}

// npmLicences reads a licence: a name or an expression of SPDX, or the forms of the time before
// 2015, {"type": NAME} and a list of these.
func npmLicences(b json.RawMessage) (names []string) {
	one := func(b json.RawMessage) {
		name := text(b)
		if name == "" {
			var old map[string]json.RawMessage
			if json.Unmarshal(b, &old) == nil {
				name = text(old["type"])
			}
		}
		if name = clean(name); name != "" && len(name) <= maxLicence && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	var list []json.RawMessage
	if json.Unmarshal(b, &list) != nil {
		list = []json.RawMessage{b}
	}
	for _, b := range list[:min(len(list), maxLicences)] {
		one(b)
	}
	slices.Sort(names)
	return names
}
