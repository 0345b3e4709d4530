package image

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/keylock"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image/archive"
)

// Bounds on the remains of unfinished pulls, from which the next pull goes on: their
// age, and their size in all. The oldest are removed first.
const (
	blobsFor = 24 * time.Hour
	blobsMax = 16 << 30
)

const (
	// stall is how long a registry may send nothing in the middle of a blob.
	stall = time.Minute
	// cuts is how often in a row the connection may break before a byte of a blob has
	// come.
	cuts = 5
	half = ".part"
)

// blobs keeps downloads by digest, until the image that needs them has its name. A file
// named by its digest is whole and was checked; a file with .part behind that is the
// beginning of a blob.
type blobs struct {
	dir  string
	room func() error

	going keylock.Set // by digest: a second pull waits and finds the blob whole

	mu   sync.Mutex
	used map[string]int // by digest: how many pulls need it; guarded by mu
}

// use keeps blobs from being removed until the returned function is called. Its
// argument says whether their image is there: then the blobs are no longer needed.
func (b *blobs) use(all []archive.Layer) (done func(named bool)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range all {
		b.used[l.Digest]++
	}
	return func(named bool) {
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, l := range all {
			if b.used[l.Digest]--; b.used[l.Digest] == 0 {
				delete(b.used, l.Digest)
				if named {
					b.drop(l.Digest)
				}
			}
		}
	}
}

// drop removes a whole blob that is not needed.
func (b *blobs) drop(digest string) { _ = os.Remove(b.path(digest)) } // on an error the sweep removes it

func (b *blobs) path(digest string) string {
	return filepath.Join(b.dir, strings.ReplaceAll(digest, ":", "-"))
}

// opener opens a blob from a byte on. begins is where the body really begins, 0 or at.
// of is the source that sent it, and explain makes an error of reading it readable.
type opener interface {
	Blob(ctx context.Context, digest string, at, size int64, from int) (body io.ReadCloser, begins int64, of int, err error)
	Explain(of int, err error) error
	Sources() int
}

// get returns a blob as a file, and downloads the missing part of it. It calls progress
// with the number of bytes that are here.
// Preconditions: the blob is in use.
func (b *blobs) get(ctx context.Context, want archive.Layer, from opener, progress func(int64)) (*os.File, error) {
	unlock, err := b.going.Lock(ctx, want.Digest)
	if err != nil {
		return nil, err
	}
	defer unlock()
	path := b.path(want.Digest)
	if f, err := os.Open(path); err == nil {
		if fi, err := f.Stat(); err == nil && fi.Size() == want.Size {
			progress(want.Size)
			return f, nil
		}
		f.Close()
	}
	f, err := os.OpenFile(path+half, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("save a blob: %w", full(err))
	}
	d := &download{f: f, want: want, from: from, progress: progress, room: b.room}
	if err := d.run(ctx); err != nil {
		return nil, errors.Join(err, f.Close(), d.leave(path+half))
	}
	if err := errors.Join(f.Sync(), os.Rename(path+half, path)); err != nil {
		return nil, errors.Join(fmt.Errorf("save a blob: %w", full(err)), f.Close())
	}
	return f, nil
}

// download is the download of one blob.
type download struct {
	f        *os.File
	want     archive.Layer
	from     opener
	progress func(int64)
	room     func() error

	have  int64 // bytes in f, all of them added to sum
	sum   hash.Hash
	found bool // some of it was here already
	place int  // the first source that has not sent a wrong blob
	bad   bool // nothing of it is worth keeping
	more  bool // the source sent more than the size of the blob
}

func (d *download) run(ctx context.Context) error {
	if err := d.resume(); err != nil {
		return fmt.Errorf("read the partial download of a blob: %w", err)
	}
	empty := 0 // failed tries in a row that brought nothing
	for {
		if d.have < d.want.Size || d.want.Size == 0 {
			before := d.have
			cut, err := d.fetch(ctx)
			switch {
			case err == nil:
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case !cut:
				return err
			default:
				if empty++; d.have > before {
					empty = 0
				}
				if empty == cuts {
					return err
				}
				if perr := rest(ctx, time.Duration(empty)*time.Second); perr != nil {
					return perr
				}
				continue
			}
		}
		ok, err := d.check()
		if ok || err != nil {
			return err
		}
	}
}

