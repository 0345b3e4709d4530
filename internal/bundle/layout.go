package bundle

import (
	"bytes"
	_ "embed"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/mod/semver"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

//go:embed prelude.sh
var script []byte

// headerSize is the size of the header: the first lines of the prelude, which set variables of
// the script, padded.
const headerSize = 512

const (
	magic  = "#!/bin/sh\n# sandboxd bundle, format "
	advice = ". \"sh FILE\" installs it. To check it first: docs/design/appliance.md.\n"
)

// layout is what the header says.
type layout struct {
	version, architecture                           string
	prelude, verifier, manifest, members, signature int64 // sizes in bytes
}

// signed is the size of the signed part: all but the signature.
func (l layout) signed() int64 { return l.stream() + l.members + 1 }

// stream is where the members begin.
func (l layout) stream() int64 { return l.prelude + l.verifier + l.manifest }

func (l layout) fields() []any {
	return []any{l.version, l.architecture, l.prelude, l.verifier, l.manifest, l.members, l.signature}
}

// header is the text of l. There is one for each l, so that a reader compares bytes.
func (l layout) header() []byte {
	b := []byte(magic + strconv.Itoa(Format) + advice)
	b = fmt.Appendf(b, "version=%s\narchitecture=%s\nprelude=%d\nverifier=%d\nmanifest=%d\nmembers=%d\nsignature=%d\n", l.fields()...)
	b = append(b, bytes.Repeat([]byte{'#'}, max(0, headerSize-1-len(b)))...)
	return append(b, '\n')
}

// readLayout reads the header, the only part of a file that is read before its signature is
// checked, and compares it with the size of the file.
func readLayout(f *os.File) (l layout, header []byte, err error) {
	fi, err := f.Stat()
	if err != nil {
		return l, nil, err
	}
	if !fi.Mode().IsRegular() {
		return l, nil, errs.New(errs.Invalid, "it is no regular file: it is read twice, so copy it to a disk first")
	}
	header = make([]byte, headerSize)
	n, err := f.ReadAt(header, 0)
	if err != nil && err != io.EOF {
		return l, nil, err
	}
	header = header[:n]
	rest, ok := bytes.CutPrefix(header, []byte(magic))
	if !ok {
		return l, nil, errs.New(errs.Invalid, "it is no bundle of sandboxd, or its beginning was changed: copy it again")
	}
	format, rest, _ := bytes.Cut(rest, []byte(". "))
	if n, err := strconv.ParseUint(string(format), 10, 31); err == nil && n != Format {
		return l, nil, foreign(string(format))
	}
	if n < headerSize {
		return l, nil, errs.New(errs.Invalid, "it ends after %d bytes, in its header: the copy is not whole, copy it again", n)
	}
	_, text, _ := bytes.Cut(rest, []byte("\n"))
	if l, ok = parseHeader(string(text)); !ok || !bytes.Equal(l.header(), header) {
		return l, nil, errs.New(errs.Invalid, "its header was changed: copy it again, or get another")
	}
	switch size, want := fi.Size(), l.signed()+l.signature; {
	case size < want:
		return l, nil, errs.New(errs.Invalid, "it ends after %d of %d bytes, in the %s: the copy is not whole, copy it again",
			size, want, l.part(size))
	case size > want:
		return l, nil, errs.New(errs.Invalid, "it has %d bytes after its end at %d: it was changed, copy it again", size-want, want)
	}
	return l, header, nil
}

func parseHeader(text string) (l layout, ok bool) {
	take := func(key string) (value string) {
		line, rest, _ := strings.Cut(text, "\n")
		text = rest
		value, _ = strings.CutPrefix(line, key+"=")
		return value
	}
	l.version, l.architecture = take("version"), take("architecture")
	ok = isVersion(l.version) && isWord(l.architecture)
	for _, part := range []struct {
		key       string
		size      *int64
		least, at int64
	}{
		{"prelude", &l.prelude, headerSize, maxPrelude},
		{"verifier", &l.verifier, 0, maxVerifier},
		{"manifest", &l.manifest, 2, maxManifest},
		{"members", &l.members, 0, maxSize},
		{"signature", &l.signature, 1, maxSignature},
	} {
		n, err := strconv.ParseInt(take(part.key), 10, 64)
		*part.size, ok = n, ok && err == nil && part.least <= n && n <= part.at
	}
	return l, ok
}

// part names the part of a file that has the byte at offset at.
func (l layout) part(at int64) string {
	switch {
	case at < l.prelude:
		return "prelude"
	case at < l.prelude+l.verifier:
		return "verifier"
	case at < l.stream():
		return "manifest"
	case at < l.signed():
		return "members"
	}
	return "signature"
}

// isVersion reports whether v is a semantic version that a shell takes as a word.
func isVersion(v string) bool {
	// semver.IsValid also takes "v1".
	return len(v) <= 100 && semver.IsValid("v"+v) && strings.Count(strings.SplitN(v, "-", 2)[0], ".") >= 2
}
