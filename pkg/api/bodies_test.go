package api

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestManyValues: a body of 14 MiB that is five million empty values is refused when the first of them
// have come. All five together take less memory than one of them has bytes.
func TestManyValues(t *testing.T) {
	w := newWorld(t)
	body := `{"image":{"uri":"python"},"entrypoint":["x"],"volumes":[` + strings.Repeat(`{},`, 14<<20/3) + `{}]}`
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var all sync.WaitGroup
	for range 5 {
		all.Go(func() {
			req, err := http.NewRequest("POST", w.url+"/v1/sandboxes", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set(wire.HeaderAPIKey, testKey)
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != 400 || !strings.Contains(string(text), "more than 200000 values") {
				t.Errorf("%s %s, %v", resp.Status, text, err)
			}
		})
	}
	all.Wait()
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; took > uint64(len(body)) {
		t.Errorf("five refused bodies of %d bytes took %d bytes of memory", len(body), took)
	}
	if len(w.recs) != 0 {
		t.Errorf("%d sandboxes", len(w.recs))
	}
}

// TestBodyBudget: large bodies share a budget. One that gets no share in time is told when to come
// again, one that a client does not go on to send gives its share back, and a small one needs none.
func TestBodyBudget(t *testing.T) {
	w := newWorld(t)
	large := strings.Replace(createBody, `"env":{}`, `"env":{"BIG":"`+strings.Repeat("x", 200<<10)+`"}`, 1)
	synctest.Test(t, func(t *testing.T) {
		ln := &pipes{conns: make(chan net.Conn), done: make(chan struct{})}
		hs := w.s.HTTPServer(auth.Listener{})
		go hs.Serve(ln) //nolint:errcheck // ends with Close
		defer hs.Close()
		post := func(length int, body string) (*http.Response, time.Duration) {
			t.Helper()
			start := time.Now()
			conn := ln.dial()
			defer conn.Close()
			go fmt.Fprintf(conn, "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Length: %d\r\n\r\n%s",
				wire.HeaderAPIKey, testKey, length, body)
			in := bufio.NewReader(conn)
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			took := time.Since(start)
			resp.Body.Close()
			if resp.Close {
				io.Copy(io.Discard, in) //nolint:errcheck // the server closes late, for clients that still send
			}
			return resp, took
		}
		free := func(n int64) {
			t.Helper()
			synctest.Wait()
			if !w.s.bodies.TryAcquire(n) {
				t.Fatalf("the budget has not %d bytes left", n)
			}
			w.s.bodies.Release(n)
		}

		if !w.s.bodies.TryAcquire(bodyBudget - freeBody) { // as others do that are decoded
			t.Fatal("the budget is not whole")
		}
		resp, took := post(len(large), large)
		if resp.StatusCode != 503 || resp.Header.Get("Retry-After") != "2" || took != bodyWait {
			t.Errorf("a large body without a share: %s after %v, Retry-After %q", resp.Status, took, resp.Header.Get("Retry-After"))
		}
		free(freeBody) // it has kept none of it
		if resp, _ := post(len(createBody), createBody); resp.StatusCode != 202 {
			t.Errorf("a small body: %s", resp.Status)
		}
		time.AfterFunc(bodyWait/2, func() { w.s.bodies.Release(bodyBudget - freeBody) })
		if resp, _ := post(len(large), large); resp.StatusCode != 202 {
			t.Errorf("a large body that waits for its share: %s", resp.Status)
		}
		free(bodyBudget)

		if resp, took := post(15<<20, large); resp.StatusCode != 400 || took != largeTime {
			t.Errorf("a client that stops: %s after %v", resp.Status, took)
		}
		free(bodyBudget)
	})
}
