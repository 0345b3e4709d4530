package names

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// Kind says what a message is.
type Kind uint8

// The messages of a query. A query has a number that the child draws; the answer to a
// message has the number of the query.
const (
	// Setup, to the child: Body is the JSON of a [Config]. The child receives nothing by UDP
	// before it has one.
	Setup Kind = iota + 1
	// Query, to the child: Body is a message of DNS that came by TCP from Source. Via
	// distinguishes it.
	Query
	// Lookup, to the child: the daemon wants the addresses of Name for Source. Via
	// distinguishes it.
	Lookup
	// Verdict, to the child: the answer to Ask, Socket and Lease.
	Verdict
	// Ask, to the daemon: may Source ask for Name and Type? With Hit, Body is an answer that
	// the daemon may send at once, if it allows the name and all Addrs. Otherwise it is the
	// query for server number Upstream, which the daemon may send by the socket that it makes:
	// then Hit is set in its verdict.
	Ask
	// Socket, to the daemon: a socket to server number Upstream is needed, for TCP or not.
	Socket
	// Lease, to the daemon: the servers answered with Addrs, for TTL seconds. Body is the
	// answer, which the daemon may send at once if it allows all Addrs.
	Lease
	// Reply, to the daemon: send Body, the query has ended. Text says why it failed.
	Reply
	kinds
)

// Action is a verdict.
type Action uint8

// The verdicts.
const (
	Refuse  Action = iota // answer REFUSED; Text says why
	Fail                  // answer SERVFAIL; Text says why
	Forward               // ask the servers; a socket to one comes along
	Keep                  // answer with Addrs only
	Point                 // answer a question for PTR with the names in Body, one a line, for TTL seconds
	NoName                // answer NXDOMAIN, for no time at all; Text says why
	actions
)

// Sizes of messages, in bytes.
const (
	// MaxMessage is the size of the largest message: one with the largest answer of DNS.
	MaxMessage = headSize + maxName + maxText + 4*MaxAddrs + maxBody
	// MaxAddrs is how many addresses a message may have. An answer with more loses the others.
	MaxAddrs = 255

	headSize = 33
	maxName  = 1023 // a name of 255 bytes, each written as four characters
	maxText  = 512
	maxBody  = 64 << 10
)

// Message is one message between the daemon and the child. Which fields have a meaning
// depends on Kind.
type Message struct {
	Kind     Kind
	Do       Action
	Hit, TCP bool
	Upstream uint8
	Rcode    uint8
	Type     uint16
	Via      uint32
	TTL      uint32
	ID       uint64
	Source   netip.AddrPort // IPv4
	Name     string         // in lower case, without the last dot, as DNS writes names in text
	Text     string
	Addrs    []netip.Addr // IPv4
	Body     []byte
}

// Append appends m to b, without its kind. What is longer than a message may be is cut off.
func (m *Message) Append(b []byte) []byte {
	name, text, addrs := m.Name[:min(len(m.Name), maxName)], m.Text[:min(len(m.Text), maxText)], m.Addrs[:min(len(m.Addrs), MaxAddrs)]
	b = append(b, byte(m.Do), flags(m.Hit, m.TCP), m.Upstream, m.Rcode)
	b = binary.BigEndian.AppendUint16(b, m.Type)
	b = binary.BigEndian.AppendUint32(b, m.Via)
	b = binary.BigEndian.AppendUint32(b, m.TTL)
	b = binary.BigEndian.AppendUint64(b, m.ID)
	var source [4]byte
	if a := m.Source.Addr().Unmap(); a.Is4() {
		source = a.As4()
	}
	b = append(b, source[:]...)
	b = binary.BigEndian.AppendUint16(b, m.Source.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(len(name)))
	b = binary.BigEndian.AppendUint16(b, uint16(len(text)))
	b = append(b, byte(len(addrs)))
	b = append(b, name...)
	b = append(b, text...)
	for _, a := range addrs {
		four := a.Unmap().As4()
		b = append(b, four[:]...)
	}
	return append(b, m.Body[:min(len(m.Body), maxBody)]...)
}

func flags(hit, tcp bool) (b byte) {
	if hit {
		b |= 1
	}
	if tcp {
		b |= 2
	}
	return b
}

var errMessage = errors.New("not a message of the resolver")

// Parse reads a message of that kind. Its Body is part of b.
func Parse(kind Kind, b []byte) (m Message, err error) {
	if len(b) < headSize || len(b) > MaxMessage {
		return m, errMessage
	}
	m = Message{
		Kind: kind, Do: Action(b[0]), Hit: b[1]&1 != 0, TCP: b[1]&2 != 0, Upstream: b[2], Rcode: b[3],
		Type: binary.BigEndian.Uint16(b[4:]), Via: binary.BigEndian.Uint32(b[6:]), TTL: binary.BigEndian.Uint32(b[10:]),
		ID:     binary.BigEndian.Uint64(b[14:]),
		Source: netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[22:])), binary.BigEndian.Uint16(b[26:])),
	}
	name, text, addrs := int(binary.BigEndian.Uint16(b[28:])), int(binary.BigEndian.Uint16(b[30:])), int(b[32])
	rest := b[headSize:]
	if kind == 0 || kind >= kinds || m.Do >= actions || b[1] > 3 || name > maxName || text > maxText || len(rest) < name+text+4*addrs ||
		len(rest)-name-text-4*addrs > maxBody {
		return Message{}, errMessage
	}
	m.Name, rest = string(rest[:name]), rest[name:]
	m.Text, rest = string(rest[:text]), rest[text:]
	for range addrs {
		m.Addrs = append(m.Addrs, netip.AddrFrom4([4]byte(rest)))
		rest = rest[4:]
	}
	m.Body = rest
	return m, nil
}
