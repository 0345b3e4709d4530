package runtimetest

import (
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/seccomp"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// testLevels asks a sandbox of each level of security what oci.Differences says of it.
func testLevels(t *testing.T, h *Host, rt Runtime) {
	for _, level := range record.SecurityLevels {
		b := h.NewBox(t, rt)
		b.Config.Security = level
		must(t, b.Start(t.Context()))
		var r map[string]string
		must(t, b.Ask("report", &r))
		status := fields(r["/proc/self/status"])
		caps, ptrace, nnp, euid := "00000000800405fb", "ESRCH", "1", "1000"
		hidden := level == record.SecurityStrict && h.runtime == oci.Runc
		switch level {
		case record.SecurityStrict:
			caps = "00000000000004eb"
		case record.SecurityCompat:
			nnp, euid = "0", "0"
		}
		if hidden {
			ptrace = "EPERM"
		}
		for _, set := range []string{"CapPrm", "CapEff", "CapBnd"} {
			if got := status[set]; got != caps {
				t.Errorf("%s: %s is %s, want %s", level, set, got, caps)
			}
		}
		var got string
		if h.runtime == oci.Runc { // its root is on a nosuid file system of the host here; test/e2e runs a program
			got, euid = status["NoNewPrivs"], nnp
		} else {
			must(t, b.Ask("setuid", &got))
		}
		if got != euid {
			t.Errorf("%s: no_new_privs, or the user that a setuid program of root's runs as, is %s, want %s", level, got, euid)
		}
		if r["sys.ptrace"] != ptrace {
			t.Errorf("%s: ptrace answers %s, want %s", level, r["sys.ptrace"], ptrace)
		}
		proc, _ := find(r["/proc/self/mountinfo"], " /proc ")
		if strings.Contains(proc, "hidepid=") != hidden || (r["/sys"] == "") != hidden {
			t.Errorf("%s: /proc is mounted %q, /sys has %q", level, proc, r["/sys"])
		}
		// What else stands between a sandbox and the host is the same on all levels.
		for _, name := range []string{"bpf", "alg", "vsock", "perf", "reboot", "mknod"} {
			if r["sys."+name] == "ok" {
				t.Errorf("%s: %s is allowed", level, name)
			}
		}
		filters := "2"
		if level == record.SecurityCompat {
			filters = "1"
		}
		if got := status["Seccomp_filters"]; h.runtime == oci.Runc && got != filters {
			t.Errorf("%s: %s filters, want %s", level, got, filters)
		}
	}
}

// testCalls makes every system call in a sandbox of each level. What the second filter
// refuses must be answered as its table says; what it allows, as without it.
func testCalls(t *testing.T, h *Host, rt Runtime) {
	ask := func(level seccomp.Level, filters string) map[uint32]string {
		b := h.NewBox(t, rt)
		b.Config.Security = record.Security(level)
		must(t, b.Start(t.Context()))
		var pong string
		must(t, b.Ask("ping", &pong)) // PID 1 has its filter
		for pid, p := range b.hostSide(t) {
			if p["Seccomp_filters"] != filters {
				t.Errorf("%s: process %s has %s filters, want %s", level, pid, p["Seccomp_filters"], filters)
			}
		}
		var answers map[uint32]string
		must(t, b.Ask("calls", &answers))
		return answers
	}
	without := ask(seccomp.Compat, "1")
	if len(without) < 600 {
		t.Fatalf("%d calls were made", len(without))
	}
	const all = ^uint64(0)
	for _, level := range []seccomp.Level{seccomp.Default, seccomp.Strict} {
		with := ask(level, "2")
		for nr, plain := range without {
			c := seccomp.Lookup(runtime.GOARCH, nr)
			want := plain
			errno := c.Verdict.Errno(level, [6]uint64{all, all, all, all, all, all})
			switch {
			case errno != 0 && nr < 1<<30: // above is x32, where the first filter ends the process
				want = unix.ErrnoName(errno)
			case c.Name == "landlock_restrict_self": // needs no_new_privs, which compat does not have
				want = "EINVAL"
			}
			switch got := with[nr]; {
			case got == "untried" && plain == "untried":
				if !slices.Contains([]string{"fork", "vfork", "rt_sigreturn", "sync"}, c.Name) {
					t.Errorf("%s: %s, number %#x, was not tried", level, c.Name, nr)
				}
			case got != want:
				t.Errorf("%s: %s, number %#x: %s, want %s; with one filter it is %s", level, c.Name, nr, got, want, plain)
			}
		}
	}
}
