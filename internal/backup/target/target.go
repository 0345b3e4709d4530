// Package target is where backups are kept: in a directory, or in a bucket of S3-compatible
// storage.
//
//	Save: put NAME ─▶ read it back, compare ─▶ put NAME.sha256, read that back
//
// A backup with data has a list of its packs, NAME.packs, which is put before it.
//
// What surprises: NAME.sha256 is the mark of a whole backup. It is written after what the
// target has stored was read back and compared. A backup without it was cut short, or its
// target has lied.
package target

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/sandboxd/sandboxd/internal/failpoint"
)

// An Object is a file that a target has.
type Object struct {
	Name  string
	Bytes int64
}

// A Target keeps files. Its methods may be called concurrently for different names. Errors
// have the target's name, and no credentials.
type Target interface {
	// Put stores r, which has so many bytes, under a new name: all of it, or nothing. It fails with
	// fs.ErrExist if there is a file of that name.
	Put(ctx context.Context, name string, r io.ReadSeeker, bytes int64) error
	// List lists the files of the target, of others too, in no order.
	List(ctx context.Context) ([]Object, error)
	// Get opens a file, as the target has stored it and not as this host remembers it. It fails
	// with fs.ErrNotExist.
	Get(ctx context.Context, name string) (io.ReadCloser, error)
	// Remove removes a file. It is nil if there is none.
	Remove(ctx context.Context, name string) error
	// String is the target as it stands in the configuration.
	String() string
}

// Options are what S3-compatible storage needs beside its address.
type Options struct {
	// Credentials is a file of mode 0600 with one line, ACCESS_KEY:SECRET_KEY. It is read for each
	// request. The credential of the service (Credential) in Directory comes first.
	Credentials, Directory string
	// CA is a file of certificates, trusted in addition to the system's; empty: none.
	CA     string
	Region string // empty: the target is asked for it
}

// scheme begins the address of S3-compatible storage: s3:https://HOST[:PORT]/BUCKET[/PREFIX].
const scheme = "s3:"

// Parse returns the target of an address: an absolute path, or s3:https://HOST/BUCKET/PREFIX.
// It connects to nothing.
func Parse(address string, o Options) (Target, error) {
	if strings.HasPrefix(address, scheme) {
		return parseS3(address, o)
	}
	if !filepath.IsAbs(address) || filepath.Clean(address) != address || address == "/" {
		return nil, fmt.Errorf("%q: want the absolute path of a directory, or s3:https://HOST[:PORT]/BUCKET[/PREFIX]", address)
	}
	return directory(address), nil
}

// ErrAppendOnly says that nothing is removed from a target, as the configuration says.
var ErrAppendOnly = errors.New("the target is append-only (backup.append_only): this daemon removes nothing from it, and the storage " +
	"says how long files stay")

// AppendOnly is a target of which the daemon never asks that something be removed: its storage locks objects, or
// the key may not.
type AppendOnly struct{ Target }

// Remove fails with ErrAppendOnly, and does not ask the target.
func (AppendOnly) Remove(context.Context, string) error { return ErrAppendOnly }

// Tidy is what is left of the error of a removal that cleans up: on a target that is append-only the file
// stays, and does no harm.
func Tidy(err error) error {
	if errors.Is(err, ErrAppendOnly) {
		return nil
	}
	return err
}

// ErrFull says that a target has no room for a file, or that a quota is used up.
var ErrFull = errors.New("is full")

// ErrLied says that a target has other bytes than it was sent.
var ErrLied = errors.New("it has stored something else than it was sent")

// Suffix ends the name of the file with the checksum of a backup. The file is what sha256sum(1)
// reads.
const Suffix = ".sha256"

// ListSuffix ends the name of the file that lists the packs of a backup, a name a line. A backup of
// the state alone has none.
const ListSuffix = ".packs"

// Save stores r under name, reads it back, and marks it as whole. It returns the checksum, in
// hex. packs are those that it needs; nil if it is of the state alone. After an error there is
// nothing under that name, if the target can still be reached.
func Save(ctx context.Context, t Target, name string, r io.ReadSeeker, bytes int64, packs []string) (sum string, err error) {
	defer func() {
		if err != nil && !errors.Is(err, fs.ErrExist) { // a file of that name is somebody else's
			// A target that is gone keeps what it has; it has no mark.
			err = errors.Join(err, Tidy(Drop(context.WithoutCancel(ctx), t, name)))
		}
	}()
	text := ""
	if packs != nil {
		list := strings.NewReader(strings.Join(packs, "\n") + "\n")
		if sum, err = Store(ctx, t, name+ListSuffix, list, list.Size()); err != nil {
			return "", err
		}
		text = sum + "  " + name + ListSuffix + "\n"
		if err := failpoint.Pass("backup:listed"); err != nil {
			return "", err
		}
	}
	if sum, err = Store(ctx, t, name, r, bytes); err != nil {
		return "", err
	}
	if err := failpoint.Pass("backup:stored"); err != nil {
		return "", err
	}
	mark := strings.NewReader(sum + "  " + name + "\n" + text)
	_, err = Store(ctx, t, name+Suffix, mark, mark.Size())
	return sum, err
}

