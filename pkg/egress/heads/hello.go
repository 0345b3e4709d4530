package heads

import (
	"bytes"
	"encoding/binary"
	"errors"
)

// What a connection begins with. More: it cannot be said yet.
const (
	more = iota
	isTLS
	isHTTP
	isH2  // HTTP/2 without TLS, with prior knowledge
	other // neither
)

// preface begins HTTP/2 (RFC 9113, section 3.4).
const preface = "PRI * HTTP/2.0\r\n"

// beginning says what b, the first bytes of a connection, begins. It takes more for HTTP
// than a strict server does: such as one after empty lines, or with tabs. net/http refuses
// these later. So what a lenient server would read as HTTP is never taken for another
// protocol.
func beginning(b []byte) int {
	if len(b) > 0 && b[0] == recordHandshake {
		switch {
		case len(b) == 1:
			return more
		case b[1] == 3:
			return isTLS
		}
		return other
	}
	if len(b) <= len(preface) && preface[:len(b)] == string(b) && len(b) > 3 {
		if len(b) == len(preface) {
			return isH2
		}
		return more
	}
	if bytes.HasPrefix(b, []byte(preface)) {
		return isH2
	}
	return requestLine(bytes.TrimLeft(b, "\r\n \t"))
}

// requestLine says whether b begins as "METHOD target HTTP/".
func requestLine(b []byte) int {
	const version = "HTTP/"
	n := 0
	for n < len(b) && token(b[n]) {
		n++
	}
	switch {
	case n < len(b) && (n == 0 || !space(b[n])):
		return other
	case n == len(b):
		return more
	}
	b = bytes.TrimLeft(b[n:], " \t\v\f")
	n = 0
	for n < len(b) && b[n] > ' ' {
		n++
	}
	if n < len(b) && !space(b[n]) { // the line ends: HTTP/0.9, which has no Host, or no HTTP
		return other
	}
	if b = bytes.TrimLeft(b[n:], " \t\v\f"); len(b) < len(version) {
		if bytes.EqualFold(b, []byte(version[:len(b)])) {
			return more
		}
		return other
	}
	if bytes.EqualFold(b[:len(version)], []byte(version)) {
		return isHTTP
	}
	return other
}

func space(c byte) bool { return c == ' ' || c == '\t' || c == '\v' || c == '\f' }

// token reports whether c may stand in a method (RFC 9110, section 5.6.2).
func token(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || bytes.IndexByte([]byte("!#$%&'*+-.^_`|~"), c) >= 0
}

// The numbers of TLS (RFC 8446, section 5.1; RFC 6066, section 3) that are used here.
const (
	recordAlert, recordHandshake = 21, 22

	typeClientHello, typeServerHello = 1, 2

	extServerName = 0
	hostNameType  = 0

	recordHeader = 5
	maxRecord    = 16 << 10
	maxRecords   = 256 // of a ClientHello
)

var (
	errMore  = errors.New("the rest has not come yet")
	errHello = errors.New("the ClientHello is malformed")
	errLarge = errors.New("the ClientHello is larger than 16 KiB")
)

// serverName is the name that a ClientHello at the begin of b asks for, as it stands there:
// "" if it has none. The ClientHello may lie in several records. The error is errMore until
// all of it is there.
//
// It reads strictly: what it refuses, a server might read in another way than this.
func serverName(b []byte) (string, error) {
	msg, _, err := handshake(b)
	if err != nil {
		return "", err
	}
	if msg[0] != typeClientHello {
		return "", errHello
	}
	return nameIn(msg[4:])
}

