package image

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// An Alias is another name for a local image. Clients use it in programs that were made
// for a host with a registry. An image on this host with the very name that a client
// gives always comes first, and a digest means an image, not a name: aliases are used
// for neither.
type Alias struct {
	Name  string // NAME[:TAG], or NAME:PREFIX* for all tags that begin so
	Image string // NAME[:TAG] of a local image

	repo, tag string // of Name; the tag without its star
	any       bool   // it had one
	to        Reference
}

// ParseAliases reads a map from the names that clients give to names of images. An
// empty value removes an alias. The error names every wrong entry.
func ParseAliases(m map[string]string) ([]Alias, error) {
	var all []Alias
	var bad []error
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if m[name] == "" {
			continue
		}
		a, err := parseAlias(name, m[name])
		if err != nil {
			bad = append(bad, err)
		}
		all = append(all, a)
	}
	// The most exact come first: a whole tag before a prefix, a long prefix before a
	// short one.
	slices.SortStableFunc(all, func(a, b Alias) int {
		if a.any != b.any {
			if b.any {
				return -1
			}
			return 1
		}
		return cmp.Compare(len(b.tag), len(a.tag))
	})
	return all, errors.Join(bad...)
}

func parseAlias(name, image string) (Alias, error) {
	a := Alias{Name: name, Image: image}
	want := func(what string) (Alias, error) {
		return a, errs.New(errs.Invalid, "alias %.200q = %.200q: %s; want NAME[:TAG] or NAME:PREFIX* (all tags with that prefix) = "+
			"NAME[:TAG] of a local image", name, image, what)
	}
	plain, star := strings.CutSuffix(name, "*")
	if plain, a.any = strings.CutSuffix(plain, ":"); a.any { // NAME:*
		if !star {
			return want("the tag is empty")
		}
	}
	from, err := ParseReference(plain)
	switch {
	case err != nil || from.Digest != "":
		return want("the alias is not a valid name")
	case star && !a.any && from.Tag == "":
		return want("a star is allowed only at the end of a tag")
	}
	a.any = star
	a.repo, a.tag = from.Name, from.Tag
	if !star {
		a.tag = cmp.Or(a.tag, DefaultTag)
	}
	if a.to, err = ParseReference(image); err != nil || a.to.Digest != "" {
		return want("the image is not a valid name")
	}
	a.to.Tag = cmp.Or(a.to.Tag, DefaultTag)
	return a, nil
}

// alias finds the alias for a name and a tag.
func (s *Store) alias(ref Reference) (Alias, bool) {
	tag := cmp.Or(ref.Tag, DefaultTag)
	for _, a := range s.cfg.Aliases {
		if a.repo == ref.Name && (a.tag == tag || a.any && strings.HasPrefix(tag, a.tag)) {
			return a, true
		}
	}
	return Alias{}, false
}

// Aliases lists the aliases of i, in order.
func (s *Store) Aliases(i record.Image) (names []string) {
	for _, a := range s.cfg.Aliases {
		if a.to.Name == i.Name && a.to.Tag == i.Tag {
			names = append(names, a.Name)
		}
	}
	slices.Sort(names)
	return names
}
