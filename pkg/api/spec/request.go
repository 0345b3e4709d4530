package spec

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// maxRequestKey bounds an Idempotency-Key, in bytes.
const maxRequestKey = 255

// Request reads the Idempotency-Key headers of a creation: given are their values, client is who sends it.
// Keys of two clients are two keys. Without a header the request is empty.
func Request(given []string, client string, body []byte) (once record.Request, err error) {
	if len(given) == 0 {
		return once, nil
	}
	key := given[0]
	if len(given) > 1 || key == "" || len(key) > maxRequestKey ||
		strings.IndexFunc(key, func(c rune) bool { return c < ' ' || c > '~' }) >= 0 {
		return once, errs.Wire(httperr.Invalid("%s: want one value of 1 to %d printable ASCII characters, such as a UUID, "+
			"and a new one for each sandbox", wire.HeaderIdempotency, maxRequestKey), "SANDBOX::INVALID_IDEMPOTENCY_KEY")
	}
	digest := func(parts ...string) string {
		h := sha256.New()
		for _, p := range parts {
			fmt.Fprintf(h, "%d\n%s\n", len(p), p)
		}
		return hex.EncodeToString(h.Sum(nil))
	}
	return record.Request{Key: digest(client, key), Body: digest(string(body))}, nil
}

// maxAuth bounds user name and password together, in bytes. Tokens of registries
// have some kilobytes.
const maxAuth = 16 << 10

// CheckAuth refuses registry credentials that cannot be valid. Its errors repeat no
// part of them.
func CheckAuth(field string, a *wire.ImageAuth) error {
	switch {
	case a == nil:
		return nil
	case a.Username == "" || a.Password == "":
		return httperr.Invalid("%s needs both username and password; leave it out for a public image", field)
	case strings.ContainsAny(a.Username, ":\x00\r\n"), strings.ContainsAny(a.Password, "\x00\r\n"):
		return httperr.Invalid("%s has a character that a user name (:) or a password (line break, NUL) cannot contain", field)
	case len(a.Username)+len(a.Password) > maxAuth:
		return httperr.Invalid("%s has %d bytes; at most %d are allowed", field, len(a.Username)+len(a.Password), maxAuth)
	}
	return nil
}