// handshake puts together the handshake message at the begin of b, with its header, and
// says how long the records are that it fills. Another message may begin in the last one.
func handshake(b []byte) (msg []byte, used int, err error) {
	all := b
	for range maxRecords {
		switch {
		case len(b) > 0 && b[0] != recordHandshake, len(b) > 1 && b[1] != 3:
			return nil, 0, errHello
		case len(b) < recordHeader:
			return nil, 0, errMore
		}
		n := int(binary.BigEndian.Uint16(b[3:]))
		if n == 0 || n > maxRecord {
			return nil, 0, errHello
		}
		part := b[recordHeader:min(recordHeader+n, len(b))]
		msg = append(msg, part...)
		if len(msg) >= 4 {
			size := 4 + (int(msg[1])<<16 | int(msg[2])<<8 | int(msg[3]))
			switch {
			case size > MaxHead:
				return nil, 0, errLarge
			case len(msg) > size && msg[0] == typeClientHello: // nothing may stand behind it
				return nil, 0, errHello
			case len(msg) >= size && len(part) == n:
				return msg[:size], len(all) - len(b) + recordHeader + n, nil
			}
		}
		if len(part) < n {
			return nil, 0, errMore
		}
		b = b[recordHeader+n:]
	}
	return nil, 0, errHello
}

// A reader takes values off a message; bad: one was not there.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) bytes(n int) []byte {
	if n > len(r.b) {
		r.b, r.bad = nil, true
		return nil
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) number(size int) (n int) {
	for _, c := range r.bytes(size) {
		n = n<<8 | int(c)
	}
	return n
}

// vector takes a value that its length stands before.
func (r *reader) vector(size int) []byte { return r.bytes(r.number(size)) }

// nameIn reads the body of a ClientHello (RFC 8446, section 4.1.2).
func nameIn(body []byte) (name string, err error) {
	r := reader{b: body}
	r.bytes(2 + 32) // version, random
	session, suites, compression := r.vector(1), r.vector(2), r.vector(1)
	if r.bad || len(session) > 32 || len(suites) < 2 || len(suites)%2 != 0 || len(compression) == 0 {
		return "", errHello
	}
	if len(r.b) == 0 {
		return "", nil // before TLS 1.2 there may be no extensions
	}
	extensions := reader{b: r.vector(2)}
	if r.bad || len(r.b) > 0 {
		return "", errHello
	}
	seen := false
	for len(extensions.b) > 0 {
		typ, data := extensions.number(2), extensions.vector(2)
		if extensions.bad || typ == extServerName && seen {
			return "", errHello
		}
		if typ == extServerName {
			seen = true
			if name, err = nameOf(data); err != nil {
				return "", err
			}
		}
	}
	return name, nil
}

// nameOf reads the extension server_name. It has one name: of another kind there is none.
func nameOf(data []byte) (string, error) {
	r := reader{b: data}
	list := reader{b: r.vector(2)}
	typ, name := list.number(1), list.vector(2)
	if r.bad || len(r.b) > 0 || list.bad || len(list.b) > 0 || typ != hostNameType || len(name) == 0 {
		return "", errHello
	}
	return string(name), nil
}

// retry is the random of a ServerHello that asks for a second ClientHello (RFC 8446,
// section 4.1.3).
var retry = []byte("\xCF\x21\xAD\x74\xE5\x9A\x61\x11\xBE\x1D\x8C\x02\x1E\x65\xB8\x91" +
	"\xC2\xA2\x11\x16\x7A\xBB\x8C\x5E\x07\x9E\x09\xE2\xC8\xA8\x33\x9C")

// asksAgain reports whether b, the first bytes of a server, ask for a second ClientHello. ok
// is false as long as it cannot be said.
func asksAgain(b []byte) (again, ok bool) {
	const at = recordHeader + 4 + 2 // of the random
	if len(b) > 0 && b[0] != recordHandshake || len(b) > recordHeader && b[recordHeader] != typeServerHello {
		return false, true
	}
	n := min(max(len(b)-at, 0), len(retry))
	if !bytes.Equal(b[min(at, len(b)):min(at, len(b))+n], retry[:n]) {
		return false, true
	}
	return n == len(retry), n == len(retry)
}
