package main

import (
	"cmp"
	"fmt"
	"slices"
)

// usualCost is the cost of a job that costs does not name, in seconds.
const usualCost = 10

// partOf returns the jobs of a part, "K/N" with K from 1 to N. The parts together are all jobs. Each has the job that
// fills the cache, without which the others cannot run; with a full cache it takes seconds. A part depends on nothing
// but the jobs' names and costs, so it is the same on each machine.
func partOf(jobs []*job, part string) ([]*job, error) {
	var k, n int
	_, err := fmt.Sscanf(part, "%d/%d", &k, &n)
	if err != nil || k < 1 || k > n || fmt.Sprintf("%d/%d", k, n) != part {
		return nil, fmt.Errorf("part %q: want K/N, as 2/5, with K from 1 to N", part)
	}
	return parts(jobs, n)[k-1], nil
}

// parts cuts jobs into n parts: the longest job first, each into the part that is the shortest so far.
func parts(jobs []*job, n int) [][]*job {
	byCost := slices.SortedFunc(slices.Values(jobs), func(a, b *job) int {
		return cmp.Or(cmp.Compare(b.cost, a.cost), cmp.Compare(a.name, b.name))
	})
	all, length := make([][]*job, n), make([]int, n)
	for _, j := range byCost {
		if j.name == fixtures {
			for i := range all {
				all[i] = append(all[i], j)
			}
			continue
		}
		shortest := slices.Index(length, slices.Min(length))
		all[shortest] = append(all[shortest], j)
		length[shortest] += max(j.cost, usualCost)
	}
	return all
}
