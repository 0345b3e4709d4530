package e2e_test

import (
	"hash/fnv"
	"testing"
)

// chosen reports whether a case is run on a runtime: each on one of them, chosen by its
// name, and with the build tag `all` (make test-all) on every one.
func chosen(runtime, of string) bool {
	if everything {
		return true
	}
	h := fnv.New32a()
	h.Write([]byte(of))
	return runtimes[int(h.Sum32()%uint32(len(runtimes)))] == runtime
}

// Each case is run on one runtime, and each runtime has its share of them.
func TestChosen(t *testing.T) {
	of := map[string]int{}
	for _, point := range steps() {
		n := 0
		for _, runtime := range runtimes {
			if chosen(runtime, point) {
				n++
				of[runtime]++
			}
		}
		if want := map[bool]int{false: 1, true: len(runtimes)}[everything]; n != want {
			t.Errorf("%s is run on %d runtimes, want %d", point, n, want)
		}
	}
	for _, runtime := range runtimes {
		if of[runtime]*3 < len(steps()) {
			t.Errorf("%s has %d of %d cases", runtime, of[runtime], len(steps()))
		}
	}
}
