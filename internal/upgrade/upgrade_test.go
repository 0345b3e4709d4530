package upgrade

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/upgrade/upgradetest"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// The tests here are about what is on disk when a change or its undoing is cut anywhere. The daemon is
// a few lines; test/e2e changes the version of the real one.

const (
	before, from, to = "0.9.0", "1.0.0", "1.1.0"

	diskBytes = 32 << 20
	old       = 3 // newest schema that before and from read: that of release-2
)

// ways are the changes that a process makes: of from to a version with a newer schema, and of from back to
// the version before it, which has the same schema.
var ways = []struct{ do, to string }{{"change", to}, {"back", before}}

// site is a directory with three versions and a state.
type site struct {
	dir   string
	root  versions.Root
	state string
	units string
}

func siteIn(dir string) site {
	return site{dir, versions.Root(filepath.Join(dir, "root")), filepath.Join(dir, "state/sandboxd.db"), filepath.Join(dir, "units")}
}

// build fills the site: from is current, and before was it before.
func build(t *testing.T, dir string) site {
	t.Helper()
	s := siteIn(dir)
	for version, schema := range map[string]int{before: old, from: old, to: store.Schema} {
		s.put(t, "root/versions/"+version+"/share/sandboxd/schema", fmt.Sprint(schema), 0o644)
		s.put(t, "root/versions/"+version+"/systemd/sandboxd.service", "unit of "+version, 0o644)
		s.put(t, "root/versions/"+version+"/systemd/sandboxd.socket", "socket", 0o644)
		// It takes any state, and any configuration but one with new_key, and finds nothing.
		program := "#!/bin/sh\n[ $1 != config ] || ! grep -s new_key \"$4\" || exit 1\n" +
			"[ $1 != doctor ] || echo '[]'\n[ $1 != restore ] || cat >/dev/null\n"
		s.put(t, "root/versions/"+version+"/bin/sandboxd", program, 0o755)
	}
	s.put(t, "units/sandboxd.service", "unit of "+from, 0o644)
	s.put(t, "units/sandboxd.socket", "socket", 0o644)
	released, err := os.ReadFile("../../pkg/store/testdata/release-2/sandboxd.db")
	if err != nil {
		t.Fatal(err)
	}
	s.put(t, "state/sandboxd.db", string(released), 0o600)
	if err := errors.Join(s.root.Point(versions.Current, from), s.root.Point(versions.Previous, before)); err != nil {
		t.Fatal(err)
	}
	unix.Sync()
	return s
}

func (s site) put(t *testing.T, name, text string, mode os.FileMode) {
	t.Helper()
	path := filepath.Join(s.dir, name)
	syscall.ForkLock.RLock() // no child holds it open for writing: it may be a program
	defer syscall.ForkLock.RUnlock()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), mode)); err != nil {
		t.Fatal(err)
	}
}

// change is the change from from to to, of a daemon of a few lines. It opens the state as each
// version does when it starts.
func (s site) change(out io.Writer) (*Change, error) {
	running := from
	fill := os.Getenv("UPGRADE_TEST_FILL") // when the first restart has the disk full
	socket := filepath.Join(os.TempDir(), fmt.Sprintf("upgrade-test-%d", os.Getpid()))
	c, err := upgradetest.Daemon(socket, func() string { return running })
	restart := func(context.Context) error {
		now := fill
		fill = ""
		if now == "before" {
			if err := hosttest.Fill(s.dir); err != nil {
				return err
			}
		}
		settle := exec.Command(os.Args[0]) // the lock is this process's
		settle.Env = append(os.Environ(), "UPGRADE_TEST_DIR="+s.dir, "UPGRADE_TEST_DO=settle", failpoint.Env+"=")
		if out, err := settle.CombinedOutput(); err != nil {
			return fmt.Errorf("settle: %w: %s", err, out)
		}
		version, err := s.root.Named(versions.Current)
		if err != nil {
			return err
		}
		running = version
		if err := s.open(version); err != nil || now != "after" {
			return err
		}
		return hosttest.Fill(s.dir)
	}
	return &Change{Root: s.root, To: to, Client: c, Restart: restart, Units: s.units, Limit: time.Minute, Out: out}, err
}

// open opens the state as the version does.
func (s site) open(version string) error {
	if n, err := s.root.Schema(version); err != nil || n < store.Schema {
		return errors.Join(err, s.reads(n))
	}
	db, err := store.Open(s.state, store.Options{})
	if err != nil {
		return err
	}
	return db.Close()
}

// reads fails if a version that reads schemas up to n cannot read the state.
func (s site) reads(n int) error {
	have, err := store.SchemaOf(s.state)
	if err == nil && have > n {
		err = fmt.Errorf("the state has schema %d, and this version reads %d", have, n)
	}
	return err
}

