package image

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// An image that is built here says in its labels which versions it has:
// sandboxd.version.debian = "12.11 bookworm". A value is the names of one version, the
// most exact one first. An archive of the image keeps them.
const versionLabel = "sandboxd.version."

// Files of a new root that tell its versions. A root without a distribution may lack them.
const (
	osRelease     = "etc/os-release"
	debianVersion = "etc/debian_version"
	dpkgStatus    = "var/lib/dpkg/status"
)

// keepVersions is a hook of mmdebstrap: it copies these files into dir.
func keepVersions(dir string) string {
	dir = "'" + strings.ReplaceAll(dir, "'", `'\''`) + "'"
	return fmt.Sprintf(`for f in %s %s %s; do if [ -e "$1/$f" ]; then cat "$1/$f" >%s/"${f##*/}"; fi; done`,
		osRelease, debianVersion, dpkgStatus, dir)
}

// readVersions returns the labels of a root: the version of its distribution, and of
// each program of the recipe that of its package.
func (r *Recipe) readVersions(dir string) (map[string]string, error) {
	var failed error
	text := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, path.Base(name)))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = errors.Join(failed, err)
		}
		return b
	}
	system, point, status := text(osRelease), text(debianVersion), text(dpkgStatus)
	if failed != nil {
		return nil, fmt.Errorf("read the versions of the new root: %w", failed)
	}
	labels := map[string]string{}
	if id := field(system, "ID="); id != "" {
		release := field(system, "VERSION_ID=")
		if p := string(bytes.TrimSpace(point)); strings.HasPrefix(p, release+".") {
			release = p // 12.11, not only 12
		}
		labels[versionLabel+id] = strings.TrimSpace(release + " " + field(system, "VERSION_CODENAME="))
	}
	for program, name := range r.Versions {
		v := packageVersion(status, name)
		if v == "" {
			return nil, errs.New(errs.Invalid, "versions: the package %q, whose version is that of %s, is not in the image", name, program)
		}
		labels[versionLabel+program] = v
	}
	return labels, nil
}

// field is the value of a line of os-release(5).
func field(text []byte, key string) string {
	for line := range bytes.Lines(text) {
		if v, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte(key)); ok {
			return strings.Trim(string(v), `"'`)
		}
	}
	return ""
}

// packageVersion is the upstream version of a package in dpkg's status: of 2:3.11.2-1+b1 it
// is 3.11.2 (Debian policy §5.6.12). It is "" if the package is not there.
func packageVersion(status []byte, name string) string {
	for entry := range bytes.SplitSeq(status, []byte("\n\n")) {
		if field(entry, "Package: ") != name {
			continue
		}
		v := field(entry, "Version: ")
		if _, rest, ok := strings.Cut(v, ":"); ok {
			v = rest
		}
		if i := strings.LastIndexByte(v, '-'); i > 0 {
			v = v[:i]
		}
		if i := strings.IndexAny(v, "+~"); i >= 0 {
			v = v[:i]
		}
		return v
	}
	return ""
}

// another reports whether i, which ref found by the alias a, is not known to be what ref
// says. An alias without a star is for one tag: its author has decided.
func (a Alias) another(ref Reference, i record.Image) bool {
	if !a.any {
		return false
	}
	program := path.Base(ref.Name)
	have, known := i.Config.Labels[versionLabel+program]
	asked, _, _ := strings.Cut(cmp.Or(ref.Tag, DefaultTag), "-") // 3.11-slim is 3.11
	if asked == DefaultTag || asked == "slim" {                  // of no version
		return !known && program != path.Base(i.Name)
	}
	for v := range strings.FieldsSeq(have) {
		if v == asked || strings.HasPrefix(v, asked+".") {
			return false
		}
	}
	return true
}

// Note says that an image which Resolve found for ref is an alias of another version, or
// of another distribution. It is "" if the image is what ref names.
func (s *Store) Note(ref Reference, i record.Image) string {
	if ref.Digest != "" || i.Name == ref.Name && i.Tag == cmp.Or(ref.Tag, DefaultTag) {
		return ""
	}
	if a, ok := s.alias(ref); !ok || !a.another(ref, i) {
		return ""
	}
	return fmt.Sprintf("image %s is not on this host; its alias %s (%s) is used instead", ref.URI, i.Ref(), versionsOf(i))
}

// versionsOf writes the versions of an image for people.
func versionsOf(i record.Image) string {
	var all []string
	for _, label := range slices.Sorted(maps.Keys(i.Config.Labels)) {
		if program, ok := strings.CutPrefix(label, versionLabel); ok {
			v, _, _ := strings.Cut(i.Config.Labels[label], " ")
			all = append(all, program+" "+v)
		}
	}
	if all == nil {
		return "its versions are not recorded"
	}
	return strings.Join(all, ", ")
}
