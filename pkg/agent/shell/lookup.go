package shell

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// LookPath returns the first file named name in the directories of path that
// anybody may execute, or "". It gives up at a relative directory.
func LookPath(name, path string) string {
	for dir := range strings.SplitSeq(path, ":") {
		if !filepath.IsAbs(dir) {
			return ""
		}
		p := dir + "/" + name
		if Executable(p) {
			return p
		}
	}
	return ""
}

func Executable(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Mode().IsRegular() && fi.Mode().Perm()&0o111 != 0
}

// FindShell returns bash, else sh, else "".
func FindShell(path string) string {
	for _, name := range []string{"bash", "sh"} {
		if p := LookPath(name, path); p != "" {
			return p
		}
		if p := "/bin/" + name; Executable(p) {
			return p
		}
	}
	return ""
}

// Environ returns env as KEY=VALUE, sorted.
func Environ(env map[string]string) []string {
	out := make([]string, 0, len(env))
	for _, k := range slices.Sorted(maps.Keys(env)) {
		out = append(out, k+"="+env[k])
	}
	return out
}
