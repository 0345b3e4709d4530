package sealed

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// mustBeAlone fails unless the directory of file has file and nothing else.
func mustBeAlone(t testing.TB, file string) {
	t.Helper()
	all, err := os.ReadDir(filepath.Dir(file))
	if err != nil || len(all) != 1 || all[0].Name() != filepath.Base(file) {
		t.Errorf("the directory has %v, %v; want %s alone", all, err, filepath.Base(file))
	}
}

// TestMade: the first Open makes a key that the next one reads, in a file that is secret.
func TestMade(t *testing.T) {
	file := newFile(t)
	k := mustOpen(t, file)
	sealed := k.Seal(purpose, []byte("a secret"))
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil || st.Mode != unix.S_IFREG|0o600 || int(st.Uid) != os.Geteuid() {
		t.Errorf("mode %o of user %d, %v", st.Mode, st.Uid, err)
	}
	text, err := os.ReadFile(file)
	if err != nil || !regexp.MustCompile(`^`+k.ID()+` [0-9a-f]{64}\n$`).Match(text) {
		t.Errorf("%d bytes, %v", len(text), err)
	}
	again := mustOpen(t, file)
	if got, err := again.Unseal(purpose, sealed); err != nil || string(got) != "a secret" || again.ID() != k.ID() {
		t.Errorf("%q, %v", got, err)
	}
	if other := mustOpen(t, newFile(t)); other.ID() == k.ID() {
		t.Error("two files have one key")
	}
	mustBeAlone(t, file)
}

// TestCredential: the credential comes first, the file is then neither read nor made.
func TestCredential(t *testing.T) {
	file, dir := newFile(t), t.TempDir()
	path := filepath.Join(dir, Credential)
	if err := os.WriteFile(path, []byte(keyA+"\n"), 0o400); err != nil {
		t.Fatal(err)
	}
	k, err := Open(dir, file, true)
	if err != nil || k.From() != path || k.ID() != keyOf(t, keyA).ID() {
		t.Fatalf("%v, %v", k, err)
	}
	_, err = k.Unseal(purpose, keyOf(t, keyB).Seal(purpose, nil))
	if !errors.Is(err, ErrOtherKey) || !strings.Contains(err.Error(), "at the end of the file that the credential sandboxd.key") {
		t.Errorf("with another key: %v", err)
	}
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file was made beside the credential: %v", err)
	}
	// One that is there and cannot be used is no reason to take another key.
	if err := os.Chmod(path, 0o444); err != nil {
		t.Fatal(err)
	}
	if k, err := Open(dir, file, true); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("%v, %v", k, err)
	}
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file was made in the place of the credential: %v", err)
	}
	// A service may have other credentials alone.
	if k, err := Open(t.TempDir(), file, true); err != nil || k.From() != file {
		t.Errorf("%v, %v", k, err)
	}
}

