// Package bundle makes and reads bundles: one signed file that carries sandboxd, images and
// documents to a host without a network. docs/design/appliance.md says what each byte is.
//
//	prelude │ verifier │ manifest │ members │ newline │ signature
//	└──────────────── signed ─────────────────────────┘
//
// Create writes a bundle. Open checks the signature of one, and reads nothing but sizes before.
// Bundle.Check, Each and Extract read the members, each against the size and the SHA-256 that
// the manifest has. Errors of a file that may not be used are of package errs: errs.Invalid for
// one that is damaged, errs.Denied for a signature that no given key made, errs.Unsupported for
// another format or host, errs.WrongState for a release older than the installed one.
//
// The prelude is a script, so "sh FILE" runs bytes that nobody has checked. The signature covers
// them, but only a program that is on the host already can say so beforehand.
package bundle

import (
	"encoding/json"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Format is the version of the form of bundles. A release that must change what older ones read
// raises it. Keys may be added to the manifest without that: a reader ignores those that it does
// not know.
const Format = 1

// Limits of what a reader accepts, whoever signed it.
const (
	maxPrelude   = 64 << 10
	maxVerifier  = 256 << 20
	maxManifest  = 4 << 20
	maxSignature = 2 << 10
	maxMembers   = 4096
	maxPatches   = 64      // each costs a second reading of what is in front of it
	maxSize      = 1 << 40 // of the members' stream, and of each member: 4096 of them fit into an int64
	maxName      = 512
	maxElement   = 255 // NAME_MAX of Linux
)

// window is how far back the stream of members refers: what a reader holds in memory. Of
// build/bin and the image base (220 MB) a window of 8 MiB made 59.2 MB, one of 32 MiB 51.1 MB.
const window = 32 << 20

// Kinds of members. A reader may meet others, of later releases.
const (
	Package = "package" // a .deb or .rpm
	Image   = "image"   // an archive that `sandboxctl image import` reads
	File    = "file"
	SBOM    = "sbom" // CycloneDX, in JSON
)

// Manifest says what a bundle holds.
type Manifest struct {
	Format       int       `json:"format"`
	Version      string    `json:"version"` // of sandboxd: https://semver.org
	Commit       string    `json:"commit,omitempty"`
	OS           string    `json:"os"`           // as runtime.GOOS
	Architecture string    `json:"architecture"` // as runtime.GOARCH
	Created      time.Time `json:"created"`      // SOURCE_DATE_EPOCH
	Members      []Member  `json:"members"`      // by name, in the order of their bytes
}

// Member is a file in a bundle.
type Member struct {
	Name    string `json:"name"` // a relative path with slashes
	Kind    string `json:"kind"`
	Package string `json:"package,omitempty"` // name of a package, as dpkg or rpm know it
	Version string `json:"version,omitempty"` // of the package
	// IfNeeded: the package is of the host's distribution, and is installed only where something that is
	// installed needs it, and the host has not as good a one. Older releases install it in any case.
	IfNeeded bool `json:"if_needed,omitempty"`

	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"` // in hex
	Mode   string `json:"mode"`   // 0644 or 0755
	// Like names an earlier member of which this one is stored as a patch, which has Stored bytes.
	// The other one is no patch itself.
	Like   string `json:"like,omitempty"`
	Stored int64  `json:"stored,omitempty"`
}

// inStream is how many bytes of the stream are the member's.
func (f Member) inStream() int64 {
	if f.Like != "" {
		return f.Stored
	}
	return f.Size
}

// parse reads a manifest and holds it against all rules.
func parse(b []byte) (*Manifest, error) {
	m := &Manifest{}
	if err := json.Unmarshal(b, m); err != nil {
		return nil, errs.New(errs.Invalid, "its manifest cannot be read (%v): it was made by a broken program, get another", err)
	}
	// Before all else: the other rules are those of this format.
	if m.Format != Format {
		return nil, foreign(strconv.Itoa(m.Format))
	}
	if err := m.check(); err != nil {
		return nil, errs.New(errs.Invalid, "its manifest is wrong: %v: it was made by a broken program, get another", err)
	}
	return m, nil
}

func foreign(format string) error {
	return errs.New(errs.Unsupported, "it has format %s and this sandboxd reads format %d: "+
		"use the sandboxd of the release that made it, or one that reads both", format, Format)
}

func (m *Manifest) check() error {
	switch {
	case !isVersion(m.Version):
		return errs.New(errs.Invalid, "version %q is no semantic version", m.Version)
	case !isWord(m.OS) || !isWord(m.Architecture):
		return errs.New(errs.Invalid, "system %q, architecture %q", m.OS, m.Architecture)
	case strings.Trim(m.Commit, "0123456789abcdef") != "" || len(m.Commit) > 64:
		return errs.New(errs.Invalid, "commit %q is no hash", m.Commit)
	case len(m.Members) > maxMembers:
		return errs.New(errs.Invalid, "it has %d members, more than %d", len(m.Members), maxMembers)
	}
	// A host may unpack to a file system that does not tell upper from lower case.
	seen := map[string]string{}
	for _, f := range m.Members {
		if err := f.check(); err != nil {
			return err
		}
		folded := strings.ToLower(f.Name)
		if other, ok := seen[folded]; ok {
			return errs.New(errs.Invalid, "the members %q and %q have one name (upper and lower case are not told apart)", other, f.Name)
		}
		seen[folded] = f.Name
	}
	for folded, name := range seen {
		for dir := path.Dir(folded); dir != "."; dir = path.Dir(dir) {
			if other, ok := seen[dir]; ok {
				return errs.New(errs.Invalid, "the member %q is a directory of the member %q", other, name)
			}
		}
	}
	if !slices.IsSortedFunc(m.Members, byName) {
		return errs.New(errs.Invalid, "the members are not sorted by name")
	}
	return m.checkPatches()
}

func (m *Manifest) checkPatches() error {
	patches := 0
	whole := map[string]bool{}
	for _, f := range m.Members {
		switch {
		case f.Like == "" && f.Stored == 0:
			whole[f.Name] = true
		case f.Like == "" || f.Stored < 0 || f.Stored > maxSize:
			return errs.New(errs.Invalid, "the member %s is stored in %d bytes as a patch of %q", f.Name, f.Stored, f.Like)
		case !whole[f.Like]:
			return errs.New(errs.Invalid, "the member %s is a patch of %.600q, which is no earlier member that is stored whole",
				f.Name, f.Like)
		default:
			patches++
		}
	}
	if patches > maxPatches {
		return errs.New(errs.Invalid, "%d members are patches, more than %d", patches, maxPatches)
	}
	return nil
}

func byName(a, b Member) int { return strings.Compare(a.Name, b.Name) }

func (f Member) check() error {
	if why := nameFault(f.Name); why != "" {
		return errs.New(errs.Invalid, "the member name %.600q %s", f.Name, why)
	}
	switch {
	case !isWord(f.Kind):
		return errs.New(errs.Invalid, "the member %s has the kind %q", f.Name, f.Kind)
	case f.Size < 0 || f.Size > maxSize:
		return errs.New(errs.Invalid, "the member %s has the size %d", f.Name, f.Size)
	case len(f.SHA256) != 64 || strings.Trim(f.SHA256, "0123456789abcdef") != "":
		return errs.New(errs.Invalid, "the member %s has the SHA-256 %q", f.Name, f.SHA256)
	case f.Mode != "0644" && f.Mode != "0755":
		return errs.New(errs.Invalid, "the member %s has the mode %q, and only 0644 and 0755 are allowed", f.Name, f.Mode)
	case f.Kind == Package && (!isPlain(f.Package) || !isPlain(f.Version)):
		return errs.New(errs.Invalid, "the member %s is the package %q, version %q", f.Name, f.Package, f.Version)
	case f.Kind != Package && (f.Package != "" || f.Version != ""):
		return errs.New(errs.Invalid, "the member %s is no package, and has the version %q of package %q", f.Name, f.Version, f.Package)
	}
	return nil
}

// nameFault says what is wrong with the name of a member; "" is nothing. Names are arguments of
// programs and are printed: they have no characters that a shell or a terminal acts on.
func nameFault(name string) string {
	switch {
	case name == "":
		return "is empty"
	case len(name) > maxName:
		return "is longer than " + strconv.Itoa(maxName) + " bytes"
	case name[0] == '/':
		return "is absolute"
	case strings.IndexFunc(name, func(r rune) bool { return !plain(r) && r != '/' }) >= 0:
		return "has other characters than letters, digits and " + plainMarks + "/"
	}
	for e := range strings.SplitSeq(name, "/") {
		switch {
		case e == "..":
			return "climbs"
		case e == "" || e[0] == '.' || e[0] == '-':
			return `has an element that is empty or begins with "." or "-"`
		case len(e) > maxElement:
			return "has an element longer than " + strconv.Itoa(maxElement) + " bytes"
		}
	}
	return ""
}

// plainMarks are what Debian's and Python's names of files use besides letters and digits.
const plainMarks = "._+~:%=@,-"

func plain(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune(plainMarks, r)
}

func isPlain(s string) bool {
	return s != "" && len(s) <= maxElement && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0
}

func isWord(s string) bool {
	return s != "" && len(s) <= 32 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789") == ""
}
