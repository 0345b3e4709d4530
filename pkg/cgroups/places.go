package cgroups

// places are the directories of the cgroups below one root.
type places struct {
	layout *layout
	root   string // relative to the mount of each hierarchy
}

func (p places) rootDir(h *hierarchy) string           { return h.mount + "/" + p.root }
func (p places) dir(h *hierarchy, id string) string    { return p.rootDir(h) + "/" + id }
func (p places) leafIn(h *hierarchy, id string) string { return p.dir(h, id) + "/" + leaf }

// controlled is the group that control uses.
func (p places) controlled(id string) string {
	if p.layout.v2 != nil {
		return p.dir(p.layout.v2, id)
	}
	return p.dir(p.layout.of["freezer"], id)
}

// ioDir is the one cgroup of id with limits of I/O: on v1 the leaf would not inherit
// them; on v2 a request would be charged twice.
func (p places) ioDir(id string) string {
	h := p.layout.of["io"]
	if h.v2 {
		return p.dir(h, id)
	}
	return p.leafIn(h, id)
}
