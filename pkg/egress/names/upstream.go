package names

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"time"

	"github.com/miekg/dns"
)

const (
	// demoted is how long a server that did not answer is asked after all others.
	demoted = 10 * time.Second
	// maxStrays is how many answers to something else may come by UDP. After more, somebody
	// is guessing, and TCP is used.
	maxStrays = 8
	// NoSocket in place of the number of a server: none is needed.
	NoSocket = 255
)

// order lists the servers as they are to be asked.
func (s *setup) order(now time.Time) []int {
	var well, ill []int
	for i := range s.Upstreams {
		if s.health[i].Load() > now.UnixNano() {
			ill = append(ill, i)
		} else {
			well = append(well, i)
		}
	}
	return append(well, ill...)
}

// exchange asks the servers for one query.
type exchange struct {
	s        *server
	q        *query
	setup    *setup
	got      chan verdict
	deadline time.Time
	first    *dns.Msg // for the first server, or nil
	sent     bool     // the daemon has sent first
}

// message makes the query for a server: of the guest's it has name and type.
func (x *exchange) message() (q *dns.Msg, b []byte) {
	q = new(dns.Msg).SetQuestion(randomCase(dns.Fqdn(x.q.Name)), x.q.Type)
	q.Id = uint16(rand.Uint32())
	q.SetEdns0(EDNSSize, false)
	b, err := q.Pack()
	if err != nil {
		return nil, nil
	}
	return q, b
}

var errRefused = errors.New("the daemon gave no socket")

// wait waits for a verdict of the daemon.
func (x *exchange) wait() (verdict, error) {
	t := time.NewTimer(time.Until(x.deadline))
	defer t.Stop()
	select {
	case v := <-x.got:
		return v, nil
	case <-t.C:
		return verdict{}, os.ErrDeadlineExceeded
	}
}

// socket asks the daemon for a socket that is connected to server n.
func (x *exchange) socket(n int, tcp bool) (*os.File, error) {
	m := x.q.Message
	m.Kind, m.Upstream, m.TCP = Socket, uint8(n), tcp
	x.s.send(m)
	v, err := x.wait()
	switch {
	case err != nil:
		return nil, err
	case v.Do != Forward || v.file == nil:
		return nil, fmt.Errorf("%w: %s", errRefused, v.Text)
	}
	return v.file, nil
}

// ask asks the servers in turn. file is a socket to the first.
func (x *exchange) ask(order []int, file *os.File) (*entry, error) {
	var errs []error
	var refusal *entry
	for i, n := range order {
		until := time.Now().Add(time.Until(x.deadline) / time.Duration(len(order)-i))
		a, err := x.one(n, file, until)
		file = nil
		if err != nil {
			x.setup.health[n].Store(time.Now().Add(demoted).UnixNano())
			errs = append(errs, fmt.Errorf("server %d: %w", n+1, err))
			continue
		}
		e := pick(x.q.Name, x.q.Type, a)
		if a.Rcode == dns.RcodeSuccess || a.Rcode == dns.RcodeNameError {
			return e, nil
		}
		if refusal == nil {
			refusal = e
		}
	}
	if refusal != nil {
		return refusal, nil
	}
	if len(order) == 0 {
		if file != nil {
			file.Close()
		}
		return nil, errors.New("no name server is known")
	}
	return nil, errors.Join(errs...)
}

// one asks server n until that time.
func (x *exchange) one(n int, file *os.File, until time.Time) (*dns.Msg, error) {
	sent := x.sent && file != nil
	q, b := x.first, []byte(nil)
	x.first, x.sent = nil, false
	if sent {
		b, _ = q.Pack()
	} else {
		q, b = x.message()
	}
	if b == nil {
		if file != nil {
			file.Close()
		}
		return nil, errors.New("the name cannot be written")
	}
	var err error
	if p := x.setup.tls[n]; p != nil {
		return p.ask(x, n, file, q, b, until)
	}
	if file == nil {
		if file, err = x.socket(n, false); err != nil {
			return nil, err
		}
	}
	a, err := byUDP(file, q, b, sent, until)
	file.Close()
	if err != nil || a != nil {
		return a, err
	}
	if file, err = x.socket(n, true); err != nil {
		return nil, err
	}
	defer file.Close()
	return byStream(file, q, b, until)
}

// byUDP sends a query, unless that is sent, and once more when half of the time is over. It returns nil if TCP is
// to be used: the answer is truncated, or somebody may have forged it.
func byUDP(file *os.File, q *dns.Msg, b []byte, sent bool, until time.Time) (*dns.Msg, error) {
	half := time.Now().Add(time.Until(until) / 2)
	if err := file.SetDeadline(half); err != nil {
		return nil, err
	}
	if !sent {
		if _, err := file.Write(b); err != nil {
			return nil, err
		}
	}
	again := false
	buf := make([]byte, MaxQuery)
	for strays := 0; strays <= maxStrays; {
		n, err := file.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) && !again {
			again = true
			if err := file.SetDeadline(until); err != nil {
				return nil, err
			}
			if _, err := file.Write(b); err != nil {
				return nil, err
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		a := new(dns.Msg)
		if err := a.Unpack(buf[:n]); err != nil && !a.Truncated || !answers(a, q) {
			strays++ // a late answer to something else, or a forged one
			continue
		}
		// Other letters: the answer is forged, or the server changes case. TCP settles it.
		if a.Truncated || a.Question[0].Name != q.Question[0].Name {
			return nil, nil
		}
		return a, nil
	}
	return nil, nil
}

// byStream sends a query by TCP or TLS.
func byStream(c interface {
	io.ReadWriter
	SetDeadline(time.Time) error
}, q *dns.Msg, b []byte, until time.Time,
) (*dns.Msg, error) {
	if err := c.SetDeadline(until); err != nil {
		return nil, err
	}
	if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)); err != nil {
		return nil, err
	}
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return nil, err
	}
	buf := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(c, buf); err != nil {
		return nil, err
	}
	a := new(dns.Msg)
	if err := a.Unpack(buf); err != nil {
		return nil, err
	}
	switch {
	case !answers(a, q):
		return nil, errors.New("the answer is for another question")
	case a.Truncated:
		return nil, errors.New("the answer is truncated even over TCP")
	}
	return a, nil
}

// answers reports whether a answers q, letters aside.
func answers(a, q *dns.Msg) bool {
	return a.Id == q.Id && a.Response && a.Opcode == dns.OpcodeQuery && len(a.Question) == 1 &&
		a.Question[0].Qtype == q.Question[0].Qtype && a.Question[0].Qclass == dns.ClassINET &&
		strings.EqualFold(a.Question[0].Name, q.Question[0].Name)
}

// randomCase makes an answer harder to forge (0x20 encoding).
func randomCase(name string) string {
	b := []byte(name)
	for i, c := range b {
		if ('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z') && rand.IntN(2) == 0 {
			b[i] = c ^ 0x20
		}
	}
	return string(b)
}

// fileConn is a socket as crypto/tls wants it.
type fileConn struct{ *os.File }

// LocalAddr and RemoteAddr are not known here: the daemon made the connection.
func (fileConn) LocalAddr() net.Addr  { return nil }
func (fileConn) RemoteAddr() net.Addr { return nil }
