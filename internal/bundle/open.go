package bundle

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"aead.dev/minisign"
	"golang.org/x/mod/semver"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Bundle is an open file whose signature is right.
type Bundle struct {
	Manifest
	Key     Key    // that made the signature
	Comment string // the trusted comment of the signature
	Bytes   int64  // of the whole file
	file    *os.File
	layout  layout
}

// Open opens the bundle at path, if one of keys signed it. The whole file is read; all but its
// last part is signed, and nothing but sizes is looked at before the signature is right. The
// manifest that it returns is the one that was signed, also if the file changes meanwhile. The
// caller closes the bundle.
func Open(ctx context.Context, path string, keys []Key) (*Bundle, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open the bundle: %w", err)
	}
	b, err := open(ctx, f, keys)
	if err != nil {
		return nil, errors.Join(refusal(path, err), f.Close())
	}
	return b, nil
}

// refusal puts what was tried in front of err and keeps its code.
func refusal(path string, err error) error {
	if e, ok := errors.AsType[*errs.Error](err); ok {
		return errs.New(e.Code, "bundle %s is refused: %s", path, e.Text)
	}
	return fmt.Errorf("read the bundle %s: %w", path, err)
}

func open(ctx context.Context, f *os.File, keys []Key) (*Bundle, error) {
	l, header, err := readLayout(f)
	if err != nil {
		return nil, err
	}
	signature := make([]byte, l.signature)
	if _, err := f.ReadAt(signature, l.signed()); err != nil {
		return nil, err
	}
	key, comment, err := findKey(signature, keys)
	if err != nil {
		return nil, err
	}
	r := minisign.NewReader(within(ctx, io.NewSectionReader(f, 0, l.signed())))
	begin, manifest := make([]byte, headerSize), make([]byte, l.manifest)
	_, err = io.ReadFull(r, begin)
	if err == nil {
		_, err = io.CopyN(io.Discard, r, l.prelude+l.verifier-headerSize)
	}
	if err == nil {
		_, err = io.ReadFull(r, manifest)
	}
	if err == nil {
		_, err = io.Copy(io.Discard, r)
	}
	if err != nil {
		return nil, err
	}
	// The header may be another one by now, on a disk that lies.
	if !bytes.Equal(begin, header) || !r.Verify(key.key, signature) {
		return nil, errs.New(errs.Denied, "the key %s (%s) did not sign these bytes: the file was changed, or somebody else made it; "+
			"copy it again, or get another", key.ID(), key.From)
	}
	m, err := parse(manifest)
	if err != nil {
		return nil, err
	}
	if m.Version != l.version || m.Architecture != l.architecture || !strings.HasPrefix(comment, trusted(m)) {
		return nil, errs.New(errs.Invalid, "header (%s %s), manifest (%s %s) and signature (%s) name different releases: "+
			"it was made by a broken program, get another", l.version, l.architecture, m.Version, m.Architecture, comment)
	}
	return &Bundle{Manifest: *m, Key: key, Comment: comment, Bytes: l.signed() + l.signature, file: f, layout: l}, nil
}

// Close closes the file.
func (b *Bundle) Close() error { return b.file.Close() }

// Has reports whether the bundle has a member of this kind.
func (m *Manifest) Has(kind string) bool {
	return slices.ContainsFunc(m.Members, func(f Member) bool { return f.Kind == kind })
}

// Host is what a bundle is meant for.
type Host struct {
	OS, Architecture string // as runtime.GOOS and runtime.GOARCH
	Installed        string // version of sandboxd there; "" for none
	Force            bool   // an older version than the installed one is all right
}

// For returns an error if the bundle is not for this host.
func (b *Bundle) For(h Host) error {
	err := b.Manifest.suits(h)
	if err != nil {
		return refusal(b.file.Name(), err)
	}
	return nil
}

func (m *Manifest) suits(h Host) error {
	if m.OS != h.OS || m.Architecture != h.Architecture {
		return errs.New(errs.Unsupported, "it is for %s/%s, and this host is %s/%s: get the bundle for this host",
			m.OS, m.Architecture, h.OS, h.Architecture)
	}
	if h.Installed != "" && !h.Force && semver.Compare("v"+m.Version, "v"+h.Installed) < 0 {
		return errs.New(errs.WrongState, "it has sandboxd %s, and %s is installed, which is newer: get a newer bundle, "+
			"or take the older release by --force", m.Version, h.Installed)
	}
	return nil
}

// within returns r, which fails when ctx ends.
func within(ctx context.Context, r io.Reader) io.Reader { return reader{ctx, r} }

type reader struct {
	ctx  context.Context
	from io.Reader
}

func (r reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.from.Read(p)
}
