// Package launch keeps a launcher running: a child process that starts sandboxes when
// asked over a socket. So no start pays for a process of its own, and the daemon need
// not link the code that starts sandboxes.
//
// The protocol is one SOCK_SEQPACKET socket, the launcher's descriptor 3. A packet from
// the daemon is one Request in JSON with one descriptor beside it, the stdin of PID 1;
// a packet back is one Reply. Requests run at the same time and are answered in any
// order. When the socket closes, the launcher ends; sandboxes live on.
//
// What surprises: Start does not return before the launcher has answered, even if its
// context ends first. A start that the caller has given up but that still runs could
// make a sandbox after its teardown.
package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Request asks for one start.
type Request struct {
	Seq    uint64 `json:"seq"` // copied into the Reply
	ID     string `json:"id"`
	Bundle string `json:"bundle"`
}

// Reply answers one Request.
type Reply struct {
	Seq uint64 `json:"seq"`
	Err string `json:"err,omitempty"` // the runtime's error; empty: it runs
}

const (
	socketFD  = 3
	maxPacket = 16 << 10
	maxErr    = 8 << 10
)

// Serve is the launcher's side: it calls start for each request, all at the same time,
// and returns nil when the daemon has closed the socket. Serve closes stdin when start
// returns.
func Serve(start func(id, bundle string, stdin *os.File) error) error {
	f := os.NewFile(socketFD, "launcher socket")
	c, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return fmt.Errorf("descriptor %d is not the socket of a daemon: %w", socketFD, err)
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return fmt.Errorf("descriptor %d is a %T, not a unix socket", socketFD, c)
	}
	for {
		req, stdin, err := receive(conn)
		if err != nil || req == nil {
			return err
		}
		go func() {
			defer stdin.Close()
			reply := Reply{Seq: req.Seq}
			if err := start(req.ID, req.Bundle, stdin); err != nil {
				reply.Err = truncate(err.Error(), maxErr)
			}
			b, err := json.Marshal(reply)
			if err == nil {
				// The daemon is gone: the read above ends the launcher.
				_, _ = conn.Write(b)
			}
		}()
	}
}

// receive reads one request; nil without an error means that the socket is closed.
func receive(conn *net.UnixConn) (*Request, *os.File, error) {
	b, oob := make([]byte, maxPacket), make([]byte, unix.CmsgSpace(4))
	n, noob, flags, _, err := conn.ReadMsgUnix(b, oob)
	if n == 0 || errors.Is(err, syscall.ECONNRESET) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read request: %w", err)
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return nil, nil, errors.New("read request: packet larger than the protocol allows")
	}
	var fds []int
	msgs, err := unix.ParseSocketControlMessage(oob[:noob])
	if err == nil && len(msgs) == 1 {
		fds, err = unix.ParseUnixRights(&msgs[0])
	}
	if err != nil || len(fds) != 1 {
		return nil, nil, fmt.Errorf("read request: %d descriptors, want 1 (%v)", len(fds), err)
	}
	stdin := os.NewFile(uintptr(fds[0]), "stdin")
	var req Request
	if err := json.Unmarshal(b[:n], &req); err != nil {
		stdin.Close()
		return nil, nil, fmt.Errorf("read request: %w", err)
	}
	return &req, stdin, nil
}

func truncate(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}
