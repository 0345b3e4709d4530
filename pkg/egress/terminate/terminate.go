// Package terminate decrypts the connections of one sandbox to the hosts that a rule or a
// binding marks, in a child without privileges that only this sandbox has.
//
//	guest ══ TLS ══▶ heads: the name ── Open ──▶ daemon: Inspect
//	        │          │
//	        │          ▼             ── Leaf ──▶ daemon: certificate and key for the name
//	        └──▶ TLS ends here: net/http reads requests of HTTP/1.1 and HTTP/2
//	                   │ Host is the name, or 421
//	                   ▼
//	             Judge.Request ── refuses ──▶ guest: JSON, and an Event ──▶ daemon
//	                   │             ── Value ──▶ daemon: the value of a credential
//	                   │             ── Dial ──▶ daemon: a socket to what it has verified
//	                   ▼
//	             TLS to the server, verified by the name ══▶ server
//	                   │
//	             Answerer.Response ◀── answer
//
// The child is pkg/egress/heads with an Inspector: what the daemon does not mark passes
// undecrypted, as in that. The child makes no connection, and does not have the key of the
// sandbox's authority. Its Judge (pkg/egress/judge) has the rules about requests and the values
// of bound credentials.
//
// Each flow has connections to the server of its own, so the daemon that cuts a flow cuts all
// that it sent. To the server it speaks what the guest speaks: HTTP/1.1 for HTTP/1.1, and for
// HTTP/2 what the server prefers.
//
// The surprise: a guest may send requests for another host on a connection (RFC 9113, section
// 9.1.1). It gets 421 and sends them on a new one, whose name the daemon then sees.
package terminate

import (
	"net/http"
	"net/netip"
	"runtime"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/heads"
)

// Verb is the name under which that of Serve is a verb of internal/confine.
const Verb = "terminate"

// Version is that of the messages, of the line, and of what stands in Config.Judge. See
// heads.Version, which counts too: a child lives on with the daemon that speaks both.
const Version = 2

// Memory is the limit of a child's data, in bytes, for 256 connections of its sandbox:
//
//	256 connections: TLS of the two sides, 80 KiB            20 MiB
//	on HTTP/2, if nobody reads: 256 KiB of the guest,
//	and 512 KiB of the server                               192 MiB
//	maxRequests with 384 KiB: the head and its copy,
//	buffers (see ahead), stacks                             192 MiB
//	as many that are told 503 on HTTP/2, with 128 KiB        64 MiB
//
// That is 468 MiB if a guest does all of it, 212 MiB if 256 programs read slowly, and 116 MiB
// for 256 flows of HTTP/1.1. Requests without TLS are among these 256. The collector keeps the
// child below two thirds of the limit, and works the harder the more of it is in use. A guest
// that wants more than that loses its own connections: no other sandbox has any here.
//
// But its processors and memory are the host's. So whoever starts the child puts it into the
// cgroup of its sandbox, or counts the children: N of them may hold N times Memory, and use
// N times processors.
const Memory = 512 << 20

// processors is how many a child runs Go on at most: one for each direction of a flow.
const processors = 2

const (
	// maxRequests is how many requests of TLS are under way at most; more get 503. A guest of
	// HTTP/2 may not read that, so beyond twice as many the streams are reset.
	maxRequests = 512
	// maxStreams are those of one connection of HTTP/2.
	maxStreams = 250

	handshakeLimit = 10 * time.Second

	// Windows of HTTP/2. Of a stream it is less than of the connection, so that one which
	// nobody reads does not stop the others: they share what is left, 64 KiB of the guest and
	// 128 KiB of the server in a round trip, and two such streams do stop them. More for the
	// connection would be less for other connections (Memory), less for a stream would slow the
	// many that are read. The guest is near: 192 KiB in a round trip of
	// 0.2 ms are 900 MB/s, and in one of 1 ms, on a busy host, 190 MB/s. To a server 384 KiB in
	// 50 ms are 8 MB/s for each stream.
	guestWindow, guestStream   = 256 << 10, 192 << 10
	serverWindow, serverStream = 512 << 10, 384 << 10
	frameSize                  = 32 << 10

	// A flow may have eight sockets, and ask four questions at a time (pkg/egress/proxy.go). The
	// daemon counts a socket, and a question, for a moment longer than the child.
	maxServerConns = 6
	maxDials       = 3
)

// A Destination is where a request goes, after the checks: the server name of TLS, the Host,
// and the name that the daemon has verified are this one.
type Destination struct {
	Scheme string // "https" or "http"
	Name   string // in normal form: lower case, without the last dot
	Port   uint16
	Addr   netip.Addr // to which the guest has opened the connection; the daemon may dial another one of Name
}

// A Judge decides on requests and answers of one sandbox. Its methods are called concurrently.
type Judge interface {
	// Request decides on r, an outgoing request, which it may change (header, path and query,
	// body). It goes to the Destination whatever its URL says then. The guest is told a
	// *Refusal; of another error, only that there was one. A nil Answerer has nothing to do.
	Request(r *http.Request, to Destination) (Answerer, error)
}

// An Answerer looks at the answers to a request that Judge has let pass, and may change them.
// It is called for each answer 1xx, which has no body, and then for the last one. The body of
// a 101 is the connection, and stays what it is. Trailers are there at the end of a body.
type Answerer interface {
	Response(r *http.Response) error
}

// A Refusal is an answer of sandboxd's own, in JSON.
type Refusal struct {
	Status int
	Code   string // such as SANDBOX::FORBIDDEN
	Text   string // for whoever wrote the program of the guest
}

// Error is the text.
func (r *Refusal) Error() string { return r.Text }

// Tell makes a Refusal a heads.Teller.
func (r *Refusal) Tell() (status int, code, text string) { return r.Status, r.Code, r.Text }

// A JudgeMaker makes a Judge of the bytes of Config.Judge. A child makes a new one for each
// Config, one at a time; requests that were sent keep theirs (see Daemon.Replaced), and one that is
// judged meanwhile is refused, to be sent again. old is the Judge that it replaces, or nil. If it
// fails, old stays.
type JudgeMaker func(config []byte, d Daemon, old Judge) (Judge, error)

// Serve returns the verb.
func Serve(judges JudgeMaker) func(args []string) error {
	return func([]string) error {
		runtime.GOMAXPROCS(min(processors, runtime.GOMAXPROCS(0)))
		return heads.ServeWith(newInspector(judges), maxToChild)
	}
}
