package bundle

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Check reads all members and compares them with the manifest.
func (b *Bundle) Check(ctx context.Context) error {
	return b.Each(ctx, func(Member, io.Reader) error { return nil })
}

// Each calls f for each member, in the order of the manifest. f may leave bytes unread. The bytes
// are checked when their end is reached, so f's result may be used only if Each returns nil.
// Each holds at most four windows in memory, and never reads more than the sizes that the manifest names.
func (b *Bundle) Each(ctx context.Context, f func(Member, io.Reader) error) error {
	var theirs error // of f, and not of the bundle
	err := b.each(ctx, func(m Member, r io.Reader) error {
		theirs = f(m, r)
		return theirs
	})
	if err == nil || err == theirs {
		return err
	}
	return refusal(b.file.Name(), err)
}

// members opens the stream of members.
func (b *Bundle) members(ctx context.Context) (*zstd.Decoder, error) {
	stored := bufio.NewReaderSize(within(ctx, io.NewSectionReader(b.file, b.layout.stream(), b.layout.members)), 1<<20)
	return zstd.NewReader(stored, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(window))
}

func (b *Bundle) each(ctx context.Context, f func(Member, io.Reader) error) error {
	z, err := b.members(ctx)
	if err != nil {
		return err
	}
	defer z.Close()
	for _, m := range b.Members {
		if m.Like != "" {
			err = b.patch(ctx, m, z, f)
		} else {
			err = member(m, z, f)
		}
		if err != nil {
			return err
		}
	}
	n, err := io.ReadFull(z, make([]byte, 1))
	if n > 0 {
		return errs.New(errs.Invalid, "it holds more than the members of its manifest: it was made by a broken program, get another")
	}
	if err != io.EOF {
		return damaged("the end of the members", err)
	}
	return nil
}

// patch reads a member that is a patch of another one, which a second decoder reads.
func (b *Bundle) patch(ctx context.Context, m Member, stored io.Reader, f func(Member, io.Reader) error) error {
	z, err := b.members(ctx)
	if err != nil {
		return err
	}
	defer z.Close()
	var before int64
	i := slices.IndexFunc(b.Members, func(o Member) bool { return o.Name == m.Like })
	for _, o := range b.Members[:i] {
		before += o.inStream()
	}
	if _, err := io.CopyN(io.Discard, z, before); err != nil {
		return damaged(m.Like, err)
	}
	steps := &io.LimitedReader{R: stored, N: m.Stored}
	whole := &patched{patch: bufio.NewReader(steps), other: io.LimitReader(z, b.Members[i].Size)}
	if err := member(m, whole, f); err != nil {
		return err
	}
	n, err := io.ReadFull(whole, make([]byte, 1))
	if n > 0 {
		return errs.New(errs.Invalid, "the patch of the member %s makes more than %d bytes: it was made by a broken program, get another",
			m.Name, m.Size)
	}
	if err == io.EOF && steps.N > 0 {
		err = io.ErrUnexpectedEOF
	}
	if err != io.EOF {
		return damaged(m.Name, err)
	}
	return nil
}

// member reads the next member of z.
func member(m Member, z io.Reader, f func(Member, io.Reader) error) error {
	sum := sha256.New()
	r := &stream{from: io.TeeReader(io.LimitReader(z, m.Size), sum)}
	err := f(m, r)
	if err == nil {
		_, err = io.Copy(io.Discard, r)
	}
	if r.err != nil {
		return damaged(m.Name, r.err)
	}
	if err != nil {
		return err
	}
	if r.n != m.Size {
		return errs.New(errs.Invalid, "the member %s has %d bytes and should have %d: it was made by a broken program, get another",
			m.Name, r.n, m.Size)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != m.SHA256 {
		return errs.New(errs.Invalid, "the member %s has the SHA-256 %s and should have %s: the file changed while it was read, "+
			"or was made by a broken program; copy it again, or get another", m.Name, got, m.SHA256)
	}
	return nil
}

// damaged is the error of a stream that cannot be read. An error of the disk stays what it is.
func damaged(what string, err error) error {
	if _, ok := errors.AsType[*os.PathError](err); ok || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%s: %w", what, err)
	}
	return errs.New(errs.Invalid, "%s cannot be decompressed (%v): the file changed while it was read, "+
		"or was made by a broken program; copy it again, or get another", what, err)
}

// stream counts, and keeps an error of the stream apart from those of a caller that reads it.
type stream struct {
	from io.Reader
	n    int64
	err  error
}

func (s *stream) Read(p []byte) (int, error) {
	n, err := s.from.Read(p)
	s.n += int64(n)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// Extract writes the members that want chooses to the new directory dir, with their names. dir
// exists afterwards if all went well, and then it is on disk; otherwise nothing is left.
func (b *Bundle) Extract(ctx context.Context, dir string, want func(Member) bool) (err error) {
	if _, err := os.Lstat(dir); err == nil {
		return errs.New(errs.Exists, "extract to %s: it exists and was not changed; name a new directory", dir)
	}
	dir = filepath.Clean(dir)
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "."+filepath.Base(dir)+".")
	if err != nil {
		return fmt.Errorf("extract to %s: %w", dir, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	root, err := os.OpenRoot(tmp)
	if err != nil {
		return fmt.Errorf("extract to %s: %w", dir, err)
	}
	defer root.Close()
	dirs := map[string]bool{".": true}
	err = b.Each(ctx, func(m Member, r io.Reader) error {
		if !want(m) {
			return nil
		}
		for d := path.Dir(m.Name); d != "."; d = path.Dir(d) {
			dirs[d] = true
		}
		if err := write(root, m, r); err != nil {
			return fmt.Errorf("extract %s to %s: %w", m.Name, dir, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for d := range dirs {
		if err := durable.SyncDir(filepath.Join(tmp, d)); err != nil {
			return fmt.Errorf("extract to %s: %w", dir, err)
		}
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return fmt.Errorf("extract to %s: %w", dir, err)
	}
	return durable.Rename(tmp, dir)
}

func write(root *os.Root, m Member, r io.Reader) error {
	mode, err := strconv.ParseUint(m.Mode, 8, 32)
	if err != nil {
		return err
	}
	if err := root.MkdirAll(path.Dir(m.Name), 0o755); err != nil {
		return err
	}
	f, err := root.OpenFile(m.Name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, os.FileMode(mode))
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Chmod(os.FileMode(mode)), f.Sync(), f.Close())
}
