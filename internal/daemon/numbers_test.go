package daemon

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestNumbersSmuggling: the listeners beside the API serve no request that says in two
// ways where it ends, either.
func TestNumbersSmuggling(t *testing.T) {
	d := &Daemon{log: slog.New(slog.DiscardHandler)}
	for _, network := range []string{"unix", "tcp"} {
		at := map[string]string{"unix": filepath.Join(t.TempDir(), "s"), "tcp": "127.0.0.1:0"}[network]
		l, err := net.Listen(network, at)
		if err != nil {
			t.Fatal(err)
		}
		srv := d.serveNumbers("a listener", l, http.NewServeMux())
		defer srv.Close()
		c, err := net.Dial(network, l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(20 * time.Second)) //nolint:errcheck // a read fails then
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"+
			"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n5c\r\n")
		r := bufio.NewReader(c)
		for _, want := range []int{http.StatusNotFound, http.StatusBadRequest} {
			resp, err := http.ReadResponse(r, nil)
			if err != nil {
				t.Fatalf("%s: %v", network, err)
			}
			b, _ := io.ReadAll(resp.Body)
			if resp.StatusCode != want || resp.Close != (want == http.StatusBadRequest) ||
				resp.Close && !strings.Contains(string(b), "where it ends") {
				t.Errorf("%s: %s %s, want %d", network, resp.Status, b, want)
			}
		}
		if _, err := r.ReadByte(); err == nil {
			t.Errorf("%s: the connection is not closed", network)
		}
	}
}

// TestForgetLayers: of layers that are gone, no size is remembered.
func TestForgetLayers(t *testing.T) {
	s := &system{layers: map[string]int64{"gone": 1, "there": 2, "empty": 0}}
	s.forgetLayers(map[string]int64{"there": 2, "empty": 0, "new": 3})
	if want := map[string]int64{"there": 2, "empty": 0}; !maps.Equal(s.layers, want) {
		t.Errorf("it remembers %v, want %v", s.layers, want)
	}
}
