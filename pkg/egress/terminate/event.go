package terminate

import "github.com/sandboxd/sandboxd/pkg/egress/heads"

// An EventKind says what was refused, or noticed.
type EventKind uint8

// The kinds of events. The request was denied, but for an Echo. All but the first are those of
// pkg/egress/vault/inject.
const (
	RuleDenied  EventKind = iota + 1 // by a rule about requests, or because no rule allows it
	Foreign                          // a placeholder that is none of this sandbox
	WrongHost                        // a placeholder on its way to a host that it is not for
	WrongPlace                       // a placeholder where it may not stand
	Malformed                        // a request that two readers could read differently
	Unavailable                      // a value could not be had, or cannot stand where it should
	Echo                             // a value in an answer
	eventKinds
)

// An Event tells of a decrypted request or its answer. A child sends as many as its Notes let
// pass. One that a guest has taken over sends what it likes, so the daemon has Notes of its own
// for the events of each child.
//
// Texts are printable. None has a value, a placeholder or the path of a request in it, unless a
// guest has taken over the child.
type Event struct {
	Kind       EventKind
	Host       string // in normal form, or ""
	Method     string // of RuleDenied, at most maxMethod bytes
	Binding    string // that the request matched, or ""
	Credential string // or ""
	Place      string // where in the request or the answer, in one word, or ""
	Text       string // of RuleDenied the rule, of Unavailable why; at most maxNote bytes
}

// OfSecret reports whether an event is about a secret, or what may be meant as one. These have
// Notes of their own, so a guest cannot hide them behind others.
func (k EventKind) OfSecret() bool {
	return k == Foreign || k == WrongHost || k == WrongPlace || k == Echo
}

const (
	maxMethod = 32
	maxPlace  = 16
)

// eventTexts are the limits of what Append writes before Text, in its order.
var eventTexts = [...]int{253, maxMethod, maxName, maxName, maxPlace}

func (e *Event) texts() [len(eventTexts)]*string {
	return [...]*string{&e.Host, &e.Method, &e.Binding, &e.Credential, &e.Place}
}

// cut makes the texts printable, and as short as they must be.
func (e Event) cut() Event {
	for i, s := range e.texts() {
		*s = plain(*s, eventTexts[i])
	}
	e.Text = plain(e.Text, maxNote)
	return e
}

// Append writes e as the body of a message. No text may be longer than it may be.
func (e Event) Append(b []byte) []byte {
	b = append(b, byte(e.Kind))
	for _, s := range e.texts() {
		b = append(append(b, byte(len(*s))), *s...)
	}
	return append(b, e.Text...)
}

// ParseEvent reads what Append has written. A child may have written anything.
func ParseEvent(b []byte) (e Event, err error) {
	if len(b) < 1 || b[0] == 0 || b[0] >= byte(eventKinds) {
		return e, errForm
	}
	e.Kind, b = EventKind(b[0]), b[1:]
	for i, s := range e.texts() {
		if len(b) < 1 || len(b)-1 < int(b[0]) {
			return Event{}, errForm
		}
		end := 1 + int(b[0])
		if *s, b = string(b[1:end]), b[end:]; !isPlain(*s, eventTexts[i]) {
			return Event{}, errForm
		}
	}
	if e.Text = string(b); !isPlain(e.Text, maxNote) || e.Host != "" && heads.PlainName(e.Host) != e.Host {
		return Event{}, errForm
	}
	return e, nil
}

// isPlain reports whether a text is printable, and at most max bytes long.
func isPlain(s string, max int) bool { return len(s) <= max && plain(s, max) == s }
