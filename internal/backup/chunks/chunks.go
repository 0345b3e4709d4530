// Package chunks keeps the data of backups on a target: each piece of it once.
//
//	file ─▶ Split: chunks ─▶ Session.Put: new ones ─▶ a pack ─▶ the target, read back and compared
//	                                └─ known ones: nothing       └─▶ the journal of this host
//
// A chunk is some 200 KB whose ends are where its content says, so what moves within a file is found
// again. Its name (ID) is a hash with a key, and where it is cut depends on that key: a target that
// knows a file learns of no chunk that it is there. A pack is a file of chunks, compressed and then
// encrypted; its name has the sha256 of what the target stores. The journal says which chunk is in
// which pack. A Catalog is all that a backup needs to find its chunks again.
//
// What surprises: this host cannot read what it has sent, if it is encrypted. The journal is all it
// needs to send only what is new. A host that has lost its journal, or whose recipients have
// changed, begins anew: its next backup is a full one.
package chunks

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"runtime/debug"

	"github.com/klauspost/compress/zstd"
	"github.com/restic/chunker"
)

// Sizes of chunks. Smaller ones make increments smaller, and the journal and a Catalog larger: both
// take 28 bytes for each, and the memory of a Session some 60. (docs/benchmarks.md)
const (
	minChunk    = 64 << 10
	averageBits = 17 // beyond minChunk, so 192 KiB on average
	MaxChunk    = 1 << 20
)

// packBytes is when a pack is full: large enough for a target that answers slowly, and small enough
// to be in memory.
const packBytes = 16 << 20

// maxChunks bounds the memory of a Session to some 500 MB: 1.5 TB of large files.
const maxChunks = 8 << 20

// mostChunks is how many chunks a Session may know: maxChunks, or what fills three quarters of Go's limit of
// the heap, if there is one. Beyond it the kernel would end the daemon in each backup.
func mostChunks() int { return int(min(maxChunks, debug.SetMemoryLimit(-1)/4*3/60)) }

// An ID names a chunk: the first half of an HMAC-SHA256 of its content. Without the key nobody can
// make two chunks of one name.
type ID [16]byte

// MarshalText writes an ID in hex.
func (id ID) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, id[:]), nil }

// UnmarshalText reads what MarshalText has written.
func (id *ID) UnmarshalText(b []byte) error {
	if len(b) != hex.EncodedLen(len(id)) {
		return fmt.Errorf("%d characters are no name of a chunk", len(b))
	}
	_, err := hex.Decode(id[:], b)
	return err
}

// A Key names chunks, and says where they are cut.
type Key [32]byte

// MarshalText writes a Key in hex.
func (k Key) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, k[:]), nil }

// UnmarshalText reads what MarshalText has written.
func (k *Key) UnmarshalText(b []byte) error {
	if len(b) != hex.EncodedLen(len(k)) {
		return fmt.Errorf("%d characters are no key of chunks", len(b))
	}
	_, err := hex.Decode(k[:], b)
	return err
}

func newKey() (k Key) {
	_, _ = rand.Read(k[:]) // never fails since Go 1.24
	return k
}

// derive draws a key for one purpose.
func (k *Key) derive(what string) []byte {
	h := hmac.New(sha256.New, k[:])
	io.WriteString(h, what) //nolint:errcheck // a hash never fails
	return h.Sum(nil)
}

// A namer names chunks. It is not for concurrent use.
type namer struct{ h hash.Hash }

func (k *Key) namer() namer { return namer{hmac.New(sha256.New, k.derive("names"))} }

func (n namer) name(data []byte) (id ID) {
	n.h.Reset()
	n.h.Write(data) //nolint:errcheck // a hash never fails
	var sum [sha256.Size]byte
	copy(id[:], n.h.Sum(sum[:0]))
	return id
}

// A Splitter cuts content into chunks. It is not for concurrent use.
type Splitter struct {
	pol chunker.Pol
	c   *chunker.Chunker
	buf []byte
}

// splitter returns the Splitter of a key.
func (k *Key) splitter() (*Splitter, error) {
	pol, err := chunker.DerivePolynomial(&stream{key: k.derive("cuts")})
	if err != nil {
		return nil, fmt.Errorf("draw where chunks are cut: %w", err)
	}
	return &Splitter{pol, chunker.NewWithBoundaries(nil, pol, minChunk, MaxChunk), make([]byte, 0, MaxChunk)}, nil
}

// Split calls f for each chunk of r, which is valid until f returns.
func (s *Splitter) Split(r io.Reader, f func([]byte) error) error {
	s.c.ResetWithBoundaries(r, s.pol, minChunk, MaxChunk)
	s.c.SetAverageBits(averageBits)
	for {
		c, err := s.c.Next(s.buf[:0])
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = f(c.Data)
		}
		if err != nil {
			return err
		}
	}
}

// stream is an endless reader of bytes that follow from a key.
type stream struct {
	key  []byte
	n    byte
	left []byte
}

func (s *stream) Read(b []byte) (n int, err error) {
	for n < len(b) {
		if len(s.left) == 0 {
			h := hmac.New(sha256.New, s.key)
			h.Write([]byte{s.n}) //nolint:errcheck // a hash never fails
			s.n++
			s.left = h.Sum(nil)
		}
		m := copy(b[n:], s.left)
		s.left, n = s.left[m:], n+m
	}
	return n, nil
}

// A Sealer encrypts packs on their way to the target. The zero value does not.
type Sealer struct {
	// Seal returns a writer that encrypts for all that is written to it, until it is closed.
	Seal func(io.Writer) (io.WriteCloser, error)
	// For says for whom; a change of it begins anew.
	For string
}

func (s Sealer) on() bool { return s.Seal != nil }

// An Opener decrypts what a Sealer has encrypted, and returns other content as it is.
type Opener func(io.Reader) (io.Reader, error)

// encoder makes the compressor: in the caller's goroutine, whose priority counts.
func encoder() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderCRC(false),
		zstd.WithWindowSize(MaxChunk), zstd.WithAllLitEntropyCompression(true))
}

func decoder() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(MaxChunk), zstd.WithDecoderMaxWindow(MaxChunk))
}

// done is the reason for which ctx has ended, or nil.
func done(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}
