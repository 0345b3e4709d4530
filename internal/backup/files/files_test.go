package files

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/store"
)

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func newStore(t *testing.T) *chunks.Store {
	t.Helper()
	d, err := target.Parse(t.TempDir(), target.Options{})
	must(t, err)
	return &chunks.Store{
		Target: d, Whose: target.Whose{Label: "a-box", BackupIdentity: store.NewBackupIdentity("")},
		Journal: filepath.Join(t.TempDir(), "journal"), Log: slog.New(slog.DiscardHandler),
	}
}

func plain(r io.Reader) (io.Reader, error) { return r, nil }

// save is a backup of a directory.
func save(t *testing.T, s *chunks.Store, dir string) (Tree, chunks.Catalog, chunks.Stats) {
	t.Helper()
	n, err := s.Begin(t.Context())
	must(t, err)
	defer n.Close() //nolint:errcheck // its journal is synced
	n.BeginTree()
	tree, err := Save(t.Context(), n, dir, t.TempDir())
	must(t, err)
	c, err := n.Finish(t.Context(), t.TempDir())
	must(t, err)
	return tree, c, n.Stats()
}

func restore(t *testing.T, s *chunks.Store, tree Tree, c chunks.Catalog) (string, error) {
	t.Helper()
	r, err := chunks.NewReader(t.Context(), s.Target, c, plain)
	must(t, err)
	defer r.Close()
	dir := t.TempDir()
	return dir, Restore(t.Context(), r, tree, dir, nil)
}

// list describes all names below a directory, with everything that a restore must bring back.
func list(t *testing.T, dir string) (all []string) {
	t.Helper()
	inodes := map[uint64]int{}
	must(t, filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err = errors.Join(err, unix.Lstat(p, &st)); err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		if _, ok := inodes[st.Ino]; !ok {
			inodes[st.Ino] = len(inodes)
		}
		line := fmt.Sprintf("%s #%d %o %d:%d %d.%09d rdev %d", rel, inodes[st.Ino],
			st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec, st.Rdev)
		buf := make([]byte, 64<<10)
		n, err := unix.Llistxattr(p, buf)
		if err != nil {
			return err
		}
		keys := strings.Split(string(buf[:n]), "\x00")
		slices.Sort(keys)
		for _, k := range keys {
			if n, err := unix.Lgetxattr(p, k, buf); k != "" && err == nil {
				line += fmt.Sprintf(" %s=%q", k, buf[:n])
			}
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(p)
			line += fmt.Sprintf(" %d bytes %.4x, err %v, %d MiB on disk", len(b), sha256.Sum256(b), err, st.Blocks>>11)
		case unix.S_IFLNK:
			to, err := os.Readlink(p)
			line += fmt.Sprintf(" -> %s, %v", to, err)
		}
		all = append(all, line)
		return nil
	}))
	return all
}

func compare(t *testing.T, got, want []string) {
	t.Helper()
	for _, line := range want {
		if !slices.Contains(got, line) {
			t.Errorf("missing: %s", line)
		}
	}
	for _, line := range got {
		if !slices.Contains(want, line) {
			t.Errorf("too much: %s", line)
		}
	}
}

// zoo makes a directory with every kind of name that needs no root.
func zoo(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	at := func(p string) string { return filepath.Join(dir, p) }
	r := rand.New(rand.NewPCG(1, 2))
	big := make([]byte, 5<<20)
	for i := range big {
		big[i] = byte(r.IntN(256))
	}
	must(t, os.MkdirAll(at("a/b/c"), 0o755), os.WriteFile(at("a/big"), big, 0o640), os.WriteFile(at("empty"), nil, 0o600),
		os.WriteFile(at("a/b/su"), []byte("su"), 0o755), os.Chmod(at("a/b/su"), 0o4755|fs.ModeSetuid),
		os.Symlink("/etc/shadow", at("a/link")), os.Symlink("nowhere", at("a/b/c/link")), os.Link(at("a/big"), at("a/b/hard")),
		os.Link(at("a/link"), at("hard-link-of-link")),
		unix.Mkfifo(at("pipe"), 0o622), os.WriteFile(at("\xff\n name"), []byte("x"), 0o644),
		os.Mkdir(at("closed"), 0o500), os.WriteFile(at("zeros"), make([]byte, 3<<20), 0o644))
	sparse, err := os.Create(at("sparse"))
	must(t, err)
	must(t, sparse.Truncate(40<<20))
	for _, off := range []int64{1 << 20, 1<<20 + 20<<10, 30 << 20} {
		_, err := sparse.WriteAt([]byte("data"), off)
		must(t, err)
	}
	must(t, sparse.Close(), unix.Setxattr(at("empty"), "user.note", []byte("kept\x00too"), 0),
		unix.Setxattr(at("a"), "user.dir", []byte("d"), 0))
	old := []unix.Timespec{{Sec: 1, Nsec: 5}, {Sec: -100, Nsec: 123456789}}
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, at("a/link"), old, unix.AT_SYMLINK_NOFOLLOW),
		unix.UtimesNanoAt(unix.AT_FDCWD, at("a/b"), old, 0))
	return dir
}

