package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func connect(addr string) (string, error) {
	c, err := net.DialTimeout("tcp", addr, 2*time.Second)
	if e, ok := err.(net.Error); ok && e.Timeout() {
		return "", wordError("timeout")
	}
	if err != nil {
		return "", err
	}
	return "", c.Close()
}

// marked connects with every bit of a mark, as the host's chains use them.
func marked(args []string) (string, error) {
	mark := func(_, _ string, c syscall.RawConn) (err error) {
		fault := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, 0xffffffff) })
		return errors.Join(err, fault)
	}
	c, err := (&net.Dialer{Timeout: 2 * time.Second, Control: mark}).Dial("tcp4", args[0])
	if err != nil {
		return "", err
	}
	return "", c.Close()
}

// datagram sends a packet of so many bytes, in fragments if it is long, and waits for what
// comes back.
func datagram(args []string) (string, error) {
	c, err := net.Dial("udp4", args[0])
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := c.Write(make([]byte, number(args[1]))); err != nil {
		return "", err
	}
	c.SetReadDeadline(time.Now().Add(2 * time.Second)) //nolint:errcheck // of a socket
	_, err = c.Read(make([]byte, 1))
	return "", err
}

// connects begins so many connections to different ports of an address, and waits for
// none. It prints how many sockets that took.
func connects(args []string) (string, error) {
	ip := [4]byte(net.ParseIP(args[0]).To4())
	refused := 0
	more, err := until(args[1], func(i int) error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.Connect(fd, &unix.SockaddrInet4{Port: 1024 + i%60000, Addr: ip}); err != nil && err != unix.EINPROGRESS {
			refused++
		}
		return nil
	})
	return fmt.Sprintf("%s, %d refused at once", more, refused), err
}

// bind listens on a port that another process has, in all ways that share one.
func bind(args []string) (string, error) {
	share := func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) //nolint:errcheck // then it is bound without
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) //nolint:errcheck // the same
		})
	}
	var last error
	for _, host := range []string{"0.0.0.0", "127.0.0.1", "127.0.0.2", ownAddress()} {
		l, err := (&net.ListenConfig{Control: share}).Listen(context.Background(), "tcp4", net.JoinHostPort(host, args[0]))
		if err == nil {
			return host, l.Close()
		}
		last = err
	}
	return "", last
}

// ownAddress is the address of this sandbox.
func ownAddress() string {
	all, _ := net.InterfaceAddrs()
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
			return n.IP.String()
		}
	}
	return "127.0.0.3"
}

// query is a question of DNS for the address of a name.
func query(id uint16, name string) []byte { return queryOf(id, name, 1) }

// queryOf is a question of DNS for a type of record.
func queryOf(id uint16, name string, of byte) []byte {
	q := binary.BigEndian.AppendUint16(nil, id)
	q = append(q, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0)
	for label := range strings.SplitSeq(name, ".") {
		q = append(append(q, byte(len(label))), label...)
	}
	return append(q, 0, 0, of, 0, 1)
}

// codeOf is the error that an answer has. That a policy denies the name is said by NXDOMAIN, with an authority of its
// own.
func codeOf(answer []byte) error {
	code := int(answer[3] & 15)
	switch {
	case code == 0:
		return nil
	case bytes.Contains(answer, []byte("\x06policy\x07invalid\x00")):
		return wordError("denied")
	}
	return wordError([]string{"ok", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED"}[min(code, 5)])
}

// dns asks a server for a name, and a type of record if that is not A. The word is the code
// of the answer: "ok" is an answer that has one, from anywhere.
func dns(args []string) (string, error) {
	c, err := net.Dial("udp", args[0])
	if err != nil {
		return "", err
	}
	defer c.Close()
	answer, of := make([]byte, 512), byte(1)
	if len(args) > 2 {
		of = byte(number(args[2]))
	}
	for range 5 { // packets may be lost
		if _, err = c.Write(queryOf(7, args[1], of)); err != nil {
			return "", err
		}
		c.SetReadDeadline(time.Now().Add(time.Second)) //nolint:errcheck // of a socket
		var n int
		if n, err = c.Read(answer); err == nil && n >= 12 {
			return "", codeOf(answer[:n])
		}
	}
	return "", err
}

// queries asks so many questions at once, each from a port of its own, and counts the
// answers of the second after that: "ok" if each was answered.
func queries(args []string) (string, error) {
	var all []net.Conn
	for i := range int(number(args[1])) {
		c, err := net.Dial("udp", args[0])
		if err != nil {
			return "", err
		}
		defer c.Close()
		if _, err := c.Write(query(uint16(i), "attack.invalid")); err != nil {
			return "", err
		}
		all = append(all, c)
	}
	limit, answers := time.Now().Add(time.Second), 0
	for _, c := range all {
		c.SetReadDeadline(limit) //nolint:errcheck // of a socket
		if _, err := c.Read(make([]byte, 512)); err == nil {
			answers++
		}
	}
	if answers < len(all) {
		return fmt.Sprintf("%d of %d", answers, len(all)), wordError("dropped")
	}
	return "", nil
}

// serve is a server of a guest that wishes its clients no good. It ends with its sandbox.
func serve(args []string) (string, error) {
	l, err := net.Listen("tcp4", "0.0.0.0:"+args[0])
	if err != nil {
		return "", err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return "", err
		}
		go answer(c)
	}
}

// answer answers one request by its path.
func answer(c net.Conn) {
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute)) //nolint:errcheck // of a socket
	from := bufio.NewReader(c)
	r, err := http.ReadRequest(from)
	if err != nil {
		return
	}
	what, more, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	if what == "echo" { // the request's own head
		var b strings.Builder
		r.Header.Write(&b) //nolint:errcheck // into memory
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", b.Len(), b.String())
		return
	}
	lie(c, what, more)
}

// believed is the head of an answer of an agent, as far as the daemon asks for more of it.
const believed = "HTTP/1.1 200 OK\r\nX-Sandboxd-Agent-Protocol: 1\r\nEXECD-COMMANDS-TAIL-CURSOR: 0\r\nConnection: close\r\n"

// lie answers in one of the ways that wish a client no good.
func lie(c net.Conn, what, more string) {
	endless := func(head, s string) {
		io.WriteString(c, head) //nolint:errcheck // as below
		for {
			if _, err := io.WriteString(c, s); err != nil {
				return
			}
		}
	}
	switch what {
	case "redirect":
		fmt.Fprintf(c, "HTTP/1.1 302 Found\r\nLocation: http://%s/\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", more)
	case "cookie":
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\nSet-Cookie: a=b; Domain=example.org; Path=/\r\nClear-Site-Data: \"*\"\r\n"+
			"Content-Length: 0\r\nConnection: close\r\n\r\n")
	case "endless-head":
		endless("HTTP/1.1 200 OK\r\n", "X-A: "+strings.Repeat("a", 1000)+"\r\n")
	case "endless-line":
		endless("HTTP/1.1 200 OK\r\nX-A: ", strings.Repeat("a", 1000))
	case "endless-interim":
		endless("", "HTTP/1.1 103 Early Hints\r\nX-A: a\r\n\r\n")
	case "two-lengths":
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length: 50\r\nConnection: close\r\n\r\n")
	case "garbage":
		fmt.Fprint(c, "\x00\x01garbage\r\n\r\n")
	case "endless-body":
		endless(believed+"\r\n{\"a\":\"", strings.Repeat("a", 1000))
	case "deep":
		endless(believed+"\r\n", strings.Repeat("[", 1000))
	case "short":
		fmt.Fprint(c, believed+"Content-Length: 1099511627776\r\n\r\n{")
	case "frames": // of outputs, events and interpreters
		endless(believed+"Content-Type: text/event-stream\r\n\r\n",
			"\x01\xff\xff\xff\xff\x7f\r\n{\"type\":\"stdout\",\"text\":1}\n\ndata: {\"exitCode\":-9999999999999999999}\n\n")
	case "upgrade":
		endless("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
			"\x81\x7f\xff\xff\xff\xff\xff\xff\xff\xff")
	}
}
