package files

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"io"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// uncompressed reads a tar that may be compressed.
func uncompressed(r io.Reader) (io.Reader, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	head, err := in.Peek(6)
	if err != nil && err != io.EOF {
		return nil, localErr("read standard input", err)
	}
	begins := func(magic string) bool { return bytes.HasPrefix(head, []byte(magic)) }
	var out io.Reader = in
	switch err = nil; {
	case begins("\x1f\x8b"):
		out, err = gzip.NewReader(in)
	case begins("BZh"):
		out = bzip2.NewReader(in)
	case begins("\x28\xb5\x2f\xfd"):
		out, err = zstd.NewReader(in)
	case begins("\xfd7zXZ\x00"):
		return nil, errs.New(errs.Unsupported, "standard input is compressed with xz; pipe it through xz -d")
	}
	if err != nil {
		return nil, localErr("read standard input", err)
	}
	return out, nil
}

// reading remembers why reading failed.
type reading struct {
	io.Reader
	failed atomic.Pointer[error]
}

func (r *reading) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil && err != io.EOF {
		r.failed.Store(&err)
	}
	return n, err
}

// err is why reading failed, or nil.
func (r *reading) err() error {
	if e := r.failed.Load(); e != nil {
		return *e
	}
	return nil
}
