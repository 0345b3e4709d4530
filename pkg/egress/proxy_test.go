package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Two addresses outside that a name may have, with servers on ports 80 (HTTP), 443 (TLS),
// 5432 (speaks first) and 9999 (plain).
const (
	site      = "203.0.113.80"
	otherSite = "203.0.113.81"
)

// public is an authority of servers, and certificate one of its for all names below .test.
var (
	public      = sync.OnceValue(func() *hosttest.Authority { return hosttest.NewAuthority("public") })
	certificate = sync.OnceValue(func() tls.Certificate { return public().Issue("*.test", time.Now().Add(time.Hour)) })
)

// sites serves at both addresses. It counts the connections that arrive.
func (w *world) sites() *atomic.Int64 {
	w.t.Helper()
	arrived := &atomic.Int64{}
	echoTLS := func(c net.Conn) {
		s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{certificate()}})
		io.Copy(s, s) //nolint:errcheck // the guest says
		s.Close()
	}
	web := func(c net.Conn) {
		defer c.Close()
		for r := bufio.NewReader(c); ; {
			q, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(q.Host), q.Host)
		}
	}
	banner := func(c net.Conn) { fmt.Fprint(c, "hello\n"); c.Close() }
	plain := func(c net.Conn) { io.Copy(c, c); c.Close() } //nolint:errcheck // the guest says
	w.in(w.outside, func() {
		for _, a := range []string{site, otherSite} {
			w.run("ip", "addr", "replace", a+"/32", "dev", "lo")
			for port, serve := range map[int]func(net.Conn){80: web, 443: echoTLS, 5432: banner, 9999: plain} {
				l, err := net.Listen("tcp4", fmt.Sprintf("%s:%d", a, port))
				if err != nil {
					w.t.Fatal(err)
				}
				w.t.Cleanup(func() { l.Close() })
				go func() {
					for {
						c, err := l.Accept()
						if err != nil {
							return
						}
						arrived.Add(1)
						go serve(c)
					}
				}()
			}
		}
	})
	return arrived
}

// named is a sandbox that DNS has told the address of allowed.test.
func (w *world) named(e *Engine, i int, n record.Network) string {
	w.t.Helper()
	id := w.sandbox(e, i, n)
	e.lookup(addr(i)).leases.Add("allowed.test", []netip.Addr{netip.MustParseAddr(site)}, time.Hour, time.Now())
	return id
}

// tls makes a connection of TLS from id, as a client that means name.
func (w *world) tls(id, to, name string) (*tls.Conn, error) {
	c, err := w.connect(w.guests[id], "tcp", to, patient)
	if err != nil {
		return nil, err
	}
	c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in the handshake
	s := tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true})
	if err := s.Handshake(); err != nil {
		c.Close()
		return nil, err
	}
	return s, nil
}

// said sends a word and reads it again.
func said(c net.Conn) error {
	if _, err := c.Write([]byte("wor\n")); err != nil {
		return err
	}
	got := make([]byte, 4)
	_, err := io.ReadFull(c, got)
	if err == nil && string(got) != "wor\n" {
		err = fmt.Errorf("got %q", got)
	}
	return err
}

// raw sends bytes, and returns all that comes until the other side ends, or 64 bytes.
func (w *world) raw(id, to, send string) (string, error) {
	c, err := w.connect(w.guests[id], "tcp", to, patient)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in the read
	if _, err := io.WriteString(c, send); err != nil {
		return "", err
	}
	got, err := io.ReadAll(io.LimitReader(c, 64))
	return string(got), err
}

var byName = []string{"allowed.test:80", "allowed.test:443", "allowed.test:5432", "allowed.test:9999", "203.0.113.1:443"}