// consistent fails if the site is not wholly of one version, and returns which it is.
func (s site) consistent() (version string, err error) {
	version, err = s.root.Named(versions.Current)
	if err != nil {
		return "", err
	}
	want := map[string]struct {
		before string
		schema int
	}{before: {from, old}, from: {before, old}, to: {from, store.Schema}}[version]
	previous, err := s.root.Named(versions.Previous)
	if err == nil && previous != want.before {
		err = fmt.Errorf("previous is %q", previous)
	}
	unit, uerr := os.ReadFile(filepath.Join(s.units, "sandboxd.service"))
	if uerr == nil && string(unit) != "unit of "+version {
		uerr = fmt.Errorf("the unit is %q", unit)
	}
	armed, aerr := s.root.Named(versions.Undo)
	j, jerr := s.root.Journal()
	if armed != "" || j.UnderWay() {
		jerr = fmt.Errorf("it is under way: %+v, undo is %q", j, armed)
	}
	if err := errors.Join(err, uerr, aerr, jerr, s.reads(want.schema)); err != nil {
		return "", fmt.Errorf("version %s: %w", version, err)
	}
	return version, nil
}

// TestMain is also a process that changes the version, or settles a change, and may be killed there.
func TestMain(m *testing.M) {
	dir, do := os.Getenv("UPGRADE_TEST_DIR"), os.Getenv("UPGRADE_TEST_DO")
	if dir == "" {
		os.Exit(m.Run())
	}
	s := siteIn(dir)
	var err error
	switch do {
	case "settle":
		_, err = Settle(context.Background(), s.root, s.state, "", slog.New(slog.DiscardHandler))
	case "serve":
		err = serveMarked(s.root)
	default:
		var c *Change
		c, err = s.change(os.Stdout)
		if err == nil && do == "back" { // as sandboxd rollback does
			c.To, err = s.root.Named(versions.Previous)
		}
		if err == nil {
			err = c.Run(context.Background())
		}
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// another runs this program as a process that changes the version or settles, and is killed at a point.
// cut reports whether it was.
func (s site) another(t *testing.T, do, point string) (out string, cut bool) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "UPGRADE_TEST_DIR="+s.dir, "UPGRADE_TEST_DO="+do, failpoint.Env+"="+point)
	b, err := cmd.CombinedOutput()
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if err != nil && !(ok && status.Signaled()) {
		return string(b) + err.Error(), false
	}
	return string(b), ok && status.Signaled()
}

func TestChange(t *testing.T) {
	s := build(t, t.TempDir())
	out, _ := s.another(t, "change", "")
	if version, err := s.consistent(); err != nil || version != to {
		t.Fatalf("%q, %v\n%s", version, err, out)
	}
	if out, _ = s.another(t, "change", ""); !strings.Contains(out, "is the current version already") {
		t.Errorf("once more: %s", out)
	}
	if err := os.RemoveAll(s.root.Dir(to)); err != nil {
		t.Fatal(err)
	}
	if err := s.root.Point(versions.Current, from); err != nil {
		t.Fatal(err)
	}
	if out, _ = s.another(t, "change", ""); !strings.Contains(out, "sandboxd versions lists those that are") {
		t.Errorf("to a version that is not there: %s", out)
	}
}

// TestFails: whatever step fails, the version of before runs again, and the message says why.
func TestFails(t *testing.T) {
	for _, point := range FailpointNames() {
		step, ok := strings.CutPrefix(point, "upgrade:")
		if !ok {
			continue
		}
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			s := build(t, t.TempDir())
			out, _ := s.another(t, "change", point+"=error")
			version, err := s.consistent()
			if step == "disarm" { // it is done
				if !strings.Contains(out, "what was left to do failed: failpoint "+point) {
					t.Errorf("it says %s", out)
				}
				if _, err := Settle(t.Context(), s.root, s.state, "", slog.Default()); err != nil {
					t.Fatal(err)
				}
				if version, err := s.consistent(); err != nil || version != to {
					t.Errorf("%q, %v", version, err)
				}
				return
			}
			if err != nil || version != from || !strings.Contains(out, "failpoint "+point) || !strings.Contains(out, from+" runs again") {
				t.Errorf("%q, %v; it says:\n%s", version, err, out)
			}
		})
	}
}

