package doctor

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestMain lets the test binary be a daemon that holds a lock until its input ends.
func TestMain(m *testing.M) {
	lock := os.Getenv("HOLD_LOCK")
	if lock == "" {
		os.Exit(m.Run())
	}
	f, err := os.OpenFile(lock, os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		err = unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	}
	fmt.Println(err)
	io.Copy(io.Discard, os.Stdin) //nolint:errcheck // until it ends
	os.Exit(0)
}

// hold starts a process that holds a lock, with these arguments.
func hold(t *testing.T, lock, dir string, args ...string) (pid int) {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env, cmd.Dir = append(os.Environ(), "HOLD_LOCK="+lock), dir
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); cmd.Wait() }) //nolint:errcheck // it has no more to say
	said := make([]byte, len("<nil>"))
	if io.ReadFull(out, said); string(said) != "<nil>" {
		t.Fatalf("the lock cannot be taken: %s", said)
	}
	return cmd.Process.Pid
}

// TestDaemons finds the daemons that run, and what they have read.
func TestDaemons(t *testing.T) {
	run := t.TempDir()
	if err := os.WriteFile(filepath.Join(run, "sandboxd-a.lock"), nil, 0o600); err != nil { // of one that has ended
		t.Fatal(err)
	}
	if all := daemons(run, "/proc"); len(all) != 0 {
		t.Errorf("no daemon runs, and %v were found", all)
	}
	file := filepath.Join(run, "dev.toml")
	if err := os.WriteFile(file, []byte("instance = \"d\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	pid := hold(t, filepath.Join(run, "sandboxd-d.lock"), run, "serve", "--config", "dev.toml")
	only := daemons(run, "/proc")
	if len(only) != 1 || only[0] != (daemon{"d", pid, file}) {
		t.Fatalf("found %v, want pid %d and %s", only, pid, file)
	}
	cfg, f, err := read("", only)
	if err != nil || cfg.InstanceName != "d" || !strings.Contains(f.Detail, file) ||
		!strings.Contains(f.Detail, fmt.Sprintf("its daemon runs, pid %d", pid)) {
		t.Errorf("%+v, %v", f, err)
	}
	hold(t, filepath.Join(run, "sandboxd-e.lock"), run, "serve", "--config="+file)
	cfg, f, err = read("", daemons(run, "/proc")) // which of the two is not guessed
	if err != nil || cfg.InstanceName != "a" || !strings.Contains(f.Detail, "the defaults") ||
		strings.Count(f.Detail, "another daemon runs") != 2 || !strings.Contains(f.Detail, "--config "+file) {
		t.Errorf("%+v, %v", f, err)
	}
	if cfg, f, err = read(file, nil); err != nil || cfg.InstanceName != "d" || !strings.Contains(f.Detail, "no daemon of it runs") {
		t.Errorf("%+v, %v", f, err)
	}
}

// TestLastingStates: a state that lasts until somebody ends it is said, with what ends it.
func TestLastingStates(t *testing.T) {
	at := time.Date(2027, 3, 1, 0, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		info wire.SystemInfo
		want Status
		says []string
	}{
		"none":     {wire.SystemInfo{}, OK, nil},
		"draining": {wire.SystemInfo{DrainingSince: &at}, Warn, []string{"2027-03-01T00:00:00Z", "sandboxctl system drain --off"}},
		"damaged":  {wire.SystemInfo{Unreadable: []string{"aaaaaaaaaaaa"}}, Warn, []string{"1 record", "aaaaaaaaaaaa", "sandboxctl rm"}},
		"all": {
			wire.SystemInfo{NoSweep: "the pool is lost: run it", DrainingSince: &at, Unreadable: []string{"a", "b"}},
			Fail,
			[]string{"the pool is lost: run it", "drains since", "2 records"},
		},
	} {
		f := judgeLasting(c.info)
		if f.Status != c.want || (f.Status == OK) != (f.Mend == "") {
			t.Errorf("%s: %+v", name, f)
		}
		for _, says := range c.says {
			if !strings.Contains(f.Detail+"\n"+f.Mend, says) {
				t.Errorf("%s: %+v has no %q", name, f, says)
			}
		}
	}
}
