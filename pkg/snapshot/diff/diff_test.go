package diff

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree/treetest"
	"golang.org/x/sys/unix"
)

// budget has room for the names of two directories of a crowd.
const budget = 250 * (tree.NameCost + 3)

// TestDiffHolds: a comparison counts the names of all directories that it is in, and
// no others.
func TestDiffHolds(t *testing.T) {
	for _, nested := range []bool{true, false} {
		changes := 0
		d := differ{
			ctx: t.Context(), held: tree.Names{Max: budget}, maxOpen: maxOpen,
			hide: func(string) bool { return false }, emit: func(_, _ string) error { changes++; return nil },
		}
		top := &dirs{}
		if err := d.openTop(top, treetest.Crowd(t, nested), t.TempDir(), nil); err != nil {
			t.Fatal(err)
		}
		err := d.walk(top)
		if errs.Is(err, errs.Exhausted) != nested || !nested && (err != nil || changes != 303) || d.held.Bytes != 0 || d.fds != 0 {
			t.Errorf("nested %v: %d changes, %d bytes held, %d descriptors, %v", nested, changes, d.held.Bytes, d.fds, err)
		}
	}
}

// nest makes n directories of a name in one another, some with two others beside it, and an
// old file in the innermost.
func nest(t *testing.T, top, dir string, n int, bottom string) {
	t.Helper()
	fd, err := unix.Open(top, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
	for i := range n {
		for _, name := range []string{"a", dir, "z"} {
			if err == nil && (name == dir || i%100 == 0) {
				err = unix.Mkdirat(fd, name, 0o755)
			}
		}
		next, oerr := unix.Openat(fd, dir, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil || oerr != nil {
			t.Fatal(i, err, oerr)
		}
		unix.Close(fd)
		fd = next
	}
	file, err := unix.Openat(fd, bottom, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	old := make([]unix.Timespec, 2)
	if err := unix.UtimesNanoAt(fd, bottom, old, 0); err != nil {
		t.Fatal(err)
	}
	unix.Close(file)
	unix.Close(fd)
}

// deepDirs makes empty directories for trees that are too deep for os.RemoveAll.
func deepDirs(t *testing.T, n int) (all []string) {
	t.Helper()
	for i := range n {
		dir := filepath.Join(t.TempDir(), fmt.Sprint(i))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := tree.Remove(dir); err != nil {
				t.Error(err)
			}
		})
		all = append(all, dir)
	}
	return all
}

// TestDeep compares trees that are deeper than there are descriptors. Each directory whose
// path is not too long is reported once and in order, on the way back, too.
func TestDeep(t *testing.T) {
	const depth = 1000
	deep := deepDirs(t, 2)
	nest(t, deep[0], "d", depth, "x")
	nest(t, deep[1], "d", depth, "y")
	var got []string
	compare := func(of, base string, open int) (most int) {
		t.Helper()
		got = nil
		d := differ{ctx: t.Context(), held: tree.Names{Max: tree.MaxNames}, maxOpen: open, hide: func(string) bool { return false }}
		d.emit = func(kind, path string) error {
			most = max(most, d.fds)
			got = append(got, kind+" "+path)
			return nil
		}
		top := &dirs{}
		if err := d.openTop(top, of, base, nil); err != nil {
			t.Fatal(err)
		}
		if err := d.walk(top); err != nil {
			t.Fatal(err)
		}
		if d.fds != 0 || d.held.Bytes != 0 || len(d.path) != 0 || d.short != 0 {
			t.Errorf("left %d descriptors, %d bytes, path %.80q", d.fds, d.held.Bytes, d.path)
		}
		return most
	}
	var want []string // all directories above the bottom, and what is in it
	for i := range depth {
		want = append(want, "C "+strings.Repeat("/d", i+1))
	}
	want = append(want, "A "+strings.Repeat("/d", depth)+"/x", "D "+strings.Repeat("/d", depth)+"/y")
	for _, open := range []int{maxOpen, 100, 16} {
		if most := compare(deep[0], deep[1], open); !slices.Equal(got, want) || most > open+2 {
			t.Errorf("at most %d open: %d were; %d changes, want %d", open, most, len(got), len(want))
		}
	}
	empty := t.TempDir()
	if compare(deep[0], empty, 16); len(got) != depth+depth/100*2+1 {
		t.Errorf("%d changes beside nothing", len(got))
	}
	for i, c := range got { // what is on the way comes on the way down, the rest on the way back
		if kind, path, _ := strings.Cut(c, " "); kind != Added || i > 0 && strings.HasSuffix(path, "/z") != (i > depth+depth/100) {
			t.Fatalf("change %d is %.3q…%q", i, c, path[len(path)-2:])
		}
	}
	if compare(empty, deep[0], 16); !slices.Equal(got, []string{"D /a", "D /d", "D /z"}) {
		t.Errorf("nothing beside it: %q", got)
	}
}

// TestTooDeep compares trees with paths that are too long to be reported. That something
// in them has changed is reported at the last directory that has a short path.
func TestTooDeep(t *testing.T) {
	const depth = 500
	name := strings.Repeat("n", 255)
	deep := deepDirs(t, 3)
	for i, bottom := range []string{"x", "y", "x"} {
		nest(t, deep[i], name, depth, bottom)
	}
	last := func(of, base string) (n int, change string) {
		t.Helper()
		err := Trees(t.Context(), of, base, nil, func(string) bool { return false }, func(kind, path string) error {
			n++
			if strings.HasSuffix(path, "n") {
				change = fmt.Sprint(kind, " ", len(path)/(1+len(name)))
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		return n, change
	}
	const short = maxPath / 256
	if n, change := last(deep[0], deep[1]); n != short || change != fmt.Sprint("C ", short) {
		t.Errorf("another bottom: %d changes, the last is %s", n, change)
	}
	if n, change := last(deep[0], t.TempDir()); n != short+2 || change != fmt.Sprint("A ", short) { // two others at the top
		t.Errorf("all of it: %d changes, the last is %s", n, change)
	}
	if n, change := last(deep[0], deep[2]); n != 0 {
		t.Errorf("the same: %d changes, the last is %s", n, change)
	}
}
