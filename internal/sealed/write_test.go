package sealed

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestHalf: a process that is killed while it writes leaves a file beside the key file, with
// any part of a key. No process reads that file or writes into it, and the next process
// that writes the key file removes it.
func TestHalf(t *testing.T) {
	a, b := keyOf(t, keyA).ID(), keyOf(t, keyB).ID()
	whole := b + " " + keyB + "\n"
	for n := 0; n <= len(whole); n += 1 + n/4 {
		for _, there := range []bool{false, true} {
			file := newFile(t)
			if there {
				if err := put(file, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(file+".new", []byte(whole[:n]), 0o644); err != nil {
				t.Fatal(err)
			}
			k := mustOpen(t, file)
			if k.ID() == b || there != (k.ID() == a) {
				t.Errorf("%d bytes beside a file (%v): key %s", n, there, k.ID())
			}
			if there {
				if err := Rotate(file); err != nil {
					t.Fatal(err)
				}
				if ids := mustOpen(t, file).IDs(); len(ids) != 2 || ids[0] == b || ids[1] != a {
					t.Errorf("%d bytes beside a file that was rotated: keys %v", n, ids)
				}
			}
			mustBeAlone(t, file)
		}
	}
	file := newFile(t)
	victim := filepath.Join(t.TempDir(), "victim")
	if err := errors.Join(os.WriteFile(victim, []byte("kept"), 0o644), os.Symlink(victim, file+".new")); err != nil {
		t.Fatal(err)
	}
	mustOpen(t, file)
	if b, err := os.ReadFile(victim); err != nil || string(b) != "kept" {
		t.Errorf("it wrote through a link: %q, %v", b, err)
	}
	mustBeAlone(t, file)
}

// TestTogether: processes that start at once, here goroutines, have one key.
func TestTogether(t *testing.T) {
	file := newFile(t)
	keys := make([]*Key, 16)
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			var err error
			if keys[i], err = Open("", file, true); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, k := range keys {
		if k != nil && k.ID() != keys[0].ID() {
			t.Errorf("keys %s and %s", k.ID(), keys[0].ID())
		}
	}
	mustBeAlone(t, file)
}

// TestKill kills a process that makes and rotates keys, again and again. What it said it
// had is there, or newer: the file is whole at every moment, and the next process that writes
// it leaves nothing beside it. TestHalf has what a kill in the midst of a write leaves.
func TestKill(t *testing.T) {
	if file := os.Getenv("SEALED_TEST_WRITER"); file != "" {
		for {
			k, err := Open("", file, true)
			if err == nil {
				fmt.Println("has", k.ID())
				err = Rotate(file)
			}
			if err == nil && len(k.IDs()) > 2 {
				fmt.Println("removes", k.ID())
				err = os.Remove(file)
			}
			if err != nil {
				fmt.Println("failed", err)
				os.Exit(1)
			}
		}
	}
	file := newFile(t)
	for round := range 12 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
		cmd.Env = append(os.Environ(), "SEALED_TEST_WRITER="+file)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		last := ""
		lines := bufio.NewScanner(out)
		for n := 0; lines.Scan(); n++ {
			last = lines.Text()
			if strings.HasPrefix(last, "failed") {
				t.Error(last)
			}
			if n == 1+round%7 {
				cmd.Process.Kill() //nolint:errcheck // it may be gone
			}
		}
		cmd.Wait() //nolint:errcheck // killed
		_, err = os.Lstat(file)
		there := err == nil
		k, err := Open("", file, true)
		if err != nil {
			t.Fatalf("round %d, after %q: %v", round, last, err)
		}
		if id, ok := strings.CutPrefix(last, "has "); ok && (!there || !strings.Contains(strings.Join(k.IDs(), " "), id)) {
			t.Errorf("round %d: it had key %s, and there are %v (file: %v)", round, id, k.IDs(), there)
		}
		if err := Rotate(file); err != nil {
			t.Fatalf("round %d, after %q: %v", round, last, err)
		}
		mustBeAlone(t, file)
	}
}

// TestTooLarge: the kernel takes no byte of the file (RLIMIT_FSIZE, setrlimit(2)). The
// error says which file, and nothing is left.
func TestTooLarge(t *testing.T) {
	if file := os.Getenv("SEALED_TEST_LIMITED"); file != "" {
		err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Max: unix.RLIM_INFINITY})
		if err == nil {
			if os.Getenv("SEALED_TEST_ROTATE") != "" {
				err = Rotate(file)
			} else {
				_, err = Open("", file, true)
			}
		}
		_, werr := os.Stderr.WriteString(fmt.Sprint(err)) // a pipe is no file
		os.Exit(map[bool]int{true: 0, false: 1}[werr == nil])
	}
	for _, rotate := range []string{"", "yes"} {
		file := newFile(t)
		if rotate != "" {
			if err := put(file, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		before := listing(t, file)
		cmd := exec.Command(os.Args[0], "-test.run=^TestTooLarge$")
		cmd.Env = append(os.Environ(), "SEALED_TEST_LIMITED="+file, "SEALED_TEST_ROTATE="+rotate)
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "write key file "+file) || !strings.Contains(string(out), unix.EFBIG.Error()) {
			t.Errorf("rotate %q: %s, %v", rotate, out, err)
		}
		if after := listing(t, file); after != before {
			t.Errorf("rotate %q: there was\n%s, and now there is\n%s", rotate, before, after)
		}
	}
}

// TestFullDisk: without room there is no key, and no half of one; with room there is.
func TestFullDisk(t *testing.T) {
	hosttest.Root(t)
	dir := hosttest.SmallDisk(t, "size=64k,mode=0700")
	file := filepath.Join(dir, "sandboxd.key")
	refused := func(err error) {
		t.Helper()
		if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "free some space there") {
			t.Errorf("on a full disk: %v", err)
		}
	}
	free := hosttest.FillDisk(t, dir)
	_, err := Open("", file, true)
	refused(err)
	if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("there is a key file: %v", err)
	}
	free()
	k := mustOpen(t, file)
	mustBeAlone(t, file)
	hosttest.FillDisk(t, dir)
	refused(Rotate(file))
	if again := mustOpen(t, file); len(again.IDs()) != 1 || again.ID() != k.ID() {
		t.Errorf("keys %v, and there was %s", again.IDs(), k.ID())
	}
}
