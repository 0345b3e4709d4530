package spec

import (
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Labels follow Kubernetes: kubernetes.io/docs/concepts/overview/working-with-objects/labels.
var (
	labelWord   = regexp.MustCompile(`^[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$`)
	labelPrefix = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
)

// maxLabels is how many labels one sandbox may have.
const maxLabels = 64

const reservedPrefix = "opensandbox.io/"

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
		return badLabel(wireCode, "metadata key %q: the part before the / must be a DNS name of at most 253 lower-case characters",
			httperr.Clip(k, 80))
	case len(name) > 63 || !labelWord.MatchString(name):
		return badLabel(wireCode, "metadata key %q: want 1 to 63 characters of A-Z a-z 0-9 - _ . that begin and end with a "+
			"letter or digit", httperr.Clip(k, 80))
	}
	return nil
}

func checkLabel(k, v, wireCode string) error {
	if err := checkLabelKey(k, wireCode); err != nil {
		return err
	}
	if len(v) > 63 || v != "" && !labelWord.MatchString(v) {
		return badLabel(wireCode, "metadata value %q of key %q: want at most 63 characters of A-Z a-z 0-9 - _ . that begin and end with a "+
			"letter or digit, or an empty value", httperr.Clip(v, 80), httperr.Clip(k, 80))
	}
	return nil
}

func checkLabels(m map[string]string) error {
	const code = "SANDBOX::INVALID_METADATA_LABEL"
	if len(m) > maxLabels {
		return badLabel(code, "metadata has %d entries; at most %d are allowed", len(m), maxLabels)
	}
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if err := checkLabel(k, m[k], code); err != nil {
			return err
		}
	}
	return nil
}

// CheckLabelPatch checks a merge patch of the labels that a sandbox has, and the
// labels that it would have then. nil removes one.
func CheckLabelPatch(have map[string]string, patch map[string]*string) error {
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
		return badLabel(code, "metadata would have %d entries; at most %d are allowed", after, maxLabels)
	}
	return nil
}
