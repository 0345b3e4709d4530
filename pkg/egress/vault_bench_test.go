package egress

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// boundTo is the name that the credential of a vaulted is bound to.
const boundTo = "bound.test"

// A vaulted is a server of HTTPS outside, and guests that reach it in two ways: by a rule by
// address, which nobody decrypts, and by its name, to which a credential is bound. The server and
// the clients are in this process; the child that decrypts is not.
type vaulted struct {
	b      *testing.B
	w      *world
	e      *Engine
	roots  *x509.CertPool
	pids   chan int // of children
	direct string
	bound  *inspected
	other  *inspected // as bound

	mu    sync.Mutex
	waits int           // requests for /together
	here  chan struct{} // closed when there are streams of them
}

// newVaulted makes one whose clients and server speak HTTP/2, or HTTP/1.1.
func newVaulted(b *testing.B, h2 bool) *vaulted {
	v := &vaulted{b: b, w: newWorld(b), roots: x509.NewCertPool(), pids: make(chan int, 10), here: make(chan struct{})}
	v.roots.AddCert(public().Cert)
	v.w.in(v.w.outside, func() { v.serve(h2) })
	v.e, _ = v.w.openInspecting(func(c *Config) {
		c.MaxFlows = 60_000
		c.Inspecting = func(_ string, pid int) error { v.pids <- pid; return nil }
	})
	v.direct = v.w.sandbox(v.e, 0, rules(b, record.NetworkRules, site))
	for i, s := range map[int]**inspected{1: &v.bound, 2: &v.other} {
		*s = v.w.inspected(v.e, i)
		(*s).set(rules(b, record.NetworkRules, boundTo), bearer, boundTo)
		v.roots.AppendCertsFromPEM((*s).authority.Certificate())
		v.e.lookup(addr(i)).leases.Add(boundTo, []netip.Addr{netip.MustParseAddr(site)}, time.Hour, time.Now())
	}
	return v
}

const bearer = "the-token-of-the-benchmark"

// serve answers GET /N with N bytes, and says in a header how many it got, and whether the
// credential came. It answers /together when as many ask for that as there are to be streams.
func (v *vaulted) serve(h2 bool) {
	v.w.run("ip", "addr", "replace", site+"/32", "dev", "lo")
	l, err := net.Listen("tcp4", site+":443")
	if err != nil {
		v.b.Fatal(err)
	}
	s := &http.Server{
		Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/together" {
				v.wait(r.Context())
			}
			n, _ := strconv.ParseInt(strings.TrimPrefix(r.URL.Path, "/"), 10, 64) // then it is none
			got, _ := io.Copy(io.Discard, r.Body)                                 // the count says
			rw.Header().Set("X-Got", fmt.Sprint(got))
			rw.Header().Set("X-Bound", fmt.Sprint(r.Header.Get("Authorization") == "Bearer "+bearer))
			rw.Header().Set("Content-Length", fmt.Sprint(n))
			io.CopyN(rw, zeros{}, n) //nolint:errcheck // the client says
		}),
		ErrorLog: log.New(io.Discard, "", 0), Protocols: speaks(h2),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate()}},
	}
	v.b.Cleanup(func() { s.Close() })
	go s.ServeTLS(l, "", "") //nolint:errcheck // ends with the benchmark
}

// wait waits until streams call it.
func (v *vaulted) wait(ctx context.Context) {
	v.mu.Lock()
	here := v.here
	if v.waits++; v.waits == streams {
		v.waits, v.here = 0, make(chan struct{})
		close(here)
	}
	v.mu.Unlock()
	select {
	case <-here:
	case <-ctx.Done():
	}
}

func speaks(h2 bool) *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(!h2)
	p.SetHTTP2(h2)
	return p
}

// A caller is a client in a guest.
type caller struct {
	v     *vaulted
	c     *http.Client
	bound bool
}

