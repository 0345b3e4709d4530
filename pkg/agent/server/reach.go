package server

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

const (
	// reachStep is how long a step of a reach may take.
	reachStep = 5 * time.Second
	// reachRest is how long a connection must stay open to count as reached, on ports
	// where the client has nothing to say first.
	reachRest = 300 * time.Millisecond
)

// reach is POST /reach: it tries to reach a TCP port as any program of the guest would, by
// the guest's own resolver and network. So the answer is what the network allows.
func reach(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	port, err := strconv.ParseUint(q.Get("port"), 10, 16)
	host := q.Get("host")
	if err != nil || port == 0 || host == "" || len(host) > 253 {
		return reply.BadRequest("want ?host=NAME or address &port=1 to 65535")
	}
	var got agent.Reached
	if err := tryReach(r.Context(), &got, host, uint16(port)); err != nil {
		got.Error = err.Error()
	} else {
		got.OK = true
	}
	return reply.JSON(w, http.StatusOK, got)
}

func tryReach(ctx context.Context, got *agent.Reached, host string, port uint16) error {
	got.Step = agent.StepResolve
	addr, err := netip.ParseAddr(host)
	isName := err != nil
	if isName {
		limited, cancel := context.WithTimeout(ctx, reachStep)
		defer cancel()
		all, err := net.DefaultResolver.LookupNetIP(limited, "ip4", host)
		if err != nil {
			return err
		}
		addr = all[0].Unmap()
	}
	got.Step, got.Address = agent.StepConnect, addr.String()
	d := net.Dialer{Timeout: reachStep}
	conn, err := d.DialContext(ctx, "tcp4", netip.AddrPortFrom(addr, port).String())
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(reachStep)) //nolint:errcheck // then it ends with the request
	switch port {
	case 443:
		got.Step = agent.StepTLS
		if !isName {
			host = "" // an address is no name for a server
		}
		return shake(ctx, conn, host)
	case 80:
		got.Step = agent.StepHTTP
		return ask(conn, host)
	case 53:
		return asksNothing(conn, reachRest)
	}
	return staysOpen(conn, reachRest)
}

// shake begins TLS with a server of this name, whatever its certificate says: nothing is
// sent to it.
func shake(ctx context.Context, conn net.Conn, name string) error {
	c := tls.Client(conn, &tls.Config{ServerName: name, InsecureSkipVerify: true}) //nolint:gosec // see above
	err := c.HandshakeContext(ctx)
	const accessDenied = "tls: access denied" // alert 49, which no server sends before it knows a client
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "remote error" && op.Err.Error() != accessDenied {
		return nil // the server itself refuses: it was reached
	}
	return err
}

// ask sends a request to a server of this name.
func ask(conn net.Conn, name string) error {
	r, err := http.NewRequest(http.MethodHead, "http://"+name+"/", http.NoBody)
	if err != nil {
		return err
	}
	r.Close = true
	if err := r.Write(conn); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(io.LimitReader(conn, 64<<10)), r)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// asksNothing sends a message of DNS without a question, with its length before it (RFC 1035,
// 4.1.1 and 4.2.2). A server answers at once that this is none, and no policy is asked for a
// name.
func asksNothing(conn net.Conn, rest time.Duration) error {
	if _, err := conn.Write([]byte{0, 12, 0x53, 0x42, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		return err
	}
	return staysOpen(conn, rest)
}

// staysOpen waits for the end of a connection. A server that sends something, or nothing
// within rest, was reached.
func staysOpen(conn net.Conn, rest time.Duration) error {
	conn.SetReadDeadline(time.Now().Add(rest)) //nolint:errcheck // the deadline before it holds
	_, err := conn.Read(make([]byte, 1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	if errors.Is(err, io.EOF) {
		return errors.New("the connection was closed at once")
	}
	return err
}
