package sbom

import (
	"fmt"
	"strings"
)

// purl writes a package URL (https://github.com/package-url/purl-spec). name may have a namespace,
// divided by slashes. qualifiers are pairs of a key and a value in the order of the keys; those
// without a value are left out.
func purl(kind, name, version string, qualifiers ...string) string {
	var b strings.Builder
	b.WriteString("pkg:" + kind)
	for segment := range strings.SplitSeq(name, "/") {
		b.WriteString("/" + percent(segment))
	}
	if version != "" {
		b.WriteString("@" + percent(version))
	}
	between := "?"
	for i := 0; i+1 < len(qualifiers); i += 2 {
		if qualifiers[i+1] != "" {
			b.WriteString(between + qualifiers[i] + "=" + percent(qualifiers[i+1]))
			between = "&"
		}
	}
	return b.String()
}

// percent encodes what is neither a letter, a digit nor one of ".-_~:".
func percent(s string) string {
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte(".-_~:", c) >= 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// url is the package URL of a package of an image.
func (p Package) url(of OS) string {
	switch p.Type {
	case deb:
		distro, upstream := of.ID, p.Source
		if of.Version != "" {
			distro += "-" + of.Version
		}
		if p.SourceVersion != "" {
			upstream += "@" + p.SourceVersion
		}
		vendor := of.ID
		if vendor == "" {
			vendor = "debian"
		}
		return purl(deb, vendor+"/"+p.Name, p.Version, "arch", p.Arch, "distro", distro, "upstream", upstream)
	case pypi:
		return purl(pypi, normal(p.Name), p.Version)
	}
	return purl(npm, strings.ToLower(p.Name), p.Version)
}
