package main

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/test/internet/quic"
)

// shout sends a packet to an address of many, and waits for an answer, from whomever.
func shout(args []string) (string, error) {
	to, err := netip.ParseAddrPort(args[0])
	if err != nil {
		return "", err
	}
	c, err := net.ListenUDP("udp4", nil) // with SO_BROADCAST
	if err != nil {
		return "", err
	}
	defer c.Close()
	var from netip.AddrPort
	err = again(c, func() error {
		_, err := c.WriteToUDPAddrPort([]byte("anybody?"), to)
		return err
	}, func() (err error) {
		_, from, err = c.ReadFromUDPAddrPort(make([]byte, 64))
		return err
	})
	if err != nil {
		return "", err
	}
	return from.String(), nil
}

// again sends up to five times, as dns does, and waits a second for an answer after each:
// packets may be lost. An answer that is late is one.
func again(c net.Conn, send, read func() error) (err error) {
	for range 5 {
		if err = send(); err != nil {
			return err
		}
		c.SetReadDeadline(time.Now().Add(time.Second)) //nolint:errcheck // of a socket
		if err = read(); !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
	return err
}

// mapped connects to an address of IPv4 by a socket of IPv6.
func mapped(args []string) (string, error) {
	to, err := netip.ParseAddrPort(args[0])
	if err != nil {
		return "", err
	}
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 0); err != nil {
		return "", err
	}
	limit := unix.NsecToTimeval(int64(2 * time.Second)) // of connect, too
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit); err != nil {
		return "", err
	}
	return "", unix.Connect(fd, &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())})
}

// atOnce asks for so many names of a slow server, and counts the answers that say that it
// will not be asked: they come at once. It is "ok" if there is none.
func atOnce(args []string) (string, error) {
	c, err := net.Dial("udp4", args[0])
	if err != nil {
		return "", err
	}
	defer c.Close()
	for i := range int(number(args[2])) {
		if _, err := c.Write(query(uint16(i), strconv.Itoa(i)+"."+args[1])); err != nil {
			return "", err
		}
	}
	refused, b := 0, make([]byte, 512)
	c.SetReadDeadline(time.Now().Add(time.Second)) //nolint:errcheck // of a socket
	for {
		n, err := c.Read(b)
		if err != nil {
			break
		}
		if n > 3 && b[3]&15 == 2 { // SERVFAIL
			refused++
		}
	}
	if refused > 0 {
		return strconv.Itoa(refused), wordError("limited")
	}
	return "", nil
}

// moved is lookup, until an answer has the address or three have not. In between it waits
// for the end of the answer's time.
func moved(args []string) (more string, err error) {
	for range 3 {
		if more, err = lookup(args); err == nil {
			break
		}
		time.Sleep(1500 * time.Millisecond)
	}
	return more, err
}

// quicTo sends the first packet of QUIC: address, name of the handshake. The server must say
// the name.
func quicTo(args []string) (string, error) {
	first, err := quic.Initial(args[1])
	if err != nil {
		return "", err
	}
	c, err := net.Dial("udp4", args[0])
	if err != nil {
		return "", err
	}
	defer c.Close()
	b, n := make([]byte, 512), 0
	err = again(c, func() error {
		_, err := c.Write(first)
		return err
	}, func() (err error) {
		n, err = c.Read(b)
		return err
	})
	if err == nil && string(b[:n]) != "this is "+args[1] {
		err = wordError("other")
	}
	return string(b[:n]), err
}
