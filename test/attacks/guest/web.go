package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// patience is how long an answer may take: longer than what the host itself waits for.
const patience = 8 * time.Second

// dial opens a TCP connection.
func dial(addr string) (net.Conn, error) {
	c, err := net.DialTimeout("tcp4", addr, patience)
	if e, ok := err.(net.Error); ok && e.Timeout() {
		return nil, wordError("timeout")
	}
	if err == nil {
		err = c.SetDeadline(time.Now().Add(patience))
	}
	return c, err
}

// secure is dial with TLS. An empty name sends none. Whose certificate comes is nothing
// that an attacker looks at.
func secure(addr, name string, protocols ...string) (*tls.Conn, error) {
	return secureBehind("", addr, name, protocols...)
}

// secureBehind is secure behind bytes that a server may skip, or take for no part of the
// handshake.
func secureBehind(first, addr, name string, protocols ...string) (*tls.Conn, error) {
	c, err := dial(addr)
	if err != nil {
		return nil, err
	}
	if first != "" {
		c = &behind{c, []byte(first)}
	}
	s := tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true, NextProtos: protocols}) //nolint:gosec // as above
	if err := s.Handshake(); err != nil {
		c.Close() //nolint:errcheck // it failed
		return nil, denied(err)
	}
	return s, nil
}

// behind writes some bytes before all others, in one piece with the first of them.
type behind struct {
	net.Conn
	first []byte
}

func (b *behind) Write(p []byte) (int, error) {
	if b.first == nil {
		return b.Conn.Write(p)
	}
	n, err := b.Conn.Write(append(b.first, p...))
	n, b.first = max(n-len(b.first), 0), nil
	return n, err
}

// denied is the word for an alert of TLS, or for its like of HTTP/2.
func denied(err error) error {
	switch {
	case strings.Contains(err.Error(), "access denied"):
		return wordError("alert-49")
	case strings.Contains(err.Error(), "error decoding message"):
		return wordError("alert-50")
	case strings.Contains(err.Error(), "GOAWAY"):
		return wordError("GOAWAY")
	case strings.Contains(err.Error(), "client conn could not be established"):
		return wordError("ended") // it began to write when the other side had closed
	}
	return err
}

// httpRaw sends requests as they are to an address and looks for a text in all that comes
// back. A | in the requests waits for an answer to what is before it.
func httpRaw(args []string) (string, error) {
	c, err := dial(args[0])
	if err != nil {
		return "", err
	}
	defer c.Close()
	return exchange(c, args[1], args[2])
}

// httpsRaw is httpRaw by TLS: address, name of the handshake, text, requests.
func httpsRaw(args []string) (string, error) {
	c, err := secure(args[0], args[1])
	if err != nil {
		return "", err
	}
	defer c.Close()
	return exchange(c, args[2], args[3])
}

// httpsLeased is httpsRaw to an address of an allowed name, after a lookup of that: server of
// DNS, allowed name, and the arguments of httpsRaw. A last one is hexadecimal, and sent first.
func httpsLeased(args []string) (string, error) {
	if more, err := lookup([]string{"udp", args[0], args[1]}); err != nil {
		return more, err
	}
	first, err := hex.DecodeString(strings.Join(args[6:], ""))
	if err != nil {
		return "", err
	}
	c, err := secureBehind(string(first), args[2], args[3])
	if err != nil {
		return "", err
	}
	defer c.Close()
	return exchange(c, args[4], args[5])
}

func exchange(c net.Conn, want, requests string) (string, error) {
	var all bytes.Buffer
	b := make([]byte, 64<<10)
	for part := range strings.SplitSeq(strings.NewReplacer(`\r\n`, "\r\n").Replace(requests), "|") {
		if _, err := io.WriteString(c, part); err != nil {
			return said(all.String(), err)
		}
		n, err := c.Read(b)
		all.Write(b[:n])
		if err != nil && !strings.Contains(all.String(), want) {
			return said(all.String(), err)
		}
	}
	// What else comes: the last request may be answered later than the others.
	c.SetReadDeadline(time.Now().Add(patience)) //nolint:errcheck // of a socket
	for !strings.Contains(all.String(), want) {
		n, err := c.Read(b)
		all.Write(b[:n])
		if err != nil {
			break
		}
	}
	if strings.Contains(all.String(), want) {
		return "", nil
	}
	return said(all.String(), io.EOF)
}

// said is the status of the last answer, if there is one, else the error.
func said(all string, err error) (string, error) {
	if i := strings.LastIndex(all, "HTTP/1."); i >= 0 && len(all) >= i+12 {
		return strings.Join(strings.Fields(all[i:]), " "), wordError(all[i+9 : i+12])
	}
	return strings.Join(strings.Fields(all), " "), denied(err)
}

// http2 asks for a name by HTTP/2: address, name of the handshake, name of the request.
// An address with port 80 gets it in clear text, without asking whether it knows it.
func http2(args []string) (string, error) {
	p := &http.Protocols{}
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	transport := &http.Transport{
		Protocols:      p,
		DialContext:    func(context.Context, string, string) (net.Conn, error) { return dial(args[0]) },
		DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return secure(args[0], args[1], "h2") },
	}
	scheme := "https://"
	if strings.HasSuffix(args[0], ":80") {
		scheme = "http://"
	}
	return get(&http.Client{Transport: transport, Timeout: patience}, scheme+args[2]+"/", args[2])
}

// follow asks for a page of a name at an address, and follows where it leads to, also to
// other addresses, as programs do. It wants a text.
func follow(args []string) (string, error) {
	first := true
	transport := &http.Transport{DialContext: func(_ context.Context, _, addr string) (net.Conn, error) {
		if first {
			first = false
			return dial(args[0])
		}
		return dial(addr)
	}}
	return get(&http.Client{Transport: transport, Timeout: patience}, args[1], args[2])
}

func get(c *http.Client, url, want string) (string, error) {
	resp, err := c.Get(url)
	if err != nil {
		return "", denied(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = wordError(strconv.Itoa(resp.StatusCode))
	}
	if err == nil && !strings.Contains(string(b), want) {
		err = wordError("other")
	}
	return strings.Join(strings.Fields(string(b)), " "), err
}

// doh asks a server of DNS over HTTPS (RFC 8484) for a name, and connects to what it
// answers: address of the server, its name, the name.
func doh(args []string) (string, error) {
	c, err := secure(args[0], args[1])
	if err != nil {
		return "", err
	}
	defer c.Close()
	q := base64.RawURLEncoding.EncodeToString(query(0, args[2]))
	//nolint:errcheck // then no answer comes
	fmt.Fprintf(c, "GET /dns-query?dns=%s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", q, args[1])
	answer, err := io.ReadAll(c)
	if len(answer) < 4 {
		return "", errors.Join(err, wordError("no-answer"))
	}
	found := net.IP(answer[len(answer)-4:]).String() // the address is the end of the answer
	request := "GET / HTTP/1.1\r\nHost: " + args[2] + "\r\n\r\n"
	return httpsRaw([]string{net.JoinHostPort(found, "443"), args[2], "this is " + args[2], request})
}

// lookup asks a server for an address of a name, by udp or tcp: it is "ok" if there is one
// or, if an address is given, that one; "none" if there is none, "huge" if there are
// more than 255.
func lookup(args []string) (string, error) {
	network, server, name := args[0], args[1], args[2]
	c, err := net.DialTimeout(network, server, patience)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience)) //nolint:errcheck // of a socket
	q := query(7, name)
	if network == "tcp" {
		q = append([]byte{byte(len(q) >> 8), byte(len(q))}, q...)
	}
	if _, err := c.Write(q); err != nil {
		return "", err
	}
	a := make([]byte, 64<<10)
	n, err := c.Read(a)
	for network == "tcp" && err == nil && (n < 2 || n < 2+int(a[0])<<8+int(a[1])) {
		var more int
		more, err = c.Read(a[n:])
		n += more
	}
	if err != nil {
		return "", err
	}
	if network == "tcp" {
		a, n = a[2:], n-2
	}
	if err := codeOf(a[:n]); err != nil {
		return "", err
	}
	switch count := int(a[6])<<8 + int(a[7]); {
	case count == 0:
		return "", wordError("none")
	case count > 255:
		return strconv.Itoa(count), wordError("huge")
	}
	if len(args) > 3 && !bytes.Contains(a[:n], net.ParseIP(args[3]).To4()) {
		return "", wordError("other")
	}
	return "", nil
}

// resolved looks a name up and connects to an address: its lease, or the lack of one,
// decides.
func resolved(args []string) (string, error) {
	if more, err := lookup(args[:3]); err != nil && word(err) != "none" {
		return more, err
	}
	return connect(args[3])
}

// tunnel sends data by names below a name: so many queries, each with 60 characters that
// nobody asked for before, slower than what a flood is stopped at. It is "ok" if all
// were answered.
func tunnel(args []string) (string, error) {
	c, err := net.Dial("udp4", args[0])
	if err != nil {
		return "", err
	}
	defer c.Close()
	all := int(number(args[2]))
	b := make([]byte, 4096)
	lost := 0
	for i := range all {
		begin := time.Now()
		label := make([]byte, 60)
		for j := range label {
			label[j] = "abcdefghijklmnopqrstuvwxyz234567"[rand.IntN(32)] //nolint:gosec // data
		}
		if _, err := c.Write(query(uint16(i), string(label)+"."+args[1])); err != nil {
			return "", err
		}
		c.SetReadDeadline(time.Now().Add(time.Second)) //nolint:errcheck // of a socket
		n, err := c.Read(b)
		if err != nil {
			if lost++; lost > 5 {
				return strconv.Itoa(i), wordError("limited")
			}
			continue
		}
		if n > 3 && b[3]&15 == 5 {
			return strconv.Itoa(i), wordError("limited")
		}
		time.Sleep(7*time.Millisecond - time.Since(begin)) // 140 a second: a limit of floods is at 200
	}
	return "", nil
}

// slow asks so often at once for a name whose server is slow, and then for another, which
// must be answered.
func slow(args []string) (string, error) {
	for i := range int(number(args[3])) {
		c, err := net.Dial("udp4", args[0])
		if err != nil {
			return "", err
		}
		defer c.Close()
		if _, err := c.Write(query(uint16(i), strconv.Itoa(i)+"."+args[1])); err != nil {
			return "", err
		}
	}
	var err error
	for range 10 { // while it has as many queries in flight as it may, others are dropped
		if _, err = lookup([]string{"udp", args[0], args[2]}); err == nil {
			break
		}
		time.Sleep(500 * time.Millisecond)
	}
	return "", err
}

// ping sends an ICMP echo by a socket that needs no privilege, where there are such.
func ping(args []string) (string, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM, syscall.IPPROTO_ICMP)
	if err != nil {
		return "", err
	}
	defer syscall.Close(fd) //nolint:errcheck // the end
	to := &syscall.SockaddrInet4{Addr: [4]byte(net.ParseIP(args[0]).To4())}
	if err := syscall.Sendto(fd, []byte{8, 0, 0, 0, 0, 1, 0, 1}, 0, to); err != nil {
		return "", err
	}
	limit := syscall.NsecToTimeval(int64(2 * time.Second))
	if err := syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &limit); err != nil {
		return "", err
	}
	for err = syscall.EINTR; err == syscall.EINTR; { // a signal of Go's scheduler ends a call that has a limit (signal(7))
		_, _, err = syscall.Recvfrom(fd, make([]byte, 64), 0)
	}
	return "", err
}
