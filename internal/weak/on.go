//go:build weak

package weak

import (
	"os"
	"slices"
	"strings"
)

// env names the walls that are down, separated by commas.
const env = "SANDBOXD_WEAK"

var down = strings.Split(os.Getenv(env), ",")

// Off reports whether a wall is down.
func Off(w Wall) bool { return slices.Contains(down, string(w)) }

// Environ is what a child needs to have the same walls down.
func Environ() []string { return []string{env + "=" + os.Getenv(env)} }