// TestMissing: no key is made where something was sealed with another one. The error says
// which key is missing and what to do, and what it says works.
func TestMissing(t *testing.T) {
	file, credentials := newFile(t), t.TempDir()
	sealed := keyOf(t, keyA).Seal(purpose, []byte("a secret"))
	for _, dir := range []string{"", credentials} {
		k, err := Open(dir, file, false)
		if k != nil || !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("%v, %v", k, err)
		}
		for _, want := range []string{
			file, "no credential sandboxd.key", "give the service its credential", "put back a copy", "openssl rand",
		} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%v; want %q in it", err, want)
			}
		}
		if left := listing(t, file); left != "" {
			t.Errorf("it made\n%s", left)
		}
	}
	for _, path := range []string{filepath.Join(credentials, Credential), file} { // either is given again
		if err := put(path, 0o600); err != nil {
			t.Fatal(err)
		}
		k, err := Open(credentials, file, false)
		if err != nil || k.From() != path {
			t.Fatalf("%v, %v", k, err)
		}
		if got, err := k.Unseal(purpose, sealed); err != nil || string(got) != "a secret" {
			t.Errorf("%q, %v", got, err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(credentials, file, false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("gone again: %v", err)
	}
}

// TestOpenWritesNothing: a key that is there is read at once, whoever has locked the
// directory, and what lies beside it stays. So it opens on a read-only file system, too.
func TestOpenWritesNothing(t *testing.T) {
	file := newFile(t)
	if err := errors.Join(put(file, 0o600), os.WriteFile(file+".new", []byte("half"), 0o600)); err != nil {
		t.Fatal(err)
	}
	d, err := os.Open(filepath.Dir(file))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	before := listing(t, file)
	mustOpen(t, file) // a hang is a failure, with the stack
	if after := listing(t, file); after != before {
		t.Errorf("there was\n%s, and now there is\n%s", before, after)
	}
}

// TestText: what a file may say, and what the errors say of what it may not. None quotes
// a key, and none changes the file.
func TestText(t *testing.T) {
	a, b := keyOf(t, keyA).ID(), keyOf(t, keyB).ID()
	var many strings.Builder
	for n := range maxKeys {
		fmt.Fprintf(&many, "%064x\n", n+1)
	}
	for name, c := range map[string]struct {
		text, want string // an error if want begins with "!"
	}{
		"digits":            {keyA, a},
		"with its ID":       {a + " " + keyA + "\n", a},
		"two":               {a + " " + keyA + "\n" + keyB + "\n", a + " " + b},
		"empty lines":       {"\n" + keyA + "\r\n\n" + b + " " + keyB + "\n\n", a + " " + b},
		"twice":             {keyA + "\n" + keyB + "\n" + keyA, a + " " + b},
		"capitals":          {strings.ToUpper(keyA), a},
		"most":              {many.String(), "…"},
		"empty":             {"", "!has no key"},
		"empty line":        {"\n", "!has no key"},
		"raw bytes":         {strings.Repeat("\xa1", keySize), "!line 1: it has no key"},
		"zeros":             {strings.Repeat("\x00", 2*keySize), "!line 1: its key has more than hex digits"},
		"short":             {keyA[1:], "!line 1: it has no key"},
		"long":              {keyA + "a", "!line 1: it has no key"},
		"no hex":            {keyA[1:] + "g", "!line 1: its key has more than hex digits"},
		"another ID":        {keyA + "\n" + a + " " + keyB, "!line 2: the key is not the one that the line begins with, but " + b},
		"a changed digit":   {a + " " + keyA[:63] + "0", "!line 1: the key is not the one"},
		"lines that joined": {keyA + keyB, "!line 1: it has no key"},
		"three words":       {a + " " + keyA + " x", "!line 1: it has no key"},
		"too many":          {many.String() + keyA, "!more than 32 keys"},
		"huge":              {strings.Repeat("\n", maxFile+1), "!more than"},
	} {
		file := newFile(t)
		if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		k, err := Open("", file, true)
		want, bad := strings.CutPrefix(c.want, "!")
		switch {
		case bad && (err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), file)):
			t.Errorf("%s: %v; want %q and the file's name", name, err, want)
		case bad && (strings.Contains(err.Error(), keyA[:8]) || strings.Contains(err.Error(), keyB[:8])):
			t.Errorf("%s: the error has some of the key: %v", name, err)
		case !bad && err != nil:
			t.Errorf("%s: %v", name, err)
		case !bad && want != "…" && strings.Join(k.IDs(), " ") != want:
			t.Errorf("%s: keys %v, want %s", name, k.IDs(), want)
		}
		if now, err := os.ReadFile(file); err != nil || string(now) != c.text {
			t.Errorf("%s: the file was changed, %v", name, err)
		}
		mustBeAlone(t, file)
	}
}