// TestNamesAtConnect: an allowed name opens its address for itself and for no other name.
func TestNamesAtConnect(t *testing.T) {
	w := newWorld(t)
	w.upstream() // which does not know the names
	arrived := w.sites()
	e := w.open()
	id := w.named(e, 0, rules(t, "rules", byName...))
	c, err := w.tls(id, site+":443", "allowed.test")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := said(c); err != nil {
		t.Error(err)
	}
	w.allowed(id, "tcp", "203.0.113.1:443") // by its address, without a name
	before := arrived.Load()
	for name, to := range map[string]string{
		"other.test": site, "": site, "allowed.test": otherSite, "sub.allowed.test": site,
	} {
		if _, err := w.tls(id, to+":443", name); err == nil || !strings.Contains(err.Error(), "tls: access denied") {
			t.Errorf("%q at %s: %v, want the alert access_denied", name, to, err)
		}
	}
	if got, err := w.raw(id, site+":443", "SSH-2.0-x\r\n"); !errors.Is(err, unix.ECONNRESET) || got != "" {
		t.Errorf("no TLS: %q, %v", got, err)
	}
	if n := arrived.Load(); n != before {
		t.Errorf("%d denied connections reached a server", n-before)
	}
	if got, err := w.raw(id, site+":5432", ""); err != nil || got != "hello\n" {
		t.Errorf("a server that speaks first: %q, %v", got, err)
	}
	if got, err := w.raw(id, otherSite+":5432", "\x00\x00\x00\x08"); err == nil || got != "" {
		t.Errorf("an address without a lease: %q, %v", got, err)
	}
	w.denies(id, "tcp", site+":22")
	w.denies(id, "tcp", fmt.Sprintf("%s:%d", inst.Gateway(), ProxyPort))
	w.heard(e, id, "other.test", "allowed.test")
}

// denies holds that a connection is refused at once.
func (w *world) denies(id, network, to string) {
	w.t.Helper()
	if c, err := w.connect(w.guests[id], network, to, patient); !errors.Is(err, unix.ECONNREFUSED) {
		w.t.Errorf("%s: %v, want a refusal", to, err)
		if err == nil {
			c.Close()
		}
	}
}

// heard holds that denials of these names were told.
func (w *world) heard(e *Engine, id string, names ...string) {
	w.t.Helper()
	e.Told()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range names {
		if !slices.ContainsFunc(w.denied, func(d Denial) bool { return d.ID == id && d.Name == name && d.Rule != "" }) {
			w.t.Errorf("no denial of %s was told: %v", name, w.denied)
		}
	}
}

// TestHostOfEachRequest: on a kept connection each request is judged by its own Host, and a
// refusal says why in words.
func TestHostOfEachRequest(t *testing.T) {
	w := newWorld(t)
	w.sites()
	e := w.open()
	id := w.named(e, 0, rules(t, "rules", byName...))
	c, err := w.connect(w.guests[id], "tcp", site+":80", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in reads
	r := bufio.NewReader(c)
	for _, host := range []string{"allowed.test", "other.test", "allowed.test"} {
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", host)
		a, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(a.Body)
		if err != nil {
			t.Fatal(err)
		}
		if host == "allowed.test" {
			if a.StatusCode != http.StatusOK || string(body) != host {
				t.Errorf("%s: %s %s", host, a.Status, body)
			}
			continue
		}
		var refused struct{ Code, Message string }
		err = json.Unmarshal(body, &refused)
		if err != nil || a.StatusCode != http.StatusForbidden || refused.Code == "" ||
			!strings.Contains(refused.Message, "other.test:80") || !strings.Contains(refused.Message, "rule") {
			t.Errorf("%s: %s %s, %v", host, a.Status, body, err)
		}
	}
}

// TestPolicyClosesProxied: a tighter policy resets the flows that it denies before Register
// returns, and no others. So does the end of the sandbox, and the death of the child.
func TestPolicyClosesProxied(t *testing.T) {
	w := newWorld(t)
	w.sites()
	e := w.open()
	id := w.named(e, 0, rules(t, "rules", byName...))
	e.lookup(addr(0)).leases.Add("second.test", []netip.Addr{netip.MustParseAddr(site)}, time.Hour, time.Now())
	register := func(specs ...string) {
		t.Helper()
		if err := e.Register(t.Context(), id, addr(0), rules(t, "rules", specs...), nil); err != nil {
			t.Fatal(err)
		}
	}
	open := func(name string) *tls.Conn {
		t.Helper()
		c, err := w.tls(id, site+":443", name)
		if err == nil {
			err = said(c)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	isReset := func(what string, c *tls.Conn) {
		t.Helper()
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s: %v, want a reset", what, err)
		}
	}
	register("allowed.test:443", "second.test:443")
	first, second := open("allowed.test"), open("second.test")
	register("second.test:443")
	isReset("a denied name", first)
	if err := said(second); err != nil {
		t.Errorf("a name that is still allowed: %v", err)
	}
	line, err := e.proxy.child.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	line.Close() // as if it had died
	isReset("a flow of a child that died", second)
	open("second.test") // by the next child
	if err := e.Unregister(context.Background(), id); err != nil {
		t.Fatal(err)
	}
	w.noneProxied(e)
}

// noneProxied waits until the child has told the daemon that all its flows are closed.
func (w *world) noneProxied(e *Engine) {
	w.t.Helper()
	w.proxyEnds(e, func() (left int) { return len(e.proxy.flows) })
}

// proxyEnds waits until nothing is left of what the proxy ends. left is called with its lock.
func (w *world) proxyEnds(e *Engine, left func() int) {
	w.t.Helper()
	p, late := e.proxy, false
	defer time.AfterFunc(patient, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		late = true
		p.fewer.Broadcast()
	}).Stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for left() > 0 {
		if late {
			w.t.Fatalf("%d are left that the proxy was to end", left())
		}
		p.fewer.Wait()
	}
}

// silent is an address that answers nothing.
const silent = "203.0.113.82"

// dials makes a connection of a guest for which the proxy dials in vain, and waits until it
// does.
func (w *world) dials(e *Engine, i int, id string) net.Conn {
	w.t.Helper()
	s := e.lookup(addr(i))
	s.leases.Add("allowed.test", []netip.Addr{netip.MustParseAddr(silent)}, time.Hour, time.Now())
	c, err := w.connect(w.guests[id], "tcp", silent+":9999", patient)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in reads
	for end := time.Now().Add(patient); w.tracks(silent) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatal("no SYN was sent")
		}
	}
	return c
}