// calls returns a client of a guest, which resumes no session of TLS. It opens eight connections
// at a time: a queue of SYNs, on a busy host, is none of what is measured.
func (v *vaulted) calls(id string, h2 bool) caller {
	conf := &tls.Config{RootCAs: v.roots, ServerName: boundTo, NextProtos: []string{"http/1.1"}}
	if h2 {
		conf.NextProtos = []string{"h2"}
	}
	turns := make(chan struct{}, 8)
	t := &http.Transport{
		DialTLSContext: func(ctx context.Context, _, _ string) (c net.Conn, err error) {
			select {
			case turns <- struct{}{}:
				defer func() { <-turns }()
			case <-v.b.Context().Done(): // Transport has asked for more than it needs
				return nil, v.b.Context().Err()
			}
			v.w.in(v.w.guests[id], func() { c, err = net.DialTimeout("tcp4", site+":443", patient) })
			if err != nil {
				return nil, err
			}
			t := tls.Client(c, conf)
			if err := t.HandshakeContext(ctx); err != nil {
				return nil, errors.Join(err, c.Close())
			}
			return t, nil
		},
		Protocols: speaks(h2), DisableCompression: true, MaxIdleConnsPerHost: streams,
	}
	v.b.Cleanup(func() {
		t.CloseIdleConnections()
		for range cap(turns) { // until the last dial has ended
			turns <- struct{}{}
		}
	})
	return caller{v, &http.Client{Transport: t}, id != v.direct}
}

// call sends up bytes, gets down bytes, and returns how long that took.
func (c caller) call(up, down int64) (time.Duration, error) {
	return c.ask(fmt.Sprintf("/%d", down), up, down)
}

func (c caller) ask(path string, up, down int64) (time.Duration, error) {
	start := time.Now()
	method, body := http.MethodGet, io.Reader(nil)
	if up > 0 {
		method, body = http.MethodPut, io.LimitReader(zeros{}, up)
	}
	r, err := http.NewRequestWithContext(c.v.b.Context(), method, "https://"+boundTo+path, body)
	if err != nil {
		return 0, err
	}
	r.ContentLength = up
	a, err := c.c.Do(r)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(io.Discard, a.Body)
	took := time.Since(start)
	err = cmp.Or(err, a.Body.Close())
	got, bound := a.Header.Get("X-Got"), a.Header.Get("X-Bound")
	if err == nil && (n != down || got != fmt.Sprint(up) || bound != fmt.Sprint(c.bound)) {
		err = fmt.Errorf("%s: %d bytes, the server got %s, with the credential %s", a.Status, n, got, bound)
	}
	return took, err
}

// must is call with nothing but an answer.
func (c caller) must() time.Duration {
	c.v.b.Helper()
	took, err := c.call(0, 0)
	if err != nil {
		c.v.b.Fatal(err)
	}
	return took
}

// rate is call in MB/s.
func (c caller) rate(up, down int64) float64 {
	c.v.b.Helper()
	took, err := c.call(up, down)
	if err != nil {
		c.v.b.Fatal(err)
	}
	return float64(up+down) / 1e6 / took.Seconds()
}

// inTurn calls both, and the other one first the next time.
func inTurn(i int, one, other func()) {
	if i%2 == 1 {
		one, other = other, one
	}
	one()
	other()
}

// eachProtocol runs f for HTTP/1.1, and HTTP/2.
func eachProtocol(b *testing.B, f func(b *testing.B, v *vaulted, h2 bool)) {
	for _, h2 := range []bool{false, true} {
		b.Run(map[bool]string{false: "h1", true: "h2"}[h2], func(b *testing.B) { f(b, newVaulted(b, h2), h2) })
	}
}

// BenchmarkVaultKept makes a request on a connection that is open, decrypted and direct.
func BenchmarkVaultKept(b *testing.B) {
	eachProtocol(b, func(b *testing.B, v *vaulted, h2 bool) {
		bound, direct := v.calls(v.bound.id, h2), v.calls(v.direct, h2)
		bound.must()
		direct.must()
		var took, without []time.Duration
		for i := 0; b.Loop(); i++ {
			inTurn(i, func() { took = append(took, bound.must()) }, func() { without = append(without, direct.must()) })
		}
		quantiles(b, "vault", took)
		quantiles(b, "direct", without)
	})
}

// BenchmarkVaultNew makes a request on a connection of its own, with the handshakes. One guest may
// open 200 a second.
func BenchmarkVaultNew(b *testing.B) {
	eachProtocol(b, func(b *testing.B, v *vaulted, h2 bool) {
		one := func(id string) time.Duration {
			c := v.calls(id, h2)
			defer c.c.CloseIdleConnections()
			return c.must()
		}
		one(v.bound.id)
		one(v.direct)
		var took, without []time.Duration
		for i := 0; b.Loop(); i++ {
			inTurn(i, func() { took = append(took, one(v.bound.id)) }, func() { without = append(without, one(v.direct)) })
		}
		quantiles(b, "vault", took)
		quantiles(b, "direct", without)
	})
}

