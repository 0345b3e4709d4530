package daemon

import (
	"os"
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