// Store stores r under name, and compares what the target then has. It returns the checksum, in hex.
func Store(ctx context.Context, t Target, name string, r io.ReadSeeker, bytes int64) (sum string, err error) {
	h := sha256.New()
	n, err := io.Copy(h, r)
	if err == nil {
		_, err = r.Seek(0, io.SeekStart)
	}
	if err == nil && n != bytes {
		err = fmt.Errorf("it has %d bytes and not %d", n, bytes)
	}
	if err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	if err := t.Put(ctx, name, r, bytes); err != nil {
		return "", err
	}
	sum = hex.EncodeToString(h.Sum(nil))
	got, n, err := sumOf(ctx, t, name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("%s on %s: %w: nothing", name, t, ErrLied)
	case err != nil:
		return "", fmt.Errorf("read back: %w", err)
	case n != bytes || got != sum:
		return "", fmt.Errorf("%s on %s: %w: %d bytes with sha256 %.12s… instead of %d with %.12s…", name, t, ErrLied, n, got, bytes, sum)
	}
	return sum, nil
}

// sumOf reads all that the target has under name.
func sumOf(ctx context.Context, t Target, name string) (sum string, n int64, err error) {
	r, err := t.Get(ctx, name)
	if err != nil {
		return "", 0, err
	}
	h := sha256.New()
	n, err = io.Copy(h, r)
	if err = errors.Join(err, r.Close()); err != nil {
		return "", n, fmt.Errorf("read %s from %s: %w", name, t, err)
	}
	return hex.EncodeToString(h.Sum(nil)), n, nil
}

// maxMark bounds a file with a checksum.
const maxMark = 1 << 10

// SumOf returns the checksum with which a backup is marked, in hex. It fails with
// fs.ErrNotExist if the backup is not marked.
func SumOf(ctx context.Context, t Target, name string) (string, error) {
	sum, _, err := mark(ctx, t, name)
	return sum, err
}

// mark reads the mark of a backup: its checksum, and that of the list of its packs, which is empty if
// it is of the state alone.
func mark(ctx context.Context, t Target, name string) (sum, list string, err error) {
	r, err := t.Get(ctx, name+Suffix)
	if err != nil {
		return "", "", err
	}
	defer r.Close() //nolint:errcheck // read only
	text, err := io.ReadAll(io.LimitReader(r, maxMark))
	if err != nil {
		return "", "", fmt.Errorf("read %s%s from %s: %w", name, Suffix, t, err)
	}
	sum, list, ok := parseMark(string(text), name)
	if !ok {
		return "", "", fmt.Errorf("%s%s on %s is not the checksum of that backup: %w", name, Suffix, t, ErrLied)
	}
	return sum, list, nil
}

func parseMark(text, name string) (sum, list string, ok bool) {
	first, second, more := strings.Cut(strings.TrimSpace(text), "\n")
	line := func(text, of string) (string, bool) {
		sum, name, ok := strings.Cut(text, "  ")
		b, err := hex.DecodeString(sum)
		return sum, ok && err == nil && name == of && len(b) == sha256.Size
	}
	if sum, ok = line(first, name); ok && more {
		list, ok = line(second, name+ListSuffix)
	}
	return sum, list, ok
}

// maxList bounds the list of packs of a backup: a million of them, 16 TB.
const maxList = 256 << 20

// Packs returns the packs that a whole backup needs; none if it is of the state alone.
func Packs(ctx context.Context, t Target, name string) ([]string, error) {
	_, want, err := mark(ctx, t, name)
	if err != nil || want == "" {
		return nil, err
	}
	r, err := t.Get(ctx, name+ListSuffix)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(r, maxList))
	if err = errors.Join(err, r.Close()); err != nil {
		return nil, fmt.Errorf("read %s%s from %s: %w", name, ListSuffix, t, err)
	}
	if sum := sha256.Sum256(text); hex.EncodeToString(sum[:]) != want {
		return nil, fmt.Errorf("%s%s on %s: %w", name, ListSuffix, t, ErrLied)
	}
	return strings.Fields(string(text)), nil
}

// Open opens a backup. Reading it to its end fails with ErrLied if it is not what was stored.
func Open(ctx context.Context, t Target, name string) (io.ReadCloser, error) {
	sum, err := SumOf(ctx, t, name)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w; a backup without that file was not stored whole, or it is none of sandboxd's", err)
		}
		return nil, err
	}
	r, err := t.Get(ctx, name)
	if err != nil {
		return nil, err
	}
	return &checked{r, sha256.New(), sum, name + " on " + t.String()}, nil
}

// checked compares the checksum of what was read at its end.
type checked struct {
	io.ReadCloser
	h interface {
		io.Writer
		Sum([]byte) []byte
	}
	sum, what string
}

func (c *checked) Read(b []byte) (n int, err error) {
	n, err = c.ReadCloser.Read(b)
	c.h.Write(b[:n]) //nolint:errcheck // a hash never fails
	if errors.Is(err, io.EOF) {
		if got := hex.EncodeToString(c.h.Sum(nil)); got != c.sum {
			return n, fmt.Errorf("%s: %w: its sha256 is %.12s… and was %.12s…", c.what, ErrLied, got, c.sum)
		}
	}
	return n, err
}

// Drop removes a backup. Its mark goes first: a backup without one counts for nothing.
func Drop(ctx context.Context, t Target, name string) error {
	if err := t.Remove(ctx, name+Suffix); err != nil {
		return err
	}
	if err := failpoint.Pass("backup:unmarked"); err != nil {
		return err
	}
	if err := t.Remove(ctx, name); err != nil {
		return err
	}
	return t.Remove(ctx, name+ListSuffix)
}
