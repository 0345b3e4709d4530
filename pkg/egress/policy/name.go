package policy

import (
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// lookup is how browsers read a name (UTS #46, not transitional), but it keeps the
// underscores that names of services have.
var lookup = idna.New(idna.MapForLookup(), idna.BidiRule(), idna.Transitional(false), idna.StrictDomainName(false),
	idna.VerifyDNSLength(true))

// NormalName returns a domain name as rules keep it: lower case, ASCII (IDNA), without
// the last dot. "*." may stand before it: then it means all names below it, at any depth,
// and not the name itself. The error is for the client.
func NormalName(s string) (string, error) {
	name, below := strings.CutPrefix(s, "*.")
	name = strings.TrimSuffix(name, ".")
	bad := func(why string) (string, error) {
		return "", errs.New(errs.Invalid, "network rule for %q: %s; write a name such as pypi.org, or *.pypi.org for all names below it",
			short(s), why)
	}
	if strings.Contains(name, "*") {
		return bad("a * stands only at the beginning, before a dot")
	}
	if len(name) > 4*maxName { // a letter of a name has up to four bytes
		return bad("no name is that long")
	}
	ascii, err := lookup.ToASCII(name)
	if err != nil || !utf8.ValidString(name) {
		return bad("not a domain name")
	}
	labels := strings.Split(ascii, ".")
	for _, label := range labels {
		if label == "" || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" || label[0] == '-' ||
			label[len(label)-1] == '-' {
			return bad("not a domain name")
		}
	}
	last := labels[len(labels)-1]
	switch {
	case isDigit(last[0]):
		return bad("not an IPv4 address or CIDR, such as 203.0.113.7 or 203.0.113.0/24, and no name ends in a number")
	case last == "localhost":
		return bad("localhost is the sandbox itself, and needs no rule")
	}
	if below {
		ascii = "*." + ascii
	}
	if len(ascii) > maxName {
		return bad("a name has at most 253 characters")
	}
	return ascii, nil
}

// maxName is how long a domain name may be (RFC 1035, section 2.3.4, without the last
// dot).
const maxName = 253

// nameMatches reports whether name is what a rule's pattern means. Both are in normal form.
func nameMatches(pattern, name string) bool {
	if below, ok := strings.CutPrefix(pattern, "*"); ok {
		return len(name) > len(below) && strings.HasSuffix(name, below)
	}
	return pattern == name
}
