package terminate

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// sized answers with as many bytes as the path says, and reads what it is sent.
func sized(rw http.ResponseWriter, r *http.Request) {
	var n int64
	fmt.Sscanf(r.URL.Path, "/%d", &n)     //nolint:errcheck // then it is none
	got, _ := io.Copy(io.Discard, r.Body) // the count says
	rw.Header().Set("X-Got", fmt.Sprint(got))
	rw.Header().Set("Content-Length", fmt.Sprint(n))
	io.CopyN(rw, zeros{}, n) //nolint:errcheck // the client says
}

// TestLargeBodies: bodies pass both ways in memory that does not grow with them.
func TestLargeBodies(t *testing.T) {
	const size = 48 << 20
	eachWay(t, sized, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		get(t, c, request(t, "GET", "https://"+host+"/0", nil))
		var before, most uint64
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		before = m.Sys - m.HeapReleased
		var mu sync.Mutex
		look := func() { // of the guest, the server and the child together
			mu.Lock()
			defer mu.Unlock()
			runtime.ReadMemStats(&m)
			most = max(most, m.Sys-m.HeapReleased)
		}
		up := request(t, "POST", "https://"+host+"/1", looking{io.LimitReader(zeros{}, size), look})
		up.ContentLength = size
		if resp, _ := get(t, c, up); resp.Header.Get("X-Got") != fmt.Sprint(size) {
			t.Errorf("the server got %s bytes", resp.Header.Get("X-Got"))
		}
		resp, err := c.Do(request(t, "GET", fmt.Sprintf("https://%s/%d", host, size), nil))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if n, err := io.Copy(io.Discard, looking{resp.Body, look}); err != nil || n != size {
			t.Errorf("%d bytes, %v", n, err)
		}
		mu.Lock()
		defer mu.Unlock()
		if grown := int64(most) - int64(before); grown > 32<<20 {
			t.Errorf("memory grew by %d MiB", grown>>20)
		} else {
			t.Logf("memory grew by %d KiB", grown>>10)
		}
	})
}

// looking calls a function now and then.
type looking struct {
	io.Reader
	look func()
}

var looks atomic.Int64

func (l looking) Read(p []byte) (int, error) {
	if looks.Add(1)%256 == 0 {
		l.look()
	}
	return l.Reader.Read(p)
}

// direct is a client of a site without a child between.
func direct(s *site, h2 bool) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext:     func(context.Context, string, string) (net.Conn, error) { return s.dial() },
		TLSClientConfig: &tls.Config{RootCAs: public().Pool()}, Protocols: protocols(h2), DisableCompression: true,
	}}
}

// cpu is the time of the processors that this process has had: another measure than that of
// the clock, on a machine that does other things too.
func cpu(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// eachSide runs f directly and through a child, with each protocol.
func eachSide(b *testing.B, f func(b *testing.B, client func() *http.Client)) {
	run := func(b *testing.B, client func() *http.Client) {
		before := cpu(b)
		f(b, client)
		b.ReportMetric(float64(cpu(b)-before)/float64(b.N), "cpu-ns/op")
	}
	for _, h2 := range []bool{false, true} {
		s := newSite(b, http.HandlerFunc(sized), h2, nil)
		b.Run(fmt.Sprintf("h2=%t/direct", h2), func(b *testing.B) { run(b, func() *http.Client { return direct(s, h2) }) })
		b.Run(fmt.Sprintf("h2=%t/child", h2), func(b *testing.B) {
			d := newDesk(b, (&clerk{}).maker, s.dial)
			run(b, func() *http.Client { return d.client(h2) })
		})
	}
}

func fetch(b *testing.B, c *http.Client, r *http.Request) {
	resp, err := c.Do(r)
	if err != nil {
		b.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 200 {
		b.Fatal(resp.Status, err)
	}
}

// BenchmarkDownload, BenchmarkUpload: bytes a second of one request, in which guest, child and
// server share the processors of this process.
func BenchmarkDownload(b *testing.B) {
	const size = 64 << 20
	eachSide(b, func(b *testing.B, client func() *http.Client) {
		c := client()
		b.SetBytes(size)
		for b.Loop() {
			fetch(b, c, request(b, "GET", fmt.Sprintf("https://%s/%d", host, size), nil))
		}
	})
}

func BenchmarkUpload(b *testing.B) {
	const size = 64 << 20
	eachSide(b, func(b *testing.B, client func() *http.Client) {
		c := client()
		b.SetBytes(size)
		for b.Loop() {
			r := request(b, "POST", "https://"+host+"/1", io.LimitReader(zeros{}, size))
			r.ContentLength = size
			fetch(b, c, r)
		}
	})
}

// BenchmarkKept is a request on a connection that is open.
func BenchmarkKept(b *testing.B) {
	eachSide(b, func(b *testing.B, client func() *http.Client) {
		c := client()
		fetch(b, c, request(b, "GET", "https://"+host+"/1", nil))
		for b.Loop() {
			fetch(b, c, request(b, "GET", "https://"+host+"/1", strings.NewReader("")))
		}
	})
}

// BenchmarkNew is a request on a new connection, with both handshakes.
func BenchmarkNew(b *testing.B) {
	eachSide(b, func(b *testing.B, client func() *http.Client) {
		for b.Loop() {
			c := client()
			fetch(b, c, request(b, "GET", "https://"+host+"/1", nil))
			c.CloseIdleConnections()
		}
	})
}