// rest waits for d, or until ctx ends.
func rest(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// resume reads what an earlier download has left.
func (d *download) resume() error {
	d.sum = sha256.New()
	fi, err := d.f.Stat()
	if err != nil {
		return err
	}
	if fi.Size() == 0 || fi.Size() > d.want.Size {
		return d.again()
	}
	if d.have, err = io.Copy(d.sum, d.f); err != nil {
		return err
	}
	d.found = true
	d.progress(d.have)
	return nil
}

// again begins anew.
func (d *download) again() error {
	d.sum.Reset()
	d.have, d.found = 0, false
	_, err := d.f.Seek(0, io.SeekStart)
	return errors.Join(err, d.f.Truncate(0))
}

// fetch reads the missing part. cut says that another try may help against the error.
func (d *download) fetch(ctx context.Context) (cut bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	body, begins, of, err := d.from.Blob(ctx, d.want.Digest, d.have, d.want.Size, d.place)
	if err != nil {
		return false, err // Blob has tried it several times
	}
	defer body.Close()
	d.place = max(d.place, of)
	if begins != d.have {
		if err := d.again(); err != nil {
			return false, fmt.Errorf("restart the download of a blob: %w", err)
		}
	}
	silence := errors.New("it has sent nothing for " + stall.String())
	watch := time.AfterFunc(stall, func() { cancel(silence) })
	defer watch.Stop()
	left := d.want.Size - d.have
	in := &meter{r: &roomy{r: body, room: d.room}, report: func(int64) { watch.Reset(stall) }}
	w := writer{w: d.f}
	n, err := io.CopyBuffer(&w, &meter{r: io.TeeReader(io.LimitReader(in, left), d.sum), report: func(n int64) { d.progress(d.have + n) }},
		make([]byte, 1<<18))
	d.have += n
	switch {
	case w.err != nil:
		return false, fmt.Errorf("save a blob: %w", full(w.err))
	case errs.Is(err, errs.Exhausted): // the disk is full
		return false, err
	case err != nil:
		return true, d.from.Explain(of, cmp.Or(cause(ctx, silence), err))
	case n < left:
		return true, d.from.Explain(of, fmt.Errorf("it has sent %d of %d bytes of %s: %w", d.have, d.want.Size, d.want.Digest,
			io.ErrUnexpectedEOF))
	}
	more, _ := io.ReadFull(in, make([]byte, 1))
	d.more = more > 0
	return false, nil
}

// cause returns why if ctx ended because of it, else nil.
func cause(ctx context.Context, why error) error {
	if errors.Is(context.Cause(ctx), why) {
		return why
	}
	return nil
}

// writer remembers that a write failed. The digest has then read more than the file
// has.
type writer struct {
	w   io.Writer
	err error
}

func (w *writer) Write(p []byte) (n int, err error) {
	n, w.err = w.w.Write(p)
	return n, w.err
}

// check compares the digest. The wrong bytes may be from an earlier download, or from a
// mirror: then the download begins anew.
func (d *download) check() (ok bool, err error) {
	got := "sha256:" + hex.EncodeToString(d.sum.Sum(nil))
	if got == d.want.Digest && !d.more {
		return true, nil
	}
	lie := "it has the digest " + got
	if d.more {
		lie = fmt.Sprintf("it has more than the %d bytes of its manifest", d.want.Size)
	}
	d.more = false
	switch {
	case d.found:
	case d.place+1 < d.from.Sources():
		d.place++
	default:
		d.bad = true
		return false, errs.New(errs.Invalid, "the registry sent wrong content for %s: %s", d.want.Digest, lie)
	}
	if err := d.again(); err != nil {
		return false, fmt.Errorf("restart the download of a blob: %w", err)
	}
	return false, nil
}

// leave removes the file if another download cannot go on from it.
func (d *download) leave(path string) error {
	if !d.bad && d.have > 0 {
		return nil
	}
	return os.Remove(path)
}

// leftover is a file that no pull needs.
type leftover struct {
	path  string
	bytes int64
	time  time.Time
}

// leftovers lists the files that no pull needs, the oldest first.
func (b *blobs) leftovers() (list []leftover, err error) {
	entries, err := os.ReadDir(b.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list blobs: %w", err)
	}
	for _, e := range entries {
		digest := strings.Replace(strings.TrimSuffix(e.Name(), half), "-", ":", 1)
		fi, err := e.Info()
		if b.used[digest] > 0 || errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list blobs: %w", err)
		}
		list = append(list, leftover{filepath.Join(b.dir, e.Name()), fi.Size(), fi.ModTime()})
	}
	slices.SortFunc(list, func(x, y leftover) int { return x.time.Compare(y.time) })
	return list, nil
}

// sweep removes files that are too old, and the oldest ones while all together exceed
// most. It returns how many bytes it removed.
func (b *blobs) sweep(age time.Duration, most int64) (bytes int64, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	list, err := b.leftovers()
	var total int64
	for _, l := range list {
		total += l.bytes
	}
	for _, l := range list {
		if time.Since(l.time) <= age && total <= most {
			break
		}
		if rerr := os.Remove(l.path); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
			continue
		}
		total -= l.bytes
		bytes += l.bytes
	}
	return bytes, err
}
