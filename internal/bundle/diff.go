package bundle

import (
	"cmp"
	"path"
	"slices"
)

// How a member differs from the one of another bundle.
const (
	Added   = "added"
	Removed = "removed"
	Changed = "changed"
)

// Change is a member that two bundles do not have in common.
type Change struct {
	Change string  `json:"change"`
	Kind   string  `json:"kind"`
	Name   string  `json:"name"` // of the package, or else of the member
	Old    *Member `json:"old,omitempty"`
	New    *Member `json:"new,omitempty"`
}

// identity is what two releases of one thing share. The name of a package's file has the version,
// and a bundle may hold a package for Debian and for RPM.
type identity struct{ kind, name, form string }

func (m Member) identity() identity {
	if m.Kind == Package {
		return identity{m.Kind, m.Package, path.Ext(m.Name)}
	}
	return identity{m.Kind, m.Name, ""}
}

// Diff returns what changes from the bundle old to the bundle new, sorted by kind and name. Of
// several packages with one name, those that are equal are paired first.
func Diff(old, new *Manifest) []Change {
	before, after := grouped(old), grouped(new)
	changes := []Change{}
	for id, olds := range before {
		changes = append(changes, id.diff(olds, after[id])...)
	}
	for id, news := range after {
		if _, ok := before[id]; !ok {
			changes = append(changes, id.diff(nil, news)...)
		}
	}
	slices.SortFunc(changes, func(a, b Change) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name), cmp.Compare(a.member().Name, b.member().Name))
	})
	return changes
}

func (c Change) member() *Member { return cmp.Or(c.New, c.Old) }

func grouped(m *Manifest) map[identity][]Member {
	all := map[identity][]Member{}
	for _, f := range m.Members {
		all[f.identity()] = append(all[f.identity()], f)
	}
	return all
}

// diff compares the members of one identity.
func (id identity) diff(olds, news []Member) (changes []Change) {
	olds, news = slices.Clone(olds), slices.Clone(news)
	olds = slices.DeleteFunc(olds, func(o Member) bool {
		i := slices.Index(news, o)
		if i >= 0 {
			news = slices.Delete(news, i, i+1)
		}
		return i >= 0
	})
	for i := range max(len(olds), len(news)) {
		c := Change{Change: Changed, Kind: id.kind, Name: id.name}
		if i < len(olds) {
			c.Old = &olds[i]
		} else {
			c.Change = Added
		}
		if i < len(news) {
			c.New = &news[i]
		} else {
			c.Change = Removed
		}
		changes = append(changes, c)
	}
	return changes
}
