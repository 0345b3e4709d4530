package record

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"runtime"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// ErrNotReplaced is in the error of NotReplaced.
var ErrNotReplaced = errors.New("the name of an image is not given to another one")

// NotReplaced is the refusal to name an image i whose name is another image's: what
// sandboxes of all clients start from changes only by an admin. as says how that one is
// known here.
func NotReplaced(i Image, as string) error {
	return errs.Wrap(ErrNotReplaced, errs.Denied, "image %s exists on this host with other content (%s), and sandboxes of all clients "+
		"start from it; use another name, or let an admin replace it (an admin's key, or the Unix socket)", i.Ref(), as)
}

// NotGiven is the refusal to give an image i a name for which there is no image yet:
// is says which one it is to be.
func NotGiven(i Image, is string) error {
	return errs.Wrap(ErrNotReplaced, errs.Denied, "image %s is not on this host, and its name is kept: it is %s, and sandboxes of all "+
		"clients will start from it; use another name, for example localhost/%s, or let an admin give it (an admin's key, or the "+
		"Unix socket)", i.Ref(), is, path.Base(i.Ref()))
}

// Machine is the architecture that an image is for, and the variant of it if it says one.
func (c ImageConfig) Machine() (architecture, variant string) {
	architecture, variant, _ = strings.Cut(strings.TrimPrefix(c.Platform, "linux/"), "/")
	return cmp.Or(architecture, runtime.GOARCH), variant
}

// Notes say, for people, what an image asks for and does not get on this host.
func (c ImageConfig) Notes() (notes []string) {
	if c.Platform != "" {
		notes = append(notes, fmt.Sprintf("it is for %s, and this host is linux/%s: its programs do not start here", c.Platform,
			runtime.GOARCH))
	}
	return notes
}
