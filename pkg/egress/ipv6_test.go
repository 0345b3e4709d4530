package egress

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// rules6 are the rules of ip6tables that name links of sandboxes.
func (w *world) rules6() (found []string) {
	w.t.Helper()
	for line := range strings.Lines(w.run("ip6tables-save")) {
		if strings.Contains(line, " sb-") {
			found = append(found, strings.TrimSpace(line))
		}
	}
	slices.Sort(found)
	return found
}

var both6 = []string{"-A OUTPUT -o " + inst.LinkMatch() + " -j DROP", "-A PREROUTING -i " + inst.LinkMatch() + " -j DROP"}

// stands6 waits until the rules against IPv6 stand, by themselves.
func (w *world) stands6() {
	w.t.Helper()
	var have []string
	// the guard is what is waited for
	for deadline := time.Now().Add(patient); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if have = w.rules6(); slices.Equal(have, both6) {
			return
		}
	}
	w.t.Fatalf("after %v ip6tables has %q", patient, have)
}

// TestOperator6 has an operator flush what ip6tables has, and that alone: the
// guard hears of it, and a daemon that was away looks.
func TestOperator6(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	deeds := []string{"-t raw -F", "-F", "-t raw -F PREROUTING", "-D OUTPUT -o " + inst.LinkMatch() + " -j DROP"}
	for _, deed := range deeds {
		e.guarding.Lock() // or it might be back before we have looked
		w.run("ip6tables", strings.Fields(deed)...)
		if have := w.rules6(); len(have) != 1 {
			t.Errorf("ip6tables %s left %q", deed, have)
		}
		e.guarding.Unlock()
		w.stands6() // it hears of it, and does not come by
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	for _, deed := range deeds {
		w.run("ip6tables", strings.Fields(deed)...)
		e := w.open()
		if have := w.rules6(); !slices.Equal(have, both6) {
			t.Errorf("ip6tables %s with no daemon: the next one leaves %q", deed, have)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPurge6: what is there goes, also what somebody doubled, and that of other
// instances stays.
func TestPurge6(t *testing.T) {
	w := newWorld(t)
	if err := w.open().Close(); err != nil {
		t.Fatal(err)
	}
	theirs, before := "-i "+other.LinkMatch()+" -j DROP", hosttest.Held(other)
	w.run("ip6tables", strings.Fields("-t raw -I PREROUTING -i "+inst.LinkMatch()+" -j DROP")...)
	w.run("ip6tables", strings.Fields("-t raw -I PREROUTING "+theirs)...)
	defer w.run("ip6tables", strings.Fields("-t raw -D PREROUTING "+theirs)...)
	if held := hosttest.Held(inst); !slices.Contains(held, "rule of IPv6 raw "+both6[1]) {
		t.Errorf("what would be left is not seen: %q", held)
	}
	for range 2 {
		if err := Purge(t.Context(), inst); err != nil {
			t.Fatal(err)
		}
		if have := w.rules6(); !slices.Equal(have, []string{"-A PREROUTING " + theirs}) {
			t.Errorf("after Purge ip6tables has %q", have)
		}
	}
	held := slices.DeleteFunc(hosttest.Held(other), func(it string) bool { return slices.Contains(before, it) })
	if !slices.Equal(held, []string{"rule of IPv6 raw -A PREROUTING " + theirs}) {
		t.Errorf("of the other instance there is %q", held)
	}
}

// TestWithoutIP6tables: a host that has none is served and purged.
func TestWithoutIP6tables(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	for _, name := range []string{"iptables", "iptables-save", "iptables-restore", "ip", "ipset"} {
		path, err := exec.LookPath(name)
		if err == nil {
			err = os.Symlink(path, filepath.Join(dir, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	e := w.open()
	w.allowed(w.sandbox(e, 0, rules(t, "open")), "tcp", "203.0.113.1:443")
	if err := e.restore6(t.Context()); err != nil {
		t.Error(err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if err := Purge(t.Context(), inst); err != nil {
		t.Error(err)
	}
}

// TestBrokenIP6tables: what cannot be read, made or taken away is said.
func TestBrokenIP6tables(t *testing.T) {
	for program, script := range map[string]string{
		"ip6tables-save": "echo it is broken >&2; exit 4",
		"ip6tables":      `case "$*" in *"-D "*|*"-I "*) echo it is broken >&2; exit 4;; esac; PATH=$WHOLE; exec ip6tables "$@"`,
	} {
		t.Run(program, func(t *testing.T) {
			w := newWorld(t)
			if err := w.open().Close(); err != nil {
				t.Fatal(err)
			}
			dir, whole := t.TempDir(), os.Getenv("PATH")
			if err := os.WriteFile(filepath.Join(dir, program), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
				t.Fatal(err)
			}
			said := func(by string, err error) {
				t.Helper()
				if err == nil || !strings.Contains(err.Error(), "it is broken") {
					t.Errorf("%s says %v", by, err)
				}
			}
			t.Run("purge", func(t *testing.T) { // PATH is whole again behind it
				t.Setenv("WHOLE", whole)
				t.Setenv("PATH", dir+":"+whole)
				said("purge", Purge(t.Context(), inst))
			})
			if have := w.rules6(); !slices.Equal(have, both6) {
				t.Errorf("what could not be taken away is %q", have)
			}
			w.run("ip6tables", "-t", "raw", "-F")
			t.Run("open", func(t *testing.T) {
				t.Setenv("WHOLE", whole)
				t.Setenv("PATH", dir+":"+whole)
				e, err := Open(t.Context(), Config{Instance: inst})
				if err == nil {
					e.Close() //nolint:errcheck // it should not be
				}
				said("open", err)
			})
		})
	}
}
