package image

import (
	"encoding/json"
	"errors"
	"path"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Bounds of the config of an imported image, which is copied into the record of
// each sandbox (labels are not).
const (
	maxEnv    = 1000
	maxLabels = 1000
	maxText   = 256 << 10 // bytes of all variables, of all labels
	maxUser   = 256
	// Of ENTRYPOINT and CMD, together, as of the entrypoint of a request.
	maxArgs     = 1000
	maxArgBytes = 128 << 10
)

var platformForm = regexp.MustCompile(`^linux/[a-z0-9_.-]{1,32}(?:/[a-z0-9_.-]{1,32})?$`)

// checkConfig refuses what a sandbox could not start with.
func checkConfig(c *record.ImageConfig) error {
	bad := func(format string, args ...any) error {
		return errs.New(errs.Invalid, "the config of the image: "+format, args...)
	}
	total := 0
	for _, kv := range c.Env {
		if k, _, ok := strings.Cut(kv, "="); !ok || !record.IsVariable(k) || strings.ContainsRune(kv, 0) {
			return bad("variable %.80q is not KEY=VALUE", kv)
		}
		total += len(kv)
	}
	if total > maxText || len(c.Env) > maxEnv {
		return bad("%d variables of %d bytes; at most %d variables of %d bytes are allowed", len(c.Env), total, maxEnv, maxText)
	}
	total = 0
	for k, v := range c.Labels {
		total += len(k) + len(v)
	}
	if total > maxText || len(c.Labels) > maxLabels {
		return bad("%d labels of %d bytes; at most %d labels of %d bytes are allowed", len(c.Labels), total, maxLabels, maxText)
	}
	total = 0
	argv := c.Command(nil)
	for _, a := range argv {
		if strings.ContainsRune(a, 0) {
			return bad("ENTRYPOINT or CMD contains a NUL byte")
		}
		total += len(a) + 1
	}
	if total > maxArgBytes || len(argv) > maxArgs {
		return bad("ENTRYPOINT and CMD have %d arguments of %d bytes; at most %d arguments of %d bytes are allowed", len(argv), total,
			maxArgs, maxArgBytes)
	}
	if !path.IsAbs(c.Workdir) || path.Clean(c.Workdir) != c.Workdir || len(c.Workdir) > unix.PathMax || strings.ContainsRune(c.Workdir, 0) {
		return bad("WORKDIR %.200q is not a clean absolute path", c.Workdir)
	}
	if len(c.User) > maxUser || strings.ContainsAny(c.User, "\x00\n") {
		return bad("USER %.80q is not a valid user", c.User)
	}
	if len(c.StopSignal) > maxUser || strings.ContainsAny(c.StopSignal, "\x00\n") {
		return bad("STOPSIGNAL %.80q is no signal", c.StopSignal)
	}
	if c.Platform != "" && !platformForm.MatchString(c.Platform) {
		return bad("it is for %.80q, which is no platform", c.Platform)
	}
	return nil
}

// unusedFields are the fields of a config that are kept and not used.
var unusedFields = []string{"ExposedPorts", "Healthcheck", "OnBuild", "Shell", "Volumes"}

// checkUnused refuses what no honest child says, or takes too much room in a record.
func checkUnused(fields map[string]json.RawMessage) error {
	total := 0
	for k, v := range fields {
		if total += len(v); !slices.Contains(unusedFields, k) || total > maxText {
			return errs.New(errs.Invalid, "the config of the image: %.40q and the like have more than %d bytes", k, maxText)
		}
	}
	return nil
}

// full adds to an error of a full disk what to do about it.
func full(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errs.Wrap(err, errs.Exhausted, "the disk of the state directory is full: free space, or remove images (sandboxctl image "+
			"prune)")
	}
	return err
}
