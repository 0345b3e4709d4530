// Package files turns trees of files into chunks, and back.
//
//	Save:     a directory ─▶ the chunks of its files, and a stream of entries in chunks
//	Restore:  the stream  ─▶ a directory with the same files
//
// A stream is one entry after the other, in the order of a walk with sorted names: a directory
// begins, its files, it ends. An entry has owner, mode, time, extended attributes, and the chunks and
// holes of a file. Unchanged directories give the same bytes, so most of a stream is known to the
// target too. Neither side has a tree in memory.
//
// What surprises: owners are those on the disk, which are a guest's (0..65535). Devices other than
// the whiteouts of overlayfs are left out: nobody may get a device by a backup.
package files

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/sandboxd/sandboxd/internal/backup/chunks"
)

// Bounds of what is read from a target, and of what is written to one.
const (
	maxName  = 255       // NAME_MAX
	maxPath  = 4000      // below PATH_MAX: of a link's target
	maxValue = 64 << 10  // XATTR_SIZE_MAX
	maxAttrs = 256 << 10 // all attributes of a file
	maxDepth = 512       // directories in one another: each is a descriptor
)

// The types of entries.
const (
	dirBegin = 'd'
	dirEnd   = '.'
	file     = 'f' // its pieces follow
	symlink  = 'l'
	hardlink = 'h'
	whiteout = 'w' // of overlayfs: a character device 0/0
	fifo     = 'p'
	socket   = 's'
)

// An Entry is a name in a tree. The name of the first directory is empty.
type Entry struct {
	Type     byte
	Name     string
	Mode     uint32 // the lower twelve bits
	UID, GID uint32
	Sec      int64 // when it was changed
	Nsec     uint32
	Size     int64  // of a file
	Target   string // of a symbolic link; of a hard link the path of the other name
	Attrs    []Attr
}

// An Attr is an extended attribute.
type Attr struct{ Name, Value string }

// A Piece of a file is a chunk or a hole.
type Piece struct {
	Bytes int64
	Hole  bool
	ID    chunks.ID
}

// A Tree is what a backup has of one tree.
type Tree struct {
	Stream []chunks.ID `json:"stream"`
	Files  int         `json:"files"` // all names but those of directories
	Bytes  int64       `json:"bytes"` // of the content of files, without holes
	// Devices is how many devices were left out.
	Devices int `json:"devices,omitempty"`
}

// write writes an entry.
func (e *Entry) write(w *bufio.Writer) error {
	b := append(make([]byte, 0, 256), e.Type)
	if e.Type != dirEnd {
		b = appendString(b, e.Name)
		for _, n := range []uint64{uint64(e.Mode), uint64(e.UID), uint64(e.GID)} {
			b = binary.AppendUvarint(b, n)
		}
		b = binary.AppendVarint(b, e.Sec)
		b = binary.AppendUvarint(b, uint64(e.Nsec))
		b = binary.AppendUvarint(b, uint64(e.Size))
		b = appendString(b, e.Target)
		b = binary.AppendUvarint(b, uint64(len(e.Attrs)))
		for _, a := range e.Attrs {
			b = appendString(appendString(b, a.Name), a.Value)
		}
	}
	_, err := w.Write(b)
	return err
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// The marks of pieces.
const (
	pieceEnd   = 0
	pieceChunk = 1
	pieceHole  = 2
)

// write writes a piece; one without bytes ends the file.
func (p *Piece) write(w *bufio.Writer) error {
	var b []byte
	switch {
	case p.Bytes == 0:
		b = append(b, pieceEnd)
	case p.Hole:
		b = binary.AppendUvarint(append(b, pieceHole), uint64(p.Bytes))
	default:
		b = append(binary.AppendUvarint(append(b, pieceChunk), uint64(p.Bytes)), p.ID[:]...)
	}
	_, err := w.Write(b)
	return err
}

// A decoder reads a stream, which may come from anywhere.
type decoder struct{ r *bufio.Reader }

func newDecoder(r io.Reader) *decoder { return &decoder{bufio.NewReaderSize(r, 64<<10)} }

var errStream = errors.New("the list of files is damaged")

func bad(format string, a ...any) error {
	return fmt.Errorf("%w: %w", errStream, fmt.Errorf(format, a...))
}

// whole makes an error of a stream that ends too early.
func whole(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return bad("it is cut short")
	}
	return err
}

