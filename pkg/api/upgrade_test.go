package api

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// An upgrade that nobody asked for is refused, and its connection closed.
func TestStrayUpgrade(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	gone := make(chan error)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			br := bufio.NewReader(c)
			if _, err := http.ReadRequest(br); err == nil {
				// read below
				io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: other\r\n\r\n") //nolint:errcheck
			}
			c.SetReadDeadline(time.Now().Add(10 * time.Second)) //nolint:errcheck // then it reads for ever
			_, err = br.ReadByte()
			gone <- err
			c.Close()
		}
	}()
	w := newWorld(t)
	w.app = ln
	sb := w.create()
	for _, headers := range [][]string{nil, {"Connection", "Upgrade", "Upgrade", "websocket"}} {
		a := w.do("GET", "/sandboxes/"+sb.ID+"/proxy/8000/", "", headers...)
		if e := a.error(t); a.StatusCode != http.StatusBadGateway || !strings.Contains(e.Message, `"other"`) {
			t.Errorf("%v: %s %s", headers, a.Status, a.body)
		}
		if err := <-gone; err != io.EOF {
			t.Errorf("%v: the connection: %v", headers, err)
		}
	}
}
