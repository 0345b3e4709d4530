package flowfile

import (
	"bytes"
	"errors"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

var head = Head{Version: 3, Pid: 4711, Started: 99}

func entry(flow uint64, socket uint32, name string) Entry {
	return Entry{
		Flow: flow, Socket: socket, Cookie: flow<<8 | uint64(socket), Sandbox: "aegressaaxyz", Guest: netip.MustParseAddr("10.88.0.2"),
		Dst: netip.MustParseAddrPort("203.0.113.80:443"), Kind: 2, Name: name,
	}
}

// TestReadAgain: the next daemon reads what stands, and goes on with the same file.
func TestReadAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "flows")
	f, err := Create(path, head)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := Create(path, head); !errors.Is(err, fs.ErrExist) {
		t.Errorf("made twice: %v", err)
	}
	want := map[int]Entry{}
	put := func(f *File, e Entry) int {
		t.Helper()
		n, err := f.Put(e)
		if err != nil {
			t.Fatal(err)
		}
		if _, used := want[n]; used {
			t.Fatalf("slot %d is used twice", n)
		}
		want[n] = e
		return n
	}
	for i := range uint64(8) {
		put(f, entry(i+1, 0, ""))
		put(f, entry(i+1, 1, strings.Repeat("x", 255)))
	}
	for _, n := range []int{3, 16} {
		f.Clear(n)
		delete(want, n)
	}
	put(f, entry(20, 0, ""))
	changed := entry(1, 1, "second.test")
	if err := f.Set(2, changed); err != nil {
		t.Fatal(err)
	}
	want[2] = changed
	if _, err := f.Put(Entry{Flow: 1, Sandbox: strings.Repeat("x", 65), Guest: changed.Guest, Dst: changed.Dst}); err == nil {
		t.Error("an id that is too long was written")
	}
	for range 2 {
		again, h, all, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		if h != head || !maps.Equal(all, want) {
			t.Errorf("%v %v, want %v %v", h, all, head, want)
		}
		put(again, entry(30, 0, "")) // to the free slot, then behind the last
	}
}

// TestTornAndForeign: what was half written is no Entry, and what is no file of flows is none.
func TestTornAndForeign(t *testing.T) {
	path := filepath.Join(t.TempDir(), "flows")
	f, err := Create(path, head)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for i := range uint64(3) {
		if _, err := f.Put(entry(i+1, 0, "allowed.test")); err != nil {
			t.Fatal(err)
		}
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	other, _ := entry(9, 9, "another.test").append()
	for cut := 1; cut < slot; cut++ { // a write of another Entry that stopped in the middle
		b := bytes.Clone(whole)
		copy(b[2*slot:], other[:cut])
		_, all, err := parse(b)
		if err != nil || all[1].Flow != 1 || all[3].Flow != 3 {
			t.Fatalf("cut at %d: %v, %v", cut, all, err)
		}
		if e, ok := all[2]; ok && e != entry(2, 0, "allowed.test") && e != entry(9, 9, "another.test") {
			t.Fatalf("cut at %d: it is %v", cut, e)
		}
	}
	for cut := range len(whole) {
		_, all, err := parse(whole[:cut])
		if cut < slot != (err != nil) || len(all) != max(cut/slot-1, 0) {
			t.Fatalf("%d bytes: %d entries, %v", cut, len(all), err)
		}
	}
	foreign := filepath.Join(t.TempDir(), "foreign")
	earlier := bytes.Clone(whole)
	earlier[36] ^= 1
	seal(earlier[:slot])
	if err := os.WriteFile(foreign, earlier, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := Open(foreign); err == nil {
		t.Error("a file from before the host's last start was read")
	}
	for _, b := range [][]byte{nil, bytes.Repeat([]byte("x"), 4*slot), append([]byte(magic), make([]byte, slot)...)} {
		if err := os.WriteFile(foreign, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, _, err := Open(foreign); !errors.Is(err, errForm) {
			t.Errorf("%d foreign bytes: %v", len(b), err)
		}
	}
	if err := os.Remove(foreign); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(foreign, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := Open(foreign); err == nil { // and does not wait for a writer
		t.Error("a pipe was read")
	}
	if err := errors.Join(os.Remove(foreign), os.Symlink(path, foreign)); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := Open(foreign); !errors.Is(err, unix.ELOOP) {
		t.Errorf("a link was followed: %v", err)
	}
}

// TestNilFile: without a file nothing is written.
func TestNilFile(t *testing.T) {
	var f *File
	n, err := f.Put(entry(1, 0, ""))
	f.Clear(n)
	if err = errors.Join(err, f.Set(n, entry(1, 0, "")), f.Close()); err != nil {
		t.Error(err)
	}
}

// FuzzEntry: a slot is read as what was written there, and any other bytes with a right
// checksum as an Entry that can be written again, or none.
func FuzzEntry(f *testing.F) {
	b, _ := entry(1, 2, "allowed.test").append()
	f.Add(b)
	f.Add(make([]byte, slot))
	f.Fuzz(func(t *testing.T, b []byte) {
		b = append(bytes.Clone(b), make([]byte, slot)...)[:slot]
		seal(b)
		e, ok := parseEntry(b)
		if !ok {
			return
		}
		again, err := e.append()
		if err != nil {
			t.Fatal(err)
		}
		if same, ok := parseEntry(again); !ok || same != e {
			t.Fatalf("%v, %v", same, e)
		}
	})
}

// TestNextSocket: the number is behind all, also those that nobody wrote down.
func TestNextSocket(t *testing.T) {
	for last, want := range map[uint32]uint32{0: 1 << 20, 3: 1 << 20, 1<<20 - 1: 1 << 20, 1 << 20: 2 << 20, 1<<20 + 9: 2 << 20} {
		if got := NextSocket(map[int]Entry{1: {Socket: 0}, 2: {Socket: last}}); got != want {
			t.Errorf("after %d: %d, want %d", last, got, want)
		}
	}
}

// BenchmarkPut is what a socket costs: one write to tmpfs, if TMPDIR is there.
func BenchmarkPut(b *testing.B) {
	f, err := Create(filepath.Join(b.TempDir(), "flows"), head)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	for b.Loop() {
		n, err := f.Put(entry(1, 1, "allowed.test"))
		if err != nil {
			b.Fatal(err)
		}
		f.Clear(n)
	}
}
