package layer

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"golang.org/x/sys/unix"
)

// TestPack: what a guest wrote becomes the tar of a layer, without what no layer has; what
// a layer cannot say is refused.
func TestPack(t *testing.T) {
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	ok(os.MkdirAll(in("etc/deep"), 0o750))
	ok(os.Mkdir(in(".agent"), 0o700))
	ok(os.WriteFile(in(".agent/secret"), []byte("token"), 0o600))
	ok(os.WriteFile(in("etc/file"), []byte("text"), 0o644))
	ok(os.Link(in("etc/file"), in("etc/hard")))
	ok(os.Symlink("/etc/shadow", in("etc/soft")))
	ok(unix.Mkfifo(in("etc/pipe"), 0o600))
	hide := func(p string) bool { return p == "/.agent" }
	pack := func() (names string, err error) {
		var b bytes.Buffer
		if err := Pack(t.Context(), dir, hide, &b); err != nil {
			return "", err
		}
		var all []string
		for tr := tar.NewReader(&b); ; {
			h, err := tr.Next()
			if err == io.EOF {
				return strings.Join(all, " "), nil
			}
			ok(err)
			name := h.Name
			if h.Linkname != "" {
				name += ">" + h.Linkname
			}
			all = append(all, name)
		}
	}
	const want = "etc/ etc/deep/ etc/file etc/hard>etc/file etc/soft>/etc/shadow"
	if names, err := pack(); err != nil || names != want {
		t.Errorf("%s, %v; want %s", names, err, want)
	}
	refused := func(why string, want errs.Code, make, unmake func() error) {
		t.Helper()
		ok(make())
		if _, err := pack(); !errs.Is(err, want) {
			t.Errorf("%s: %v, want %s", why, err, want)
		}
		ok(unmake())
	}
	name := in("etc/.wh.file")
	refused("a name of whiteouts", errs.Unsupported,
		func() error { return os.WriteFile(name, nil, 0o600) }, func() error { return os.Remove(name) })
	big := in("big")
	refused("a huge file of one hole", errs.Exhausted, func() error {
		if err := os.WriteFile(big, nil, 0o600); err != nil {
			return err
		}
		return os.Truncate(big, maxGuestBytes+1)
	}, func() error { return os.Remove(big) })
	deep := in(strings.Repeat("d/", maxGuestDepth+2))
	refused("a deep tree", errs.Unsupported,
		func() error { return os.MkdirAll(deep, 0o700) }, func() error { return os.RemoveAll(in("d")) })
	if names, err := pack(); err != nil || names != want {
		t.Errorf("%s, %v; want %s", names, err, want)
	}
}