// next reads an entry. At the end it is io.EOF.
func (d *decoder) next() (e Entry, err error) {
	if e.Type, err = d.r.ReadByte(); err != nil || e.Type == dirEnd {
		return e, err
	}
	if err := d.entry(&e); err != nil {
		return e, whole(err)
	}
	switch e.Type {
	case dirBegin, file, symlink, hardlink, whiteout, fifo, socket:
	default:
		return e, bad("it has an entry of type %q", e.Type)
	}
	if e.Mode > 0o7777 || e.Nsec > 999_999_999 || e.Size < 0 {
		return e, bad("entry %q has mode %o, %d ns and %d bytes", e.Name, e.Mode, e.Nsec, e.Size)
	}
	return e, nil
}

func (d *decoder) entry(e *Entry) (err error) {
	if e.Name, err = d.string(maxName); err != nil {
		return err
	}
	var mode, uid, gid, nsec, size, attrs uint64
	for _, n := range []*uint64{&mode, &uid, &gid} {
		if *n, err = binary.ReadUvarint(d.r); err != nil {
			return err
		}
	}
	if e.Sec, err = binary.ReadVarint(d.r); err != nil {
		return err
	}
	for _, n := range []*uint64{&nsec, &size} {
		if *n, err = binary.ReadUvarint(d.r); err != nil {
			return err
		}
	}
	if mode > 0o7777 || uid >= 1<<32 || gid >= 1<<32 || nsec > 999_999_999 || size >= 1<<63 {
		return bad("entry %q has numbers that no file has", e.Name)
	}
	e.Mode, e.UID, e.GID, e.Nsec, e.Size = uint32(mode), uint32(uid), uint32(gid), uint32(nsec), int64(size)
	if e.Target, err = d.string(maxPath); err != nil {
		return err
	}
	if attrs, err = binary.ReadUvarint(d.r); err != nil {
		return err
	}
	total := 0
	for range attrs {
		var a Attr
		if a.Name, err = d.string(maxName); err != nil {
			return err
		}
		if a.Value, err = d.string(maxValue); err != nil {
			return err
		}
		if total += len(a.Name) + len(a.Value); total > maxAttrs || a.Name == "" {
			return bad("entry %q has more than %d bytes of attributes", e.Name, maxAttrs)
		}
		e.Attrs = append(e.Attrs, a)
	}
	return nil
}

func (d *decoder) string(limit uint64) (string, error) {
	n, err := binary.ReadUvarint(d.r)
	if err != nil {
		return "", err
	}
	if n > limit {
		return "", bad("it has a text of %d bytes", n)
	}
	b := make([]byte, n)
	_, err = io.ReadFull(d.r, b)
	return string(b), err
}

// piece reads a piece of a file; one without bytes ends the file.
func (d *decoder) piece() (p Piece, err error) {
	mark, err := d.r.ReadByte()
	if err != nil || mark == pieceEnd {
		return p, whole(err)
	}
	n, err := binary.ReadUvarint(d.r)
	switch {
	case err != nil:
		return p, whole(err)
	case n == 0 || n >= 1<<63, mark != pieceHole && mark != pieceChunk, mark == pieceChunk && n > chunks.MaxChunk:
		return p, bad("it has a piece of %d bytes and kind %d", n, mark)
	}
	p.Bytes, p.Hole = int64(n), mark == pieceHole
	if !p.Hole {
		_, err = io.ReadFull(d.r, p.ID[:])
	}
	return p, whole(err)
}
