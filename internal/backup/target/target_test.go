package target_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/backup/target/targettest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/store"
)

func directory(t *testing.T) target.Target {
	t.Helper()
	d, err := target.Parse(t.TempDir(), target.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func names(t *testing.T, to target.Target) (all []string) {
	t.Helper()
	files, err := to.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		all = append(all, fmt.Sprintf("%s:%d", f.Name, f.Bytes))
	}
	slices.Sort(all)
	return all
}

func text(t *testing.T, r io.ReadCloser, err error) string {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(r)
	if err := errors.Join(err, r.Close()); err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestTarget holds what both kinds do, and that a saved file is what was sent.
func TestTarget(t *testing.T) {
	s3 := targettest.S3(t)
	for kind, to := range map[string]target.Target{"directory": directory(t), "S3": s3.Target} {
		t.Run(kind, func(t *testing.T) {
			ctx := t.Context()
			if got := names(t, to); len(got) > 0 {
				t.Errorf("an empty target has %v", got)
			}
			if _, err := to.Get(ctx, "none"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("get what is not there: %v", err)
			}
			if err := to.Remove(ctx, "none"); err != nil {
				t.Errorf("remove what is not there: %v", err)
			}
			big := bytes.Repeat([]byte("0123456789abcdef"), 20<<16) // 20 MiB, more than one part of S3's
			for name, content := range map[string][]byte{"big": big, "small": []byte("x"), "empty": nil} {
				sum, err := target.Save(ctx, to, name, bytes.NewReader(content), int64(len(content)), nil)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if want := sha256.Sum256(content); sum != hex.EncodeToString(want[:]) {
					t.Errorf("%s has the sum %s", name, sum)
				}
				r, err := target.Open(ctx, to, name)
				if got := text(t, r, err); got != string(content) {
					t.Errorf("%s reads as %d other bytes", name, len(got))
				}
			}
			want := []string{"big.sha256:70", "big:20971520", "empty.sha256:72", "empty:0", "small.sha256:72", "small:1"}
			if got := names(t, to); !slices.Equal(got, want) {
				t.Errorf("it has %v, want %v", got, want)
			}
			for _, name := range []string{"big", "small"} {
				if err := target.Drop(ctx, to, name); err != nil {
					t.Error(err)
				}
			}
			if got := names(t, to); !slices.Equal(got, []string{"empty.sha256:72", "empty:0"}) {
				t.Errorf("it has %v after both were removed", got)
			}
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			if _, err := target.Save(ctx, to, "late", bytes.NewReader(big), int64(len(big)), nil); !errors.Is(err, context.Canceled) {
				t.Errorf("nobody wants it any more: %v", err)
			}
			if got := names(t, to); len(got) != 2 {
				t.Errorf("it has %v after a put that was ended", got)
			}
		})
	}
}

// TestDirectory holds what a directory is refused for, and that sha256sum reads the marks.
func TestDirectory(t *testing.T) {
	d := directory(t)
	if err := d.Put(t.Context(), "a", strings.NewReader("one"), 3); err != nil {
		t.Fatal(err)
	}
	if err := d.Put(t.Context(), "a", strings.NewReader("two"), 3); !errors.Is(err, fs.ErrExist) {
		t.Errorf("put over another file: %v", err)
	}
	if err := d.Put(t.Context(), "b", strings.NewReader("three"), 9); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("put less than was said: %v", err)
	}
	if _, err := target.Save(t.Context(), d, "c", strings.NewReader("three"), 5, nil); err != nil {
		t.Fatal(err)
	}
	check := exec.Command("sha256sum", "-c", "c.sha256")
	check.Dir = d.String()
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("sha256sum: %v\n%s", err, out)
	}
	if fi, err := os.Stat(filepath.Join(d.String(), "c")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the mode of a backup: %v, %v", fi.Mode(), err)
	}
	if err := errors.Join(os.Symlink("/etc/passwd", filepath.Join(d.String(), "out")),
		unix.Mkfifo(filepath.Join(d.String(), "pipe"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"out", "pipe", "../out"} {
		if r, err := d.Get(t.Context(), name); err == nil {
			t.Errorf("%s is read: %q", name, text(t, r, nil))
		}
	}
	if got := names(t, d); !slices.Equal(got, []string{"a:3", "c.sha256:68", "c:5"}) {
		t.Errorf("it has %v", got)
	}
	if err := os.Chmod(d.String(), 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := d.List(t.Context()); err == nil || !strings.Contains(err.Error(), "chmod go-w") {
		t.Errorf("a directory of everybody: %v", err)
	}
	if err := os.RemoveAll(d.String()); err != nil {
		t.Fatal(err)
	}
	for what, f := range map[string]func() error{
		"put":  func() error { return d.Put(t.Context(), "a", strings.NewReader("one"), 3) },
		"list": func() error { _, err := d.List(t.Context()); return err },
		"get":  func() error { _, err := d.Get(t.Context(), "a"); return err },
	} {
		if err := f(); err == nil || !strings.Contains(err.Error(), "mount it") || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s in a directory that is gone: %v", what, err)
		}
	}
}

// TestFullDirectory holds that a full disk leaves nothing half, and what was there.
func TestFullDirectory(t *testing.T) {
	hosttest.Root(t)
	dir := hosttest.SmallDisk(t, "size=1m")
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	d, err := target.Parse(dir, target.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := target.Save(t.Context(), d, "first", strings.NewReader("first"), 5, nil); err != nil {
		t.Fatal(err)
	}
	big := bytes.NewReader(make([]byte, 2<<20))
	_, err = target.Save(t.Context(), d, "second", big, big.Size(), nil)
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), dir+" is full") {
		t.Errorf("a full disk: %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("the full disk has %v, %v", entries, err)
	}
}

// TestPart holds that a host which lost its power in a put has one file of it at most.
func TestPart(t *testing.T) {
	d := directory(t)
	left := filepath.Join(d.String(), ".sandboxd-a-h.part")
	if err := os.WriteFile(left, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	all, err := target.Backups(t.Context(), d)
	if err != nil || len(all) > 0 {
		t.Errorf("half a backup counts: %v, %v", all, err)
	}
	name := target.Name("a-h", 1, time.Unix(0, 0), false)
	if _, err := target.Save(t.Context(), d, name, strings.NewReader("x"), 1, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the rest of the put that was cut short is there: %v", err)
	}
}

// TestBadStorage holds what is said of storage that is gone, full, lies or wants another key, and
// that nothing of the backup is then there.
func TestBadStorage(t *testing.T) {
	s := targettest.S3(t)
	if _, err := target.Save(t.Context(), s.Target, "kept", strings.NewReader("kept"), 4, nil); err != nil {
		t.Fatal(err)
	}
	save := func() error {
		_, err := target.Save(t.Context(), s.Target, "new", strings.NewReader("new"), 3, nil)
		return err
	}
	bad := func(what, want string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), s.Address) ||
			strings.Contains(err.Error(), targettest.Secret) {
			t.Errorf("%s: %v; want %q", what, err, want)
		}
	}
	answer := func(f func(*http.Response)) { s.Answer.Store(&f) }

	answer(targettest.Flip)
	err := save()
	bad("it lies", "stored something else", err)
	if !errors.Is(err, target.ErrLied) {
		t.Errorf("it lies: %v", err)
	}
	answer(targettest.Full)
	bad("it is full", "full", save())
	answer(func(*http.Response) {})
	s.Gone.Store(true)
	bad("it is gone", "new", save())
	s.Gone.Store(false)
	if err := os.WriteFile(s.Options.Credentials, []byte(targettest.Key+":another-secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	bad("another key", "signature", save())
	if err := os.WriteFile(s.Options.Credentials, []byte(targettest.Key+":"+targettest.Secret), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := names(t, s.Target); !slices.Equal(got, []string{"kept.sha256:71", "kept:4"}) {
		t.Errorf("after all that it has %v", got)
	}
	if err := save(); err != nil {
		t.Errorf("when it is well again: %v", err)
	}
	// What rots later is found when it is read.
	answer(targettest.Flip)
	if r, err := target.Open(t.Context(), s.Target, "kept"); err == nil {
		if _, err := io.ReadAll(r); err == nil {
			t.Error("a damaged mark is taken")
		}
	}
	answer(func(r *http.Response) {
		if strings.HasSuffix(r.Request.URL.Path, "/kept") {
			targettest.Flip(r)
		}
	})
	r, err := target.Open(t.Context(), s.Target, "kept")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(r); !errors.Is(err, target.ErrLied) {
		t.Errorf("a damaged backup: %v", err)
	}
	none, err := target.Parse(strings.Replace(s.Address, "/backups/", "/nobodys/", 1), s.Options)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := none.List(t.Context()); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a bucket that is not there: %v", err)
	}
}

// TestCredentials holds from where they come, and that no error has one.
func TestCredentials(t *testing.T) {
	dir := t.TempDir()
	file, own := filepath.Join(dir, "file"), filepath.Join(dir, target.Credential)
	for what, c := range map[string]struct {
		text string
		mode fs.FileMode
		want string
	}{
		"good":       {"key:secret\n", 0o600, ""},
		"with colon": {"key:se:cret", 0o400, ""},
		"open":       {"key:secret", 0o640, "chmod 600"},
		"two lines":  {"key:secret\nkey:secret", 0o600, "want one line"},
		"one word":   {"secret", 0o600, "want one line"},
		"empty":      {"", 0o600, "want one line"},
	} {
		for _, path := range []string{file, own} {
			if err := errors.Join(os.WriteFile(path, []byte(c.text), 0o600), os.Chmod(path, c.mode)); err != nil {
				t.Fatal(err)
			}
			o := target.Options{Credentials: path}
			if path == own {
				o = target.Options{Credentials: "/nobody/reads/this", Directory: dir}
			}
			switch err := o.Check(); {
			case c.want == "" && err != nil, c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("%s: %v", what, err)
			case err != nil && strings.Contains(err.Error(), "secret"):
				t.Errorf("%s: the error has the secret: %v", what, err)
			}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := (target.Options{Directory: dir}).Check(); err == nil || !strings.Contains(err.Error(), target.Credential) {
		t.Errorf("none: %v", err)
	}
}

func TestParse(t *testing.T) {
	for address, want := range map[string]string{
		"/srv/backups":                            "",
		"s3:https://storage.example.com/b":        "",
		"s3:https://storage.example.com:9000/b/p": "",
		"s3:http://127.0.0.1:9000/b/p/q":          "",
		"":                                        "absolute path",
		"srv":                                     "absolute path",
		"/":                                       "absolute path",
		"/srv/../x":                               "absolute path",
		"https://storage.example.com/b":           "absolute path",
		"s3:https://storage.example.com":          "BUCKET",
		"s3:https://storage.example.com/b/../c":   "without . and ..",
		"s3:ftp://storage.example.com/b":          "want s3:",
		"s3:https://k:hunter2@example.com/b":      "without a user",
		"s3:https://k:hunter2@[/b":                "want s3:",
		"s3:https://storage.example.com/b?x=y":    "want s3:",
	} {
		to, err := target.Parse(address, target.Options{})
		switch {
		case want == "" && (err != nil || to.String() != address):
			t.Errorf("%q: %v", address, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "hunter2")):
			t.Errorf("%q: %v; want %q", address, err, want)
		}
	}
	for address, want := range map[string]bool{
		"/srv": false, "s3:https://h/b": false, "s3:http://h/b": true, "s3:http://127.0.0.1:1/b": false, "s3:http://[::1]/b": false,
		"s3:http://10.0.0.1/b": true, "s3:http://localhost:1/b": false,
	} {
		if got := target.InClear(address); got != want {
			t.Errorf("%s goes in clear: %v", address, got)
		}
	}
}

// TestNames holds that names say what a backup is, and in which order.
func TestNames(t *testing.T) {
	at := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	const id = "abcdefghijkl2345"
	for host, want := range map[string]string{
		"box": "a-box", "Box.Example.COM": "a-box.example.com", "-_-": "a-localhost", "a b/../c": "a-a-b-..-c", "": "a-localhost",
	} {
		label := target.Label("a", host)
		if label != want {
			t.Errorf("the label of %q is %s, want %s", host, label, want)
		}
		owner := target.Owner(label, id)
		name := target.Name(owner, 7, at, true)
		b, ok := target.ParseName(name)
		want := target.Backup{Name: name, Owner: owner, Label: label, ID: id, Number: 7, Taken: at, Encrypted: true}
		if !ok || b != want {
			t.Errorf("%s reads as %+v", name, b)
		}
	}
	for _, name := range []string{
		"", "x", "sandboxd-a-h-1-20261127T120000Z.tar.gz", "sandboxd-a-h-000001-2026.tar.gz",
		"sandboxd-a-h-000001-20261399T120000Z.tar.gz", "sandboxd-a-h-000001-20261127T120000Z.tar.gz.sha256",
	} {
		if b, ok := target.ParseName(name); ok {
			t.Errorf("%q reads as %+v", name, b)
		}
	}
	// An earlier release wrote none; what is no id is of the name.
	for owner, want := range map[string][2]string{
		"a-box": {"a-box", ""}, "a-abcdefghijkl2341": {"a-abcdefghijkl2341", ""}, "a-box-abcdefghijkl234": {"a-box-abcdefghijkl234", ""},
		"a-b-" + id: {"a-b", id},
	} {
		if b, ok := target.ParseName(target.Name(owner, 7, at, false)); !ok || b.Label != want[0] || b.ID != want[1] || b.Owner != owner {
			t.Errorf("%s reads as %+v", owner, b)
		}
	}
	d := directory(t)
	write := func(name string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(d.String(), name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	here := target.Whose{Label: "a-h", BackupIdentity: store.BackupIdentity{ID: id}}
	// The clock was wrong at the second one; the third was cut short; of the fourth only the mark is left.
	for i, when := range []time.Time{at, at.AddDate(9, 0, 0), at.Add(time.Hour), at.Add(2 * time.Hour)} {
		name := target.Name(here.Owner(), i+1, when, false)
		if i < 3 {
			write(name)
		}
		if i != 2 {
			write(name + target.Suffix)
		}
	}
	other := target.Name("a-other", 9, at, false)
	write(other)
	write(other + target.Suffix)
	write("notes.txt")
	all, err := target.Backups(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, b := range all {
		got = append(got, fmt.Sprintf("%s %d %v %d", b.Label, b.Number, b.Whole, b.Bytes))
	}
	if want := []string{"a-h 1 true 1", "a-h 2 true 1", "a-h 3 false 1", "a-h 4 false -1", "a-other 9 true 1"}; !slices.Equal(got, want) {
		t.Errorf("the backups are %q, want %q", got, want)
	}
	if b, err := target.Find(t.Context(), d, here, target.Latest); err != nil || b.Number != 2 {
		t.Errorf("the latest is %+v, %v", b, err)
	}
	if b, err := target.Find(t.Context(), d, here, other); err != nil || b.Name != other {
		t.Errorf("one of another host is %+v, %v", b, err)
	}
	if _, err := target.Find(t.Context(), d, target.Whose{Label: "a-new"}, target.Latest); !errs.Is(err, errs.NotFound) ||
		!strings.Contains(err.Error(), other) {
		t.Errorf("a new host without backups: %v", err)
	}
	if _, err := target.Find(t.Context(), d, here, "none"); !errs.Is(err, errs.NotFound) {
		t.Errorf("a name that is none: %v", err)
	}
}
