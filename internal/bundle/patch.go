package bundle

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Two images of one distribution have most files in common, and they lie too far apart for the
// window of the stream. Such a member is stored as a patch of another one, a list of steps:
//
//	skip, copy, insert: a uvarint each; then insert bytes
//
// A step leaves out skip bytes of the other member, then copies some of it, then inserts its own.
// So the other member is read once, forward, and a reader needs a second decoder and no file.

// block is the unit of the comparison: files in a tar begin at a multiple of it.
const block = 512

// Bounds of a patch. far is how far a step may skip: a match by chance at the end of the other member
// would leave nothing to copy from.
const (
	far     = 16 << 20
	maxStep = 1 << 20 // bytes that a step inserts
)

// index is where each block of a file is; ambiguous for one that occurs again.
type index map[[8]byte]int64

const ambiguous = -1

func key(b []byte) (k [8]byte) {
	sum := sha256.Sum256(b)
	copy(k[:], sum[:])
	return k
}

// blocks calls f for each block of the file at path.
func blocks(ctx context.Context, path string, f func(at int64, b []byte) error) error {
	in, err := os.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	r := bufio.NewReaderSize(within(ctx, in), 1<<20)
	b := make([]byte, block)
	for at := int64(0); ; {
		n, err := io.ReadFull(r, b)
		if n > 0 {
			if err := f(at, b[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return nil
		}
		if err != nil {
			return err
		}
		at += int64(n)
	}
}

func indexOf(ctx context.Context, path string) (index, error) {
	found := index{}
	err := blocks(ctx, path, func(at int64, b []byte) error {
		k := key(b)
		if _, ok := found[k]; ok {
			at = ambiguous
		}
		found[k] = at
		return nil
	})
	return found, err
}

// shared is how many blocks of the file at path are in the index, and how many it has.
func (i index) shared(ctx context.Context, path string) (in, of int64, err error) {
	err = blocks(ctx, path, func(_ int64, b []byte) error {
		of++
		if _, ok := i[key(b)]; ok {
			in++
		}
		return nil
	})
	return in, of, err
}

// differ writes the patch that makes a file of another one.
type differ struct {
	out    *bufio.Writer
	index  index
	other  *os.File
	at     int64 // in other, behind what was copied
	skip   int64 // of the step that is being made
	copied int64
	insert []byte
}

// patch writes to out what makes the file of s of the file other.
func patch(ctx context.Context, out io.Writer, s Source, other string, i index) error {
	f, err := os.Open(other)
	if err != nil {
		return err
	}
	defer f.Close()
	d := &differ{out: bufio.NewWriterSize(out, 1<<20), index: i, other: f}
	sum := sha256.New()
	err = blocks(ctx, s.Path, func(_ int64, b []byte) error {
		sum.Write(b)
		return d.add(b)
	})
	if err != nil {
		return err
	}
	if hex.EncodeToString(sum.Sum(nil)) != s.SHA256 {
		return errs.New(errs.WrongState, "%s changed while it was read: wait until it is complete", s.Path)
	}
	return errors.Join(d.step(), d.out.Flush())
}

// add adds the next block of the file.
func (d *differ) add(b []byte) error {
	if len(d.insert) == 0 && d.matches(d.at, b) {
		d.copied, d.at = d.copied+int64(len(b)), d.at+int64(len(b))
		return nil
	}
	at, ok := d.index[key(b)]
	if ok && at >= d.at && at-d.at <= far && d.matches(at, b) {
		if err := d.step(); err != nil {
			return err
		}
		d.skip, d.copied, d.at = at-d.at, int64(len(b)), at+int64(len(b))
		return nil
	}
	d.insert = append(d.insert, b...)
	if len(d.insert) >= maxStep {
		return d.step()
	}
	return nil
}

func (d *differ) matches(at int64, b []byte) bool {
	var there [block]byte
	n, _ := d.other.ReadAt(there[:len(b)], at)
	return bytes.Equal(there[:n], b)
}

// step writes a step, if there is one.
func (d *differ) step() error {
	if d.skip == 0 && d.copied == 0 && len(d.insert) == 0 {
		return nil
	}
	var b []byte
	for _, n := range []int64{d.skip, d.copied, int64(len(d.insert))} {
		b = binary.AppendUvarint(b, uint64(n))
	}
	_, err := d.out.Write(append(b, d.insert...))
	d.skip, d.copied, d.insert = 0, 0, d.insert[:0]
	return err
}

// patched reads what a patch makes of another member.
type patched struct {
	patch        *bufio.Reader
	other        io.Reader
	copy, insert uint64 // that are left of the step
}

func (p *patched) Read(b []byte) (int, error) {
	for p.copy == 0 && p.insert == 0 {
		if err := p.next(); err != nil {
			return 0, err
		}
	}
	from, left := p.other, &p.copy
	if p.copy == 0 {
		from, left = p.patch, &p.insert
	}
	n, err := from.Read(b[:min(uint64(len(b)), *left)])
	*left -= uint64(n)
	if err == io.EOF && (n == 0 || *left > 0) {
		return n, fmt.Errorf("a patch ends in a step, or copies more than there is: %w", io.ErrUnexpectedEOF)
	}
	if err == io.EOF {
		err = nil
	}
	return n, err
}

// next reads the numbers of the next step. io.EOF is the end of the patch.
func (p *patched) next() error {
	var step [3]uint64
	for i := range step {
		n, err := binary.ReadUvarint(p.patch)
		if err == io.EOF && i > 0 {
			err = io.ErrUnexpectedEOF
		}
		if err == nil && n > maxSize {
			err = fmt.Errorf("a step of a patch has the number %d", n)
		}
		if err != nil {
			return err
		}
		step[i] = n
	}
	if step[1] == 0 && step[2] == 0 {
		return errors.New("a step of a patch is empty") // without a bound, many could follow
	}
	n, err := io.CopyN(io.Discard, p.other, int64(step[0]))
	if err != nil {
		return fmt.Errorf("a patch skips %d bytes, and there are %d: %w", step[0], n, io.ErrUnexpectedEOF)
	}
	p.copy, p.insert = step[1], step[2]
	return nil
}
