package chunks

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
)

// A pack, before it is encrypted, is
//
//	magic, 16 random bytes │ chunks │ table: ID, offset, stored, raw of each │ number of chunks
//
// with numbers of 32 bits, little-endian. Chunks whose stored and raw sizes are the same are not
// compressed. The random bytes make every pack another file: one that the target has damaged is
// never taken for a new one of the same chunks.
const (
	packMagic   = "sandboxd pack 1\n"
	packHead    = len(packMagic) + 16
	entryBytes  = 16 + 3*4
	maxPack     = 64 << 20 // of a file that is read
	maxInPack   = 1 << 20
	packTrailer = 4
)

// place is where a chunk is in a pack.
type place struct {
	ID                  ID
	Offset, Stored, Raw uint32
}

func (p place) append(b []byte) []byte {
	b = append(b, p.ID[:]...)
	b = binary.LittleEndian.AppendUint32(b, p.Offset)
	b = binary.LittleEndian.AppendUint32(b, p.Stored)
	return binary.LittleEndian.AppendUint32(b, p.Raw)
}

var errPlace = errors.New("it is damaged: its table names a chunk outside of it, or of a size that no chunk has")

// readPlace reads what append has written. end is where chunks end.
func readPlace(b []byte, end uint64) (p place, err error) {
	copy(p.ID[:], b)
	p.Offset = binary.LittleEndian.Uint32(b[16:])
	p.Stored = binary.LittleEndian.Uint32(b[20:])
	p.Raw = binary.LittleEndian.Uint32(b[24:])
	if p.Raw == 0 || p.Raw > MaxChunk || p.Stored == 0 || p.Stored > p.Raw || int(p.Offset) < packHead ||
		uint64(p.Offset)+uint64(p.Stored) > end {
		return p, errPlace
	}
	return p, nil
}

// A packer makes a pack in memory.
type packer struct {
	out    bytes.Buffer
	w      io.WriteCloser
	n      uint32 // bytes before encryption
	places []place
}

func newPacker(s Sealer) (p *packer, err error) {
	p = &packer{}
	p.w = nopCloser{&p.out}
	if s.on() {
		if p.w, err = s.Seal(&p.out); err != nil {
			return nil, fmt.Errorf("encrypt a pack: %w", err)
		}
	}
	var nonce [16]byte
	_, _ = rand.Read(nonce[:]) // never fails since Go 1.24
	return p, p.write(append([]byte(packMagic), nonce[:]...))
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

func (p *packer) write(b []byte) error {
	_, err := p.w.Write(b)
	p.n += uint32(len(b))
	return err
}

// add adds a chunk as it is stored.
func (p *packer) add(id ID, stored []byte, raw int) error {
	p.places = append(p.places, place{id, p.n, uint32(len(stored)), uint32(raw)})
	return p.write(stored)
}

// finish ends the pack, and returns what the target gets and its checksum in hex.
func (p *packer) finish() (b []byte, sum string, err error) {
	var table []byte
	for _, one := range p.places {
		table = one.append(table)
	}
	table = binary.LittleEndian.AppendUint32(table, uint32(len(p.places)))
	if err = errors.Join(p.write(table), p.w.Close()); err != nil {
		return nil, "", fmt.Errorf("encrypt a pack: %w", err)
	}
	h := sha256.Sum256(p.out.Bytes())
	return p.out.Bytes(), hex.EncodeToString(h[:]), nil
}

// readTable reads the table of a pack that is decrypted.
func readTable(b []byte) (all []place, err error) {
	if len(b) < packHead+packTrailer || string(b[:len(packMagic)]) != packMagic {
		return nil, errors.New("it is no pack of sandboxd, or of a newer format")
	}
	n := uint64(binary.LittleEndian.Uint32(b[len(b)-packTrailer:]))
	if n > maxInPack || n*entryBytes > uint64(len(b)-packHead-packTrailer) {
		return nil, errors.New("it is damaged: its table does not fit into it")
	}
	table := b[len(b)-packTrailer-int(n)*entryBytes : len(b)-packTrailer]
	end := uint64(len(b) - packTrailer - len(table))
	all = make([]place, n)
	for i := range all {
		if all[i], err = readPlace(table[i*entryBytes:], end); err != nil {
			return nil, err
		}
	}
	return all, nil
}
