package upgrade

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/versions"
)

// serveMarked is a daemon of the version on trial or in its soak, until it is asked to end.
func serveMarked(r versions.Root) error {
	mark, err := r.Mark()
	if err != nil || mark == nil {
		return errors.Join(err, errors.New("there is no mark of this process"))
	}
	os.Stdout.WriteString("marked\n")
	io.Copy(io.Discard, os.Stdin) //nolint:errcheck // its end is the order to end
	return mark.Remove()
}

// serves starts such a daemon.
func (s site) serves(t *testing.T) (end func(asked bool)) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "UPGRADE_TEST_DIR="+s.dir, "UPGRADE_TEST_DO=serve")
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
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "marked\n" {
		t.Fatalf("the daemon: %q, %v", line, err)
	}
	return func(asked bool) {
		t.Helper()
		if !asked {
			err = cmd.Process.Kill()
		}
		err = errors.Join(err, in.Close())
		if ended := cmd.Wait(); asked {
			err = errors.Join(err, ended)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestSoak: after a change that is done, a version whose daemon ends without having been asked to is undone, once,
// and until the soak is over. Nothing else undoes it.
func TestSoak(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(t *testing.T, s site, j *versions.Journal)
		want string
	}{
		"crash": {func(t *testing.T, s site, _ *versions.Journal) { s.serves(t)(false) }, from},
		"asked": {func(t *testing.T, s site, _ *versions.Journal) { s.serves(t)(true) }, to},
		"crash after it was asked once": {func(t *testing.T, s site, _ *versions.Journal) {
			s.serves(t)(true)
			s.serves(t)(false)
		}, from},
		"the daemon of another instance runs": {func(t *testing.T, s site, _ *versions.Journal) {
			end := s.serves(t)
			t.Cleanup(func() { end(true) })
		}, to},
		"the host lost its power": {func(t *testing.T, s site, _ *versions.Journal) {
			s.serves(t)(false)
			s.put(t, "root/upgrade.running", "another boot\n", 0o600)
		}, to},
		"crash after the soak": {func(t *testing.T, s site, j *versions.Journal) {
			s.serves(t)(false)
			j.SoakUntil = j.Ended.Add(time.Nanosecond)
			if err := s.root.Note(j); err != nil {
				t.Fatal(err)
			}
		}, to},
		"crash of another version, which a package brought": {func(t *testing.T, s site, _ *versions.Journal) {
			s.serves(t)(false)
			if err := s.root.Point(versions.Current, before); err != nil {
				t.Fatal(err)
			}
		}, before},
	} {
		t.Run(name, func(t *testing.T) {
			s := soaking(t)
			j, err := s.root.Journal()
			if err != nil || !j.Soaks(time.Now()) {
				t.Fatalf("the journal: %+v, %v", j, err)
			}
			c.do(t, s, j)
			run, err := Settle(t.Context(), s.root, s.state, s.config(t, ""), slog.New(slog.DiscardHandler))
			if err != nil || (run == from) != (c.want == from) {
				t.Errorf("settle: %q, %v", run, err)
			}
			current, err := s.root.Named(versions.Current)
			if err != nil || current != c.want {
				t.Errorf("current is %q, %v; want %s", current, err, c.want)
			}
			if c.want != from {
				return
			}
			if version, err := s.consistent(); err != nil || version != from {
				t.Errorf("%q, %v", version, err)
			}
			j, err = s.root.Journal()
			if err != nil || j.Step != versions.Undone || !strings.Contains(j.Reason, "without having been asked to") {
				t.Errorf("the journal: %+v, %v", j, err)
			}
			if left, _ := filepath.Glob(string(s.root) + "/upgrade.r*"); len(left) > 0 {
				t.Errorf("it left %v", left)
			}
		})
	}
}

// TestSoakConfig: a crash does not go back to a version that cannot read the present configuration. It ends the soak,
// and the log says what to do. A check that is cut short decides nothing.
func TestSoakConfig(t *testing.T) {
	s := soaking(t)
	s.serves(t)(false)
	config := s.config(t, "new_key = true\n")
	cut, cancel := context.WithCancel(t.Context())
	cancel()
	if run, err := Settle(cut, s.root, s.state, config, slog.New(slog.DiscardHandler)); !errors.Is(err, context.Canceled) {
		t.Errorf("cut short: %q, %v", run, err)
	}
	if j, err := s.root.Journal(); err != nil || !j.Soaks(time.Now()) {
		t.Fatalf("the journal after that: %+v, %v", j, err)
	}
	for _, again := range []bool{false, true} {
		var said strings.Builder
		run, err := Settle(t.Context(), s.root, s.state, config, slog.New(slog.NewTextHandler(&said, nil)))
		if run != "" || err != nil {
			t.Errorf("settle: %q, %v", run, err)
		}
		for _, want := range []string{"level=ERROR", "sandboxd rollback", "new_key = true", "before=" + from} {
			if strings.Contains(said.String(), want) == again {
				t.Errorf("again %v: %q in the log:\n%s", again, want, said.String())
			}
		}
		current, err := s.root.Named(versions.Current)
		if err != nil || current != to {
			t.Errorf("current is %q, %v", current, err)
		}
		armed, err := s.root.Named(versions.Undo)
		left, _ := filepath.Glob(string(s.root) + "/upgrade.r*")
		if armed != "" || err != nil || len(left) > 0 {
			t.Errorf("undo is %q, %v; it left %v", armed, err, left)
		}
		j, err := s.root.Journal()
		if err != nil || j.Step != versions.Done || j.Soaks(time.Now()) {
			t.Errorf("the journal: %+v, %v", j, err)
		}
		s.serves(t)(false) // another crash, if it had a mark
	}
}

// config is a configuration file.
func (s site) config(t *testing.T, text string) string {
	t.Helper()
	s.put(t, "config.toml", text, 0o600)
	return filepath.Join(s.dir, "config.toml")
}

// soaking is a site on which to has just been found good. It has the schema of from.
func soaking(t *testing.T) site {
	t.Helper()
	s := build(t, t.TempDir())
	s.put(t, "root/versions/"+to+"/share/sandboxd/schema", "3", 0o644)
	c, err := s.change(t.Output())
	if err != nil {
		t.Fatal(err)
	}
	c.Soak = time.Hour
	if err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}
