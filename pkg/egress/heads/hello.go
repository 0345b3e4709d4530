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

// beginning says what b, the first bytes of a connection, begins. It takes more for TLS and
// for HTTP than a strict server does: such as a record of any version, or a request after
// empty lines, or with tabs. What reads these later refuses them. So what a lenient server
// would read as one of the two is never taken for another protocol.
func beginning(b []byte) int {
	if begins := firstRecord(b); begins != other {
		return begins
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
	for len(b) > 0 && (space(b[0]) || b[0] == '\n' || b[0] == '\r') {
		b = b[1:]
	}
	return requestLine(b)
}

// firstRecord says whether b begins as a record of TLS that a server may take for the first one: a
// ClientHello, also one with a version that has never been, as some servers take it, one in
// the form of SSL 2.0 (RFC 5246, appendix E.2), or what a server may skip before it: an alert,
// or ChangeCipherSpec.
func firstRecord(b []byte) int {
	if len(b) == 0 {
		return other
	}
	var form string // of the bytes from the fourth on
	switch b[0] {
	case recordHandshake:
		if len(b) > 1 && b[1] == 3 {
			return isTLS
		}
		form = "??\x01"
	case recordAlert:
		form = "\x00\x02"
	case recordChange:
		form = "\x00\x01\x01"
	default:
		if b[0]&0x80 == 0 {
			return other
		}
		return like(b[1:], "?\x01\x03")
	}
	return like(b[1:], "??"+form)
}

// like says whether b begins with form, in which ? is any byte.
func like(b []byte, form string) int {
	for i := range len(form) {
		switch {
		case i == len(b):
			return more
		case form[i] != '?' && form[i] != b[i]:
			return other
		}
	}
	return isTLS
}

// requestLine says whether b begins as a line of a request: METHOD target HTTP/. Some servers
// split the line at any space, take the last word for the version, or do without one, and
// read a Host all the same (Python's http.server, llhttp). So every word behind the target may
// be the version, and a target that looks like one is enough.
//
// A method here is any word of printable ASCII. Other bytes in it make it another protocol:
// binary ones must not wait for the end of a line.
func requestLine(b []byte) int {
	const version = "HTTP/"
	n := 0
	for n < len(b) && '!' <= b[n] && b[n] <= '~' {
		n++
	}
	if n < len(b) && (n == 0 || !space(b[n]) && b[n] != '\r') {
		return other
	}
	target := false // the line has one
	for words := 0; ; words++ {
		b = b[n:]
		for len(b) > 0 && (space(b[0]) || b[0] == '\r' && len(b) > 1 && b[1] != '\n') {
			b = b[1:]
		}
		switch v := b[:min(len(b), len(version))]; {
		case len(b) == 0, len(b) == 1 && b[0] == '\r':
			return more
		case b[0] == '\n', b[0] == '\r': // the line ends
			if target && words == 1 {
				return isHTTP
			}
			return other
		case words == 0:
			target = b[0] == '/' || bytes.EqualFold(v[:min(len(v), 4)], []byte("http"))
		case bytes.EqualFold(v, []byte(version[:len(v)])):
			if len(v) == len(version) {
				return isHTTP
			}
			return more
		}
		for n = 0; n < len(b) && b[n] != '\n' && b[n] != '\r' && !space(b[n]); n++ {
		}
	}
}

// space reports whether c is a space: for Python's http.server, which reads ISO 8859-1, also
// those above ASCII.
func space(c byte) bool {
	return c == ' ' || c == '\t' || c == '\v' || c == '\f' || 0x1c <= c && c <= 0x1f || c == 0x85 || c == 0xa0
}

// The numbers of TLS (RFC 8446, section 5.1; RFC 6066, section 3) that are used here.
const (
	recordChange, recordAlert, recordHandshake = 20, 21, 22

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
