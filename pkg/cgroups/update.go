package cgroups

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Limit changes the limits of id, which has cgroups and perhaps processes, to l;
// LimitCPU changes CPU time. It may be called any number of times. A limit below
// MemoryHeld is errs.WrongState on v1, where the kernel refuses it; v2 kills instead,
// so check first. An id without cgroups is fs.ErrNotExist.
func (t *Tree) Limit(_ context.Context, id string, l Limits) error {
	if err := errors.Join(t.check(id), t.checkLimits(l)); err != nil {
		return err
	}
	for _, c := range needed {
		if c == "memory" && l.KeepMemory {
			continue
		}
		for _, dir := range []string{t.dir(t.layout.of[c], id), t.leafIn(t.layout.of[c], id)} {
			if err := t.rewrite(c, dir, l); err != nil {
				return limitFailed(id, l, err)
			}
		}
	}
	if can, _ := t.LimitsIO(); can && (l.limitsIO() || t.hasIOLimits(id)) {
		if err := t.write("io", t.ioDir(id), l); err != nil {
			return limitFailed(id, l, err)
		}
	}
	return nil
}

func limitFailed(id string, l Limits, err error) error {
	switch {
	case gone(err):
		err = fs.ErrNotExist
	case errors.Is(err, unix.EBUSY):
		return errs.Wrap(err, errs.WrongState, "limit sandbox %s to %d MiB of memory: it uses more, and the kernel cannot reclaim enough",
			id, l.MemoryBytes>>20)
	}
	return fmt.Errorf("limit %s: %w", id, err)
}

// rewrite is write for a cgroup that has limits already. v1 requires memory ≤
// memory+swap at any moment. So to raise the limits write memory+swap first; to lower
// them, memory first.
func (t *Tree) rewrite(ctrl, dir string, l Limits) error {
	w := l.writes(ctrl, t.flavours[ctrl])
	if f := t.flavours[ctrl]; ctrl == "memory" && !f.v2 && f.swap {
		now, err := readNumber(dir + "/memory.limit_in_bytes")
		if err != nil {
			return err
		}
		if l.enforced() == 0 || l.enforced() > now {
			w[0], w[1] = w[1], w[0]
		}
	}
	for _, w := range w {
		if err := writeFile(dir+"/"+w.file, w.value); err != nil {
			return err
		}
	}
	return nil
}

// hasIOLimits reports whether id has a limit of I/O: without one the files are empty.
func (t *Tree) hasIOLimits(id string) bool {
	seen := map[string]bool{}
	for _, w := range (Limits{}).io(t.flavours["io"]) {
		if seen[w.file] {
			continue
		}
		seen[w.file] = true
		if text, err := readFile(t.ioDir(id) + "/" + w.file); err == nil && text != "" {
			return true
		}
	}
	return false
}

// MemoryHeld is the memory of id, in bytes, that the kernel could not reclaim without
// killing: all but the page cache of files. An id without cgroups has 0.
func (t *Tree) MemoryHeld(id string) (int64, error) {
	if err := t.check(id); err != nil {
		return 0, err
	}
	h := t.layout.of["memory"]
	usage, prefix := "memory.current", ""
	if !h.v2 {
		usage, prefix = "memory.usage_in_bytes", "total_"
	}
	dir := t.dir(h, id)
	used, err := readNumber(dir + "/" + usage)
	var stat string
	if err == nil {
		stat, err = readFile(dir + "/memory.stat")
	}
	if gone(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the memory that %s holds: %w", id, err)
	}
	// Files of memory file systems are on the lists of anonymous memory, not on these.
	for _, list := range []string{"inactive_file", "active_file"} {
		n, _ := field(stat, prefix+list)
		used -= int64(n)
	}
	return max(used, 0), nil
}

func readNumber(path string) (int64, error) {
	text, err := readFile(path)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", path, err)
	}
	return n, nil
}

// PidsRefused counts the tasks that id was refused at its limit; an id without cgroups
// has 0. Call it before Remove.
//
// The kernel decides which of the two levels counts: v1, and v2 before 6.11, count in
// the cgroup whose fork failed, which is the leaf; later kernels count on v2 in the
// cgroup with the limit and in its ancestors (pids_event in kernel/cgroup/pids.c).
func (t *Tree) PidsRefused(id string) (uint64, error) {
	if err := t.check(id); err != nil {
		return 0, err
	}
	h := t.layout.of["pids"]
	dirs := []string{t.leafIn(h, id)}
	if h.v2 {
		dirs = append(dirs, t.dir(h, id))
	}
	var most uint64
	for _, dir := range dirs {
		text, err := readFile(dir + "/pids.events")
		if gone(err) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("count refused tasks of %s: %w", id, err)
		}
		n, _ := field(text, "max")
		most = max(most, n)
	}
	return most, nil
}
