package sbom

import (
	"bytes"
	"cmp"
	"regexp"
	"strings"
)

// The forms of a Python package's name and version: PEP 508, and PEP 440 read generously.
var (
	pythonName    = regexp.MustCompile(`(?i)^[A-Z0-9](?:[A-Z0-9._-]{0,198}[A-Z0-9])?$`)
	pythonVersion = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z.!+_-]{0,199}$`)
	separators    = regexp.MustCompile(`[-_.]+`)
)

// normal is the one form of a Python package's name (PEP 503).
func normal(name string) string { return strings.ToLower(separators.ReplaceAllString(name, "-")) }

// readMetadata reads the METADATA of a wheel or the PKG-INFO of an egg: a message's headers, then
// text that it does not read (PEP 566). why says why it is no package.
func readMetadata(b []byte) (pkg Package, why string) {
	h := headers(b)
	pkg = Package{Type: pypi, Name: h["name"], Version: h["version"], Supplier: clean(cmp.Or(h["author"], h["maintainer"]))}
	for _, text := range []string{h["license-expression"], h["license"]} {
		// Some packages have the whole text there.
		if text = clean(text); text != "" && text != "UNKNOWN" && len(text) <= maxLicence {
			pkg.Licences = []string{text}
			break
		}
	}
	return pkg, pkg.wrong()
}

// headers are the headers of a message (RFC 5322), by their name in lower case. Of two headers of
// one name the first counts, as in Python's importlib.metadata. What is no header is the end.
func headers(b []byte) map[string]string {
	all, last := map[string]string{}, ""
	for raw := range bytes.Lines(b) {
		line := strings.TrimSuffix(strings.TrimSuffix(string(raw), "\n"), "\r")
		if line == "" {
			break
		}
		if line[0] == ' ' || line[0] == '\t' {
			if last != "" {
				all[last] = more(all[last], " ", strings.Trim(line, " \t"))
			}
			continue
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok || !isFieldName(name) {
			break
		}
		last = strings.ToLower(name)
		if _, twice := all[last]; twice {
			last = "" // also the lines that continue it
			continue
		}
		all[last] = strings.Trim(value, " \t")
	}
	return all
}
