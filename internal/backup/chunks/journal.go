package chunks

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/durable"
)

// The journal is a file of records, each with its length and a checksum:
//
//	head    the key, and whom the packs are for
//	pack    its name, its bytes, and its entries: after the target has it
//	bad     a pack that the target has damaged
//	tree    a tree that never changes, and the packs it is in
//	used    how much of each pack the last backup uses
//
// What follows a record that is cut short or damaged does not count: its packs are sent again.
const journalMagic = "sandboxd chunks 1\n"

type kind byte

const (
	headRecord kind = 'H'
	packRecord kind = 'P'
	badRecord  kind = 'B'
	treeRecord kind = 'T'
	usedRecord kind = 'U'
)

// maxRecord bounds a record: a pack's has at most maxInPack entries.
const maxRecord = 64 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type head struct {
	Key Key    `json:"key"`
	For string `json:"for"`
}

// A packed is a pack in the journal.
type packed struct {
	Pack
	table []byte // entries
}

func (p *packed) encode() []byte {
	b := binary.AppendUvarint(nil, uint64(len(p.Name)))
	b = append(b, p.Name...)
	b = binary.AppendUvarint(b, uint64(p.Bytes))
	return append(b, p.table...)
}

func decodePacked(b []byte) (p packed, err error) {
	bad := errors.New("the record of a pack is damaged")
	n, used := binary.Uvarint(b)
	if used <= 0 || n > uint64(len(b)-used) {
		return p, bad
	}
	p.Name, b = string(b[used:used+int(n)]), b[used+int(n):]
	size, used := binary.Uvarint(b)
	if used <= 0 || size > maxPack || (len(b)-used)%entryBytes != 0 {
		return p, bad
	}
	p.Bytes, p.table = int64(size), b[used:]
	return p, nil
}

// entries calls f for the chunks of a pack.
func (p *packed) entries(f func(place)) error {
	for b := p.table; len(b) > 0; b = b[entryBytes:] {
		one, err := readPlace(b, maxPack)
		if err != nil {
			return err
		}
		f(one)
	}
	return nil
}

func appendRecord(b []byte, k kind, content []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(1+len(content)))
	sum := crc32.Update(crc32.Checksum([]byte{byte(k)}, castagnoli), castagnoli, content)
	b = binary.LittleEndian.AppendUint32(b, sum)
	return append(append(b, byte(k)), content...)
}

// readJournal calls f for each record of r, and returns where the last whole one ends. f may keep
// no content.
func readJournal(r io.Reader, f func(kind, []byte) error) (end int64, err error) {
	b := bufio.NewReaderSize(r, 1<<20)
	magic := make([]byte, len(journalMagic))
	if _, err := io.ReadFull(b, magic); err != nil || string(magic) != journalMagic {
		return 0, nil //nolint:nilerr // nothing in it counts
	}
	end = int64(len(magic))
	var content []byte
	for {
		var h [8]byte
		if _, err := io.ReadFull(b, h[:]); err != nil {
			return end, nil //nolint:nilerr // the end, or a part of a record
		}
		n := binary.LittleEndian.Uint32(h[:])
		if n == 0 || n > maxRecord {
			return end, nil
		}
		if cap(content) < int(n) {
			content = make([]byte, n)
		}
		content = content[:n]
		if _, err := io.ReadFull(b, content); err != nil {
			return end, nil //nolint:nilerr // likewise
		}
		if crc32.Checksum(content, castagnoli) != binary.LittleEndian.Uint32(h[4:]) {
			return end, nil
		}
		if err := f(kind(content[0]), content[1:]); err != nil {
			return end, err
		}
		end += int64(len(h)) + int64(n)
	}
}

// A journal is the file, open for one session.
type journal struct {
	f    *os.File
	end  int64
	late bool // its records are synced all at once
}

// scan calls f for the packs in the journal.
func (j *journal) scan(f func(packed) error) error {
	_, err := readJournal(io.NewSectionReader(j.f, 0, j.end), func(k kind, b []byte) error {
		if k != packRecord {
			return nil
		}
		p, err := decodePacked(b)
		if err != nil {
			return err
		}
		return f(p)
	})
	return err
}

// append adds a record, durably.
func (j *journal) append(k kind, content []byte) error {
	b := appendRecord(nil, k, content)
	_, err := j.f.WriteAt(b, j.end)
	if err == nil && !j.late {
		err = unix.Fdatasync(int(j.f.Fd()))
	}
	if err != nil {
		return fmt.Errorf("write the journal of backups: %w", err)
	}
	j.end += int64(len(b))
	return nil
}

func (j *journal) appendJSON(k kind, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return j.append(k, b)
}

func (j *journal) close() error { return j.f.Close() }

// openJournal opens the file at path, which may be missing or damaged, for appending after its last
// whole record, and calls f for each record. With another head it begins anew.
func openJournal(path string, f func(kind, []byte) error) (*journal, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the journal of backups: %w", err)
	}
	end, err := readJournal(file, f)
	if err == nil {
		err = file.Truncate(end)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read the journal of backups %s: %w", path, err), file.Close())
	}
	return &journal{f: file, end: end}, nil
}

// rewrite replaces the file at path by what write writes, and opens that.
func rewrite(path string, write func(*journal) error) (_ *journal, err error) {
	tmp := path + ".new"
	file, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("write the journal of backups: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close(), gone(os.Remove(tmp)))
		}
	}()
	if _, err := file.WriteString(journalMagic); err != nil {
		return nil, err
	}
	j := &journal{f: file, end: int64(len(journalMagic)), late: true}
	if err := write(j); err != nil {
		return nil, err
	}
	j.late = false
	if err := errors.Join(file.Sync(), os.Rename(tmp, path)); err != nil {
		return nil, err
	}
	return j, durable.SyncDir(filepath.Dir(path))
}

func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
