package agent

import (
	"encoding/binary"
	"io"
	"path"
)

// OutputDir is where the agent keeps what the entrypoint and commands print, relative to
// the root of the guest: one file for each, called by its id. It writes each byte there as
// it takes it, so a file has all of it when the agent is killed. As with the obituary, the
// guest may have put anything there.
const OutputDir = ".sandboxd/output"

// OutputOf is the path of the file of a command, or false if id is none: then it must not
// become part of a path.
func OutputOf(id string) (string, bool) {
	ok := id == EntrypointID || len(id) == 32
	for i := 0; ok && id != EntrypointID && i < len(id); i++ {
		ok = '0' <= id[i] && id[i] <= '9' || 'a' <= id[i] && id[i] <= 'f'
	}
	return path.Join(OutputDir, id), ok
}

// A file of output is the output itself. When it has reached its limit it becomes a ring:
// the byte number n then lies at n modulo the size of the ring, and behind the ring is a
// Wrap, which is written after each piece.
const (
	wrapMagic = "sandboxd-ring-1\n"
	WrapLen   = int64(len(wrapMagic)) + 8
	maxGap    = 256 << 10
)

// Wrap is what is written behind a ring of which the output is end bytes long.
func Wrap(end int64) []byte { return binary.BigEndian.AppendUint64([]byte(wrapMagic), uint64(end)) }

// Gap bounds the pieces in which a ring of size bytes is written. A writer that is killed
// between a piece and its Wrap has overwritten that much of the oldest output.
func Gap(size int64) int64 { return max(1, min(size/4, maxGap)) }

// KeptOutput is the output in a file that an agent has left.
type KeptOutput struct {
	From, End int64 // numbers of the oldest byte in it and of the one after the last

	f    io.ReaderAt
	size int64 // of the ring; 0: it has not wrapped
}

// OpenOutput finds the output in a file that is length bytes long: its last max bytes.
func OpenOutput(f io.ReaderAt, length, max int64) KeptOutput {
	k := KeptOutput{End: length, f: f}
	b := make([]byte, WrapLen)
	if size := length - WrapLen; size > 0 {
		if _, err := f.ReadAt(b, size); err == nil && string(b[:len(wrapMagic)]) == wrapMagic {
			if end := int64(binary.BigEndian.Uint64(b[len(wrapMagic):])); end >= size {
				k.size, k.End, k.From = size, end, end-size+Gap(size)
			}
		}
	}
	if k.End-k.From > max {
		k.From = k.End - max
	}
	return k
}

// ReadAt reads output from the byte number off on. It implements [io.ReaderAt] for numbers
// from From to End.
func (k KeptOutput) ReadAt(b []byte, off int64) (n int, err error) {
	for n < len(b) && err == nil {
		at := off + int64(n)
		if at < k.From || at >= k.End {
			return n, io.EOF
		}
		pos, room := at, k.End-at
		if k.size > 0 {
			pos = at % k.size
			room = min(room, k.size-pos)
		}
		var m int
		m, err = k.f.ReadAt(b[n:n+int(min(int64(len(b)-n), room))], pos)
		n += m
	}
	return n, err
}

// Since reads the output from the byte number off on.
func (k KeptOutput) Since(off int64) io.Reader {
	off = min(max(off, k.From), k.End)
	return io.NewSectionReader(k, off, k.End-off)
}
