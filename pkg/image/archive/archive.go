// Package archive reads archives of images: the output of `docker save`, `podman save`
// and buildx, OCI image layouts in a tar, and tars of a root file system.
//
// All of it runs in confined children (internal/confine). The daemon asks them where
// things are and what documents say, and reads the bytes itself:
//
//	probe    the first bytes   ─▶ Kind: is it compressed, is it an image
//	inflate  gzip or zstd      ─▶ what was compressed, at most maxRatio times as much
//	plan     the archive, open ─▶ Plan: where its layers lie, and the image's config
//	manifest what a registry says of an image ─▶ Manifest
//	config   the config that a manifest names  ─▶ Config
//
// go-containerregistry parses the documents inside. Its readers of whole archives are
// not used: they find each member by scanning from the start, and need a layout in a
// directory. Here one scan notes where members are, and a layer is then a section of a
// file.
package archive

import (
	"archive/tar"
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"regexp"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// The verbs of the children.
const (
	ProbeVerb   = "probe"
	InflateVerb = "inflate"
	PlanVerb    = "plan"

	ManifestVerb = "manifest"
	ConfigVerb   = "config"
)

// Verbs are the verbs that a program that imports images passes to confine.Main.
func Verbs() map[string]confine.Verb {
	return map[string]confine.Verb{
		ProbeVerb: func([]string) error {
			head, err := io.ReadAll(io.LimitReader(os.Stdin, HeadSize))
			if err != nil {
				return err
			}
			k, err := probe(head)
			if err != nil {
				return err
			}
			return json.NewEncoder(os.Stdout).Encode(k)
		},
		InflateVerb: func([]string) error {
			out := bufio.NewWriterSize(os.Stdout, 1<<18)
			return errors.Join(inflate(out, bufio.NewReaderSize(os.Stdin, 1<<18)), out.Flush())
		},
		PlanVerb: func(args []string) error {
			f := os.NewFile(confine.FirstFile, "archive")
			fi, err := f.Stat()
			if err != nil {
				return err
			}
			p, err := planOf(f, fi.Size(), args)
			if err != nil {
				return err
			}
			return json.NewEncoder(os.Stdout).Encode(p)
		},
		ManifestVerb: func([]string) error { return answer(manifestOf) },
		ConfigVerb:   func([]string) error { return answer(configOf) },
	}
}

// answer reads one document of a registry and says what is in it.
func answer[T any](read func([]byte) (T, error)) error {
	b, err := io.ReadAll(io.LimitReader(os.Stdin, MaxDocument))
	if err != nil {
		return err
	}
	said, err := read(b)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(said)
}

// HeadSize is how much of an archive a probe reads, in bytes.
const HeadSize = 64 << 10

// Kind is what the first bytes of an archive show.
type Kind struct {
	Compressed bool `json:"compressed"`
	Image      bool `json:"image"` // else the tar is a root file system itself
}

// member matches the names of top-level members in the archive of an image. `docker
// save` has directories or files named by digests, an OCI layout has blobs.
var member = regexp.MustCompile(`^(?:[0-9a-f]{64}(?:\.json|\.tar|\.tar\.gz)?|sha256:[0-9a-f]{64}|manifest\.json|repositories|oci-layout|index\.json|blobs)$`)

// probe reads the first members of an archive. The root directory shows nothing, so
// probe decides by the first member after it.
func probe(head []byte) (k Kind, err error) {
	switch {
	case bytes.HasPrefix(head, gzipMagic), bytes.HasPrefix(head, zstdMagic):
		k.Compressed = true
	case bytes.HasPrefix(head, []byte("BZh")), bytes.HasPrefix(head, []byte("\xfd7zXZ\x00")):
		return k, errs.New(errs.Unsupported, "the archive is compressed with bzip2 or xz: decompress it first, for example `xzcat FILE | "+
			"sandboxctl image import - NAME`")
	}
	var start bytes.Buffer
	if err := inflate(&start, bytes.NewReader(head)); err != nil && start.Len() == 0 {
		return k, err // the rest is missing by design
	}
	tr := tar.NewReader(&start)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return k, errs.New(errs.Invalid, "the archive is empty")
		}
		if err != nil {
			return k, errs.Wrap(err, errs.Invalid, "the archive is not a tar, plain or compressed with gzip or zstd")
		}
		name := path.Clean("/" + h.Name)[1:]
		if name == "" || h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		top, _, _ := strings.Cut(name, "/")
		k.Image = member.MatchString(top)
		return k, nil
	}
}

var (
	gzipMagic = []byte{0x1f, 0x8b}
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
)

// Bounds of decompression. Layers of software shrink to a third; repetitive text
// shrinks to a fiftieth.
const (
	maxRatio = 200
	slack    = 64 << 20  // size that a small archive may always reach
	maxZstd  = 1<<27 + 1 // bytes of window: zstd --long=27, the default limit of zstd -d
)

// inflate copies from to to, decompressed if it is compressed.
func inflate(to io.Writer, from io.Reader) error {
	in := &counter{r: from}
	br := bufio.NewReaderSize(in, 1<<16)
	magic, err := br.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	var r io.Reader = br
	switch {
	case bytes.HasPrefix(magic, gzipMagic):
		r, err = gzip.NewReader(br)
	case bytes.HasPrefix(magic, zstdMagic):
		var z *zstd.Decoder
		z, err = zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxZstd),
			zstd.WithDecoderMaxMemory(2*maxZstd))
		if err == nil {
			defer z.Close()
		}
		r = z
	default:
		_, err = io.Copy(to, br)
		return err
	}
	if err != nil {
		return broken(err)
	}
	buf := make([]byte, 1<<18)
	for out := int64(0); ; {
		n, err := r.Read(buf)
		if out += int64(n); out > maxRatio*in.n+slack {
			return errs.New(errs.Invalid, "the archive is a decompression bomb: %d bytes of it unpack to more than %d", in.n, out)
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return err
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return broken(err)
		}
	}
}

func broken(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return errs.Wrap(err, errs.Invalid, "the archive is cut off: its compressed data has no end")
	}
	return errs.Wrap(err, errs.Invalid, "the compressed data of the archive is damaged")
}

type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// Span is where a member lies in an archive, in bytes.
type Span struct {
	At   int64 `json:"at"`
	Size int64 `json:"size"`
}

// members are the files of an archive, by clean name.
type members struct {
	f     io.ReaderAt
	files map[string]Span
	links map[string]string // symbolic and hard ones, resolved against their directory
}

// Bounds of the archive around the layers.
const (
	maxMembers  = 100_000
	maxLinks    = 8
	maxDocument = 8 << 20 // a manifest, an index, a config
)

// scan notes where the members of an archive lie, without reading them.
func scan(f io.ReaderAt, size int64) (*members, error) {
	m := &members{f: f, files: map[string]Span{}, links: map[string]string{}}
	in := io.NewSectionReader(f, 0, size)
	tr := tar.NewReader(in)
	for n := 0; ; n++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return m, ended(in)
		}
		if err != nil {
			return nil, errs.Wrap(err, errs.Invalid, "the archive is cut off or not a tar")
		}
		if n == maxMembers {
			return nil, errs.New(errs.Invalid, "the archive has more than %d members; no image archive needs that many", maxMembers)
		}
		name := path.Clean("/" + h.Name)[1:]
		switch h.Typeflag {
		case tar.TypeReg:
			at, err := in.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, err
			}
			if h.Size > size-at {
				return nil, errs.New(errs.Invalid, "the archive is cut off in its member %.100q", h.Name)
			}
			m.files[name] = Span{at, h.Size}
		case tar.TypeSymlink:
			m.links[name] = path.Join("/", path.Dir(name), h.Linkname)[1:]
		case tar.TypeLink:
			m.links[name] = path.Clean("/" + h.Linkname)[1:]
		}
	}
}

// ended refuses a tar without an end: package tar accepts the end of its reader as one.
func ended(in *io.SectionReader) error {
	at, err := in.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	var mark [1024]byte
	if _, err := in.ReadAt(mark[:], max(0, at-int64(len(mark)))); err != nil || mark != [len(mark)]byte{} {
		return errs.Wrap(err, errs.Invalid, "the archive is cut off: its tar has no end")
	}
	return nil
}

// find returns where a member lies. It follows a few links: old versions of `docker
// save` link equal layers.
func (m *members) find(name string) (Span, error) {
	at := path.Clean("/" + name)[1:]
	for range maxLinks {
		if s, ok := m.files[at]; ok {
			return s, nil
		}
		next, ok := m.links[at]
		if !ok {
			return Span{}, errs.New(errs.Invalid, "the archive has no member %.100q", name)
		}
		at = next
	}
	return Span{}, errs.New(errs.Invalid, "member %.100q of the archive is behind more than %d links", name, maxLinks)
}

// read returns the content of a small member.
func (m *members) read(name string) ([]byte, error) {
	s, err := m.find(name)
	if err != nil {
		return nil, err
	}
	if s.Size > maxDocument {
		return nil, errs.New(errs.Invalid, "member %.100q of the archive has %d bytes; a document has at most %d", name, s.Size,
			maxDocument)
	}
	b := make([]byte, s.Size)
	if _, err := m.f.ReadAt(b, s.At); err != nil && !(errors.Is(err, io.EOF) && s.Size == 0) {
		return nil, fmt.Errorf("read member %.100q: %w", name, err)
	}
	return b, nil
}

func (m *members) has(name string) bool {
	_, err := m.find(name)
	return err == nil
}
