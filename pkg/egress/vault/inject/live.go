// Package inject puts the credentials of a vault into requests of a sandbox, and looks for them
// in the answers. It does no I/O of its own.
//
//	Vault ── New ──▶ Live
//	request, parsed by net/http ── Live.Apply ──▶ the request with credentials, and a Use
//	                                          └─▶ or a Denied: it must not be sent
//	answer                      ── Use.Mask ───▶ the answer; a value in it is reported, and *** by choice
//
// Apply trusts that scheme, host and port are where the request goes: the certificate has been
// verified for host, or the daemon has resolved it itself. And it trusts that net/http has parsed
// the request and writes it anew: net/http takes one framing of a body with both Content-Length
// and Transfer-Encoding (RFC 9112, section 6.3), refuses ends of lines in headers, and writes
// Host, Content-Length and Transfer-Encoding from the fields of http.Request, never from its
// headers. No byte of the guest's framing goes on.
//
// The guest may hold placeholders ("sbxph_…", one for each credential). A placeholder is exchanged
// for the value only where a binding puts that credential. In any other request, or elsewhere in
// this one, it is refused and reported, because somebody tries to move the secret. So is what looks
// like one and is none of this sandbox: 130 bits do not occur by chance. Names of hosts, methods and
// headers are not looked at: nothing is exchanged there.
//
// A WebSocket is a request like any other: it gets the credential of its binding. What is sent
// behind the answer 101 is looked at in neither direction.
//
// What surprises: the body of a request is looked at while it is sent. A placeholder in the
// middle of a long one ends the request as an error of its Body, a *Denied, when the head is
// gone. No part of the placeholder is sent then.
//
// The search of answers is a net and not a wall: a server that encodes a value in another way
// than those that are searched for gives it away.
package inject

