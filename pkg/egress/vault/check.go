package vault

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/net/http/httpguts"

	"github.com/sandboxd/sandboxd/pkg/egress/paths"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// maxArgs is how many arguments a command may have, with its own name.
const maxArgs = 64

// maxArg is how long a path or an argument may be, in bytes (PATH_MAX of Linux).
const maxArg = 4096

// maxPlaceholder is how long the placeholder of a substitution may be, in bytes. A short one is
// allowed, as in OpenSandbox: what else stands in requests by chance is the client's to know, and
// the value goes to no other host for it.
const maxPlaceholder = 256

// checkName checks the name of a credential or a binding. SDKs write it into the path of a
// request, where proxies and clients take a slash, "." and ".." for more than a name.
func checkName(at, name string) error {
	switch {
	case strings.TrimSpace(name) == "":
		return invalid(at, "its name is blank")
	case len(name) > MaxName:
		return invalid(at, "its name has %d bytes; at most %d are allowed", len(name), MaxName)
	case name != strings.TrimSpace(name) || strings.ContainsFunc(name, func(c rune) bool { return !unicode.IsPrint(c) }):
		return invalid(at, "its name has characters that cannot be seen, or blanks around it")
	case strings.ContainsAny(name, `/\`) || name == "." || name == "..":
		return invalid(at, "its name has a slash or a backslash, or is . or ..: it could not stand in a URL")
	}
	return nil
}

// checkEnv checks the name of a variable that a client sends; "" is none. It is one that every shell
// can read (POSIX, Environment Variable Definition), and that programs need for nothing else.
func checkEnv(at, name string) error {
	switch {
	case name == "":
	case len(name) > MaxName:
		return invalid(at, "its env has %d bytes; at most %d are allowed", len(name), MaxName)
	case !variable.MatchString(name):
		return invalid(at, "its env is no name of a variable: want letters, digits and _, and no digit first, such as API_TOKEN")
	case record.IsReserved(name):
		return invalid(at, "its env is a variable of OpenSandbox's own programs, which no guest gets; name another one")
	case name == "PATH" || name == "HOME":
		return invalid(at, "its env is %s, without which programs of the sandbox do not work; name another one", name)
	case slices.Contains(record.TrustVariables, name):
		return invalid(at, "its env is %s, by which programs find the certificates that they trust; name another one", name)
	}
	return nil
}

// checkStoredEnv checks the name of a variable in a vault that is stored. It may have been taken by
// an older release, which refused less.
func checkStoredEnv(at, name string) error {
	if name != "" && (!record.IsVariable(name) || record.IsReserved(name) || len(name) > MaxName || !utf8.ValidString(name)) {
		return invalid(at, "its env is no name of a variable")
	}
	return nil
}

var variable = regexp.MustCompile("^[A-Za-z_][A-Za-z0-9_]*$")

// check checks a source by itself.
func (s *Source) check(at string) error {
	if s.Type != Inline && s.Value.Reveal() != "" || s.Type != File && s.Path != "" || s.Type != Command && s.Argv != nil {
		return invalid(at, "a source of type %s has one of value, path and argv: the one of its type", s.Type)
	}
	switch s.Type {
	case File:
		if !plainPath(s.Path) {
			return invalid(at, "path wants an absolute path without .. and without control characters")
		}
	case Command:
		if len(s.Argv) == 0 || !plainPath(s.Argv[0]) {
			return invalid(at, "argv wants the absolute path of a program, and its arguments")
		}
		for _, arg := range s.Argv {
			if len(arg) > maxArg || strings.Contains(arg, "\x00") {
				return invalid(at, "an argument has at most %d bytes, and no NUL", maxArg)
			}
		}
	default:
		if err := CheckValue(s.Value); err != nil {
			return invalid(at+".value", "%s", err.Error())
		}
	}
	return nil
}

func plainPath(p string) bool {
	return filepath.IsAbs(p) && filepath.Clean(p) == p && len(p) <= maxArg && !strings.ContainsFunc(p, unicode.IsControl)
}

// A Fault is what is wrong with a value. It says nothing of the value but its length.
type Fault string

// Error returns the text.
func (f Fault) Error() string { return string(f) }

// CheckValue reports what is wrong with a value in any place. Tabs and ends of lines are allowed:
// a key of several lines may stand in a body. What a file or a command gives is checked at use.
func CheckValue(s Secret) error {
	v := s.Reveal()
	switch {
	case v == "":
		return Fault("the value is empty")
	case len(v) > MaxValue:
		return Fault("the value is longer than 65536 bytes")
	case !utf8.ValidString(v):
		return Fault("the value is not UTF-8")
	case strings.ContainsFunc(v, func(c rune) bool { return unicode.IsControl(c) && !strings.ContainsRune("\t\r\n", c) }):
		return Fault("the value has control characters")
	case strings.Contains(v, PlaceholderPrefix):
		return Fault("the value contains " + PlaceholderPrefix + ", with which placeholders begin")
	}
	return nil
}

// CheckHeader reports what is wrong with a value in a header of an Auth of type t (RFC 9110,
// section 5.5; for Basic also RFC 7617, section 2).
func CheckHeader(t AuthType, s Secret) error {
	v := s.Reveal()
	if !httpguts.ValidHeaderFieldValue(v) || strings.Trim(v, " \t") != v {
		return Fault("the value cannot stand in a header: it has an end of line, or a blank at its beginning or end")
	}
	if t != Basic {
		return nil
	}
	plain, err := base64.StdEncoding.Strict().DecodeString(v)
	if err != nil || !strings.Contains(string(plain), ":") || strings.ContainsFunc(string(plain), unicode.IsControl) {
		return Fault("the value for basic is base64 of user:password, with padding and without ends of lines")
	}
	return nil
}

func isToken(s string) bool { return httpguts.ValidHeaderFieldName(s) }

// reserved are headers that no binding sets, and in which nothing is substituted: they are
// about one connection, the framing, the form of the body, or who asks whom. With those that
// begin with "proxy-" or "sec-".
var reserved = []string{
	"accept-encoding", "connection", "content-encoding", "content-length", "content-range", "content-type", "expect", "forwarded",
	"host", "http2-settings", "keep-alive", "range", "if-range", "te", "trailer", "transfer-encoding", "upgrade", "via",
	"x-forwarded-for", "x-forwarded-host", "x-forwarded-proto",
}

// Reserved reports whether a header is not for bindings.
func Reserved(name string) bool {
	name = FoldHeader(name)
	return slices.Contains(reserved, name) || strings.HasPrefix(name, "proxy-") || strings.HasPrefix(name, "sec-")
}

// FoldHeader is one name for all spellings of a header that a server may take for one: case does
// not matter, and CGI and its like (RFC 3875, section 4.1.18) make "_" of "-".
func FoldHeader(name string) string { return strings.ReplaceAll(strings.ToLower(name), "_", "-") }

// normalize checks an auth by itself and brings its headers into their canonical form. Its errors
// quote nothing but names that were checked: a client may have mixed up the fields.
func (a *Auth) normalize(at string) error {
	seen := map[string]bool{}
	for i := range a.Headers {
		h, at := &a.Headers[i], at
		if a.Type == CustomHeaders {
			at = fmt.Sprintf("%s.headers[%d]", at, i)
		}
		switch {
		case strings.HasPrefix(h.Name, ":") || Reserved(h.Name):
			return invalid(at, "the name of its header is reserved: it belongs to the connection or the form of the message")
		case !isToken(h.Name) || len(h.Name) > MaxName:
			return invalid(at, "its name is not the name of a header")
		case h.Credential == "":
			return invalid(at, "the header has no credential")
		case seen[FoldHeader(h.Name)]:
			return invalid(at, "the header stands there twice (- and _ are the same for some servers)")
		}
		seen[FoldHeader(h.Name)] = true
		h.Name = http.CanonicalHeaderKey(h.Name)
	}
	if a.Type == CustomHeaders && len(a.Headers) == 0 {
		return invalid(at, "type customHeaders wants at least one header")
	}
	for i, s := range a.Substitutions {
		at := fmt.Sprintf("%s.substitutions[%d]", at, i)
		if err := s.check(at); err != nil {
			return err
		}
		for j, o := range a.Substitutions[:i] {
			if strings.Contains(s.Placeholder, o.Placeholder) || strings.Contains(o.Placeholder, s.Placeholder) {
				return invalid(at, "its placeholder and that of substitutions[%d] are one in the other: which is meant could not be "+
					"said", j)
			}
		}
	}
	return nil
}

// check checks a substitution by itself.
func (s *Substitution) check(at string) error {
	switch p := s.Placeholder; {
	case s.Credential == "":
		return invalid(at, "a substitution has no credential")
	case p == "" || len(p) > maxPlaceholder:
		return invalid(at, "a placeholder has from 1 to %d bytes, not %d", maxPlaceholder, len(p))
	case strings.ContainsFunc(p, func(c rune) bool { return unicode.IsSpace(c) || !unicode.IsPrint(c) }):
		return invalid(at, "a placeholder has no blanks and only characters that can be seen")
	case strings.Contains(p, PlaceholderPrefix):
		return invalid(at, "a placeholder does not contain %s: sandboxd draws those itself", PlaceholderPrefix)
	case len(s.In) == 0:
		return invalid(at, "it names no place; want in: [path, query, header, body], or some of them")
	}
	for _, place := range s.In {
		if !slices.Contains([]Place{InPath, InQuery, InHeader, InBody}, place) {
			return invalid(at+".in", "want path, query, header or body, or some of them")
		}
	}
	return nil
}

// compile reads the patterns of a binding.
func (b *Binding) compile(at string) error {
	b.patterns = nil
	for _, s := range b.Match.Paths {
		p, err := paths.ParsePattern(s)
		if err != nil {
			return invalid(at+".match.paths", "%q: %s", short(s), err)
		}
		b.patterns = append(b.patterns, p)
	}
	return nil
}

// check checks what no part of a vault shows alone.
func (v *Vault) check() error {
	switch size := v.size(); {
	case len(v.credentials) > MaxCredentials:
		return invalid("", "%d credentials; at most %d are allowed", len(v.credentials), MaxCredentials)
	case len(v.bindings) > MaxBindings:
		return invalid("", "%d bindings; at most %d are allowed", len(v.bindings), MaxBindings)
	case size > MaxSize:
		return invalid("", "its texts have %d bytes in all; at most %d are allowed", size, MaxSize)
	}
	variables := map[string]string{}
	for _, c := range v.Credentials() {
		if other, taken := variables[c.Env]; taken && c.Env != "" {
			return invalid("", "credentials %q and %q have the same env; name another variable for one of them", other, c.Name)
		}
		variables[c.Env] = c.Name
	}
	hosts, paths := 0, 0
	for _, b := range v.bindings {
		hosts, paths = hosts+len(b.Match.Hosts), paths+len(b.Match.Paths)
	}
	if hosts > MaxAllHosts || paths > MaxAllPaths {
		return invalid("", "the bindings have %d hosts and %d paths in all; at most %d and %d are allowed", hosts, paths, MaxAllHosts,
			MaxAllPaths)
	}
	for _, b := range v.Bindings() {
		if err := v.checkBinding(b); err != nil {
			return err
		}
	}
	return v.checkOverlap()
}

// checkBinding checks a binding against the credentials. What it says of a value is whether the
// value has the form of its place, and depends on no text that a binding brings: else who writes
// bindings could read a value by guesses. So a value may contain a placeholder: no value is
// searched for one, see exchange.replace of inject.
func (v *Vault) checkBinding(b *Binding) error {
	for i, h := range b.Auth.Headers {
		if v.credentials[h.Credential] == nil { // it may be a value that stands in the wrong field
			return invalid("", "binding %q uses a credential for its header %d that the vault does not have; add it, or change the "+
				"binding first", b.Name, i+1)
		}
	}
	for i, s := range b.Auth.Substitutions {
		if v.credentials[s.Credential] == nil {
			return invalid("", "binding %q uses a credential in its substitutions[%d] that the vault does not have; add it, or change the "+
				"binding first", b.Name, i)
		}
	}
	header := func(t AuthType, name string) error {
		if s := v.credentials[name].Source; s.Type == Inline {
			if err := CheckHeader(t, s.Value); err != nil {
				return invalid("", "binding %q cannot use credential %q: %s", b.Name, name, err.Error())
			}
		}
		return nil
	}
	for _, h := range b.Auth.Headers {
		if err := header(b.Auth.Type, h.Credential); err != nil {
			return err
		}
	}
	for _, s := range b.Auth.Substitutions {
		if slices.Contains(s.In, InHeader) {
			if err := header("", s.Credential); err != nil {
				return err
			}
		}
	}
	return nil
}

// size is the sum of all texts, in bytes.
func (v *Vault) size() (n int) {
	add := func(lists ...[]string) {
		for _, list := range lists {
			for _, s := range list {
				n += len(s)
			}
		}
	}
	for _, c := range v.credentials {
		add([]string{c.Name, c.Env, c.Source.Path, c.Source.Value.Reveal()}, c.Source.Argv)
	}
	for _, b := range v.bindings {
		add([]string{b.Name}, b.Match.Hosts, b.Match.Methods, b.Match.Paths)
		for _, h := range b.Auth.Headers {
			add([]string{h.Name, h.Credential})
		}
		for _, s := range b.Auth.Substitutions {
			add([]string{s.Credential, s.Placeholder})
		}
	}
	return n
}
