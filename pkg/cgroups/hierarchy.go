package cgroups

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/cgroups/v3/cgroup2"
)

// A hierarchy is one mounted cgroup file system.
type hierarchy struct {
	mount string   // where it is mounted
	base  string   // which of its directories is mounted there; "/" outside containers
	dev   string   // major:minor, the same for each mount of one hierarchy
	v2    bool     // the one unified tree
	names []string // v1: controllers, or "name=systemd"
}

// The controllers that limits need, in the order in which a process enters
// them. cpu is last in and first out: the thread that goes ahead of a new
// process (see Start) must not be throttled in there.
var needed = []string{"memory", "pids", "cpu"}

// io limits disks if the host has it; v1 calls it blkio. Without it there are no such
// limits, and asking for one is an error.
const blkio = "blkio"

// A layout says which hierarchy has which controller. It depends on the mounts only.
type layout struct {
	all  []*hierarchy          // every hierarchy, v2 last
	v2   *hierarchy            // nil on a host with v1 only
	of   map[string]*hierarchy // controller to hierarchy; all of needed, and perhaps io
	ours []*hierarchy          // where groups are made: v1 in the order in which a process enters them, then v2
}

// parseMounts finds the cgroup mounts in the text of /proc/self/mountinfo
// (proc(5)), each hierarchy once.
func parseMounts(mountinfo string) []*hierarchy {
	var found []*hierarchy
	for line := range strings.Lines(mountinfo) {
		left, right, ok := strings.Cut(strings.TrimSpace(line), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(r) < 3 || r[0] != "cgroup" && r[0] != "cgroup2" {
			continue
		}
		h := &hierarchy{mount: unescape(l[4]), base: unescape(l[3]), dev: l[2], v2: r[0] == "cgroup2"}
		for o := range strings.SplitSeq(r[2], ",") {
			// Of the super block's options, drop those that are no controller.
			if h.v2 || o == "rw" || o == "ro" || o == "none" || o == "xattr" || o == "noprefix" || o == "clone_children" ||
				o == "cpuset_v2_mode" || o == "favordynmods" || strings.HasPrefix(o, "release_agent=") {
				continue
			}
			h.names = append(h.names, o)
		}
		same := slices.IndexFunc(found, func(o *hierarchy) bool { return o.dev == h.dev })
		switch {
		case same < 0:
			found = append(found, h)
		case found[same].base != "/" && h.base == "/":
			found[same] = h
		}
	}
	return found
}

// unescape undoes mountinfo's octal escapes of blanks.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// newLayout assigns each controller to a hierarchy. offered are the controllers of the
// v2 tree's root.
func newLayout(mounts []*hierarchy, offered []string) (*layout, error) {
	lay := &layout{of: map[string]*hierarchy{}}
	v1 := map[string]*hierarchy{}
	for _, h := range mounts {
		if h.v2 {
			lay.v2 = h
			continue
		}
		lay.all = append(lay.all, h)
		for _, n := range h.names {
			v1[n] = h
		}
	}
	if lay.v2 != nil {
		lay.all = append(lay.all, lay.v2)
	}
	if len(lay.all) == 0 {
		return nil, errors.New("find cgroups: no cgroup file system is mounted: mount one (mount -t cgroup2 none /sys/fs/cgroup) or " +
			"start under an init that does")
	}
	want := needed
	if lay.v2 == nil {
		// CPU use and the freezer are part of every v2 cgroup; v1 has a
		// controller for each.
		want = append([]string{"freezer", "cpuacct"}, needed...)
	}
	var missing []string
	for _, c := range want {
		switch h := v1[c]; {
		case lay.v2 != nil && slices.Contains(offered, c):
			lay.of[c] = lay.v2
		case h != nil:
			lay.of[c] = h
		default:
			missing = append(missing, c)
			continue
		}
		if h := lay.of[c]; !slices.Contains(lay.ours, h) && !h.v2 {
			lay.ours = append(lay.ours, h)
		}
	}
	switch h := v1[blkio]; {
	case lay.v2 != nil && slices.Contains(offered, "io"):
		lay.of["io"] = lay.v2
	case h != nil:
		lay.of["io"] = h
		if !slices.Contains(lay.ours, h) {
			lay.ours = append([]*hierarchy{h}, lay.ours...)
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("find cgroups: this host has no controller %s, neither in the v2 tree nor on v1: "+
			"look for cgroup_disable= in /proc/cmdline and for CONFIG_MEMCG, CONFIG_CGROUP_PIDS, CONFIG_CFS_BANDWIDTH in the kernel's "+
			"config",
			strings.Join(missing, ", "))
	}
	if lay.v2 != nil {
		lay.ours = append(lay.ours, lay.v2)
	}
	return lay, nil
}

// onV2 lists the needed controllers that the v2 tree serves.
func (lay *layout) onV2() (names []string) {
	for _, c := range needed {
		if lay.of[c].v2 {
			names = append(names, c)
		}
	}
	return names
}

// mode names the layout as systemd does.
func (lay *layout) mode() string {
	switch {
	case lay.v2 == nil:
		return "legacy"
	case len(lay.onV2()) == len(needed):
		return "unified"
	default:
		return "hybrid"
	}
}

// detect reads the layout of this host.
func detect() (*layout, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find cgroups: %w", err)
	}
	hs := parseMounts(string(mounts))
	var offered []string
	for _, h := range hs {
		if h.v2 {
			if offered, err = controllers(h.mount); err != nil {
				return nil, fmt.Errorf("find cgroups: %w", err)
			}
		}
	}
	lay, err := newLayout(hs, offered)
	if err != nil {
		return nil, err
	}
	return lay, lay.checkLinks()
}

// checkLinks checks that each v1 controller is found under its own name beside its
// mount; "cpu", for example, may be a link to "cpu,cpuacct". Both runtimes and the
// statistics library use these names.
func (lay *layout) checkLinks() error {
	for c, h := range lay.of {
		if h.v2 || c == "io" { // io: only sandboxd uses it
			continue
		}
		named := filepath.Join(filepath.Dir(h.mount), c)
		a, err := os.Stat(named)
		if err != nil {
			return fmt.Errorf("find cgroups: the v1 controller %s is mounted at %s, but runtimes look for it at %s: add a "+
				"symlink there: %w", c, h.mount, named, err)
		}
		if b, err := os.Stat(h.mount); err != nil || !os.SameFile(a, b) {
			return fmt.Errorf("find cgroups: the v1 controller %s is mounted at %s, but %s is another directory: replace it with a "+
				"symlink to the mount", c, h.mount, named)
		}
	}
	return nil
}

// delegate makes the root in the v2 tree and enables the controllers that the
// tree serves on every level from the mount down to it.
func delegate(lay *layout, root string) error {
	ctrls := lay.onV2()
	if lay.v2 == nil || len(ctrls) == 0 {
		return nil
	}
	var res cgroup2.Resources
	for _, c := range ctrls {
		switch c { // an empty struct enables the controller and limits nothing
		case "memory":
			res.Memory = &cgroup2.Memory{}
		case "pids":
			res.Pids = &cgroup2.Pids{}
		case "cpu":
			res.CPU = &cgroup2.CPU{}
		}
	}
	_, err := cgroup2.NewManager(lay.v2.mount, "/"+root, &res)
	// The library returns only its last error, and removes the root then. Checking that
	// every level offers every controller says more, and decides.
	dir := lay.v2.mount
	for name := range strings.SplitSeq(root, "/") {
		dir += "/" + name
		has, rerr := controllers(dir)
		if rerr != nil && !gone(rerr) {
			return fmt.Errorf("delegate cgroup %s: %w", dir, rerr)
		}
		for _, c := range ctrls {
			if slices.Contains(has, c) {
				continue
			}
			if err == nil {
				err = errors.New("not offered")
			}
			return fmt.Errorf("delegate cgroup %s: it has no controller %s (only: %q): its parent must list it in "+
				"cgroup.subtree_control and hold no processes of its own; under systemd the unit needs Delegate=memory pids cpu: %w",
				dir, c, strings.Join(has, " "), err)
		}
	}
	return enable(dir, ctrls)
}

// delegateIO enables io down to the root, as far as it is offered: a systemd unit may
// delegate without io, and then there are no limits of I/O.
func (lay *layout) delegateIO(root string) {
	dir := lay.v2.mount
	for name := range strings.SplitSeq(root, "/") {
		_ = enable(dir, []string{"io"}) // if this failed, the root lacks io
		dir += "/" + name
	}
}

// enable enables controllers for the children of dir. Repeating it changes nothing.
func enable(dir string, ctrls []string) error {
	if err := writeFile(dir+"/cgroup.subtree_control", "+"+strings.Join(ctrls, " +")); err != nil {
		return fmt.Errorf("enable cgroup controllers: %w", err)
	}
	return nil
}

// controllers reads the controllers that a v2 cgroup offers.
func controllers(dir string) ([]string, error) {
	b, err := os.ReadFile(dir + "/cgroup.controllers")
	return strings.Fields(string(b)), err
}