import (
	"context"
	"slices"
	"sync"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// Options are what a Live needs from outside. All functions are called concurrently.
type Options struct {
	// Source gives the value of a credential that a file or a command has. It is called for each
	// request that needs it: the caller caches as Credential.Source.Cache says, and removes the
	// end of the last line. ctx is that of the request. nil: such credentials cannot be used.
	Source func(ctx context.Context, c *vault.Credential) (vault.Secret, error)
	// Report is told of every event, also of those of a Denied. nil: nobody is told.
	Report func(Event)
	// Replaced reports whether another vault is in use: then no placeholder is replaced any more, also
	// of bodies that are being sent. nil: never.
	Replaced func() bool
	// Mask replaces values in answers by "*". Then requests to bound hosts ask for no compression
	// and no ranges: in both a value could not be seen. An answer that comes piece by piece waits
	// then, up to the length of the longest form of a value, but for what ends with a line: events
	// and lines of JSON come at once if no value has several lines, and messages of gRPC late.
	Mask bool
}

// A Kind is a kind of event.
type Kind string

// The kinds. After the first five the request is denied.
const (
	Foreign     Kind = "foreign"     // a placeholder that is none of this sandbox: of another one, or of a credential that was deleted
	WrongHost   Kind = "wrong-host"  // a placeholder on its way to a host that no binding of its credential has
	WrongPlace  Kind = "wrong-place" // a placeholder where no binding puts its credential
	Malformed   Kind = "malformed"   // a request that two readers could read differently, or whose answer would show its head
	Unavailable Kind = "unavailable" // the value could not be had, or cannot stand where it should
	Echo        Kind = "echo"        // a value in an answer
)

// An Event says what happened, without a value and without a placeholder.
type Event struct {
	Kind       Kind
	Host       string
	Binding    string // that matched the request, or ""
	Credential string // whose placeholder or value it is, or ""
	Place      string // path, query, header, body, trailer, host, method, status
	Text       string // of Unavailable: why, for the log
}

// A Denied is why a request must not be sent.
type Denied struct {
	Status int    // of HTTP, for the guest
	Code   string // such as SANDBOX::FORBIDDEN
	Text   string // for the guest
	Kind   Kind
	Err    error // for the log; may be nil
}

// Error returns the text for the guest.
func (d *Denied) Error() string { return d.Text }

// Tell is what the guest gets as an answer, in the way of pkg/egress/heads.
func (d *Denied) Tell() (status int, code, text string) { return d.Status, d.Code, d.Text }

// Unwrap returns what only the log sees.
func (d *Denied) Unwrap() error { return d.Err }

// A Live is a vault that is applied to requests. Its methods may be called concurrently. A
// changed vault needs another Live; requests that have begun keep theirs: see Options.Replaced.
type Live struct {
	o            Options
	bindings     []*vault.Binding
	secrets      map[string]*secret // by the name of the credential
	placeholders map[string]*secret
}

// A secret is a credential with the values that are known for it.
type secret struct {
	*vault.Credential
	*memory
}

// A memory is the values that a credential has had. All Lives of a sandbox share it.
type memory struct {
	mu     sync.Mutex
	values []value // the newest first; two at most, because an answer may come after a rotation
}

type value struct {
	text   string
	echoes []needle // the forms of the value that are searched for in answers
}

// New compiles a vault. old is the Live of the same sandbox before a change, or nil: what it has
// sent is still searched for in answers.
func New(v *vault.Vault, o Options, old *Live) *Live {
	l := &Live{o: o, bindings: v.Bindings(), secrets: map[string]*secret{}, placeholders: map[string]*secret{}}
	for _, c := range v.Credentials() {
		s := &secret{c, &memory{}}
		if old != nil && old.secrets[c.Name] != nil {
			s.memory = old.secrets[c.Name].memory
		}
		l.secrets[c.Name], l.placeholders[c.Placeholder] = s, s
	}
	for _, s := range l.secrets {
		if s.Source.Type == vault.Inline {
			s.learn(s.Name, s.Source.Value.Reveal())
		}
	}
	return l
}

// learn makes text the newest value.
func (m *memory) learn(name, text string) value {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, v := range m.values {
		if v.text == text {
			m.values[0], m.values[i] = m.values[i], m.values[0]
			return v
		}
	}
	v := value{text, echoes(name, text)}
	m.values = append([]value{v}, m.values...)
	m.values = m.values[:min(len(m.values), 2)]
	return v
}

// known are the values that may come back.
func (m *memory) known() []value {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.values)
}

// value returns the value of a credential.
func (l *Live) value(ctx context.Context, s *secret) (value, error) {
	if s.Source.Type == vault.Inline {
		return s.learn(s.Name, s.Source.Value.Reveal()), nil
	}
	if l.o.Source == nil {
		return value{}, vault.Fault("files and commands of the host cannot be asked here")
	}
	v, err := l.o.Source(ctx, s.Credential)
	if err == nil {
		err = vault.CheckValue(v)
	}
	if err != nil {
		return value{}, err
	}
	return s.learn(s.Name, v.Reveal()), nil
}

// report tells of an event.
func (l *Live) report(e Event) {
	if l.o.Report != nil {
		l.o.Report(e)
	}
}

// bound reports whether a binding is for a host.
func (l *Live) bound(host string) bool {
	for _, b := range l.bindings {
		if b.MatchesHost(host) {
			return true
		}
	}
	return false
}

// match returns the binding of a request, or nil. One that has the very host goes before one with
// a wildcard, as in OpenSandbox. Of each there is one at most: a vault refuses others.
func (l *Live) match(scheme, host, method, reading string) *vault.Binding {
	var wild *vault.Binding
	for _, b := range l.bindings {
		if !b.Matches(scheme, host, method, reading) && !(weak.Off(weak.Vault) && b.MatchesHost(host)) {
			continue
		}
		if slices.Contains(b.Match.Hosts, host) {
			return b
		}
		wild = b
	}
	return wild
}
