// Package flowfile is the daemon's own record of the flows that it has handed to a child, by
// which the next daemon knows them: it trusts no child.
//
//	┌ head ──────────────────────────┬ slot ───────┬ slot ───────┬ …
//	│ magic, child, start of the host│ an Entry    │ free        │
//	└────────────────────────────────┴─────────────┴─────────────┴ …   512 bytes each
//
// An Entry is one socket: the guest's, or one to the destination. It is written before the
// child gets the socket, in one write(2), and names the socket by the kernel's own number
// (SO_COOKIE). A slot whose checksum is wrong is free: a socket without an Entry ends, so
// what is lost here closes a flow, and opens none.
//
// Like the sockets, a file means nothing when the host has restarted: it names the start.
package flowfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// A Head says which child the flows belong to.
type Head struct {
	Version uint32 // of the line to the child, and of what is said there
	Pid     int
	Started uint64 // in ticks since the host's start, as /proc/<pid>/stat has it
}

// An Entry is one socket that a child has.
type Entry struct {
	Flow    uint64
	Socket  uint32 // 0: the guest's; otherwise the number of one to the destination
	Cookie  uint64 // SO_COOKIE
	Sandbox string
	Guest   netip.Addr     // of the sandbox
	Dst     netip.AddrPort // that the guest meant
	// Kind and Name are how the guest began, of a socket to the destination.
	Kind uint8
	Name string
}

const (
	magic = "sandboxd-flows-1"
	slot  = 512
	most  = 1 << 16 // slots; a file of more is none of ours

	maxID, maxName = 64, 255
)

var errForm = errors.New("not a file of flows")

// A File is open for writing. The methods of a nil File do nothing: its flows end with the
// daemon. A File is not safe for concurrent use.
type File struct {
	f    *os.File
	free []int // slots, behind which all are free from next on
	next int
}

// Create makes the file at path, which must not exist.
func Create(path string, h Head) (*File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	b := make([]byte, slot)
	copy(b, magic)
	binary.LittleEndian.PutUint32(b[16:], h.Version)
	binary.LittleEndian.PutUint64(b[20:], uint64(h.Pid))
	binary.LittleEndian.PutUint64(b[28:], h.Started)
	boot, err := boot()
	if err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(path))
	}
	copy(b[36:], boot)
	seal(b)
	if _, err := f.WriteAt(b, 0); err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(path))
	}
	return &File{f: f, next: 1}, nil
}

// Open opens a file that an earlier daemon made, and reads what stands in it, by slots.
func Open(path string) (_ *File, h Head, all map[int]Entry, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, h, nil, err
	}
	file := &File{f: f, next: 1}
	if h, all, err = file.read(); err != nil {
		return nil, h, nil, errors.Join(fmt.Errorf("read %s: %w", path, err), f.Close())
	}
	return file, h, all, nil
}

// boot is the kernel's name of this start of the host.
func boot() ([]byte, error) { return os.ReadFile("/proc/sys/kernel/random/boot_id") }

func (f *File) read() (h Head, all map[int]Entry, err error) {
	boot, err := boot()
	if err != nil {
		return h, nil, err
	}
	b, err := io.ReadAll(io.NewSectionReader(f.f, 0, slot*most))
	if err != nil {
		return h, nil, err
	}
	if h, all, err = parse(b); err == nil && !bytes.HasPrefix(b[36:], boot) {
		err = errors.New("it is from before the host's last start")
	}
	for n := 1; n*slot < len(b); n++ {
		f.next = n + 1
		if _, ok := all[n]; !ok {
			f.free = append(f.free, n)
		}
	}
	return h, all, err
}

// parse reads a file.
func parse(b []byte) (h Head, all map[int]Entry, err error) {
	if len(b) < slot || string(b[:len(magic)]) != magic || !sealed(b[:slot]) {
		return h, nil, errForm
	}
	h = Head{binary.LittleEndian.Uint32(b[16:]), int(binary.LittleEndian.Uint64(b[20:])), binary.LittleEndian.Uint64(b[28:])}
	if h.Pid <= 1 || h.Pid > 1<<22 {
		return h, nil, errForm
	}
	all = map[int]Entry{}
	for n := 1; (n+1)*slot <= len(b); n++ {
		if e, ok := parseEntry(b[n*slot : (n+1)*slot]); ok {
			all[n] = e
		}
	}
	return h, all, nil
}