// BenchmarkVaultBody sends b.N MiB by one connection, and receives as many: -benchtime 1024x. It
// reports the medians of three, and how much memory the child has had at most above what it has
// when it waits for a request.
func BenchmarkVaultBody(b *testing.B) {
	eachProtocol(b, func(b *testing.B, v *vaulted, h2 bool) {
		bound, direct := v.calls(v.bound.id, h2), v.calls(v.direct, h2)
		bound.must()
		direct.must()
		above := v.memory()
		size := int64(b.N) << 20
		rates := map[string][]float64{}
		for i := range 3 {
			both := func(way string, up, down int64) {
				inTurn(i, func() { rates["vault-"+way] = append(rates["vault-"+way], bound.rate(up, down)) },
					func() { rates["direct-"+way] = append(rates["direct-"+way], direct.rate(up, down)) })
			}
			both("down", 0, size)
			both("up", size, 0)
		}
		b.ReportMetric(above(), "child-MiB-above-idle")
		for what, r := range rates {
			slices.Sort(r)
			b.ReportMetric(r[len(r)/2], what+"-MB/s")
		}
	})
}

// memory returns how many MiB the first child has had at most since, above what it has now: the
// pages that it has touched, those of the program included.
func (v *vaulted) memory() (above func() float64) {
	pid := <-v.pids
	read := func(field string) (kib float64) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			v.b.Fatal(err)
		}
		_, rest, ok := strings.Cut(string(text), field+":")
		if _, err := fmt.Sscan(rest, &kib); !ok || err != nil {
			v.b.Fatalf("%s: %v, %v", field, ok, err)
		}
		return kib
	}
	// 5 sets VmHWM to VmRSS: proc_pid_clear_refs(5).
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0); err != nil {
		v.b.Fatal(err)
	}
	idle := read("VmRSS")
	return func() float64 { return (read("VmHWM") - idle) / 1024 }
}

// streams is how many answers one sandbox receives at the same time.
const streams = 200

// BenchmarkVaultStreams receives streams answers of b.N MiB in all, at the same time: decrypted,
// and directly. Meanwhile another sandbox makes requests on a connection that is open, and
// decrypted.
func BenchmarkVaultStreams(b *testing.B) {
	eachProtocol(b, func(b *testing.B, v *vaulted, h2 bool) {
		bound, direct, other := v.calls(v.bound.id, h2), v.calls(v.direct, h2), v.calls(v.other.id, h2)
		for _, c := range []caller{bound, direct} {
			c.must()                                           // or each stream of HTTP/2 would open a connection
			if err := c.together("/together", 0); err != nil { // which opens those of HTTP/1.1
				b.Fatal(err)
			}
		}
		other.must()
		size := max(int64(b.N)<<20/streams, 1)
		run := func(c caller) (rate float64, others []time.Duration) {
			others = append(others, other.must()) // one, however soon the streams end
			ctx, stop := context.WithCancel(context.Background())
			var asks sync.WaitGroup
			asks.Go(func() {
				for ctx.Err() == nil {
					took, err := other.call(0, 0)
					if err != nil {
						b.Error(err)
						return
					}
					others = append(others, took)
				}
			})
			start := time.Now()
			err := c.together(fmt.Sprintf("/%d", size), size)
			rate = float64(streams*size) / 1e6 / time.Since(start).Seconds()
			stop()
			asks.Wait()
			if err != nil {
				b.Fatal(err)
			}
			return rate, others
		}
		run(bound)
		run(direct)
		var rates, without []float64
		var others, calm []time.Duration
		for i := range 3 {
			inTurn(i, func() {
				rate, took := run(bound)
				rates, others = append(rates, rate), append(others, took...)
			}, func() {
				rate, took := run(direct)
				without, calm = append(without, rate), append(calm, took...)
			})
			runtime.GC() // of what both have left
		}
		slices.Sort(rates)
		slices.Sort(without)
		b.ReportMetric(rates[len(rates)/2], "vault-MB/s")
		b.ReportMetric(without[len(without)/2], "direct-MB/s")
		b.ReportMetric(p99(others), "others-vault-p99-us")
		b.ReportMetric(p99(calm), "others-direct-p99-us")
	})
}

func p99(d []time.Duration) float64 {
	slices.Sort(d)
	return float64(d[len(d)*99/100]) / 1e3
}

// together receives streams answers of a size at the same time.
func (c caller) together(path string, size int64) error {
	errs := make([]error, streams)
	var all sync.WaitGroup
	for i := range errs {
		all.Go(func() { _, errs[i] = c.ask(path, 0, size) })
	}
	all.Wait()
	failed := slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	if len(failed) > 0 {
		return fmt.Errorf("%d of %d streams failed, the first with: %w", len(failed), streams, failed[0])
	}
	return nil
}
