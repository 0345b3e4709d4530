package upgrade

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/versions"
)

// unpacked is a site on which a package manager has unpacked to over from, and not come to its last script.
func unpacked(t *testing.T) site {
	t.Helper()
	s := build(t, t.TempDir())
	kept := filepath.Join(string(s.root), "kept")
	s.put(t, "root/kept/current", from+"\n", 0o644)
	err := errors.Join(os.CopyFS(filepath.Join(kept, from), os.DirFS(s.root.Dir(from))), os.RemoveAll(s.root.Dir(from)),
		os.Symlink("kept/"+from, filepath.Join(string(s.root), "undo")), s.root.Point(versions.Current, to))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestReplaced: a start between the unpacking of a package and its trial is one of the version of before, as often as
// there is one. If the files of that are lost, the new one runs. Meanwhile nobody changes the version.
func TestReplaced(t *testing.T) {
	s := unpacked(t)
	for range 2 {
		if run, err := Settle(t.Context(), s.root, s.state, "", slog.New(slog.DiscardHandler)); run != from || err != nil {
			t.Errorf("settle: %q, %v", run, err)
		}
		if current, err := s.root.Named(versions.Current); current != from || err != nil {
			t.Errorf("current is %q, %v", current, err)
		}
		if _, err := os.Stat(s.root.Program(from, "sandboxd")); err != nil {
			t.Error(err)
		}
		if undo, err := s.root.Named(versions.Undo); undo != from || err != nil {
			t.Errorf("undo is %q, %v", undo, err)
		}
	}
	if out, _ := s.another(t, "change", ""); !strings.Contains(out, "a package manager is replacing the version") {
		t.Errorf("a change meanwhile: %s", out)
	}

	s = unpacked(t)
	if err := os.RemoveAll(filepath.Join(string(s.root), "kept", from)); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	if run, err := Settle(t.Context(), s.root, s.state, "", slog.New(slog.NewTextHandler(&said, nil))); run != "" || err != nil {
		t.Errorf("settle without the files of %s: %q, %v", from, run, err)
	}
	if current, err := s.root.Named(versions.Current); current != to || err != nil || !strings.Contains(said.String(), "runs untried") {
		t.Errorf("current is %q, %v; the log: %s", current, err, said.String())
	}
}

// TestReplacedCrash: a crash in the soak of the version that is being replaced goes back as ever, and stays so when the
// daemon of that start settles, too.
func TestReplacedCrash(t *testing.T) {
	for unpacked, pending := range map[string]string{before: from, from: ""} {
		s := soaking(t) // to, after from
		s.serves(t)(false)
		for _, version := range []string{to, from} { // the scripts keep all others
			if version == unpacked {
				continue
			}
			if err := os.CopyFS(filepath.Join(string(s.root), "kept", version), os.DirFS(s.root.Dir(version))); err != nil {
				t.Fatal(err)
			}
		}
		s.put(t, "root/kept/current", to, 0o644)
		if err := s.root.Point(versions.Current, unpacked); err != nil { // as the package does
			t.Fatal(err)
		}
		for _, by := range []string{"the unit", "the daemon"} {
			run, err := Settle(t.Context(), s.root, s.state, s.config(t, ""), slog.New(slog.DiscardHandler))
			if run != from && (by == "the unit" || pending != "" || run != "") || err != nil {
				t.Errorf("%s unpacked: %s settles: %q, %v", unpacked, by, run, err)
			}
			if current, err := s.root.Named(versions.Current); current != from || err != nil {
				t.Errorf("%s unpacked: after %s has settled, current is %q, %v", unpacked, by, current, err)
			}
			if replaced, err := s.root.Replaced(); replaced != pending || err != nil {
				t.Errorf("%s unpacked: %q is to run until the scripts end, %v; want %q", unpacked, replaced, err, pending)
			}
		}
	}
}

// TestTake: without a trial the version changes as it is. A configuration that it rejects changes nothing.
func TestTake(t *testing.T) {
	s := build(t, t.TempDir())
	c, err := s.change(t.Output())
	if err != nil {
		t.Fatal(err)
	}
	c.Config = s.config(t, "new_key = true\n")
	if err := c.Take(t.Context()); err == nil || !strings.Contains(err.Error(), "nothing was changed") {
		t.Errorf("a configuration that it rejects: %v", err)
	}
	if version, err := s.consistent(); version != from || err != nil {
		t.Errorf("%q, %v", version, err)
	}
	c.Config = s.config(t, "")
	if err := c.Take(t.Context()); err != nil {
		t.Error(err)
	}
	if version, err := s.consistent(); version != to || err != nil {
		t.Errorf("%q, %v", version, err)
	}

	s = build(t, t.TempDir())
	if c, err = s.change(t.Output()); err != nil {
		t.Fatal(err)
	}
	c.Restart = func(context.Context) error { return errors.New("it does not start") }
	err = c.Take(t.Context())
	if err == nil || !strings.Contains(err.Error(), "it does not start") || !strings.Contains(err.Error(), "sandboxd rollback") {
		t.Errorf("one that does not start: %v", err)
	}
	if previous, err := s.root.Named(versions.Previous); previous != from || err != nil {
		t.Errorf("previous is %q, %v", previous, err)
	}
}
