package gateway

import (
	"net"
	"net/http"
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
		if err := upgraded(resp, nil); err != nil {
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
