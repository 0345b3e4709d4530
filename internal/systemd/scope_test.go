package systemd

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestStands: a scope with a process anywhere in it stands, as v2 says in one
// file, and v1 in none.
func TestStands(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string // below the scope's cgroup
		want  bool
	}{
		"none":              {nil, false},
		"v2 with processes": {map[string]string{"cgroup.events": "populated 1\nfrozen 0\n", "cgroup.procs": ""}, true},
		"v2 without":        {map[string]string{"cgroup.events": "populated 0\nfrozen 0\n", "cgroup.procs": ""}, false},
		"v1 without":        {map[string]string{"cgroup.procs": "", "holder/cgroup.procs": "", "aaaa/run/cgroup.procs": "\n"}, false},
		"v1 with processes": {map[string]string{"cgroup.procs": "", "holder/cgroup.procs": "", "aaaa/run/cgroup.procs": "4711\n"}, true},
		"v1 with a holder":  {map[string]string{"cgroup.procs": "", "holder/cgroup.procs": "12\n"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := &Scope{name: "sandboxd-x.scope", mount: t.TempDir()}
			for file, text := range c.files {
				path := filepath.Join(s.dir(), file)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if got := s.Stands(); got != c.want {
				t.Errorf("stands: %v", got)
			}
		})
	}
}

// TestHungSystemd: systemd receives nothing and answers nothing. Nothing waits for it without end.
func TestHungSystemd(t *testing.T) {
	dir := t.TempDir()
	inbox, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer inbox.Close()
	bus, err := net.Listen("unix", filepath.Join(dir, "bus"))
	if err != nil {
		t.Fatal(err)
	}
	defer bus.Close()
	t.Setenv("NOTIFY_SOCKET", inbox.LocalAddr().String())
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path="+bus.Addr().String())

	began := time.Now()
	for range 1000 { // net.unix.max_dgram_qlen is 10 to 512
		if err = notify("WATCHDOG=1"); err != nil {
			break
		}
	}
	if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "did not receive") || took < notifyLimit {
		t.Errorf("a message that systemd does not receive: %v after %v", err, took)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		s := &Scope{name: "sandboxd-test.scope", mount: dir}
		if err := os.MkdirAll(s.dir(), 0o755); err != nil {
			ended <- err
			return
		}
		ended <- s.Stop(ctx)
	}()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("a scope was stopped by nobody")
		}
	case <-time.After(20 * time.Second):
		t.Error("a job waits for systemd without end")
	}
}

func TestUnitOf(t *testing.T) {
	for lines, want := range map[string]string{
		"0::/system.slice/sandboxd.service\n":                                      "sandboxd.service",
		"0::/user.slice/user-0.slice/session-3.scope\n":                            "session-3.scope",
		"0::/user.slice/user-0.slice/user@0.service/app.slice/a.service\n":         "user@0.service",
		"3:cpu,cpuacct:/a.service\n1:name=systemd:/system.slice/b.service\n0::/\n": "b.service",
		"0::/\n":     "",
		"0::/init\n": "",
		"":           "",
		"nonsense":   "",
	} {
		if got := unitOf(lines); got != want {
			t.Errorf("%q: %q, want %q", lines, got, want)
		}
	}
}

// TestWithoutSystemd: on a host with another init nothing says that it ends, and its user space is that
// of PID 1. The machine stories have the answers of systemd.
func TestWithoutSystemd(t *testing.T) {
	one, err := startOfInit()
	if err != nil || !strings.HasPrefix(one, "init-") {
		t.Fatalf("%q, %v", one, err)
	}
	if Booted() {
		return
	}
	if ending, err := Ending(t.Context()); ending || err != nil {
		t.Errorf("the host ends: %v, %v", ending, err)
	}
	if again, err := Userspace(t.Context()); err != nil || again != one {
		t.Errorf("%q, %v; want %q", again, err, one)
	}
}

// TestUnitNamesNoScope: systemd forgets no unit that the unit of a service names, and while it remembers
// a scope that has ended, it makes no other one: the daemon would not start any more.
func TestUnitNamesNoScope(t *testing.T) {
	text, err := os.ReadFile("../../systemd/sandboxd.service")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, "="); ok && !strings.HasPrefix(key, "#") && strings.Contains(value, ".scope") {
			t.Errorf("the unit names a scope: %s", line)
		}
	}
}
