package bundle

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// maxSBOM is how large a bill of materials is read. One of base and python has about 1 MB.
const maxSBOM = 64 << 20

// place is a component of a bill of materials, without its version: what it is in, such as an
// image, and its name.
type place struct{ in, name string }

// Inventory is what the bills of materials in a bundle say: the versions of each component.
type Inventory map[place][]string

// component is a component of CycloneDX: https://cyclonedx.org/docs/1.6/json/#components.
type component struct {
	Name       string      `json:"name"`
	Group      string      `json:"group"`
	Version    string      `json:"version"`
	PURL       string      `json:"purl"`
	Components []component `json:"components"`
}

// Inventory reads all bills of materials of the bundle, and with them all other members.
func (b *Bundle) Inventory(ctx context.Context) (Inventory, error) {
	all := Inventory{}
	err := b.Each(ctx, func(m Member, r io.Reader) error {
		if m.Kind != SBOM {
			return nil
		}
		if m.Size > maxSBOM {
			return errs.New(errs.Invalid, "bundle %s: the bill of materials %s has %d bytes, more than %d", b.file.Name(), m.Name,
				m.Size, maxSBOM)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		var bill struct {
			Components []component `json:"components"`
		}
		if err := json.Unmarshal(text, &bill); err != nil {
			return errs.New(errs.Invalid, "bundle %s: the bill of materials %s is no CycloneDX in JSON: %v", b.file.Name(), m.Name, err)
		}
		all.add("", bill.Components)
		return nil
	})
	for _, versions := range all {
		slices.Sort(versions)
	}
	return all, err
}

// add adds components that are in another one, and those in them.
func (i Inventory) add(in string, components []component) {
	for _, c := range components {
		// What has parts is a program or an image: its parts are told, and it is their place.
		if len(c.Components) > 0 {
			i.add(strings.TrimPrefix(in+"/"+c.Name, "/"), c.Components)
			continue
		}
		p := place{in, c.label()}
		if !slices.Contains(i[p], c.Version) {
			i[p] = append(i[p], c.Version)
		}
	}
}

// label is the name of a component with its kind, as "deb bash". A package URL has the kind:
// pkg:deb/debian/bash@5.2.
func (c component) label() string {
	name := strings.TrimPrefix(c.Group+"/"+c.Name, "/")
	if kind, ok := strings.CutPrefix(c.PURL, "pkg:"); ok {
		kind, _, _ = strings.Cut(kind, "/")
		return kind + " " + name
	}
	return name
}

// PartChange is a component that two bundles do not have in the same versions.
type PartChange struct {
	Change string   `json:"change"`
	In     string   `json:"in"` // the program or the image
	Name   string   `json:"name"`
	Old    []string `json:"old,omitempty"` // its versions
	New    []string `json:"new,omitempty"`
}

// DiffParts returns what changes from the inventory old to new, sorted.
func DiffParts(old, new Inventory) []PartChange {
	changes := []PartChange{}
	for p, was := range old {
		is, ok := new[p]
		switch {
		case !ok:
			changes = append(changes, PartChange{Removed, p.in, p.name, was, nil})
		case !slices.Equal(was, is):
			changes = append(changes, PartChange{Changed, p.in, p.name, was, is})
		}
	}
	for p, is := range new {
		if _, ok := old[p]; !ok {
			changes = append(changes, PartChange{Added, p.in, p.name, nil, is})
		}
	}
	slices.SortFunc(changes, func(a, b PartChange) int { return cmp.Or(cmp.Compare(a.In, b.In), cmp.Compare(a.Name, b.Name)) })
	return changes
}
