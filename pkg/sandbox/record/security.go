package record

import "slices"

// Security is how much a sandbox may do. Each level differs from SecurityDefault in few
// things, which pkg/oci lists.
type Security string

// The levels of security.
const (
	SecurityStrict  Security = "strict"  // for programs that only compute and read and write files
	SecurityDefault Security = "default" // for any work of an agent
	SecurityCompat  Security = "compat"  // as docker's default: programs may gain rights, as sudo does
)

// SecurityLevels are all levels, the strictest first.
var SecurityLevels = []Security{SecurityStrict, SecurityDefault, SecurityCompat}

// Stricter returns the stricter of two levels.
func Stricter(a, b Security) Security {
	if slices.Index(SecurityLevels, a) < slices.Index(SecurityLevels, b) {
		return a
	}
	return b
}
