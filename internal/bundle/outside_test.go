package bundle

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

func decode(t *testing.T, s string) []byte {
	t.Helper()
	b, err := base64.StdEncoding.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func encode(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

// TestMinisign: Debian's minisign checks what the lines of docs/design/appliance.md cut out of a
// bundle, and finds a byte of the prelude that was changed.
func TestMinisign(t *testing.T) {
	hosttest.Root(t) // only there the package is installed
	doc, err := os.ReadFile("../../docs/design/appliance.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(doc), "```\ntail -n 4")
	lines, _, ok := strings.Cut(rest, "```")
	if !ok {
		t.Fatal("appliance.md has no lines that begin with tail -n 4")
	}
	lines = "tail -n 4" + lines
	by := newSigner(t)
	made := create(t, by)
	good, err := os.ReadFile(made)
	if err != nil {
		t.Fatal(err)
	}
	text, err := by.public.key.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	check := func(b []byte) (string, error) {
		dir := t.TempDir()
		put(t, filepath.Join(dir, "FILE"), string(b), 0o644)
		put(t, filepath.Join(dir, "bundle.pub"), string(text)+"\n", 0o644)
		cmd := exec.Command("sh", "-e")
		cmd.Dir, cmd.Stdin = dir, strings.NewReader(lines)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	want := "Trusted comment: sandboxd 1.2.3 linux/" + runtime.GOARCH + " test.bundle"
	if out, err := check(good); err != nil || !strings.Contains(out, want) {
		t.Errorf("%s%s: %v; want %q", lines, out, err, want)
	}
	for _, at := range []int{20, headerSize + 10, len(good) / 2} {
		good[at] ^= 1
		if out, err := check(good); err == nil {
			t.Errorf("byte %d was changed: %s", at, out)
		}
		good[at] ^= 1
	}
}

// shell runs a bundle as a script.
func shell(t *testing.T, program, file string, env []string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command(program, append([]string{filepath.Base(file)}, args...)...)
	cmd.Dir = filepath.Dir(file)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestPrelude: "sh FILE" gives the file and its arguments to the program in it, and leaves nothing.
func TestPrelude(t *testing.T) {
	by := newSigner(t)
	file := create(t, by)
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"sh", "bash"} {
		for args, want := range map[string]string{
			"":                 "ran bundle install ./test.bundle\n",
			"--key k.pub -x":   "ran bundle install ./test.bundle --key k.pub -x\n",
			"verify --key k":   "ran bundle verify ./test.bundle --key k\n",
			"show -o json":     "ran bundle show ./test.bundle -o json\n",
			"install --verify": "ran bundle install ./test.bundle --verify\n",
		} {
			tmp := t.TempDir()
			out, err := shell(t, program, file, []string{"TMPDIR=" + tmp}, strings.Fields(args)...)
			if err != nil || out != want {
				t.Errorf("%s FILE %s: %q, %v; want %q", program, args, out, err, want)
			}
			if left := tree(t, tmp); len(left) > 0 {
				t.Errorf("%s left %q", program, left)
			}
		}
	}
	out, err := shell(t, "sh", file, []string{"TMPDIR=" + filepath.Join(t.TempDir(), "none")})
	if err != nil || out != "ran bundle install ./test.bundle\n" {
		t.Errorf("without a directory for temporary files: %q, %v", out, err)
	}
	l := mustOpen(t, file, by.public).layout
	other := map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH]
	for name, c := range map[string]struct{ bytes, want string }{
		"a part":          {string(good[:len(good)-1]), "the copy is not whole, copy it again; nothing was written"},
		"more":            {string(good) + "x", "the copy is not whole"},
		"another machine": {strings.Replace(string(good), "="+runtime.GOARCH, "="+other, 1), "get the bundle for " + runtime.GOARCH},
		"a damaged program": {
			string(good[:l.prelude+30]) + "\xff\xff\xff\xff" + string(good[l.prelude+34:]), "the copy is damaged",
		},
	} {
		tmp := t.TempDir()
		bad := put(t, filepath.Join(t.TempDir(), "test.bundle"), c.bytes, 0o644)
		out, err := shell(t, "sh", bad, []string{"TMPDIR=" + tmp})
		if err == nil || !strings.Contains(out, c.want) || strings.Contains(out, "ran ") {
			t.Errorf("%s: %q, %v; want %q", name, out, err, c.want)
		}
		if left := tree(t, tmp); len(left) > 0 {
			t.Errorf("%s: left %q", name, left)
		}
	}
	if out, err := shell(t, "sh", file, []string{"PATH=/nowhere"}); err == nil || !strings.Contains(out, "lacks the programs head tail") {
		t.Errorf("without programs: %q, %v", out, err)
	}
}

// TestDiskFull: files that do not fit are not left half, and the message names the directory.
func TestDiskFull(t *testing.T) {
	hosttest.Root(t)
	by := newSigner(t)
	p := planOf(t, by.secret)
	big := put(t, filepath.Join(t.TempDir(), "big"), strings.Repeat("0123456789", 20_000), 0o644)
	p.Sources = append(p.Sources, Source{Member: Member{Name: "zzz", Kind: File}, Path: big})
	path := filepath.Join(t.TempDir(), "test.bundle")
	if err := Create(t.Context(), path, p); err != nil {
		t.Fatal(err)
	}
	full := t.TempDir()
	if err := unix.Mount("tmpfs", full, "tmpfs", 0, "size=100k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(full, 0); err != nil {
			t.Error(err)
		}
	})
	var noise strings.Builder
	if _, err := io.CopyN(&noise, rand.Reader, 200_000); err != nil {
		t.Fatal(err)
	}
	b := mustOpen(t, path, by.public)
	out := filepath.Join(full, "out")
	if err := b.Extract(t.Context(), out, all); !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "extract zzz to "+out) {
		t.Errorf("extracted to a full disk: %v", err)
	}
	p.Verifier = put(t, filepath.Join(t.TempDir(), "noise"), noise.String(), 0o755)
	if err := Create(t.Context(), filepath.Join(full, "x"), p); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("created on a full disk: %v", err)
	}
	if left := tree(t, full); len(left) > 0 {
		t.Errorf("left %q", left)
	}
}

// TestNoExec: the prelude leaves a directory that forbids programs, and takes the next one.
func TestNoExec(t *testing.T) {
	hosttest.Root(t)
	hard := t.TempDir()
	if err := unix.Mount("tmpfs", hard, "tmpfs", unix.MS_NOEXEC, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(hard, 0); err != nil {
			t.Error(err)
		}
	})
	out, err := shell(t, "sh", create(t, newSigner(t)), []string{"TMPDIR=" + hard})
	if err != nil || out != "ran bundle install ./test.bundle\n" {
		t.Errorf("%q, %v", out, err)
	}
	if left := tree(t, hard); len(left) > 0 {
		t.Errorf("left %q", left)
	}
}
