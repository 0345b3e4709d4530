package backup

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"filippo.io/age"

	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/files"
)

// Data is what finds the data of a backup on its target.
type Data struct {
	Catalog chunks.Catalog `json:"catalog"`
	Trees   []Tree         `json:"trees"`
	// Left are trees that could not be read, and why.
	Left []Left `json:"left,omitempty"`
}

// The kinds of trees.
const (
	Layer    = "layer"    // of an image; its ID is the digest
	Snapshot = "snapshot" // the files of one, over its layers
	Volume   = "volume"
)

// A Tree is a layer, a snapshot or a volume.
type Tree struct {
	Kind  string `json:"kind"`
	ID    string `json:"id"`
	Name  string `json:"name,omitempty"`  // as its owner knows it
	Limit int64  `json:"limit,omitempty"` // of a volume, in bytes; 0: none
	files.Tree
}

// String names the tree for people.
func (t *Tree) String() string { return strings.TrimSpace(t.Kind + " " + t.ID + " " + t.Name) }

// Left is a tree that is not in a backup.
type Left struct {
	Tree string `json:"tree"`
	Why  string `json:"why"`
}

// Bytes is how many bytes the files of all trees have.
func (d *Data) Bytes() (n int64) {
	for i := range d.Trees {
		n += d.Trees[i].Bytes
	}
	return n
}

// readData reads the member with the data.
func readData(tr *tar.Reader) (*Data, error) {
	if err := next(tr, dataName, maxData); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(tr)
	if err != nil {
		return nil, err
	}
	return parseData(text)
}

func parseData(text []byte) (*Data, error) {
	var d Data
	if err := json.Unmarshal(text, &d); err != nil {
		return nil, fmt.Errorf("decode the list of its data: %w", err)
	}
	for _, t := range d.Trees {
		if t.Kind != Layer && t.Kind != Snapshot && t.Kind != Volume || t.ID == "" || t.Limit < 0 {
			return nil, fmt.Errorf("the list of its data has a tree of kind %.100q", t.Kind)
		}
	}
	return &d, d.Catalog.Check()
}

// Sealer encrypts packs for the recipients.
func (to Recipients) Sealer(keys []string) (s chunks.Sealer) {
	if len(to) > 0 {
		s.Seal = func(w io.Writer) (io.WriteCloser, error) { return age.Encrypt(w, to...) }
		s.For = strings.Join(keys, " ")
	}
	return s
}

// openChanged decrypts what it can of a pack that was changed. The rest is zeros.
func (ids Identities) openChanged(c chunks.Changed) (io.Reader, error) {
	head := make([]byte, len(sealedMark))
	if _, err := c.ReadAt(head, 0); err != nil || string(head) != sealedMark {
		return c, nil //nolint:nilerr // it is not encrypted
	}
	at, size, err := age.DecryptReaderAt(c, c.Size(), ids...)
	if err != nil {
		return nil, err
	}
	const step = 64 << 10 // what age decrypts at once (age-encryption.org/v1, Payload)
	content := make([]byte, size)
	for off := 0; off < len(content); off += step {
		part := content[off:min(off+step, len(content))]
		if _, err := at.ReadAt(part, int64(off)); err != nil && !errors.Is(err, io.EOF) {
			clear(part)
		}
	}
	return bytes.NewReader(content), nil
}

// Opener opens packs. One that none of the identities opens fails with ErrEncrypted.
func (ids Identities) Opener() chunks.Opener {
	return func(r io.Reader) (io.Reader, error) {
		if c, ok := r.(chunks.Changed); ok {
			return ids.openChanged(c)
		}
		content, err := ids.Open(r)
		if err != nil && !errors.Is(err, ErrEncrypted) {
			err = fmt.Errorf("it is damaged: %w", err)
		}
		return content, err
	}
}
