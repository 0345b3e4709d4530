// Package heads reads the beginning of a guest's connection, in a child without privileges,
// and then passes on its bytes. It knows no policy.
//
//	guest ══ socket ══▶ daemon ── Serve: the socket ──▶ heads: ClientHello, or heads of HTTP/1
//	                      │ ◀── Open: the name ───────── │
//	                      │ ──  Opened: a socket to the  │
//	                      │     destination, or why not ▶ splice(2) both ways
//	                      │ ◀── End ──────────────────── │
//
// The daemon accepts, decides and dials. It keeps a copy of each socket, and so can cut a
// flow that a new policy forbids. So it must hear of each that the child closes.
//
// The child outlives the daemon: the flows go on, and what the child asks fails until the next
// daemon takes its line.
//
// TLS passes unread behind its ClientHello. Of HTTP each request is read by net/http and
// written anew (http.go): a kept connection takes no request to a host that nobody asked for.
//
// A sandbox with marked names has a child of its own. It is this one with an Inspector
// (inspect.go), to which it gives the flows to marked names.
//
// The surprise: a server may ask for a second ClientHello, and some servers serve the name in
// that one. Package heads reads it too (tls.go).
package heads

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"time"
)

// Verb is the name under which Serve is a verb of internal/confine.
const Verb = "heads"

// Version is that of the messages, and of the line. A daemon ends a child of an earlier daemon
// that speaks another: whoever changes one of them counts it up. So does whoever mends a hole
// in this package, in pkg/egress/child, internal/relay or internal/confine: then the children
// that have the hole, or were taken over by it, end with the daemon that has it.
const Version = 2

// Kinds of messages. All numbers are little endian.
const (
	KindServe  = 1 // to the child, with the guest's socket
	KindOpen   = 2 // from the child; the answer may have a socket
	KindClosed = 3 // from the child: a socket to a destination, or the whole flow
	// KindDial is like KindOpen, from a child with an Inspector: a socket for what it has
	// decrypted, and judged, of a name that is marked. A child may have written anything: the
	// daemon refuses Kinds other than TLS and HTTP, and no name.
	KindDial = 4
)

// MaxBody is the longest message that a child sends.
const MaxBody = 512

// Limits of a head, of requests and of responses. The memory of the child is sized by them:
// net/http needs 250 KiB for a head of MaxHead whose lines are as short as they may be, and
// as much for each copy. So none with more than MaxLines is copied.
const (
	MaxHead   = 16 << 10
	MaxLines  = 128
	HeadLimit = 5 * time.Second // for a head to come
)

// A Flow is a guest's connection, as the child gets it.
type Flow struct {
	Number uint64
	Dst    netip.AddrPort
	// First: the server may speak first, so the child asks for a socket before it knows a
	// name.
	First bool
}

// Append writes f as the body of a message.
func (f Flow) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, f.Number)
	first := byte(0)
	if f.First {
		first = 1
	}
	a := f.Dst.Addr().As4()
	b = append(append(b, first), a[:]...)
	return binary.LittleEndian.AppendUint16(b, f.Dst.Port())
}

var errForm = errors.New("a message of a wrong form")

// ParseFlow reads what Append has written.
func ParseFlow(b []byte) (f Flow, err error) {
	if len(b) != 15 {
		return f, errForm
	}
	return Flow{
		binary.LittleEndian.Uint64(b),
		netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[9:])), binary.LittleEndian.Uint16(b[13:])), b[8] == 1,
	}, nil
}

// A Kind says how the guest began.
type Kind uint8

// The kinds of beginnings.
const (
	First  Kind = iota + 1 // not at all: the server may speak first
	TLS                    // a ClientHello
	HTTP                   // a request of HTTP/1
	Check                  // a ClientHello on a socket that was opened as First: may it go on?
	H2C                    // HTTP/2 without TLS
	Other                  // something else
	Part                   // something that is not complete after five seconds
	Silent                 // nothing within five seconds
	kinds
)

// An Open asks for a socket to the flow's destination.
type Open struct {
	Flow uint64
	Kind Kind
	Name string // a domain name in normal form, or "": none can be seen
}

// Append writes o as the body of a message.
func (o Open) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, o.Flow)
	return append(append(b, byte(o.Kind)), o.Name...)
}

// ParseOpen reads what Append has written. A child may have written anything.
func ParseOpen(b []byte) (o Open, err error) {
	if len(b) < 9 {
		return o, errForm
	}
	o = Open{binary.LittleEndian.Uint64(b), Kind(b[8]), string(b[9:])}
	if o.Kind == 0 || o.Kind >= kinds || o.Name != "" && PlainName(o.Name) != o.Name {
		return o, errForm
	}
	return o, nil
}

// A Result is how an Open ended.
type Result uint8

// The results.
const (
	Granted Result = iota + 1 // the socket comes along, unless the Open was a Check
	Denied                    // by the policy
	Failed                    // the destination did not answer
	Inspect                   // granted, but the name is marked: only a child with an Inspector goes on
)

// Opened answers an Open.
type Opened struct {
	Result Result
	Socket uint32 // the number by which it is closed
	Text   string // why not, for the guest
}

// Append writes o as the body of a message.
func (o Opened) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(append(b, byte(o.Result)), o.Socket)
	return append(b, o.Text...)
}

// ParseOpened reads what Append has written.
func ParseOpened(b []byte) (o Opened, err error) {
	if len(b) < 5 {
		return o, errForm
	}
	return Opened{Result(b[0]), binary.LittleEndian.Uint32(b[1:]), string(b[5:])}, nil
}

// Closed says that the child has closed a socket of a flow, or with 0 the flow.
type Closed struct {
	Flow   uint64
	Socket uint32
}

// Append writes c as the body of a message.
func (c Closed) Append(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(b, c.Flow), c.Socket)
}

// ParseClosed reads what Append has written. A child may have written anything.
func ParseClosed(b []byte) (c Closed, err error) {
	if len(b) != 12 {
		return c, errForm
	}
	return Closed{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:])}, nil
}
