// Package tunnel bounds what a guest can say by names. Whoever serves a domain reads all
// names below it that anybody asks for. So where a rule allows all names below one, each new
// name carries data out.
//
// A repeated name costs nothing. What surprises: it carries a little all the same, up to 11
// bits by its place in the order, if the owner keeps it out of caches by a TTL of 0. The rate
// of queries bounds that to some 16 KiB a minute.
package tunnel

import (
	"fmt"
	"hash/maphash"
	"math"
	"strings"
	"time"
)

// Bounds for one sandbox and one wildcard, in each minute.
const (
	// MaxNames is how many different names may be asked for.
	MaxNames = 2000
	// MaxBits is how much data the names may carry beyond what each has free.
	MaxBits = 32 << 10
	// freeBits is what each name has free: d111111abcdef8.cloudfront.net has 46.
	freeBits = 32
)

// A Watch counts the names that one sandbox asks for. It is not safe for concurrent use.
type Watch struct {
	seed   maphash.Seed
	minute int64
	by     map[string]*tally // by wildcard
}

type tally struct {
	names map[uint64]struct{} // hashes
	bits  float64
}

// Admit counts a name that the rule *.below allows, or says which limit it would exceed.
func (w *Watch) Admit(wildcard, name string, now time.Time) (over string) {
	if m := now.Unix() / 60; m != w.minute || w.by == nil {
		w.minute, w.by, w.seed = m, map[string]*tally{}, maphash.MakeSeed()
	}
	t := w.by[wildcard]
	if t == nil {
		t = &tally{names: map[uint64]struct{}{}}
		w.by[wildcard] = t
	}
	h := maphash.String(w.seed, name)
	if _, known := t.names[h]; known {
		return ""
	}
	bits := max(Bits(strings.TrimSuffix(name, strings.TrimPrefix(wildcard, "*")))-freeBits, 0)
	switch {
	case len(t.names) >= MaxNames:
		return fmt.Sprintf("limit of %d names below %s in a minute", MaxNames, wildcard)
	case t.bits+bits > MaxBits:
		return fmt.Sprintf("limit of %d bytes of data in names below %s in a minute", MaxBits/8, wildcard)
	}
	t.names[h] = struct{}{}
	t.bits += bits
	return ""
}

// Bits is the entropy of a text: how many bits it has if each letter is as likely as it is
// frequent there. Dots carry nothing.
func Bits(s string) float64 {
	var count [256]int
	n := 0
	for i := range len(s) {
		if s[i] != '.' {
			count[s[i]]++
			n++
		}
	}
	bits := 0.0
	for _, c := range count {
		if c > 0 {
			bits -= float64(c) * math.Log2(float64(c)/float64(n))
		}
	}
	return bits
}
