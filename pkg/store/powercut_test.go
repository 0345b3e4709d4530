package store

import (
	"bufio"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// page and sector are what bbolt writes, and what a disk writes at once.
var page = os.Getpagesize()

const sector = 512

// fast is a directory in which a sync costs nothing: a power cut is played here
// by what is in the file.
func fast(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "sandboxd-store-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// writes are the pages a commit changed, in bbolt's order (tx.Commit): data,
// ascending, a sync, then one meta page, a sync.
func (c commit) writes() (data, meta []int) {
	before := c.grown()
	for at := 0; at < len(c.after); at += page {
		switch {
		case bytes.Equal(before[at:at+page], c.after[at:at+page]):
		case at < 2*page:
			meta = append(meta, at)
		default:
			data = append(data, at)
		}
	}
	return data, meta
}

// grown is the file before, made as long as after: what bbolt does first.
func (c commit) grown() []byte {
	b := make([]byte, len(c.after))
	copy(b, c.before)
	return b
}

// cut is the file when the power goes after n bytes were written.
func (c commit) cut(n int) []byte {
	b := c.grown()
	data, meta := c.writes()
	for _, at := range append(data, meta...) {
		m := min(n, page)
		copy(b[at:at+m], c.after[at:at+m])
		if n -= m; n == 0 {
			break
		}
	}
	return b
}

// shuffled is the file when the power goes before the first sync of a disk that
// writes sectors in any order.
func (c commit) shuffled(r *rand.Rand) []byte {
	b := c.grown()
	data, _ := c.writes()
	for _, at := range data {
		for s := at; s < at+page; s += sector {
			if r.IntN(2) == 0 {
				copy(b[s:s+sector], c.after[s:s+sector])
			}
		}
	}
	return b
}

// TestPowerCut cuts the power in the middle of each commit and opens what is
// then on the disk: it holds all of the commit or nothing of it, and everything
// that was acknowledged before. Nothing here runs at the same time as something else, so
// one cut in eight will do under the race detector, which makes each ten times as slow.
func TestPowerCut(t *testing.T) {
	path := filepath.Join(fast(t), "sandboxd.db")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r, cuts := rand.New(rand.NewPCG(seed, 0)), 0
	for _, c := range commits(t) {
		data, meta := c.writes()
		if len(data) == 0 || len(meta) != 1 {
			t.Fatalf("%s wrote data pages %v and meta pages %v: bbolt does not do what this test plays", c.what, data, meta)
		}
		check := func(how string, image []byte, may ...string) {
			t.Helper()
			if cuts++; raceEnabled && cuts%8 != 0 {
				return
			}
			if err := os.WriteFile(path, image, 0o600); err != nil {
				t.Fatal(err)
			}
			db, err := Open(path, Options{Slots: 8, Reserve: -1})
			if err != nil {
				t.Fatalf("%s, %s: %v", c.what, how, err)
			}
			defer db.Close() //nolint:errcheck // read only
			got := contents(t, db)
			for _, want := range may {
				if got == want {
					return
				}
			}
			t.Errorf("%s, %s: the store holds\n%s", c.what, how, got)
		}
		check("the file not grown", c.before, c.empty)
		synced := len(data) * page
		for n := 0; n <= synced; n += 1 + r.IntN(2*sector) {
			check(fmt.Sprintf("%d of %d bytes of data", n, synced), c.cut(n), c.empty)
		}
		for range 30 {
			check("sectors in any order", c.shuffled(r), c.empty)
		}
		for n := range 96 { // a meta page has 80 bytes, the rest is zeros
			check(fmt.Sprintf("%d bytes of the meta page", n), c.cut(synced+n), c.empty, c.written)
		}
		check("all", c.cut(synced+page), c.written)
	}
}

// TestDamaged opens files of which a disk has lost parts: each is refused in
// words, and left as it is, or holds all there was. None is taken for empty.
func TestDamaged(t *testing.T) {
	path := filepath.Join(fast(t), "sandboxd.db")
	all := commits(t)
	last := all[slices.IndexFunc(all, func(c commit) bool { return c.what == fullest })]
	whole := last.after
	images := map[string][]byte{
		"no bytes":       {},
		"zeros":          make([]byte, len(whole)),
		"no meta pages":  append(make([]byte, 2*page), whole[2*page:]...),
		"something else": []byte(strings.Repeat("SQLite format 3\x00", 1000)),
	}
	for at := page / 2; at < len(whole); at += page / 2 {
		images[fmt.Sprintf("%d of %d bytes", at, len(whole))] = whole[:at]
	}
	for at := 2 * page; at < len(whole); at += page {
		lost := bytes.Clone(whole)
		clear(lost[at : at+page])
		images[fmt.Sprintf("zeros at %d", at)] = lost
	}
	lost := map[string]int{} // by bucket, how often something in it could not be read
	for name, image := range images {
		if err := os.WriteFile(path, image, 0o600); err != nil {
			t.Fatal(err)
		}
		db, err := Open(path, Options{Slots: 8, Reserve: -1})
		if err != nil {
			now, rerr := os.ReadFile(path)
			if !strings.Contains(err.Error(), "damaged") || rerr != nil || !bytes.Equal(now, image) {
				t.Errorf("%s: %v; the file is as it was: %v", name, err, bytes.Equal(now, image))
			}
			if _, err := Examine(path); err == nil {
				t.Errorf("%s: Examine finds nothing wrong", name)
			}
			continue
		}
		// A record that cannot be read is reported, and kept from harm.
		got, bad := contents(t, db), unreadable(t, db)
		closeTest(t, db)
		_, err = Examine(path)
		switch {
		case len(bad) == 0 && (got != last.written || err != nil):
			t.Errorf("%s: the store opens and holds\n%s\nof which it can read all; Examine says %v", name, got, err)
		case len(bad) > 0 && err == nil:
			t.Errorf("%s: Examine finds nothing wrong, and %v cannot be read", name, bad)
		}
		for _, b := range bad {
			lost[strings.Fields(b)[0]]++
		}
	}
	for _, bucket := range withRecords {
		if lost[string(bucket)] == 0 {
			t.Errorf("nothing that was lost made one of the %s unreadable: its record must be larger than a page", bucket)
		}
	}
}

// TestBackupWhileWriting copies the file while others write: each copy is whole,
// and holds everything that was acknowledged before it began.
func TestBackupWhileWriting(t *testing.T) {
	dir := fast(t)
	db := openTest(t, filepath.Join(dir, "sandboxd.db"), Options{Reserve: -1})
	var acked atomic.Int64 // how many rounds have been written
	stop, done := make(chan struct{}), make(chan struct{})
	id := func(round int64) string { return fmt.Sprintf("d%011d", round%100) }
	go func() {
		defer close(done)
		for round := int64(0); ; round++ {
			select {
			case <-stop:
				return
			default:
			}
			r := record.Record{
				ID: id(round), State: record.Running, Message: fmt.Sprint(round),
				LastOutput: strings.Repeat("z", int(round)%3000),
			}
			err := db.Put(t.Context(), r)
			if round < 100 {
				err = db.Insert(t.Context(), &r)
			}
			if err != nil {
				t.Errorf("round %d: %v", round, err)
				return
			}
			acked.Store(round + 1)
		}
	}()
	path := filepath.Join(dir, "copy.db")
	for n := 0; n < 20 || acked.Load() < 100 && !t.Failed(); n++ {
		known := acked.Load()
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := db.Backup(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
		if _, err := Examine(path); err != nil {
			t.Fatal(err)
		}
		copied := openTest(t, path, Options{Reserve: -1})
		for round := max(0, known-100); round < known; round++ {
			r, _, _ := copied.Get(t.Context(), id(round))
			if got, err := strconv.ParseInt(r.Message, 10, 64); err != nil || got < round {
				t.Fatalf("round %d was acknowledged before the backup began, and %s in it is %q", round, id(round), r.Message)
			}
		}
		closeTest(t, copied)
	}
	close(stop)
	<-done
}

// TestRestored is the mark of a restored store, through openings, until it is
// accepted; a creation that the backup caught is taken for running, and a
// snapshot that it caught is forgotten, so that nobody destroys it.
func TestRestored(t *testing.T) {
	path := newPath(t)
	db := openTest(t, path, Options{})
	insert(t, db, "daaaaaaaaaaa", "")
	for id, state := range map[string]record.SnapshotState{
		"snap-daaaaaaaaaaa": record.SnapshotCreating, "snap-dbbbbbbbbbbb": record.SnapshotReady,
		"snap-dccccccccccc": record.SnapshotCreating,
	} {
		if err := db.PutSnapshot(t.Context(), record.Snapshot{ID: id, Source: "daaaaaaaaaaa", State: state}); err != nil {
			t.Fatal(err)
		}
	}
	closeTest(t, db)
	if err := MarkRestored(path, "a backup"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		db = openTest(t, path, Options{})
		r, _, err := db.Get(t.Context(), "daaaaaaaaaaa")
		if db.Restored() != "a backup" || err != nil || r.State != record.Running {
			t.Errorf("%q, %+v, %v", db.Restored(), r, err)
		}
		if snaps, _, err := db.SnapshotRecords(t.Context()); err != nil || len(snaps) != 1 || snaps[0].State != record.SnapshotReady {
			t.Errorf("%+v, %v", snaps, err)
		}
		closeTest(t, db)
	}
	db = openTest(t, path, Options{})
	if err := db.AcceptRestored(t.Context()); err != nil || db.Restored() != "" {
		t.Error(err)
	}
	closeTest(t, db)
	if db = openTest(t, path, Options{}); db.Restored() != "" {
		t.Errorf("it comes back: %q", db.Restored())
	}
}

// TestCopied stops a writing process at random moments, copies its file and
// opens the copy: everything the process had acknowledged by then is in it.
func TestCopied(t *testing.T) {
	dir := fast(t)
	path := filepath.Join(dir, "sandboxd.db")
	cmd := exec.Command(os.Args[0], "-test.run=^TestKill$") // its other end is there
	cmd.Env = append(os.Environ(), "STORE_TEST_WRITER="+path, "STORE_TEST_ROUND=0")
	out, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	// It runs ahead of its reader by this much only, and never out of slots.
	if _, err := unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 4096); err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = w
	err = cmd.Start()
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		cmd.Process.Kill() //nolint:errcheck // it may be gone
		cmd.Wait()         //nolint:errcheck // killed
	}()
	lines := bufio.NewScanner(out)
	acked := map[string]bool{}
	for round := range 15 {
		for range 5 + rand.IntN(20) {
			if !lines.Scan() {
				t.Fatalf("round %d: the writer ended", round)
			}
			if id, ok := strings.CutPrefix(lines.Text(), "wrote "); ok {
				acked[id] = true
			}
		}
		if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		var ws syscall.WaitStatus
		if _, err := syscall.Wait4(cmd.Process.Pid, &ws, syscall.WUNTRACED, nil); err != nil || !ws.Stopped() {
			t.Fatalf("%v, %v", ws, err)
		}
		image, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		copied := filepath.Join(dir, "copy.db")
		if err := os.WriteFile(copied, image, 0o600); err != nil {
			t.Fatal(err)
		}
		db := openTest(t, copied, Options{})
		for id := range acked {
			if _, ok, _ := db.Get(t.Context(), id); !ok {
				t.Fatalf("round %d: %s was acknowledged and is lost", round, id)
			}
		}
		closeTest(t, db)
	}
}
