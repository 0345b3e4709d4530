package output

import (
	"context"
	"io"
)

// Copy writes the output between two byte numbers, as far as it is kept,
// and returns the number after the last.
func (r *Ring) Copy(w io.Writer, off, end int64) (int64, error) {
	bp := buffers.Get().(*[]byte)
	defer buffers.Put(bp)
	b := *bp
	for off < end {
		n, at := r.ReadAt(b[:min(end-off, int64(len(b)))], off)
		n = int(min(int64(n), end-at)) // at is later than end if the ring has moved on
		if n <= 0 {
			break
		}
		if _, err := w.Write(b[:n]); err != nil {
			return off, err
		}
		off = at + int64(n)
	}
	return max(off, end), nil
}

// Follow writes output as it comes, from a byte number on, until ended is closed and all is
// written, or ctx ends, or a write or flush fails. It holds no buffer while it waits.
func (r *Ring) Follow(ctx context.Context, w io.Writer, flush func() error, ended <-chan struct{}, off int64) {
	for over := false; ; {
		grown := r.Grown() // before the read, so that no Write is missed
		_, end := r.Range()
		var err error
		if off, err = r.Copy(w, off, max(off, end)); err != nil || over {
			return
		}
		if flush() != nil {
			return
		}
		select {
		case <-grown:
		case <-ended:
			over = true
		case <-ctx.Done():
			return
		}
	}
}