// TestCut: no part of a key file is a key, at any byte.
func TestCut(t *testing.T) {
	file := newFile(t)
	mustOpen(t, file)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for n := range len(text) - 1 { // without its end of line it is whole
		if err := os.WriteFile(file, text[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		if k, err := Open("", file, true); err == nil {
			t.Errorf("%d of %d bytes are key %s", n, len(text), k.ID())
		}
	}
}

// TestRefused: files that are not the secret of root. The mode counts: root can read all.
func TestRefused(t *testing.T) {
	for name, c := range map[string]struct {
		make func(file string) error
		want string
	}{
		"group":     {func(file string) error { return put(file, 0o640) }, "read by others, mode 0640: chmod 0600"},
		"others":    {func(file string) error { return put(file, 0o604) }, "read by others, mode 0604: chmod 0600"},
		"writable":  {func(file string) error { return put(file, 0o602) }, "read by others, mode 0602: chmod 0600"},
		"directory": {func(file string) error { return os.Mkdir(file, 0o700) }, "no regular file"},
		"pipe":      {func(file string) error { return unix.Mkfifo(file, 0o600) }, "no regular file"},
		"link": {func(file string) error {
			return errors.Join(put(file+".real", 0o600), os.Symlink(file+".real", file))
		}, "symbolic link"},
		"link to nothing": {func(file string) error { return os.Symlink("nothing", file) }, "symbolic link"},
		"open directory": {func(file string) error {
			return errors.Join(put(file, 0o600), os.Chmod(filepath.Dir(file), 0o770))
		}, "others can replace it"},
		"open directory without a file": {func(file string) error { return os.Chmod(filepath.Dir(file), 0o707) }, "others can replace it"},
		"no directory":                  {func(file string) error { return os.Remove(filepath.Dir(file)) }, "no such file or directory"},
	} {
		file := newFile(t)
		if err := c.make(file); err != nil {
			t.Fatal(err)
		}
		before := listing(t, file)
		for what, f := range map[string]func() error{
			"open":   func() error { _, err := Open("", file, true); return err },
			"rotate": func() error { return Rotate(file) },
		} {
			if err := f(); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), filepath.Dir(file)) {
				t.Errorf("%s, %s: %v; want %q", name, what, err, c.want)
			}
		}
		if after := listing(t, file); after != before {
			t.Errorf("%s: there was\n%s, and now there is\n%s", name, before, after)
		}
	}
}

// put writes a good key file with that mode.
func put(file string, mode fs.FileMode) error {
	return errors.Join(os.WriteFile(file, []byte(keyA), 0o600), os.Chmod(file, mode))
}

// listing is what the directory of file has.
func listing(t *testing.T, file string) (text string) {
	t.Helper()
	all, err := os.ReadDir(filepath.Dir(file))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range all {
		fi, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		text += fmt.Sprintln(fi.Name(), fi.Mode(), fi.Size(), fi.ModTime())
	}
	return text
}

// TestOwner: root and the daemon's user may own the file, others not.
func TestOwner(t *testing.T) {
	for _, c := range []struct {
		owner uint32
		uid   int
		want  bool
	}{
		{0, 0, true}, {0, 1000, true}, {1000, 1000, true}, {1000, 0, false}, {1001, 1000, false}, {^uint32(0), 0, false},
	} {
		err := guarded("file", &unix.Stat_t{Mode: unix.S_IFREG | 0o400, Uid: c.owner}, c.uid)
		if (err == nil) != c.want || err != nil && !strings.Contains(err.Error(), fmt.Sprintf("belongs to user %d", c.owner)) {
			t.Errorf("a file of %d for %d: %v", c.owner, c.uid, err)
		}
	}
}

// TestOwnerOfFile is TestOwner with files.
func TestOwnerOfFile(t *testing.T) {
	hosttest.Root(t)
	for _, mine := range []bool{true, false} {
		file := newFile(t)
		if err := put(file, 0o600); err != nil {
			t.Fatal(err)
		}
		what := file
		if !mine {
			what = filepath.Dir(file)
		}
		if err := os.Chown(what, 12345, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := Open("", file, true); err == nil || !strings.Contains(err.Error(), "to user 12345") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestRotate: the new key seals, the old ones open, and what a client removes is gone.
func TestRotate(t *testing.T) {
	file := newFile(t)
	first := mustOpen(t, file)
	sealed := first.Seal(purpose, []byte("a secret"))
	if err := Rotate(file); err != nil {
		t.Fatal(err)
	}
	second := mustOpen(t, file)
	if ids := second.IDs(); len(ids) != 2 || ids[0] == first.ID() || ids[1] != first.ID() {
		t.Fatalf("keys %v; the first was %s", ids, first.ID())
	}
	if got, err := second.Unseal(purpose, sealed); err != nil || string(got) != "a secret" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := first.Unseal(purpose, second.Seal(purpose, nil)); !errors.Is(err, ErrOtherKey) {
		t.Errorf("the old key opens what the new one has sealed: %v", err)
	}
	mustBeAlone(t, file)
	for len(mustOpen(t, file).IDs()) < maxKeys {
		if err := Rotate(file); err != nil {
			t.Fatal(err)
		}
	}
	before, _ := os.ReadFile(file)
	if err := Rotate(file); err == nil || !strings.Contains(err.Error(), "remove its last lines") {
		t.Errorf("one more: %v", err)
	}
	if now, err := os.ReadFile(file); err != nil || !bytes.Equal(now, before) {
		t.Errorf("the file was changed: %v", err)
	}
	if err := Rotate(newFile(t)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a file: %v", err)
	}
}
