package versions

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// makeRoot makes a root with versions; the value is what the file schema has.
func makeRoot(t *testing.T, versions map[string]string) Root {
	t.Helper()
	r := Root(t.TempDir())
	for version, schema := range versions {
		dir := filepath.Join(r.Dir(version), "share/sandboxd")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if schema == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, "schema"), []byte(schema), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func TestOf(t *testing.T) {
	for program, want := range map[string]string{
		"/usr/lib/sandboxd/versions/1.2.3/bin/sandboxd":               "/usr/lib/sandboxd 1.2.3",
		"/r/versions/0.1.0-dev+620b32b.dirty/bin/x":                   "/r 0.1.0-dev+620b32b.dirty",
		"/usr/lib/sandboxd/kept/1.2.3/bin/sandboxd":                   "/usr/lib/sandboxd 1.2.3",
		"/usr/lib/sandboxd/versions/1.2.3/libexec/sandboxd/runsc":     "",
		"/usr/lib/sandboxd/versions/current/bin/sandboxd":             "",
		"/usr/lib/sandboxd/versions/1.2/bin/sandboxd":                 "",
		"/usr/lib/sandboxd/versions/v1.2.3/bin/sandboxd":              "",
		"/src/build/bin/sandboxd":                                     "",
		"/versions/1.2.3/sandboxd":                                    "",
		"sandboxd":                                                    "",
		"/usr/lib/sandboxd/versions/1.2.3/bin/../../4.5.6/bin/sandbo": "/usr/lib/sandboxd 4.5.6",
	} {
		r, version, ok := Of(program)
		if got := strings.TrimSpace(string(r) + " " + version); ok != (want != "") || got != want {
			t.Errorf("%s: %q %v, want %q", program, got, ok, want)
		}
	}
}

func TestList(t *testing.T) {
	if all, err := Root(filepath.Join(t.TempDir(), "none")).List(); err != nil || all != nil {
		t.Errorf("no root has %v, %v", all, err)
	}
	r := makeRoot(t, map[string]string{"1.10.0": "7\n", "1.9.0": "6\n", "1.10.0-rc.1": "", "kept": "3"})
	all, err := r.List()
	if want := []Version{{"1.10.0", 7}, {"1.10.0-rc.1", 0}, {"1.9.0", 6}}; err != nil || !slices.Equal(all, want) {
		t.Errorf("%v, %v; want %v", all, err, want)
	}
	for _, bad := range []string{"x", "-1", "0", "\n"} {
		r := makeRoot(t, map[string]string{"1.0.0": bad})
		if _, err := r.List(); err == nil || !strings.Contains(err.Error(), "install this version again") {
			t.Errorf("schema %q: %v", bad, err)
		}
	}
}

func TestPoint(t *testing.T) {
	r := makeRoot(t, map[string]string{"1.0.0": "1", "1.1.0": "1"})
	for _, version := range []string{"1.0.0", "1.1.0", "1.1.0", "", "", "1.0.0"} {
		// What a power cut left of an earlier try.
		if err := os.WriteFile(r.link(Current)+".new", nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := r.Point(Current, version); err != nil {
			t.Fatal(err)
		}
		if got, err := r.Named(Current); err != nil || got != version {
			t.Errorf("current is %q, %v; want %q", got, err, version)
		}
	}
	if err := r.Point(Current, "9.9.9"); err == nil {
		t.Error("a link names a version that is not there")
	}
	if got, _ := r.Named(Current); got != "1.0.0" {
		t.Errorf("after a refusal current is %q", got)
	}
	if err := os.Symlink("/somewhere/else", r.link(Previous)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Named(Previous); err == nil || !strings.Contains(err.Error(), "no version") {
		t.Errorf("a foreign link: %v", err)
	}
}

func TestJournal(t *testing.T) {
	r := makeRoot(t, nil)
	if j, err := r.Journal(); j != nil || err != nil || j.UnderWay() || j.Holds() {
		t.Fatalf("%v, %v", j, err)
	}
	want := Journal{
		Step: Trial, From: "1.0.0", To: "1.1.0", Before: "0.9.0", FromSchema: 6, ToSchema: 7, Nonce: "n", Units: "/u",
		Started: time.Unix(1700000000, 0).UTC(),
	}
	if err := r.Note(&want); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Journal(); err != nil || *got != want || !got.UnderWay() || !got.Holds() {
		t.Errorf("%+v, %v", got, err)
	}
	for _, c := range []struct {
		step       Step
		to         int
		way, holds bool
	}{{Trial, 6, true, false}, {Undoing, 7, true, false}, {Undone, 7, false, false}, {Done, 7, false, false}} {
		j := Journal{Step: c.step, FromSchema: 6, ToSchema: c.to}
		if j.UnderWay() != c.way || j.Holds() != c.holds {
			t.Errorf("%+v: under way %v, holds %v", c, j.UnderWay(), j.Holds())
		}
	}
	for _, bad := range []string{"", "{", `{"from":"../../etc","to":"1.0.0"}`, `{"from":"1.0.0"}`} {
		if err := os.WriteFile(r.journal(), []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Journal(); !errs.Is(err, errs.Internal) || !strings.Contains(err.Error(), "damaged") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestLockHere: of one process only one part has the lock, and a second one waits for it.
func TestLockHere(t *testing.T) {
	r := makeRoot(t, nil)
	l, err := r.Lock()
	if err != nil {
		t.Fatal(err)
	}
	second := make(chan error, 1)
	go func() {
		l, err := r.Lock()
		if err == nil {
			l.Unlock()
		}
		second <- err
	}()
	select {
	case err := <-second:
		t.Fatalf("the second part did not wait: %v", err)
	case <-time.After(50 * time.Millisecond): // it can only pass wrongly
	}
	l.Unlock()
	l.Unlock()
	if err := <-second; err != nil {
		t.Error(err)
	}
}

// TestMain is another process that holds the lock, if it is asked to.
func TestMain(m *testing.M) {
	dir := os.Getenv("VERSIONS_TEST_LOCK")
	if dir == "" {
		os.Exit(m.Run())
	}
	lock, err := Root(dir).Lock()
	if err != nil {
		os.Stdout.WriteString(err.Error() + "\n") //nolint:errcheck // the test waits for it
		os.Exit(1)
	}
	os.Stdout.WriteString("locked\n") //nolint:errcheck // the test waits for it
	time.Sleep(time.Hour)             // it is killed
	lock.Unlock()
}

func TestLock(t *testing.T) {
	r := makeRoot(t, nil)
	if held, err := r.Held(); held || err != nil {
		t.Fatalf("held: %v, %v", held, err)
	}
	other := exec.Command(os.Args[0])
	other.Env = append(os.Environ(), "VERSIONS_TEST_LOCK="+string(r))
	out, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer other.Wait()         //nolint:errcheck // it is killed
	defer other.Process.Kill() //nolint:errcheck // it may have ended
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "locked\n" {
		t.Fatalf("the other process: %q, %v", line, err)
	}
	if _, err := r.Lock(); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "pid ") {
		t.Errorf("a second lock: %v", err)
	}
	if held, err := r.Held(); !held || err != nil {
		t.Errorf("held: %v, %v", held, err)
	}
	over := make(chan error, 1)
	go func() { over <- r.Wait() }()
	select {
	case err := <-over:
		t.Fatalf("the wait ended while the lock was held: %v", err)
	case <-time.After(50 * time.Millisecond): // it can only pass wrongly
	}
	if err := other.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-over; err != nil {
		t.Fatal(err)
	}
	l, err := r.Lock()
	if err != nil {
		t.Fatal(err)
	}
	l.Unlock()
}