// TestRestore: what is restored is what was saved, and a second backup of it sends nothing.
func TestRestore(t *testing.T) {
	s, dir := newStore(t), zoo(t)
	tree, c, _ := save(t, s, dir)
	to, err := restore(t, s, tree, c)
	must(t, err)
	want := list(t, dir)
	for i, line := range want { // zeros come back as a hole
		if strings.HasPrefix(line, "zeros ") {
			want[i] = strings.Replace(line, ", 3 MiB on disk", ", 0 MiB on disk", 1)
		}
	}
	compare(t, list(t, to), want)
	if tree.Files != 11 || tree.Bytes < 8<<20 || tree.Bytes > 9<<20 {
		t.Errorf("it has %d files, %d bytes", tree.Files, tree.Bytes)
	}
	again, _, stats := save(t, s, dir)
	if stats.NewChunks > 0 || !slices.Equal(again.Stream, tree.Stream) {
		t.Errorf("a second one sends %+v", stats)
	}
	// The restored tree has the same content and list, but for blocks of zeros.
	if _, _, stats = save(t, s, to); stats.NewBytes > 64<<10 {
		t.Errorf("one of the copy sends %+v", stats)
	}
	r, err := chunks.NewReader(t.Context(), s.Target, c, plain)
	must(t, err)
	defer r.Close()
	if names, size, err := Check(r.Stream(t.Context(), tree.Stream), nil); err != nil || size != tree.Bytes || names < tree.Files {
		t.Errorf("%d names, %d bytes, %v", names, size, err)
	}
}

