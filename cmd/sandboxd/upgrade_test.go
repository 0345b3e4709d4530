package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/versions"
)

// TestVersions: which are there, which of them run, and what came of the last change.
func TestVersions(t *testing.T) {
	dir := t.TempDir()
	r := versions.Root(dir)
	shows := func(args, want string) {
		t.Helper()
		out, err := run(append([]string{"versions", "--root", dir}, strings.Fields(args)...)...)
		if err != nil || out != want {
			t.Errorf("versions %s: %v\n%s\nwant\n%s", args, err, out, want)
		}
	}
	shows("", dir+" has no versions: this sandboxd was not installed by a package\n")
	shows("-o json", "[]\n")
	for version, schema := range map[string]string{"1.9.0": "6", "1.10.0": "7", "1.8.0": ""} {
		share := filepath.Join(r.Dir(version), "share/sandboxd")
		if err := os.MkdirAll(share, 0o755); err != nil {
			t.Fatal(err)
		}
		if schema == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(share, "schema"), []byte(schema), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	undone := versions.Journal{
		Step: versions.Undone, From: "1.9.0", To: "1.10.0", Ended: time.Unix(1767225600, 0).UTC(), Reason: "it did not answer",
	}
	if err := errors.Join(r.Point(versions.Current, "1.9.0"), r.Point(versions.Previous, "1.8.0"), r.Note(&undone)); err != nil {
		t.Fatal(err)
	}
	shows("", `VERSION   ROLE       SCHEMA
1.10.0    -          7
1.9.0     current    6
1.8.0     previous   0

the change to 1.10.0 was undone at 2026-01-01T00:00:00Z: it did not answer
`)
	shows("--output json", `[
  {
    "version": "1.10.0",
    "schema": 7,
    "role": ""
  },
  {
    "version": "1.9.0",
    "schema": 6,
    "role": "current"
  },
  {
    "version": "1.8.0",
    "schema": 0,
    "role": "previous"
  }
]
`)
	for _, args := range [][]string{{"versions", "-o", "yaml"}, {"versions", "x"}, {"upgrade"}, {"rollback", "1.0.0", "2.0.0"}} {
		if _, err := run(args...); err == nil {
			t.Errorf("%q is accepted", args)
		}
	}
}

// TestShell: the command that restarts a daemon says why it fails. What it leaves running goes on, and may
// have its output open. When its time is over, it ends with all that it has started.
func TestShell(t *testing.T) {
	if _, err := shell(t.Context(), "echo no room >&2; exit 3"); err == nil || !strings.HasSuffix(err.Error(), "exit status 3: no room") {
		t.Errorf("%v", err)
	}
	started := filepath.Join(t.TempDir(), "started")
	if err := unix.Mkfifo(started, 0o600); err != nil {
		t.Fatal(err)
	}
	// process returns the process whose number the command writes to the FIFO.
	process := func() unix.PollFd {
		b, err := os.ReadFile(started)
		if err != nil {
			t.Error(err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
		if err != nil {
			t.Error(err)
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Error(err)
		}
		return unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	}
	var daemon unix.PollFd
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan unix.PollFd)
	go func() { got <- process() }()
	said, err := shell(ctx, "echo it serves; sleep 1000 & echo $! >"+started)
	daemon = <-got
	if said != "it serves" || err != nil {
		t.Errorf("%q, %v", said, err)
	}
	if n, err := unix.Poll([]unix.PollFd{daemon}, 0); n != 0 || err != nil {
		t.Errorf("what it left running has ended: %d, %v", n, err)
	}
	if err := unix.PidfdSendSignal(int(daemon.Fd), unix.SIGKILL, nil, 0); err != nil {
		t.Error(err)
	}
	go func() {
		daemon = process()
		cancel()
		got <- daemon
	}()
	if _, err := shell(ctx, "sleep 1000 & echo $! >"+started+"; wait"); err == nil || !strings.Contains(err.Error(), "signal: killed") {
		t.Errorf("after its time: %v", err)
	}
	ended := []unix.PollFd{<-got}
	for _, err := unix.Poll(ended, -1); err != nil; _, err = unix.Poll(ended, -1) {
		if !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
	}
}

// TestTrialLimits: the configuration has the limits of a trial, and flags come first.
func TestTrialLimits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(path, []byte("[upgrade]\ngate = \"90s\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string][2]time.Duration{
		"": {90 * time.Second, 10 * time.Minute}, "--gate 3s": {3 * time.Second, 10 * time.Minute}, "--soak 0": {90 * time.Second, 0},
	} {
		cmd := &cobra.Command{}
		c := changeFlags(cmd)
		if err := cmd.ParseFlags(append(strings.Fields(args), "--restart", "true", "--config", path)); err != nil {
			t.Fatal(err)
		}
		ch, err := c.change(cfg, t.Output())
		if got := [2]time.Duration{ch.Limit, ch.Soak}; err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", args, got, err, want)
		}
	}
}

// TestTry: where the configuration wants no trial, the version of a package is taken as it is.
func TestTry(t *testing.T) {
	dir := t.TempDir()
	r := versions.Root(dir)
	for _, version := range []string{"1.0.0", "1.1.0"} {
		program := r.Program(version, "sandboxd")
		if err := os.MkdirAll(filepath.Dir(program), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("/bin/true", program); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "config.toml")
	text := fmt.Sprintf("state_dir = %q\nrun_dir = %q\n[upgrade]\ntry_packages = false\n", dir+"/state", dir+"/run")
	if err := errors.Join(r.Point(versions.Current, "1.0.0"), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
	lock, err := os.Create(filepath.Join(dir, "upgrade.lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	// A lock of the open file is another one than that of this process.
	if err := unix.FcntlFlock(lock.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		t.Fatal(err)
	}
	limit := lockLimit
	defer func() { lockLimit = limit }()
	lockLimit = 10 * time.Millisecond
	if out, err := run("try", "1.1.0", "--root", dir, "--config", path, "--restart", "false"); err == nil ||
		!strings.Contains(err.Error(), "nothing was changed: another program changes the version of sandboxd") {
		t.Errorf("while another program has the lock: %q, %v", out, err)
	}
	lockLimit = limit
	time.AfterFunc(50*time.Millisecond, func() { lock.Close() }) // it can only pass wrongly
	// Of the host's own systemd nothing is asked.
	out, err := run("try", "1.1.0", "--root", dir, "--config", path, "--restart", "touch "+dir+"/restarted")
	if _, stat := os.Stat(dir + "/restarted"); err != nil || stat != nil || out != "changing from 1.0.0 to 1.1.0, without a trial\n" {
		t.Errorf("%q, %v, %v", out, err, stat)
	}
	current, err := r.Named(versions.Current)
	previous, named := r.Named(versions.Previous)
	if current != "1.1.0" || previous != "1.0.0" || err != nil || named != nil {
		t.Errorf("current is %q, %v; previous is %q, %v", current, err, previous, named)
	}
}
