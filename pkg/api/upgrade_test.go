package api

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// halfPipe can be closed for writing, as TCP.
type halfPipe struct{ net.Conn }

func (halfPipe) CloseWrite() error { return nil }

// A sandbox that never hangs up holds nothing for long; one that talks on is heard.
func TestUpgradeEndsAfterItsClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, sandboxs := net.Pipe()
		defer sandboxs.Close()
		asks := http.Header{"Connection": {"keep-alive, Upgrade"}, "Upgrade": {"WebSocket"}}
		resp := &http.Response{
			StatusCode: http.StatusSwitchingProtocols, Body: halfPipe{ours},
			Header:  http.Header{"Connection": {"upgrade"}, "Upgrade": {"websocket"}},
			Request: &http.Request{Header: asks},
		}
		if err := upgraded(resp); err != nil {
			t.Fatal(err)
		}
		if err := resp.Body.(*upgrade).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		go func() {
			for range 3 {
				time.Sleep(halfOpen * 2 / 3)
				sandboxs.Write([]byte("x")) //nolint:errcheck // the reader counts
			}
		}()
		start, got := time.Now(), 0
		for {
			n, err := resp.Body.Read(make([]byte, 9))
			got += n
			if err != nil {
				break
			}
		}
		if took := time.Since(start); got != 3 || took != 3*halfOpen {
			t.Errorf("%d bytes, gone after %s; want 3, %s", got, took, 3*halfOpen)
		}
	})
}

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
				io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: other\r\n\r\n") //nolint:errcheck // read below
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
