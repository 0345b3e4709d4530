package cgroups

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/cgroups/v3"
)

// OwnMemoryLimit is how many bytes of memory the cgroup of this process may use, by its own limit and
// those of its parents, such as MemoryMax= of a unit. 0: there is no limit.
func OwnMemoryLimit() (int64, error) {
	lay, err := detect()
	if err != nil {
		return 0, err
	}
	own, unified, err := cgroups.ParseCgroupFileUnified("/proc/self/cgroup")
	if err != nil {
		return 0, fmt.Errorf("find own cgroups: %w", err)
	}
	h := lay.of["memory"]
	if !h.v2 {
		return hierarchicalLimit(h.inside(own["memory"]))
	}
	least := int64(math.MaxInt64)
	for dir := strings.TrimSuffix(h.inside(unified), "/"); len(dir) > len(h.mount); dir = filepath.Dir(dir) {
		n, err := readNumber(dir + "/memory.max")
		if err == nil {
			least = min(least, n)
		} else if !errors.Is(err, strconv.ErrSyntax) { // "max"
			return 0, err
		}
	}
	return bounded(least), nil
}

// hierarchicalLimit is the least limit of memory of a v1 group and its parents (cgroup-v1/memory.rst).
func hierarchicalLimit(dir string) (int64, error) {
	text, err := readFile(dir + "/memory.stat")
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut(text, "hierarchical_memory_limit ")
	word, _, _ := strings.Cut(rest, "\n")
	n, err := strconv.ParseInt(word, 10, 64)
	if !ok || err != nil {
		return 0, fmt.Errorf("%s/memory.stat has no hierarchical_memory_limit that can be read", dir)
	}
	return bounded(n), nil
}

// bounded is 0 for what stands for no limit: v1 has the largest number of whole pages.
func bounded(n int64) int64 {
	if n > math.MaxInt64-1<<20 {
		return 0
	}
	return n
}
