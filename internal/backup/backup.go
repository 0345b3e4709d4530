// Package backup reads and writes the file of `sandboxctl system backup`: the state of
// a daemon, in a form that any tar can open.
//
//	<name>.tar.gz
//	  manifest.json   what wrote it, when, of which instance and pool; the sum
//	  sandboxd.db     the store, as of one moment
//	  data.json       if the data is backed up, too: what finds it on the target (data.go)
//
// What surprises: it holds no file of any sandbox and no image layer. It holds the
// records of sandboxd; the data is in other files, of packs (chunks). It is secret: it has the environments
// of the sandboxes and the tokens of their agents. The vaults of sandboxes are in it as
// they are in the store, encrypted, and the key is not: on another host they open once
// the key is there, too (vaults.go).
package backup

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/sandboxd/sandboxd/pkg/store"
)

// Format is the version of the file, and stateFormat that of one without data. A newer one is refused.
const (
	Format      = 2
	stateFormat = 1
)

// The members, in order.
const (
	manifestName = "manifest.json"
	stateName    = "sandboxd.db"
	dataName     = "data.json"
)

// Limits of Read: a backup may come from anywhere.
const (
	maxManifest = 64 << 10
	maxState    = 16 << 30
	maxData     = 256 << 20
)

// Manifest describes the content of a backup.
type Manifest struct {
	Format      int         `json:"format"`
	Version     string      `json:"version"` // of the sandboxd that wrote it
	Taken       time.Time   `json:"taken"`
	Host        string      `json:"host"`
	Instance    string      `json:"instance"`
	AddressPool string      `json:"addressPool"` // the slots and it give the addresses
	State       store.Facts `json:"state"`
	Bytes       int64       `json:"bytes"`  // of the store
	SHA256      string      `json:"sha256"` // of the store, in hex

	Data *Data `json:"-"` // nil: the backup is of the state alone
}

// Write writes a backup of state, a copy of the store. It sets the fields of the
// manifest that describe the store.
func Write(w io.Writer, m Manifest, state io.ReadSeeker) error {
	h := sha256.New()
	n, err := io.Copy(h, state)
	if err == nil {
		_, err = state.Seek(0, io.SeekStart)
	}
	if err != nil {
		return fmt.Errorf("write backup: %w", err)
	}
	m.Format, m.Bytes, m.SHA256 = stateFormat, n, hex.EncodeToString(h.Sum(nil))
	var data []byte
	if m.Data != nil {
		m.Format = Format
		if data, err = json.Marshal(m.Data); err != nil {
			return fmt.Errorf("write backup: %w", err)
		}
	}
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("write backup: %w", err)
	}
	zw := gzip.NewWriter(w)
	tw := tar.NewWriter(zw)
	header := func(name string, size int64) error {
		return tw.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: size, ModTime: m.Taken, Format: tar.FormatPAX})
	}
	err = header(manifestName, int64(len(text)))
	if err == nil {
		_, err = tw.Write(text)
	}
	if err == nil {
		err = header(stateName, n)
	}
	if err == nil {
		_, err = io.Copy(tw, state)
	}
	if err == nil && data != nil {
		if err = header(dataName, int64(len(data))); err == nil {
			_, err = tw.Write(data)
		}
	}
	if err = errors.Join(err, tw.Close(), zw.Close()); err != nil {
		return fmt.Errorf("write backup: %w", err)
	}
	return nil
}

// Read reads a backup and writes the store in it to state. It fails if the backup is
// cut short, changed or of a newer format; state is worthless then.
func Read(r io.Reader, state io.Writer) (m Manifest, err error) {
	if m, err = read(r, state); err != nil {
		return m, fmt.Errorf("read backup: %w", err)
	}
	return m, nil
}

func read(r io.Reader, state io.Writer) (m Manifest, err error) {
	zr, err := gzip.NewReader(r)
	if err != nil {
		return m, fmt.Errorf("%w: it is not a backup of `sandboxctl system backup`", err)
	}
	tr := tar.NewReader(zr)
	if m, err = readManifest(tr); err != nil {
		return m, err
	}
	if m.Format < stateFormat || m.Format > Format {
		return m, fmt.Errorf("it has format %d, and this sandboxd reads formats up to %d; use the sandboxd that wrote it, %q", m.Format,
			Format, m.Version)
	}
	if err := next(tr, stateName, maxState); err != nil {
		return m, err
	}
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(state, h), tr)
	if err != nil {
		return m, err
	}
	if sum := hex.EncodeToString(h.Sum(nil)); n != m.Bytes || sum != m.SHA256 {
		return m, fmt.Errorf("it is damaged: its manifest says %d bytes with sha256 %.12s…, but the store has %d bytes with sha256 %.12s…",
			m.Bytes, m.SHA256, n, sum)
	}
	if m.Format >= Format {
		if m.Data, err = readData(tr); err != nil {
			return m, err
		}
	}
	if _, err := tr.Next(); !errors.Is(err, io.EOF) {
		return m, fmt.Errorf("read the end of the archive: %w", orUnexpected(err))
	}
	// The gzip checksum comes after the end of the archive.
	if _, err := io.Copy(io.Discard, io.LimitReader(zr, maxManifest)); err != nil {
		return m, err
	}
	return m, nil
}

// readManifest reads the first member.
func readManifest(tr *tar.Reader) (m Manifest, err error) {
	if err := next(tr, manifestName, maxManifest); err != nil {
		return m, err
	}
	text, err := io.ReadAll(tr)
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return m, fmt.Errorf("decode its manifest: %w", err)
	}
	return m, nil
}

// Peek reads the manifest of a backup, which may be encrypted, and no more of it: a change of the rest
// is not seen.
func Peek(r io.Reader, ids Identities) (m Manifest, err error) {
	if r, err = ids.Open(r); err != nil {
		return m, fmt.Errorf("read backup: %w", err)
	}
	zr, err := gzip.NewReader(r)
	if err != nil {
		return m, fmt.Errorf("read backup: %w", err)
	}
	return readManifest(tar.NewReader(zr))
}

// next goes to the next member, which must have that name.
func next(tr *tar.Reader, name string, limit int64) error {
	h, err := tr.Next()
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	if h.Name != name || h.Typeflag != tar.TypeReg || h.Size > limit {
		return fmt.Errorf("it contains %q of %d bytes, want %s of at most %d bytes", h.Name, h.Size, name, limit)
	}
	return nil
}

func orUnexpected(err error) error {
	if err == nil {
		return errors.New("it has an unknown member")
	}
	return err
}