// TestOverlay: owners, whiteouts and the marks of overlayfs come back; devices do not.
func TestOverlay(t *testing.T) {
	hosttest.Root(t)
	s, dir := newStore(t), t.TempDir()
	at := func(p string) string { return filepath.Join(dir, p) }
	must(t, os.Mkdir(at("opaque"), 0o755), os.WriteFile(at("opaque/f"), []byte("f"), 0o755), os.Lchown(at("opaque/f"), 33, 65535),
		unix.Mknod(at("gone"), unix.S_IFCHR, 0), unix.Setxattr(at("opaque"), "trusted.overlay.opaque", []byte("y"), 0),
		os.Chmod(at("opaque/f"), fs.ModeSetuid|0o755), os.Symlink("x", at("l")), os.Lchown(at("l"), 5, 6),
		unix.Lsetxattr(at("l"), "trusted.overlay.redirect", []byte("/x"), 0), os.Lchown(dir, 7, 8))
	caps := append([]byte("\x01\x00\x00\x02\x00\x20"), make([]byte, 14)...) // cap_net_raw
	must(t, unix.Setxattr(at("opaque/f"), "security.capability", caps, 0))
	want := list(t, dir)
	must(t, unix.Mknod(at("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))),
		unix.Mknod(at("disk"), unix.S_IFBLK|0o666, int(unix.Mkdev(8, 0))))
	now := []unix.Timespec{{}, {}}
	var st unix.Stat_t
	must(t, unix.Stat(dir, &st))
	now[1] = st.Mtim
	tree, c, _ := save(t, s, dir)
	if tree.Devices != 2 {
		t.Errorf("%d devices are left out", tree.Devices)
	}
	to, err := restore(t, s, tree, c)
	must(t, err)
	must(t, os.Remove(at("null")), os.Remove(at("disk")), unix.UtimesNanoAt(unix.AT_FDCWD, dir, now, 0))
	want[0] = list(t, dir)[0]
	compare(t, list(t, to), want)
}

// TestDeep: a tree that is too deep is no reason to fail for others, and is said.
func TestDeep(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, strings.Repeat("d/", maxDepth+1)), 0o755))
	n, err := newStore(t).Begin(t.Context())
	must(t, err)
	defer n.Close() //nolint:errcheck // nothing was sent
	_, err = Save(t.Context(), n, dir, t.TempDir())
	if _, sink := errors.AsType[chunks.SinkError](err); err == nil || sink || !strings.Contains(err.Error(), "nested") {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Save(ctx, n, zoo(t), t.TempDir())
	if _, sink := errors.AsType[chunks.SinkError](err); !sink || !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// stream writes entries as they come.
func stream(t testing.TB, all ...any) []byte {
	t.Helper()
	var b bytes.Buffer
	w := bufio.NewWriter(&b)
	for _, one := range all {
		var err error
		switch one := one.(type) {
		case Entry:
			err = one.write(w)
		case Piece:
			err = one.write(w)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func into(dir string, b []byte, get func(chunks.ID) ([]byte, error)) error {
	top, err := os.Open(dir)
	if err != nil {
		return err
	}
	r := restorer{ctx: context.Background(), d: newDecoder(bytes.NewReader(b)), top: top, get: get}
	return errors.Join(r.all(), top.Close())
}

// TestHostile: a stream that wants to leave the directory, or is no tree, is refused.
func TestHostile(t *testing.T) {
	root, end := Entry{Type: dirBegin, Mode: 0o755, UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}, Entry{Type: dirEnd}
	named := func(kind byte, name, target string) Entry {
		e := root
		e.Type, e.Name, e.Target = kind, name, target
		return e
	}
	f := named(file, "f", "")
	f.Size = 5
	attr := named(fifo, "p", "")
	attr.Attrs = []Attr{{"security.selinux", "x"}}
	deep := []any{root}
	for range maxDepth + 1 {
		deep = append(deep, named(dirBegin, "d", ""))
	}
	for name, c := range map[string]struct {
		all  []any
		want string
	}{
		"nothing":        {nil, "cut short"},
		"no end":         {[]any{root}, "cut short"},
		"more":           {[]any{root, end, root, end}, "follows its end"},
		"no directory":   {[]any{named(fifo, "", "")}, "does not begin"},
		"a name":         {[]any{named(dirBegin, "x", ""), end}, "does not begin"},
		"climbs":         {[]any{root, named(dirBegin, "..", ""), end, end}, "the name"},
		"a path":         {[]any{root, named(fifo, "a/b", ""), end}, "the name"},
		"absolute":       {[]any{root, named(hardlink, "h", "/etc/passwd"), end}, "it links"},
		"link climbs":    {[]any{root, named(hardlink, "h", "../x"), end}, "cross-device link"},
		"through a link": {[]any{root, named(symlink, "s", "/etc"), named(hardlink, "h", "s/passwd"), end}, "symbolic links"},
		"twice":          {[]any{root, named(symlink, "s", "/tmp/x"), f, Piece{}, f, Piece{}, end}, "file exists"},
		"over a link":    {[]any{root, named(symlink, "f", "/tmp/sandboxd-hostile"), f, Piece{}, end}, "file exists"},
		"into a link":    {[]any{root, named(symlink, "d", "/tmp"), named(dirBegin, "d", ""), end, end}, "file exists"},
		"too long":       {[]any{root, f, Piece{Bytes: 6, Hole: true}, Piece{}, end}, "more than its 5"},
		"too large":      {[]any{root, f, Piece{Bytes: chunks.MaxChunk + 1}, Piece{}, end}, "piece of"},
		"other piece":    {[]any{root, f, Piece{Bytes: 4}, Piece{}, end}, "has 3 bytes"},
		"attribute":      {[]any{root, attr, end}, "the attribute"},
		"deep":           {deep, "nested"},
	} {
		dir := t.TempDir()
		err := into(dir, stream(t, c.all...), func(chunks.ID) ([]byte, error) { return []byte("abc"), nil })
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if _, err := os.Lstat("/tmp/sandboxd-hostile"); err == nil {
		t.Error("a file was written outside")
	}
}

// FuzzStream: what a decoder accepts is written as the same bytes, and what Check accepts is one tree.
func FuzzStream(f *testing.F) {
	e := Entry{Type: dirBegin, Mode: 0o755, Sec: -1, Attrs: []Attr{{"user.x", "y"}}}
	one := e
	one.Type, one.Name, one.Size, one.Nsec = file, "f", 10, 5
	whole := stream(f, e, one, Piece{Bytes: 4, Hole: true}, Piece{Bytes: 6, ID: chunks.ID{1}}, Piece{}, Entry{Type: dirEnd})
	f.Add(whole)
	f.Add(whole[:len(whole)-3])
	f.Add(stream(f, e, Entry{Type: hardlink, Name: "..", Target: "/etc/passwd"}, Entry{Type: dirEnd}))
	f.Add([]byte{'d', 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		names, size, err := Check(bytes.NewReader(b), nil)
		if err != nil {
			return
		}
		d, depth, n := newDecoder(bytes.NewReader(b)), 0, 0
		var all []any
		var sum int64
		for {
			e, err := d.next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("what Check accepts: %v", err)
			}
			n++
			all = append(all, e)
			switch e.Type {
			case dirBegin:
				depth++
			case dirEnd:
				depth--
			case file:
				for {
					p, err := d.piece()
					if err != nil {
						t.Fatalf("what Check accepts: %v", err)
					}
					all = append(all, p)
					if p.Bytes == 0 {
						break
					}
					if !p.Hole {
						sum += p.Bytes
					}
				}
			}
		}
		if depth != 0 || n != names || sum != size {
			t.Errorf("depth %d, %d names of %d, %d bytes of %d", depth, n, names, sum, size)
		}
		again := stream(t, all...)
		if na, s, err := Check(bytes.NewReader(again), nil); err != nil || na != names || s != size || len(again) > len(b) {
			t.Errorf("written again: %d names, %d bytes, %v", na, s, err)
		}
	})
}
