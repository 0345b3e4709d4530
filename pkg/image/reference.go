package image

import (
	"cmp"
	"regexp"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// DefaultTag is the tag of a reference without one.
const DefaultTag = "latest"

// A Reference is a parsed image URI. URIs from clients and the configuration are parsed
// where they come in; all other code takes a Reference.
type Reference struct {
	URI    string // as it was given; for people
	Name   string
	Tag    string // empty if the URI had none
	Digest string // of the image, or empty
}

// The grammar of github.com/distribution/reference, in short: an optional host
// with a port, components of lower-case letters and digits with single
// separators, a tag, a digest.
var (
	nameForm   = regexp.MustCompile(`^[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*$`)
	tagForm    = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
	digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

// ParseReference parses name[:tag][@sha256:…]. It fails with errs.Invalid.
func ParseReference(uri string) (Reference, error) {
	r := Reference{URI: uri}
	bad := func(what string) (Reference, error) {
		return Reference{}, errs.New(errs.Invalid, "image %.200q: %s; want name[:tag][@sha256:<64 hex digits>], lower case", uri, what)
	}
	rest, digest, pinned := strings.Cut(uri, "@")
	if pinned && !digestForm.MatchString(digest) {
		return bad("the digest is invalid")
	}
	r.Name, r.Digest = rest, digest
	if i := strings.LastIndexByte(rest, ':'); i > strings.LastIndexByte(rest, '/') {
		r.Name, r.Tag = rest[:i], rest[i+1:]
		if !tagForm.MatchString(r.Tag) {
			return bad("the tag is invalid")
		}
	}
	if len(r.Name) > 255 || !nameForm.MatchString(r.Name) {
		return bad("the name is invalid")
	}
	return r, nil
}

// String is the reference that is looked up: a digest comes before a tag.
func (r Reference) String() string {
	if r.Digest != "" {
		return r.Name + "@" + r.Digest
	}
	return r.Name + ":" + r.kept()
}

// kept is the tag under which a pulled image is kept. If the reference has a digest,
// the tag is made of that: the tag of the reference may be another image now.
func (r Reference) kept() string {
	if r.Digest != "" {
		return strings.Replace(r.Digest, ":", "-", 1)
	}
	return cmp.Or(r.Tag, DefaultTag)
}

// canonical is the reference that is looked up: without the tag if there is a digest,
// with the default tag if there is neither. It can be compared with ==.
func (r Reference) canonical() Reference {
	c := Reference{URI: r.String(), Name: r.Name, Digest: r.Digest}
	if c.Digest == "" {
		c.Tag = r.kept()
	}
	return c
}

// Kept is the beginning of the record that a pull of r will make: the name and the tag
// under which the image will be kept.
func (r Reference) Kept() record.Image { return record.Image{Name: r.Name, Tag: r.kept()} }
