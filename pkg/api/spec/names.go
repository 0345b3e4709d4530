package spec

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// nameForm is that of the names of sandboxes, which become host names.
var nameForm = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}$`)

// IsName reports whether s has the form of a sandbox's name. Recipes of images and
// API keys have names of the same form.
func IsName(s string) bool { return nameForm.MatchString(s) && !strings.Contains(s, "..") }

// checkName checks the name of a new sandbox; it may have none.
func checkName(name string) error {
	if name == "" {
		return nil
	}
	return CheckName(name)
}

// CheckName checks the name that a sandbox is to have.
func CheckName(name string) error {
	switch {
	case !IsName(name):
		return httperr.Invalid("name %q: want 1 to 63 characters of A-Z a-z 0-9 _ . - that begin with a letter or digit, without two "+
			"dots in a row", httperr.Clip(name, 80))
	case record.IsID(name):
		return httperr.Invalid("name %q looks like the id of a sandbox (12 characters of a-z and 2-7); choose another name", name)
	}
	return nil
}

// checkHostname checks what a new sandbox is called inside.
func checkHostname(name string) error {
	if !IsName(name) {
		return httperr.Invalid("hostname %q: want 1 to 63 characters of A-Z a-z 0-9 _ . - that begin with a letter or digit, without "+
			"two dots in a row", httperr.Clip(name, 80))
	}
	return nil
}

// maxSnapshotName is in bytes. A snapshot's name is for people. It is unique only
// if its client asks for that.
const maxSnapshotName = 256

// CheckSnapshotName checks the name of a new snapshot. It refuses names that some
// program takes for a path or an option. It allows more than IsName does, because
// OpenSandbox's clients call snapshots "before import". Snapshots that were stored
// under other names are still found by them.
func CheckSnapshotName(name string) error {
	switch {
	case name == "":
		return httperr.Invalid("name is empty; leave it out for a snapshot without a name")
	case len(name) > maxSnapshotName:
		return httperr.Invalid("name has %d bytes; at most %d are allowed", len(name), maxSnapshotName)
	case strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }):
		return httperr.Invalid("name %q contains a character that cannot be printed", httperr.Clip(name, 80))
	case strings.ContainsAny(name, `/\`), strings.Contains(name, ".."), !startsName(name), strings.HasSuffix(name, " "):
		return httperr.Invalid(
			"name %q: want a name that begins with a letter or digit, without /, \\, two dots in a row, or a space at its end",
			httperr.Clip(name, 80))
	case record.IsSnapshotID(name):
		return httperr.Invalid("name %q looks like the id of a snapshot; choose another name", name)
	}
	return nil
}

func startsName(name string) bool {
	r, _ := utf8.DecodeRuneInString(name)
	return unicode.IsLetter(r) || unicode.IsDigit(r)
}
