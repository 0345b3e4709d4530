package store

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// hollow makes a store of many large records at path, of which it deletes the first.
func hollow(t *testing.T, path string, records, deleted int) {
	t.Helper()
	db := openTest(t, path, Options{})
	ctx := t.Context()
	large := strings.Repeat("e", 1<<20)
	for i := range records {
		r := record.Record{ID: fmt.Sprintf("d%011d", i), State: record.Ended, Spec: record.Spec{Env: map[string]string{"A": large}}}
		if err := db.Insert(ctx, &r); err != nil {
			t.Fatal(err)
		}
	}
	for i := range deleted {
		if err := db.Delete(ctx, fmt.Sprintf("d%011d", i)); err != nil {
			t.Fatal(err)
		}
	}
	insert(t, db, "dsmall", "lab")
	closeTest(t, db)
}

// hollowed makes a store that is worth a compaction, and returns what it holds.
func hollowed(t *testing.T, path string) string {
	t.Helper()
	hollow(t, path, 40, 39)
	b, err := open(path, time.Second, true)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close() //nolint:errcheck // read only
	return contents(t, &DB{committer: committer{bolt: b}})
}

func sizeOf(t *testing.T, path string) int64 {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Size()
}

// TestCompact: the next start gives back what most of a large file does not use. All that
// was in it is still there, and so are its mode and owner. It says so in the log.
func TestCompact(t *testing.T) {
	path := filepath.Join(fast(t), "sandboxd.db")
	held := hollowed(t, path)
	before := sizeOf(t, path)
	if err := errors.Join(os.Chmod(path, 0o640), os.WriteFile(compactName(path), []byte("half of something"), 0o600)); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	db := openTest(t, path, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	if got := contents(t, db); got != held {
		t.Error("it holds something else after the compaction")
	}
	if after := sizeOf(t, path); before < compactFrom || after > 16<<20 || !strings.Contains(log.String(), "made the state file smaller") {
		t.Errorf("%d bytes before, %d after; log: %s", before, after, log.String())
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	if _, err := os.Stat(compactName(path)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the temporary file: %v", err)
	}
	// It is the file by this name that is written and locked now.
	insert(t, db, "dlater", "")
	if _, err := Open(path, Options{Wait: time.Millisecond}); !errors.Is(err, ErrLocked) {
		t.Errorf("a second daemon: %v", err)
	}
	closeTest(t, db)
	size := sizeOf(t, path)
	log.Reset()
	db = openTest(t, path, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	if _, ok, err := db.Get(t.Context(), "dlater"); err != nil || !ok || sizeOf(t, path) != size || log.Len() > 0 {
		t.Errorf("the next start: %v, %v, %d bytes of %d, %s", ok, err, sizeOf(t, path), size, log.String())
	}
}

// TestCompactNotWorthIt: a file of which half is in use stays the same file.
func TestCompactNotWorthIt(t *testing.T) {
	for _, c := range []struct{ records, deleted int }{{40, 0}, {6, 5}} { // full; small
		path := filepath.Join(fast(t), "sandboxd.db")
		hollow(t, path, c.records, c.deleted)
		was, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		db := openTest(t, path, Options{})
		if now, err := os.Stat(path); err != nil || !os.SameFile(was, now) {
			t.Errorf("%d of %d records deleted: the file is another one (%v)", c.deleted, c.records, err)
		}
		closeTest(t, db)
	}
}

// TestCompactKilled kills the process at each step of a compaction: the next start finds
// all that was there, and finishes the work.
func TestCompactKilled(t *testing.T) {
	if path := os.Getenv("STORE_TEST_COMPACT"); path != "" {
		db, err := Open(path, Options{})
		t.Fatalf("it was not killed: %v, %v", db, err)
	}
	path := filepath.Join(fast(t), "sandboxd.db")
	held := hollowed(t, path)
	image, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, point := range []string{"store:compact", "store:compacted", "store:renamed"} {
		if err := os.WriteFile(path, image, 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0], "-test.run=^TestCompactKilled$")
		cmd.Env = append(os.Environ(), "STORE_TEST_COMPACT="+path, failpoint.Env+"="+point+"=kill")
		if out, err := cmd.CombinedOutput(); cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != -1 {
			t.Fatalf("%s: %v: %s", point, err, out)
		}
		_, err := os.Stat(compactName(path))
		if left := err == nil; left != (point != "store:renamed") {
			t.Errorf("%s: a temporary file is left: %v", point, left)
		}
		db := openTest(t, path, Options{})
		if contents(t, db) != held || sizeOf(t, path) > 16<<20 {
			t.Errorf("%s: the next start has %d bytes, or holds something else", point, sizeOf(t, path))
		}
		if _, err := os.Stat(compactName(path)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the temporary file is left after the next start: %v", point, err)
		}
		closeTest(t, db)
	}
}

// TestCompactFullDisk: without room the file stays as it is and is used; when there is room
// again, the next start makes it smaller.
func TestCompactFullDisk(t *testing.T) {
	hosttest.Root(t)
	dir := hosttest.SmallDisk(t, "size=120m")
	path := filepath.Join(dir, "sandboxd.db")
	held := hollowed(t, path)
	before := sizeOf(t, path)
	free := hosttest.FillDisk(t, dir)
	look := func(says string) int64 {
		t.Helper()
		var log bytes.Buffer
		db := openTest(t, path, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
		defer closeTest(t, db)
		if contents(t, db) != held || !strings.Contains(log.String(), says) {
			t.Errorf("it holds something else, or says: %s", log.String())
		}
		if _, err := os.Stat(compactName(path)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the temporary file: %v", err)
		}
		return sizeOf(t, path)
	}
	if size := look("it is used as it is"); size != before {
		t.Errorf("on a full disk: %d bytes, it had %d", size, before)
	}
	free()
	if size := look("made the state file smaller"); size > 16<<20 {
		t.Errorf("with room: %d bytes", size)
	}
}

// TestCompactLink: a state file that is a link to one elsewhere stays a link, and the file
// there becomes smaller. Nothing is left in either directory.
func TestCompactLink(t *testing.T) {
	file, link := filepath.Join(fast(t), "elsewhere.db"), filepath.Join(fast(t), "sandboxd.db")
	held := hollowed(t, file)
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		db := openTest(t, link, Options{})
		if contents(t, db) != held {
			t.Error("it holds something else")
		}
		closeTest(t, db)
		if to, err := os.Readlink(link); err != nil || to != file || sizeOf(t, file) > 16<<20 {
			t.Errorf("it is a link to %q, %v, and the file has %d bytes", to, err, sizeOf(t, file))
		}
	}
	for _, path := range []string{file, link} {
		if all, err := os.ReadDir(filepath.Dir(path)); err != nil || len(all) != 1 {
			t.Errorf("beside %s: %v, %v", path, all, err)
		}
	}
}

// TestFullDiskAfterStart: a start leaves room in the file, whether it made it smaller or bbolt had
// grown it. When other programs then fill the disk, records can be deleted, and many written.
func TestFullDiskAfterStart(t *testing.T) {
	hosttest.Root(t)
	for _, c := range []struct {
		records, deleted int
		says             string
	}{{40, 25, "made the state file smaller"}, {20, 0, ""}} {
		dir := hosttest.SmallDisk(t, "size=120m")
		path := filepath.Join(dir, "sandboxd.db")
		hollow(t, path, c.records, c.deleted)
		var log bytes.Buffer
		db := openTest(t, path, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
		if said := log.String(); !strings.Contains(said, c.says) || c.says == "" && said != "" {
			t.Errorf("%d records: the log has %q", c.records, said)
		}
		hosttest.FillDisk(t, dir)
		if err := db.Delete(t.Context(), fmt.Sprintf("d%011d", c.records-1)); err != nil {
			t.Errorf("%d records: delete on a full disk: %v", c.records, err)
		}
		for i := range 200 {
			r := record.Record{ID: fmt.Sprintf("e%011d", i), State: record.Ended, LastOutput: strings.Repeat("x", 16<<10)}
			if err := db.Insert(t.Context(), &r); err != nil {
				t.Fatalf("%d records: insert %d on a full disk: %v", c.records, i, err)
			}
		}
		closeTest(t, db)
	}
}

// TestOpenAfterReplacement: a process that waited for the lock of a file which was replaced
// in that time opens the new one.
func TestOpenAfterReplacement(t *testing.T) {
	dir := fast(t)
	path, other := filepath.Join(dir, "sandboxd.db"), filepath.Join(dir, "other.db")
	first := openTest(t, path, Options{})
	second := openTest(t, other, Options{})
	insert(t, second, "dsecond", "")
	closeTest(t, second)
	got := make(chan error, 1)
	go func() {
		db, err := Open(path, Options{Wait: time.Minute})
		if err == nil {
			if _, ok, _ := db.Get(t.Context(), "dsecond"); !ok {
				err = errors.New("it opened the file that has no name any more")
			}
			err = errors.Join(err, db.Close())
		}
		got <- err
	}()
	awaitOpen(t, path, 2)
	if err := os.Rename(other, path); err != nil {
		t.Fatal(err)
	}
	closeTest(t, first)
	if err := <-got; err != nil {
		t.Error(err)
	}
}

// awaitOpen waits until this process has the file open so many times.
func awaitOpen(t *testing.T, path string, times int) {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		all, n := fds(t), 0
		for _, fd := range all {
			if other, err := os.Stat(fd); err == nil && os.SameFile(fi, other) {
				n++
			}
		}
		if n >= times {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s is open %d times", path, n)
		}
	}
}

func fds(t *testing.T) []string {
	t.Helper()
	all, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	return all
}
