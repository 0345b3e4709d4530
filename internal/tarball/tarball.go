// Package tarball copies files as tars, by the rules of `docker cp`. The agent uses it in
// a sandbox and sandboxctl uses it on the host, so both ends of a copy follow one table.
//
//	Find ─ Source.Pack ─▶ tar of a file or of a directory ─▶ Place    to a path, as cp
//	                      any tar                         ─▶ Unpack   into a directory
//
// Files, directories, symbolic links, hard links and FIFOs are copied, with modes and
// times. Sockets and devices are left out, which is an error: see LeftOut.
//
// What surprises: a tar may come from a guest. All its names are looked up beneath the
// destination by os.Root, so no link and no ".." leads out of it. Each file is written
// beside its name and renamed, so a tar that breaks off leaves no half file.
package tarball

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"
)

// DraftPrefix begins the name of a file that is being written beside its target.
const DraftPrefix = ".sandboxd-draft-"

// bufferSize is how much is copied at once, in bytes.
const bufferSize = 256 << 10

// A Refusal is a copy that the rules do not allow. Its text says why and what to do.
type Refusal struct {
	text    string
	missing bool // because something is not there
}

func refuse(format string, args ...any) error { return &Refusal{text: fmt.Sprintf(format, args...)} }

func (r *Refusal) Error() string { return r.text }

// Is makes a Refusal of what is not there an fs.ErrNotExist.
func (r *Refusal) Is(target error) bool { return r.missing && target == fs.ErrNotExist }

// A Broken error is about the tar itself: it is none, or it was cut off.
type Broken struct{ err error }

func (b *Broken) Error() string {
	if errors.Is(b.err, errNoEnd) || errors.Is(b.err, io.ErrUnexpectedEOF) {
		return "the tar was cut off: " + b.err.Error()
	}
	return "the tar cannot be read: " + b.err.Error()
}

func (b *Broken) Unwrap() error { return b.err }

var errNoEnd = errors.New("its end is missing")

// LeftOut lists what could not be copied, each with the reason. All else was copied.
type LeftOut []string

func (l LeftOut) Error() string {
	const shown = 10
	text := "left out: " + strings.Join(l[:min(len(l), shown)], "; ")
	if len(l) > shown {
		text += fmt.Sprintf("; and %d more", len(l)-shown)
	}
	return text + "; all else was copied"
}

// or returns l as an error, unless it is empty.
func (l LeftOut) or() error {
	if len(l) == 0 {
		return nil
	}
	return l
}

// DiskFull reports whether err is of a disk without room.
func DiskFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }
