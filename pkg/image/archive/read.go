package archive

import (
	"io"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Read says what an archive of size bytes holds: the plan of an image, or, for a tar of a root file
// system, one layer without a digest. The archive must not be compressed. Only a child of
// internal/confine calls it, or a program without privileges.
func Read(f io.ReaderAt, size int64) (Plan, error) {
	head := make([]byte, min(size, HeadSize))
	if _, err := io.ReadFull(io.NewSectionReader(f, 0, size), head); err != nil {
		return Plan{}, err
	}
	kind, err := probe(head)
	if err != nil {
		return Plan{}, err
	}
	if kind.Compressed {
		return Plan{}, errs.New(errs.Unsupported, "the archive is compressed: decompress it first, for example with zstd -d or gzip -d")
	}
	if !kind.Image {
		return Plan{Layers: []Layer{{Span: Span{Size: size}}}}, nil
	}
	return planOf(f, size, nil)
}

// Unpacked reads a layer of a plan that Read made, decompressed. Close ends it before its end.
func Unpacked(f io.ReaderAt, l Layer) io.ReadCloser {
	from := io.NewSectionReader(f, l.At, l.Size)
	if !l.Packed {
		return io.NopCloser(from)
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(inflate(w, from)) }()
	return r
}
