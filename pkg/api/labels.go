package api

import (
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Labels follow Kubernetes: kubernetes.io/docs/concepts/overview/working-with-objects/labels.
var (
	labelWord   = regexp.MustCompile(`^[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$`)
	labelPrefix = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	nameForm    = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}$`)
)

const reservedPrefix = "opensandbox.io/"

// isName reports whether s may be the name of a sandbox.
func isName(s string) bool { return nameForm.MatchString(s) && !strings.Contains(s, "..") }

func badLabel(wireCode, format string, args ...any) error {
	return errs.Wire(httperr.Invalid(format, args...), wireCode)
}

func checkLabelKey(k, wireCode string) error {
	prefix, name, has := strings.Cut(k, "/")
	if !has {
		prefix, name = "", k
	}
	switch {
	case strings.HasPrefix(k, reservedPrefix):
		return badLabel(wireCode, "metadata key %q: the prefix %s is reserved; choose another", httperr.Clip(k, 80), reservedPrefix)
	case has && (len(prefix) > 253 || !labelPrefix.MatchString(prefix)):
		return badLabel(wireCode, "metadata key %q: what stands before the / must be a DNS name of at most 253 lower-case characters", httperr.Clip(k, 80))
	case len(name) > 63 || !labelWord.MatchString(name):
		return badLabel(wireCode, "metadata key %q: want at most 63 of A-Z a-z 0-9 - _ . that begin and end with a letter or digit", httperr.Clip(k, 80))
	}
	return nil
}

func checkLabel(k, v, wireCode string) error {
	if err := checkLabelKey(k, wireCode); err != nil {
		return err
	}
	if len(v) > 63 || v != "" && !labelWord.MatchString(v) {
		return badLabel(wireCode, "metadata value %q of key %q: want at most 63 of A-Z a-z 0-9 - _ . that begin and end with a letter or digit, or nothing", httperr.Clip(v, 80), httperr.Clip(k, 80))
	}
	return nil
}

func checkLabels(m map[string]string) error {
	const code = "SANDBOX::INVALID_METADATA_LABEL"
	if len(m) > maxLabels {
		return badLabel(code, "metadata has %d entries; at most %d are kept for a sandbox", len(m), maxLabels)
	}
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if err := checkLabel(k, m[k], code); err != nil {
			return err
		}
	}
	return nil
}

// checkPatch checks a merge patch and what would come of it.
func checkPatch(have map[string]string, patch map[string]*string) error {
	const code = "INVALID_METADATA_LABEL"
	after := len(have)
	for _, k := range slices.Sorted(maps.Keys(patch)) {
		_, had := have[k]
		v := patch[k]
		if v == nil {
			if strings.HasPrefix(k, reservedPrefix) {
				return checkLabelKey(k, code)
			}
			if had {
				after--
			}
			continue
		}
		if !had {
			after++
		}
		if err := checkLabel(k, *v, code); err != nil {
			return err
		}
	}
	if after > maxLabels {
		return badLabel(code, "metadata would have %d entries; at most %d are kept for a sandbox", after, maxLabels)
	}
	return nil
}

// checkName checks a name that a sandbox is to get.
func checkName(name string) error {
	switch {
	case name == "":
		return nil
	case !isName(name):
		return httperr.Invalid("name %q: want 1 to 63 of A-Z a-z 0-9 _ . - that begin with a letter or digit, without two dots in a row", httperr.Clip(name, 80))
	case record.IsID(name):
		return httperr.Invalid("name %q looks like the id of a sandbox (12 characters of a-z and 2-7); choose another length", name)
	}
	return nil
}