// tracks is how many connections of the host to an address conntrack knows.
func (w *world) tracks(to string) (n int) {
	w.t.Helper()
	table, err := conntrack.Open()
	if err != nil {
		w.t.Fatal(err)
	}
	defer table.Close() //nolint:errcheck // nothing is written
	at := netip.MustParseAddr(to)
	err = conntrack.EachOf(netip.MustParseAddr("198.51.100.1"), func() { n = 0 }, func(t conntrack.Entry) {
		if t.Dst == at {
			n++
		}
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

// TestProxyEndsDials: what a sandbox dials ends with its connection, with the sandbox and
// with the daemon, and leaves nothing in the table of conntrack.
func TestProxyEndsDials(t *testing.T) {
	w := newWorld(t)
	w.sites()
	w.in(w.outside, func() { w.run("ip", "route", "add", "blackhole", silent+"/32") })
	e := w.open()
	first, second := w.named(e, 0, rules(t, "rules", byName...)), w.named(e, 1, rules(t, "rules", byName...))
	s := e.lookup(addr(0))
	c := w.dials(e, 0, first)
	begun := time.Now()
	if err := e.Unregister(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
	w.proxyEnds(e, func() (left int) { return e.proxy.outs[s] })
	if d := time.Since(begun); d > dialLimit/2 {
		t.Errorf("what a sandbox dials ends %v after it", d)
	}
	e.proxy.forget()
	e.proxy.forget()
	if n := w.tracks(silent); n != 0 {
		t.Errorf("conntrack keeps %d connections that were never made", n)
	}
	w.dials(e, 1, second)
	begun = time.Now()
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if d := time.Since(begun); d > dialLimit/2 {
		t.Errorf("Close took %v", d)
	}
	if n := w.tracks(silent); n != 0 {
		t.Errorf("after Close, conntrack keeps %d connections that were never made", n)
	}
}

// TestProxyEndsIdle: the end of a sandbox resets a connection that has no socket to a
// server, and until then none is opened that it would miss.
func TestProxyEndsIdle(t *testing.T) {
	w := newWorld(t)
	w.sites()
	e := w.open()
	e.proxy.where = func(raw syscall.RawConn) (netip.AddrPort, error) {
		dst, err := conntrack.OriginalDst(raw)
		if dst.Port() == 9999 { // as Unregister does it before it ends the connections
			e.mu.Lock()
			delete(e.byAddr, addr(0))
			e.mu.Unlock()
		}
		return dst, err
	}
	id := w.named(e, 0, rules(t, "rules", byName...))
	c, err := w.connect(w.guests[id], "tcp", site+":80", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in reads
	fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: other.test\r\n\r\n")
	a, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil || a.StatusCode != http.StatusForbidden {
		t.Fatal(a, err)
	}
	p, x := e.proxy, w.onlyProxied(e)
	to := netip.AddrPortFrom(x.flow.Dst, x.flow.Port)
	open := question{Open: heads.Open{Flow: x.number, Kind: heads.HTTP, Name: "allowed.test"}}
	if err := p.mayDial(x, to, to.String()); err != nil {
		t.Error(err)
	}
	if got, err := w.raw(id, site+":9999", "wor\n"); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a connection of a sandbox that has gone meanwhile: %q, %v", got, err)
	}
	if err := p.mayDial(x, to, to.String()); !errors.Is(err, errGone) {
		t.Errorf("dials for a sandbox that has gone: %v", err)
	}
	p.mu.Lock()
	err = p.add(x, open, &outward{})
	p.mu.Unlock()
	if !errors.Is(err, errGone) {
		t.Errorf("a socket for a sandbox that has gone: %v", err)
	}
	if err := e.Unregister(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	left := len(p.flows) + len(p.of) + p.heads
	p.mu.Unlock()
	if left != 0 {
		t.Errorf("%d connections are left", left)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
	if !errors.Is(x.ctx.Err(), context.Canceled) {
		t.Error("its dials go on")
	}
}

func (w *world) onlyProxied(e *Engine) *proxied {
	w.t.Helper()
	e.proxy.mu.Lock()
	defer e.proxy.mu.Unlock()
	for _, x := range e.proxy.flows {
		if len(e.proxy.flows) == 1 {
			return x
		}
	}
	w.t.Fatalf("%d connections, want one", len(e.proxy.flows))
	return nil
}

// TestProxyChildLies: a child that says that a connection is closed has it no longer,
// whatever it keeps.
func TestProxyChildLies(t *testing.T) {
	w := newWorld(t)
	w.sites()
	e := w.open()
	id := w.named(e, 0, rules(t, "rules", byName...))
	c, err := w.connect(w.guests[id], "tcp", site+":9999", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in reads
	if err := said(c); err != nil {
		t.Fatal(err)
	}
	x := w.onlyProxied(e)
	// The policy changes between the answer to a name and its being written down.
	pol := x.s.policy.Load()
	none, err := policy.Compile(policy.Host{}, rules(t, "rules", "203.0.113.1:443"))
	if err != nil {
		t.Fatal(err)
	}
	check := question{Open: heads.Open{Flow: x.number, Kind: heads.Check, Name: "allowed.test"}}
	x.s.policy.Store(none)
	if allow, _ := e.proxy.checked(x, check, policy.Reason{}); allow {
		t.Error("a name that the policy of the moment denies was taken")
	}
	x.s.policy.Store(pol)
	if allow, why := e.proxy.checked(x, check, policy.Reason{}); !allow {
		t.Error(why)
	}
	m := child.Message{Kind: heads.KindClosed, Body: heads.Closed{Flow: x.number}.Append(nil)}
	e.proxy.handle(x.line, m) // it has closed nothing
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("%v, want the end", err)
	}
	if allow, _ := e.proxy.checked(x, check, policy.Reason{}); allow {
		t.Error("a name of a connection that has ended was taken")
	}
}

// TestProxyFinish: what was written before arrives, nothing that is written after, and a
// reset that the child asked for stays one.
func TestProxyFinish(t *testing.T) {
	for _, cut := range []bool{false, true} {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		peer, err := net.Dial("tcp4", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer peer.Close()
		peer.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in the read
		kept, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer kept.Close()
		raw, err := kept.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		fd, err := child.CopyOf(raw)
		if err != nil {
			t.Fatal(err)
		}
		want := error(nil)
		if cut {
			want = unix.ECONNRESET
			kept.(*net.TCPConn).SetLinger(0) //nolint:errcheck // shows in the read
		}
		fmt.Fprint(kept, "last words")
		finish(fd)
		if _, err := kept.Write([]byte("more")); err == nil {
			t.Errorf("a write after the end: %v", err)
		}
		got, err := io.ReadAll(peer)
		if !errors.Is(err, want) || !cut && string(got) != "last words" {
			t.Errorf("cut %v: %q, %v", cut, got, err)
		}
	}
}

// TestProxyBudget: one sandbox does not get more connections than its share, and gets them
// again when others end.
func TestProxyBudget(t *testing.T) {
	w := newWorld(t)
	w.sites()
	e := w.open()
	id := w.named(e, 0, rules(t, "rules", byName...))
	var held []net.Conn
	for range proxyConns {
		c, err := w.connect(w.guests[id], "tcp", site+":9999", patient)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in the read
		if err := said(c); err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	if got, err := w.raw(id, site+":9999", "wor\n"); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("one more: %q, %v", got, err)
	}
	for _, c := range held {
		c.Close()
	}
	w.noneProxied(e)
	if _, err := w.tls(id, site+":443", "allowed.test"); err != nil {
		t.Error(err)
	}
}

// speed makes connections of TLS from guests in turn, and returns how long each took to its
// first byte. resets counts those that failed.
func (w *world) speed(ids []string, to, name string, n, parallel int) (took []time.Duration, resets int) {
	var mu sync.Mutex
	var all sync.WaitGroup
	for k := range parallel {
		all.Go(func() {
			for i := range n / parallel {
				start := time.Now()
				c, err := w.tls(ids[(i*parallel+k)%len(ids)], to, name)
				if err == nil {
					err = said(c)
				}
				d := time.Since(start)
				if c != nil {
					c.Close()
				}
				mu.Lock()
				took = append(took, d)
				if err != nil {
					resets++
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return took, resets
}

// BenchmarkName measures what a rule by name costs a connection of TLS, beside a rule by
// address in the same run: until the first byte, and in throughput. Of its b.N connections
// none may be reset: -benchtime 100000x. Sixteen guests share them, since one may open 200 a
// second.
func BenchmarkName(b *testing.B) {
	w := newWorld(b)
	w.sites()
	e := w.openWith(func(c *Config) { c.MaxFlows = 60000 })
	var named, direct []string
	var directTook, namedTook []time.Duration
	for i := range 16 {
		named = append(named, w.named(e, i, rules(b, "rules", byName...)))
	}
	direct = append(direct, w.sandbox(e, 16, rules(b, "rules", site)))
	for range 16 { // in turn, so that both see the same host
		took, failed := w.speed(direct, site+":443", "allowed.test", 40, 1)
		others, failed2 := w.speed(named, site+":443", "allowed.test", 40, 1)
		if failed+failed2 > 0 {
			b.Fatal("a connection failed")
		}
		directTook, namedTook = append(directTook, took...), append(namedTook, others...)
	}
	b.ResetTimer()
	_, resets := w.speed(named, site+":443", "allowed.test", b.N, 8)
	slices.Sort(directTook)
	slices.Sort(namedTook)
	b.ReportMetric(float64(namedTook[len(namedTook)/2]-directTook[len(directTook)/2])/1e3, "sni-connect-added-us")
	quantiles(b, "direct", directTook)
	quantiles(b, "named", namedTook)
	var ratios []float64
	for range 5 {
		ratios = append(ratios, w.bulk(named[0])/w.bulk(direct[0]))
	}
	slices.Sort(ratios)
	b.ReportMetric(ratios[len(ratios)/2], "sni-throughput-ratio")
	b.ReportMetric(float64(resets), "resets")
	if resets > 0 {
		b.Errorf("%d of %d connections failed", resets, b.N)
	}
}

// bulk receives 256 MiB by one connection of TLS, in bytes a second.
func (w *world) bulk(id string) float64 {
	const size, piece = 256 << 20, 1 << 20
	c, err := w.tls(id, site+":443", "allowed.test")
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	start := time.Now()
	go func() {
		for data := bytes.Repeat([]byte{1}, piece); ; {
			if _, err := c.Write(data); err != nil {
				return
			}
		}
	}()
	if _, err := io.CopyN(io.Discard, c, size); err != nil {
		w.t.Fatal(err)
	}
	return size / time.Since(start).Seconds()
}
