package record

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"runtime"
	"slices"
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

// Foreign says, for people, that an image is for another machine; empty: it is not.
func (c ImageConfig) Foreign() string {
	if c.Platform == "" {
		return ""
	}
	return fmt.Sprintf("it is for %s, and this host is linux/%s: its programs do not start here", c.Platform, runtime.GOARCH)
}

// Notes say, for people, what an image asks for and does not get on this host.
func (i Image) Notes() (notes []string) {
	if n := i.Config.Foreign(); n != "" {
		notes = append(notes, n)
	}
	if s := i.Config.StopSignal; s != "" && Signal(s) == 0 {
		notes = append(notes, fmt.Sprintf("its STOPSIGNAL %.40q is no signal: stop sends SIGTERM", s))
	}
	var check struct{ Test []string }
	if raw := i.Unused["Healthcheck"]; raw != nil && (json.Unmarshal(raw, &check) != nil || !slices.Equal(check.Test, []string{"NONE"})) {
		notes = append(notes, "its HEALTHCHECK is not run: --health-cmd of create and run gives a sandbox one")
	}
	return notes
}
