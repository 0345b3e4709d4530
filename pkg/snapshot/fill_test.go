package snapshot_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/btrfs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/snapshottest"
	"golang.org/x/sys/unix"
)

func ready(t *testing.T, e *snapshottest.Env) int64 {
	t.Helper()
	n, err := e.Pool.Ready()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func free(t *testing.T, e *snapshottest.Env) (free, total int64) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(pool.Dir(e.Config.StateDir), &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize
}

// inDisk returns the path of a file in the disk id.
func inDisk(e *snapshottest.Env, id, name string) string {
	return filepath.Join(pool.Dir(e.Config.StateDir), id, "u", name)
}

// TestPoolFill: a new pool is ready in part; when it was filled, in large part. It never
// has less than a quarter free meanwhile, says that what is taken is free, and loses
// nothing.
func TestPoolFill(t *testing.T) {
	e := snapshottest.New(t, pool.BtrfsLoop, nil)
	bytesAll := e.Config.PoolBytes
	const chunk = 72 << 20 // of metadata, which any use of so small a pool takes
	if n := ready(t, e); n < bytesAll/9 || n > bytesAll/2 {
		t.Errorf("%d bytes of a new pool of %d are ready, want about an eighth", n, bytesAll)
	}
	data := make([]byte, 50<<20)
	_, _ = rand.Read(data) // never fails
	id := e.Disk(t, 0)
	if err := os.WriteFile(inDisk(e, id, "data"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	unix.Sync()
	before, _, err := e.Pool.Space()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- e.Pool.Fill(t.Context()) }()
	var lowest, total int64 = 1 << 60, 0
	for filling := true; filling; {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			filling = false
		case <-time.After(time.Millisecond):
		}
		var now int64
		now, total = free(t, e)
		lowest = min(lowest, now)
		if now, _, err := e.Pool.Space(); err != nil || now < before-chunk {
			t.Fatalf("%d bytes free, %v; before %d", now, err, before)
		}
	}
	if lowest < total/4 || lowest > before*2/3 {
		t.Errorf("at least %d of %d bytes were free; before %d", lowest, total, before)
	}
	if now, _ := free(t, e); now < before-chunk {
		t.Errorf("%d bytes free afterwards, %d before", now, before)
	}
	filled := ready(t, e)
	if filled < bytesAll/2 {
		t.Errorf("%d of %d bytes are ready", filled, bytesAll)
	}
	if err := e.Pool.Fill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := ready(t, e); n > filled+16<<20 {
		t.Errorf("a second Fill has written %d bytes", n-filled)
	}
	if err := e.UnmountPool(); err != nil {
		t.Fatal(err)
	}
	e.Open(t)
	if b, err := os.ReadFile(inDisk(e, id, "data")); err != nil || !bytes.Equal(b, data) {
		t.Errorf("the data have changed (%v)", err)
	}
}

// TestPoolFillYields: a sandbox that needs what Fill has taken gets it, and a pool that
// is full is left alone.
func TestPoolFillYields(t *testing.T) {
	e := snapshottest.New(t, pool.BtrfsLoop, nil)
	id := e.Disk(t, 0)
	done := make(chan error, 1)
	go func() { done <- e.Pool.Fill(t.Context()) }()
	_, total := free(t, e)
	f, err := os.Create(inDisk(e, id, "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	chunk := make([]byte, 4<<20)
	for at := int64(0); at < total*3/4; at += int64(len(chunk)) {
		if _, err := f.Write(chunk); err != nil {
			t.Fatalf("%v after %d of %d bytes", err, at, total)
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	before := ready(t, e)
	if err := e.Pool.Fill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := ready(t, e); n > before+16<<20 {
		t.Errorf("Fill has written %d bytes of a pool with a quarter free", n-before)
	}
}

// TestPoolFillEnds: Fill that is cancelled, or dies with its process, leaves nothing.
func TestPoolFillEnds(t *testing.T) {
	if dir := os.Getenv("FILL_STATE"); dir != "" { // the process that dies, below
		d := btrfs.NewLoop(pool.Image(dir), 0, false)
		if err := d.Open(t.Context(), pool.Dir(dir)); err != nil {
			t.Fatal(err)
		}
		t.Fatal(d.Fill(t.Context()))
	}
	e := snapshottest.New(t, pool.BtrfsLoop, func(c *snapshot.Config) { c.PoolBytes = 2 << 30 })
	before, _ := free(t, e)
	// On a disk that has other work Fill rests for a second after each MiB, and the kernel
	// counts 64 MiB at a time. So it stands still only if nothing shows for much longer.
	taken := func() {
		t.Helper()
		const still = 5 * time.Minute
		least, end := before, time.Now().Add(still)
		for ; least >= before-300<<20; time.Sleep(time.Millisecond) {
			if now, _ := free(t, e); now < least {
				least, end = now, time.Now().Add(still)
			}
			if time.Now().After(end) {
				t.Fatalf("nothing more is filled than %d bytes", before-least)
			}
		}
	}
	given := func(who string) {
		t.Helper()
		if err := commitPool(e); err != nil {
			t.Fatal(err)
		}
		if now, _ := free(t, e); now < before-256<<20 {
			t.Errorf("%s: %d bytes are free, %d before", who, now, before)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Pool.Fill(ctx) }()
	taken()
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	given("cancelled")

	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestPoolFillEnds$")
	cmd.Env = append(os.Environ(), "FILL_STATE="+e.Config.StateDir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	taken()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // "signal: killed"
	given("killed")
	if err := e.UnmountPool(); err != nil {
		t.Fatal(err)
	}
	e.Open(t)
	given("opened again")
}

// commitPool makes the kernel account for what was deleted.
func commitPool(e *snapshottest.Env) error {
	f, err := os.Open(pool.Dir(e.Config.StateDir))
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}
