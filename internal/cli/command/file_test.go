package command

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// TestWriteFile: a file is replaced by a complete one or not at all, and nothing is left
// beside it.
func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "file")
	write := func(text string, err error) func(io.Writer) error {
		return func(w io.Writer) error {
			_, werr := io.WriteString(w, text)
			return errors.Join(werr, err)
		}
	}
	broken := errors.New("the connection broke")
	for _, v := range []struct {
		text string
		err  error
		want string
	}{
		{"the first, which is longer", nil, "the first, which is longer"},
		{"half of", broken, "the first, which is longer"},
		{"the second", nil, "the second"},
	} {
		if err := WriteFile(name, 0o600, write(v.text, v.err)); !errors.Is(err, v.err) {
			t.Errorf("%q: %v, want %v", v.text, err, v.err)
		}
		b, err := os.ReadFile(name)
		fi, serr := os.Stat(name)
		if err != nil || serr != nil || string(b) != v.want || fi.Mode() != 0o600 {
			t.Errorf("after %q the file is %q, %v, %v, %v; want %q", v.text, b, fi.Mode(), err, serr, v.want)
		}
		if all, err := os.ReadDir(dir); err != nil || len(all) != 1 {
			t.Errorf("after %q the directory has %v, %v", v.text, all, err)
		}
	}
	if err := WriteFile(filepath.Join(dir, "absent", "file"), 0o600, write("x", nil)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("in a directory that does not exist: %v", err)
	}
	pipe := filepath.Join(dir, "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	reader, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	if err := WriteFile(pipe, 0o600, write("x", nil)); err != nil {
		t.Errorf("to a pipe: %v", err)
	}
	link := filepath.Join(dir, "link") // as a guest may have sent it
	for _, to := range []string{name, pipe, "/dev/null"} {
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
		if err := WriteFile(link, 0o600, write("mine", nil)); err != nil {
			t.Errorf("over a link to %s: %v", to, err)
		}
		if fi, err := os.Lstat(link); err != nil || !fi.Mode().IsRegular() {
			t.Errorf("the link to %s is %v, %v", to, fi.Mode(), err)
		}
		if b, err := os.ReadFile(name); err != nil || string(b) != "the second" {
			t.Errorf("behind the link there is %q, %v", b, err)
		}
		if err := os.Remove(link); err != nil {
			t.Fatal(err)
		}
	}
	if err := WriteFile("/dev/fd/"+strconv.Itoa(int(reader.Fd())), 0o600, write("", nil)); err != nil {
		t.Errorf("to a link of the kernel: %v", err)
	}
	b := make([]byte, 1)
	if _, err := io.ReadFull(reader, b); err != nil || string(b) != "x" {
		t.Errorf("the pipe has %q, %v", b, err)
	}
}