// seal writes the checksum of a slot to its end.
func seal(b []byte) { binary.LittleEndian.PutUint32(b[slot-4:], crc32.ChecksumIEEE(b[:slot-4])) }

func sealed(b []byte) bool {
	return binary.LittleEndian.Uint32(b[slot-4:]) == crc32.ChecksumIEEE(b[:slot-4])
}

// used is the first byte of a slot with an Entry.
const used = 1

func (e Entry) append() ([]byte, error) {
	if len(e.Sandbox) > maxID || len(e.Name) > maxName || !e.Guest.Is4() || !e.Dst.Addr().Is4() || e.Flow == 0 {
		return nil, fmt.Errorf("flow %d of sandbox %.20q cannot be written down", e.Flow, e.Sandbox)
	}
	b := append(make([]byte, 0, slot), used, e.Kind)
	b = binary.LittleEndian.AppendUint64(b, e.Flow)
	b = binary.LittleEndian.AppendUint32(b, e.Socket)
	b = binary.LittleEndian.AppendUint64(b, e.Cookie)
	b = append(b, e.Guest.AsSlice()...)
	b = append(b, e.Dst.Addr().AsSlice()...)
	b = binary.LittleEndian.AppendUint16(b, e.Dst.Port())
	for _, s := range []string{e.Sandbox, e.Name} {
		b = append(append(b, byte(len(s))), s...)
	}
	b = b[:slot]
	seal(b)
	return b, nil
}

func parseEntry(b []byte) (e Entry, ok bool) {
	if b[0] != used || !sealed(b) {
		return e, false
	}
	e = Entry{
		Kind: b[1], Flow: binary.LittleEndian.Uint64(b[2:]), Socket: binary.LittleEndian.Uint32(b[10:]),
		Cookie: binary.LittleEndian.Uint64(b[14:]), Guest: netip.AddrFrom4([4]byte(b[22:])),
		Dst: netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[26:])), binary.LittleEndian.Uint16(b[30:])),
	}
	rest := b[32 : slot-4]
	for _, s := range []*string{&e.Sandbox, &e.Name} {
		n := int(rest[0])
		if 1+n > len(rest)-1 {
			return Entry{}, false
		}
		*s, rest = string(rest[1:1+n]), rest[1+n:]
	}
	return e, e.Flow != 0 && len(e.Sandbox) <= maxID
}

// NextSocket is a number behind those of all sockets that earlier daemons opened for a child.
// It may still say that it has closed one of them, also one that was not written down.
func NextSocket(all map[int]Entry) (n uint32) {
	const more = 20 // bits
	for _, e := range all {
		n = max(n, e.Socket)
	}
	return (n>>more + 1) << more
}

// Put writes e to a free slot, and returns which.
func (f *File) Put(e Entry) (int, error) {
	if f == nil {
		return 0, nil
	}
	n := f.next
	if len(f.free) > 0 {
		n = f.free[len(f.free)-1]
	}
	if n >= most {
		return 0, errors.New("the file of flows is full")
	}
	if err := f.Set(n, e); err != nil {
		return 0, err
	}
	if n == f.next {
		f.next++
	} else {
		f.free = f.free[:len(f.free)-1]
	}
	return n, nil
}

// Set writes e to a slot that Put or Open returned.
func (f *File) Set(n int, e Entry) error {
	if f == nil {
		return nil
	}
	b, err := e.append()
	if err != nil {
		return err
	}
	_, err = f.f.WriteAt(b, int64(n)*slot)
	return err
}

// Clear frees a slot. Its socket has ended; so it does no harm if this fails.
func (f *File) Clear(n int) {
	if f == nil || n == 0 {
		return
	}
	f.f.WriteAt([]byte{0}, int64(n)*slot) //nolint:errcheck // see above
	f.free = append(f.free, n)
}

// Close closes the file, which stays.
func (f *File) Close() error {
	if f == nil {
		return nil
	}
	return f.f.Close()
}
