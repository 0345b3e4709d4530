package spec

import (
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
)

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