// TestTwo: a second change does not begin while the first one is tried.
func TestTwo(t *testing.T) {
	s := build(t, t.TempDir())
	c, err := s.change(io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	restart, tried := c.Restart, 0
	c.Restart = func(ctx context.Context) error {
		if tried++; tried == 1 {
			if j, err := s.root.Journal(); err != nil || !j.Holds() {
				t.Errorf("the journal: %+v, %v", j, err)
			}
			if out, _ := s.another(t, "change", ""); !strings.Contains(out, fmt.Sprintf("another program (pid %d)", os.Getpid())) {
				t.Errorf("a second change: %s", out)
			}
		}
		return restart(ctx)
	}
	if err := c.Run(t.Context()); err != nil || tried != 1 {
		t.Errorf("tried %d times: %v", tried, err)
	}
	if version, err := s.consistent(); err != nil || version != to {
		t.Errorf("%q, %v", version, err)
	}
}

// TestPowerCut cuts a change, there and back, and its undoing, at each step, by the copy of a disk that
// holds what has reached it then.
func TestPowerCut(t *testing.T) {
	hosttest.Root(t)
	var upgrades, settles []string
	for _, point := range FailpointNames() {
		if strings.HasPrefix(point, "upgrade:") {
			upgrades = append(upgrades, point)
		} else {
			settles = append(settles, point)
		}
	}
	for _, way := range ways {
		cuts := map[string]int{}
		for _, point := range upgrades {
			t.Run(way.do+" "+point, func(t *testing.T) {
				d := hosttest.NewDisk(t, diskBytes)
				s := build(t, d.Dir)
				if out, cut := s.another(t, way.do, point+"=kill"); !cut {
					t.Fatalf("it was not cut at %s: %s", point, out)
				}
				want := from
				if point == "upgrade:disarm" {
					want = way.to
				}
				s.undoings(t, d, settles, want, cuts)
			})
		}
		for _, point := range settles {
			if cuts[point] == 0 {
				t.Errorf("%s: no undoing was cut at %s", way.do, point)
			}
		}
	}
}

// undoings lets the next start settle what a power cut leaves now, cuts it at each of the points, and counts
// the cuts. Each undoing begins with what the first cut has left. In the end the site must be of version want.
func (s site) undoings(t *testing.T, d *hosttest.Disk, points []string, want string, cuts map[string]int) {
	t.Helper()
	left := d.Left()
	for _, point := range append(points, "") {
		d.Put(left)
		out, cut := s.another(t, "settle", point+"=kill")
		if cut {
			cuts[point]++
		} else if out != "" {
			t.Fatalf("settle, cut at %q: %s", point, out)
		}
		d.Put(d.Left())
		if out, _ := s.another(t, "settle", ""); out != "" {
			t.Fatalf("settle after a cut at %q: %s", point, out)
		}
		if version, err := s.consistent(); err != nil || version != want {
			t.Errorf("settled after a cut at %q: %q, %v; want %s", point, version, err, want)
		}
		if !cut { // nothing was under way, or all of it is done: no other point is reached
			break
		}
	}
}

// TestFullDisk: a disk becomes full before the other version opens the state, or after. The change is
// undone while the disk is full: by whoever makes it, or after a kill by the next start, which may be
// killed itself.
func TestFullDisk(t *testing.T) {
	hosttest.Root(t)
	// On the way back the version that starts writes nothing, so before and after are the same.
	for _, c := range []struct{ do, fill string }{{"change", "before"}, {"change", "after"}, {"back", "after"}} {
		for _, point := range append([]string{""}, FailpointNames()[9:]...) {
			t.Run(c.do+" "+c.fill+" "+point, func(t *testing.T) {
				t.Setenv("UPGRADE_TEST_FILL", c.fill)
				dir := hosttest.NewDisk(t, diskBytes).Dir
				s := build(t, dir)
				kill := ""
				if point != "" {
					kill = "upgrade:done=kill"
				}
				if out, cut := s.another(t, c.do, kill); !cut && !strings.Contains(out, from+" runs again") {
					t.Errorf("it says:\n%s", out)
				}
				if out, _ := s.another(t, "settle", point+"=kill"); out != "" {
					t.Errorf("settle, killed at %q: %s", point, out)
				}
				if out, _ := s.another(t, "settle", ""); out != "" {
					t.Errorf("settle: %s", out)
				}
				if version, err := s.consistent(); err != nil || version != from {
					t.Errorf("%q, %v", version, err)
				}
				if err := os.WriteFile(filepath.Join(dir, "more"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
					t.Errorf("the disk was not full: %v", err)
				}
			})
		}
	}
	for _, way := range ways {
		t.Run(way.do+" at the beginning", func(t *testing.T) {
			s := build(t, hosttest.NewDisk(t, diskBytes).Dir)
			if err := hosttest.Fill(s.dir); err != nil {
				t.Fatal(err)
			}
			out, _ := s.another(t, way.do, "")
			if !strings.Contains(out, "nothing was changed") || !strings.Contains(out, "no space left") {
				t.Errorf("it says:\n%s", out)
			}
			if version, err := s.consistent(); err != nil || version != from {
				t.Errorf("%q, %v", version, err)
			}
		})
	}
}
