package sbom

import (
	_ "embed"
	"strings"
	"sync"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// spdx has SPDX's names of licences and of exceptions, those that CycloneDX's schema takes.
//
//go:embed spdx.txt
var spdx string

var spdxNames = sync.OnceValue(func() map[string]bool {
	names := map[string]bool{}
	for name := range strings.Lines(spdx) {
		names[strings.TrimSpace(name)] = true
	}
	return names
})

// licences says which licences a package has. What SPDX knows is said by its name there, and
// everything else as the package says it. CycloneDX has either one expression or a list.
func licences(names []string) *cdx.Licenses {
	if len(names) == 0 {
		return nil
	}
	if len(names) == 1 && !spdxNames()[names[0]] && isExpression(names[0]) {
		return &cdx.Licenses{{Expression: names[0]}}
	}
	var all cdx.Licenses
	for _, name := range names {
		if spdxNames()[name] {
			all = append(all, cdx.LicenseChoice{License: &cdx.License{ID: name}})
		} else {
			all = append(all, cdx.LicenseChoice{License: &cdx.License{Name: name}})
		}
	}
	return &all
}

// isExpression reports whether text is an expression of SPDX's names (SPDX 2.3, annex D).
func isExpression(text string) bool {
	words := strings.Fields(strings.NewReplacer("(", " ( ", ")", " ) ").Replace(text))
	depth, operand := 0, true // operand: a name or "(" comes next
	for _, w := range words {
		switch {
		case w == "(" && operand:
			depth++
		case w == ")" && !operand && depth > 0:
			depth--
		case (w == "AND" || w == "OR" || w == "WITH") && !operand:
			operand = true
		case operand && w != "(" && w != ")" && spdxNames()[strings.TrimSuffix(w, "+")]:
			operand = false
		default:
			return false
		}
	}
	return !operand && depth == 0
}
