package sbom

import (
	"bytes"
	"cmp"
	"regexp"
	"strings"
)

// OS is the distribution of an image.
type OS struct {
	ID      string `json:"id"`                // "debian"
	Version string `json:"version,omitempty"` // "12"
	Name    string `json:"name,omitempty"`    // for people
}

var osWord = regexp.MustCompile(`^[0-9a-z][0-9a-z._-]{0,99}$`)

// readOSRelease reads os-release(5). why says why it names no distribution.
func readOSRelease(b []byte) (o OS, why string) {
	of := map[string]string{}
	for line := range bytes.Lines(b) {
		if key, value, ok := strings.Cut(strings.TrimSpace(string(line)), "="); ok {
			of[key] = strings.Trim(value, `"'`)
		}
	}
	o = OS{ID: cmp.Or(of["ID"], "linux"), Version: of["VERSION_ID"], Name: clean(cmp.Or(of["PRETTY_NAME"], of["NAME"]))}
	return o, o.wrong()
}

// wrong says what is wrong with what an image says of its distribution; "" is nothing.
func (o OS) wrong() string {
	switch {
	case !osWord.MatchString(o.ID):
		return "its ID is not a word of lower-case letters, digits, '.', '_' and '-'"
	case o.Version != "" && !osWord.MatchString(o.Version):
		return "its VERSION_ID is not a word of lower-case letters, digits, '.', '_' and '-'"
	case o.Name != clean(o.Name):
		return "its name has characters that are not printable"
	}
	return ""
}
