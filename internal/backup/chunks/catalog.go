package chunks

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/sandboxd/sandboxd/internal/backup/target"
)

// A Pack is a file of chunks on the target.
type Pack struct {
	Name  string `json:"name"` // target.PackName
	Bytes int64  `json:"bytes"`
}

// A Catalog is what it takes to find the chunks of a backup. It is secret: it has the key.
type Catalog struct {
	Key   Key    `json:"key"`
	Packs []Pack `json:"packs"`
	// Index are the chunks of a table: for each of the first Tables packs the number of its chunks,
	// and then their entries, as in a pack. Packs beyond have chunks of the table alone.
	Index  []Place `json:"index"`
	Tables int     `json:"tables"`
}

// A Place is where a chunk of the index is.
type Place struct {
	ID     ID     `json:"id"`
	Pack   int    `json:"pack"` // in Packs
	Offset uint32 `json:"offset"`
	Stored uint32 `json:"stored"`
	Raw    uint32 `json:"raw"`
}

// Check says what is wrong with a catalog that comes from elsewhere.
func (c *Catalog) Check() error {
	for _, p := range c.Packs {
		if _, ok := target.ParsePack(p.Name); !ok || p.Bytes <= 0 || p.Bytes > maxPack {
			return fmt.Errorf("its catalog names a pack %.100q of %d bytes, which is none", p.Name, p.Bytes)
		}
	}
	if c.Tables < 0 || c.Tables > len(c.Packs) {
		return fmt.Errorf("its catalog has %d packs, and tables of %d", len(c.Packs), c.Tables)
	}
	for _, p := range c.Index {
		if p.Pack < 0 || p.Pack >= len(c.Packs) || p.Raw == 0 || p.Raw > MaxChunk || p.Stored == 0 || p.Stored > p.Raw {
			return errors.New("its catalog names a chunk that is in none of its packs")
		}
	}
	return nil
}

// where is a chunk, for a reader.
type where struct {
	pack        uint32
	offset      uint32
	stored, raw uint32
}

// readIndex reads the table of a catalog of so many packs.
func readIndex(r io.Reader, packs int) (map[ID]where, error) {
	b := bufio.NewReaderSize(r, 64<<10)
	all := map[ID]where{}
	var buf [entryBytes]byte
	for pack := range packs {
		if _, err := io.ReadFull(b, buf[:4]); err != nil {
			return nil, fmt.Errorf("its index is cut short: %w", err)
		}
		n := binary.LittleEndian.Uint32(buf[:])
		if n > maxInPack || len(all)+int(n) > maxChunks {
			return nil, fmt.Errorf("its index names %d chunks of one pack", n)
		}
		for range n {
			if _, err := io.ReadFull(b, buf[:]); err != nil {
				return nil, fmt.Errorf("its index is cut short: %w", err)
			}
			p, err := readPlace(buf[:], maxPack)
			if err != nil {
				return nil, err
			}
			all[p.ID] = where{uint32(pack), p.Offset, p.Stored, p.Raw}
		}
	}
	if _, err := b.ReadByte(); !errors.Is(err, io.EOF) {
		return nil, errors.New("its index names more packs than its catalog")
	}
	return all, nil
}
