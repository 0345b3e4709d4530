package netns

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
)

// TestForwarding: what Setup switched on is named, until somebody else wants
// it too, and goes off with Purge; what was on before is left alone.
func TestForwarding(t *testing.T) {
	m := newManager(t)
	for i, link := range []string{"upa", "upb"} {
		run(t, "ip", "link", "add", link, "type", "veth", "peer", "name", link+"p")
		t.Cleanup(func() { _ = exec.Command("ip", "link", "del", link).Run() })
		run(t, "ip", "addr", "add", fmt.Sprintf("192.0.2.%d/25", 1+128*i), "dev", link)
		run(t, "ip", "link", "set", link, "up")
	}
	set := func(name, value string) {
		t.Helper()
		if err := writeFile(procSys+name, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	is := func(when, a, b, named string) {
		t.Helper()
		for link, want := range map[string]string{"upa": a, "upb": b} {
			if got, err := readSysctl(forwarding(link)); err != nil || got != want {
				t.Errorf("%s: forwarding of %s is %q (%v), want %s", when, link, got, err, want)
			}
		}
		if got, err := m.SwitchedOn(); err != nil || strings.Join(got, " ") != named {
			t.Errorf("%s: switched on %q (%v), want %q", when, got, err, named)
		}
	}
	setup := func() {
		t.Helper()
		for range 2 {
			if err := errors.Join(m.Setup(t.Context()), m.OpenUplinks(t.Context())); err != nil {
				t.Fatal(err)
			}
		}
	}
	purge := func() {
		t.Helper()
		for range 2 {
			if err := m.Purge(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	set(forwarding("upb"), "1")
	is("before", "0", "1", "")
	if err := m.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	is("after Setup alone", "0", "1", "")
	m.BeforeForward = func() error { return errors.New("no lock") }
	if err := m.OpenUplinks(t.Context()); err == nil || !strings.Contains(err.Error(), "conf/upa/forwarding") {
		t.Errorf("what cannot be closed is opened: %v", err)
	}
	is("that cannot be closed", "0", "1", "upa")
	m.BeforeForward = func() error {
		is("before it forwards", "0", "1", "upa")
		return nil
	}
	setup()
	is("after OpenUplinks", "1", "1", "upa")
	purge()
	is("after Purge", "0", "1", "")
	setup()
	// As Docker does.
	set(ipForward, "1")
	t.Cleanup(func() { set(ipForward, "0") })
	is("with ip_forward", "1", "1", "")
	setup()
	is("with ip_forward and Setup", "1", "1", "")
	purge()
	is("with ip_forward and Purge", "1", "1", "")
	// Off for one link, and by hand.
	set(forwarding("upa"), "0")
	setup()
	is("off by hand", "1", "1", "upa")
	purge()
	is("off by hand and Purge", "0", "1", "")
}
