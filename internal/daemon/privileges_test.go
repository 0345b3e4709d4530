package daemon

import (
	"bytes"
	"log/slog"
	"math"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestUnitKeepsTheSame: the unit and the daemon name the same capabilities.
func TestUnitKeepsTheSame(t *testing.T) {
	b, err := os.ReadFile("../../systemd/sandboxd.service")
	if err != nil {
		t.Fatal(err)
	}
	numbers := map[string]int{
		"SYS_ADMIN": unix.CAP_SYS_ADMIN, "NET_ADMIN": unix.CAP_NET_ADMIN, "NET_RAW": unix.CAP_NET_RAW,
		"NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE, "CHOWN": unix.CAP_CHOWN, "DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE,
		"DAC_READ_SEARCH": unix.CAP_DAC_READ_SEARCH, "FOWNER": unix.CAP_FOWNER, "FSETID": unix.CAP_FSETID, "MKNOD": unix.CAP_MKNOD,
		"SETFCAP": unix.CAP_SETFCAP, "SETUID": unix.CAP_SETUID, "SETGID": unix.CAP_SETGID, "SETPCAP": unix.CAP_SETPCAP,
		"KILL": unix.CAP_KILL, "SYS_PTRACE": unix.CAP_SYS_PTRACE, "SYS_CHROOT": unix.CAP_SYS_CHROOT, "SYS_RESOURCE": unix.CAP_SYS_RESOURCE,
	}
	var unit []int
	for line := range strings.Lines(string(b)) {
		names, ok := strings.CutPrefix(strings.TrimSpace(line), "CapabilityBoundingSet=")
		if !ok {
			continue
		}
		for name := range strings.FieldsSeq(names) {
			n, known := numbers[strings.TrimPrefix(name, "CAP_")]
			if !known {
				t.Errorf("the unit keeps %s, which the daemon drops", name)
			}
			unit = append(unit, n)
		}
	}
	want := slices.Clone(kept)
	slices.Sort(unit)
	slices.Sort(want)
	if !slices.Equal(unit, want) {
		t.Errorf("the unit keeps the capabilities %v, the daemon %v", unit, want)
	}
}

// TestHeapLimit: the heap keeps below the limit of the cgroup, and has one from the host's memory where
// there is none.
func TestHeapLimit(t *testing.T) {
	const gib = 1 << 30
	for _, c := range []struct{ limit, total, want int64 }{
		{0, 24 * gib, 6 * gib},
		{0, gib / 2, gib / 4},          // a small host
		{12 * gib, 24 * gib, 6 * gib},  // the unit's default
		{gib / 4, 24 * gib, 192 << 20}, // a limit that an operator has set
		{gib, 2 * gib, gib / 2},        // the unit's default on a small host
		{0, 0, leastHeap},              // nothing is known
		{64 << 20, 24 * gib, 48 << 20}, // below what the daemon takes: Go does what it can
		{400 << 20, 0, leastHeap},
	} {
		if got := heapLimit(c.limit, c.total); got != c.want {
			t.Errorf("limit %d, host %d: %d, want %d", c.limit, c.total, got, c.want)
		}
	}
}

// TestHeapIsBounded: a daemon outside of any limited cgroup has a bound, too, and GOMEMLIMIT goes before it.
func TestHeapIsBounded(t *testing.T) {
	was := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(was)
	total, err := memory("MemTotal")
	if err != nil {
		t.Fatal(err)
	}
	debug.SetMemoryLimit(math.MaxInt64) // as Go begins
	var log bytes.Buffer
	boundHeap(slog.New(slog.NewTextHandler(&log, nil)))
	if got := debug.SetMemoryLimit(-1); got <= 0 || got > max(total/4, leastHeap) ||
		!strings.Contains(log.String(), "memory of the daemon") {
		t.Errorf("a bound of %d on a host with %d; log: %s", got, total, log.String())
	}
	debug.SetMemoryLimit(123 << 20) // as GOMEMLIMIT does
	boundHeap(slog.New(slog.DiscardHandler))
	if got := debug.SetMemoryLimit(-1); got != 123<<20 {
		t.Errorf("with GOMEMLIMIT it is %d", got)
	}
}
