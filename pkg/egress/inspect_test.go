package egress

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/egress/authority"
	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// webs serves HTTPS and HTTP at both sites, and DNS: all names below .test but those of
// nowhere.test are at the first. What it returns says which requests came since the last call.
func (w *world) webs() func() []string {
	w.t.Helper()
	var mu sync.Mutex
	var came []string
	h := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		came = append(came, strings.TrimSpace(fmt.Sprint(r.Method, " ", r.Host, r.URL.Path, " ", r.Header.Get("Authorization"))))
		fmt.Fprint(rw, "ok")
	})
	w.in(w.outside, func() {
		for _, a := range []string{site, otherSite} {
			w.run("ip", "addr", "replace", a+"/32", "dev", "lo")
			for _, port := range []string{"80", "443"} {
				l, err := net.Listen("tcp4", a+":"+port)
				if err != nil {
					w.t.Fatal(err)
				}
				s := &http.Server{Handler: h}
				if port == "443" {
					s.TLSConfig = &tls.Config{Certificates: []tls.Certificate{certificate()}}
				}
				hosttest.ServeHTTP(w.t, l, s)
			}
		}
		w.nameServer(dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) {
			m := new(dns.Msg)
			m.SetReply(q)
			name := strings.ToLower(q.Question[0].Name)
			rr, err := dns.NewRR(q.Question[0].Name + " 60 IN A " + site)
			if err != nil {
				panic(err)
			}
			if m.Answer = []dns.RR{rr}; !strings.HasSuffix(name, ".test.") || name == "nowhere.test." {
				m.Answer, m.Rcode = nil, dns.RcodeNameError
			}
			rw.WriteMsg(m) //nolint:errcheck // the other side says
		}))
	})
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		all := came
		came = nil
		return all
	}
}

// An inspected is a sandbox whose hosts may be decrypted.
type inspected struct {
	w         *world
	e         *Engine
	i         int
	id        string
	authority *authority.Authority
}

// inspected links a guest. It is registered by set.
func (w *world) inspected(e *Engine, i int) *inspected {
	w.t.Helper()
	a, err := authority.New(id(i), time.Now())
	if err != nil {
		w.t.Fatal(err)
	}
	return &inspected{w, e, i, w.guest(i), a}
}

// set registers the sandbox: with a token that is bound to hosts, or without a vault if token is
// empty. "file:TOKEN" comes from a source of the host, and "file:" fails.
func (s *inspected) set(n record.Network, token string, hosts ...string) {
	s.w.t.Helper()
	i := &Inspection{Leaf: func(name string) (cert, key []byte, err error) { return s.authority.Leaf(name, time.Now()) }}
	if token != "" {
		source := fmt.Sprintf(`{"value":%q}`, token)
		if held, ok := strings.CutPrefix(token, "file:"); ok {
			source = `{"type":"file","path":"/run/token"}`
			i.Value = func(_ context.Context, credential string) ([]byte, error) {
				if held == "" || credential != "token" {
					return nil, fmt.Errorf("read %s: no such file", credential)
				}
				return []byte(held), nil
			}
		}
		v, err := vault.CreateTrusted(fmt.Appendf(nil, `{"credentials":[{"name":"token","source":%s}],"bindings":[{"name":"one",`+
			`"match":{"hosts":["%s"],"schemes":["https","http"]},"auth":{"type":"bearer","credential":"token"}}]}`, source,
			strings.Join(hosts, `","`)))
		if err != nil {
			s.w.t.Fatal(err)
		}
		i.Vault = v.Encode()
		i.Marks = func(scheme, host string) bool {
			return slices.ContainsFunc(v.Bindings(), func(b *vault.Binding) bool {
				return slices.Contains(b.Match.Schemes, scheme) && b.MatchesHost(host)
			})
		}
	}
	if err := s.e.Register(s.w.t.Context(), s.id, addr(s.i), n, i); err != nil {
		s.w.t.Fatal(err)
	}
}

// openInspecting opens an Engine whose servers are those of webs, and returns its events.
func (w *world) openInspecting(change func(*Config)) (*Engine, chan InspectEvent) {
	w.t.Helper()
	events := make(chan InspectEvent, 1000)
	return w.openWith(func(c *Config) {
		c.Roots = func() ([]byte, error) { return public().PEM(), nil }
		c.OnInspect = func(n InspectEvent) { events <- n }
		change(c)
	}), events
}

// A browser is a kept connection of a guest.
type browser struct {
	net.Conn
	r         *bufio.Reader
	host      string
	decrypted bool
}

// browse connects to a site by HTTPS, or by HTTP at port 80.
func (s *inspected) browse(to, host string) (*browser, error) {
	c, err := s.w.connect(s.w.guests[s.id], "tcp", to, patient)
	if err != nil {
		return nil, err
	}
	s.w.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in reads
	b := &browser{Conn: c, host: host}
	if strings.HasSuffix(to, ":443") {
		roots := public().Pool()
		roots.AppendCertsFromPEM(s.authority.Certificate())
		t := tls.Client(c, &tls.Config{ServerName: host, RootCAs: roots, NextProtos: []string{"http/1.1"}})
		if err := t.Handshake(); err != nil {
			return nil, err
		}
		b.Conn, b.decrypted = t, t.ConnectionState().PeerCertificates[0].Issuer.CommonName != public().Cert.Subject.CommonName
	}
	b.r = bufio.NewReader(b.Conn)
	return b, nil
}

// mustBrowse holds that a connection opens, and whether it is decrypted.
func (s *inspected) mustBrowse(to, host string, decrypted bool) *browser {
	s.w.t.Helper()
	b, err := s.browse(to, host)
	if err != nil {
		s.w.t.Fatalf("%s at %s: %v", host, to, err)
	}
	if b.decrypted != decrypted {
		s.w.t.Errorf("%s at %s: decrypted is %v", host, to, b.decrypted)
	}
	return b
}

// opens is mustBrowse with a first request, so that a connection that is to be kept is: its first
// head must be complete within heads.HeadLimit, in which a busy host may open no other.
func (s *inspected) opens(to, host string, decrypted bool) *browser {
	s.w.t.Helper()
	b := s.mustBrowse(to, host, decrypted)
	b.answers(s.w.t, "GET", "/", 200, "ok")
	return b
}

// ask makes a request, and returns the status and the body.
func (b *browser) ask(method, path string) (int, string, error) {
	if _, err := fmt.Fprintf(b, "%s %s HTTP/1.1\r\nHost: %s\r\n\r\n", method, path, b.host); err != nil {
		return 0, "", err
	}
	a, err := http.ReadResponse(b.r, nil)
	if err != nil {
		return 0, "", err
	}
	body, err := io.ReadAll(a.Body)
	return a.StatusCode, string(body), err
}

// answers holds what a request is answered with.
func (b *browser) answers(t testing.TB, method, path string, status int, text string) {
	t.Helper()
	if got, body, err := b.ask(method, path); err != nil || got != status || !strings.Contains(body, text) {
		t.Errorf("%s %s%s: %d %q, %v; want %d and %q", method, b.host, path, got, body, err, status, text)
	}
}

// requests are rules of the mode "rules": "GET api.test" and "api.test:443".
func requests(t testing.TB, specs ...string) record.Network {
	t.Helper()
	var n record.Network
	for _, s := range specs {
		method, spec, ok := strings.Cut(s, " ")
		if !ok {
			method, spec = "", s
		}
		one := rules(t, record.NetworkRules, spec)
		if ok {
			one.Rules[0].Requests = &record.Requests{Methods: []string{method}}
		}
		n.Mode, n.Rules = one.Mode, append(n.Rules, one.Rules...)
	}
	return n
}

func wantCame(t *testing.T, came func() []string, want ...string) {
	t.Helper()
	if got := came(); !slices.Equal(got, want) {
		t.Errorf("the servers got %q, want %q", got, want)
	}
}

// event waits for one of a kind.
func event(t *testing.T, events <-chan InspectEvent, id, kind, host string) {
	t.Helper()
	late := time.After(patient)
	for {
		select {
		case n := <-events:
			if n.ID == id && n.Kind == kind && n.Host == host {
				return
			}
		case <-late:
			t.Fatalf("no event %s of %s about %q", kind, id, host)
		}
	}
}

// pid is that of the child of a sandbox that runs.
func (s *inspected) pid(pids <-chan int) int {
	s.w.t.Helper()
	select {
	case pid := <-pids:
		return pid
	case <-time.After(patient):
		s.w.t.Fatal("no child was started")
		return 0
	}
}

// idle waits until the daemon knows that the i-th sandbox has no connection.
func (w *world) idle(e *Engine, i int) {
	w.t.Helper()
	s := e.lookup(addr(i))
	w.proxyEnds(e, func() (left int) { return e.proxy.of[s] })
}

// gone reports whether a child of this process was reaped; its number may be another's since.
func gone(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	return err != nil || !strings.Contains(string(b), fmt.Sprintf("\nPPid:\t%d\n", os.Getpid()))
}

// TestInspected: in one sandbox, requests to a marked host are decrypted and judged, those to
// a bound host get the credential, and what is neither passes as it is. The address is checked
// by the name as for all.
func TestInspected(t *testing.T) {
	w := newWorld(t)
	came := w.webs()
	e, events := w.openInspecting(func(*Config) {})
	s := w.inspected(e, 0)
	policy := requests(t, "GET api.test", "open.test:443", "bound.test", "POST bound.test")
	s.set(policy, "t0ken", "bound.test")
	api := s.mustBrowse(site+":443", "api.test", true)
	api.answers(t, "GET", "/a", 200, "ok")
	api.answers(t, "POST", "/b", 403, "SANDBOX::FORBIDDEN")
	event(t, events, s.id, InspectRule, "api.test")
	api.answers(t, "GET", "/c", 200, "ok")
	wantCame(t, came, "GET api.test/a", "GET api.test/c")
	s.mustBrowse(site+":443", "open.test", false).answers(t, "POST", "/", 200, "ok")
	s.mustBrowse(site+":443", "bound.test", true).answers(t, "GET", "/", 200, "ok")
	s.set(policy, "file:of-the-host", "bound.test")
	plain := s.mustBrowse(site+":80", "bound.test", false)
	plain.answers(t, "GET", "/plain", 200, "ok")
	wantCame(t, came, "POST open.test/", "GET bound.test/ Bearer t0ken", "GET bound.test/plain Bearer of-the-host")
	s.set(policy, "file:", "bound.test")
	if status, _, err := plain.ask("GET", "/"); err != nil || status < 400 {
		t.Errorf("without a value: %d, %v", status, err)
	}
	event(t, events, s.id, InspectUnavailable, "bound.test")
	s.set(policy, "t0ken", "bound.test")
	plain.host = "api.test" // each request is for its own host
	plain.answers(t, "POST", "/", 403, "SANDBOX::FORBIDDEN")
	plain.answers(t, "GET", "/", 200, "ok")
	plain.host = "other.test"
	plain.answers(t, "GET", "/", 403, "other.test:80")
	wantCame(t, came, "GET api.test/")
	for to, host := range map[string]string{otherSite + ":443": "bound.test", otherSite + ":80": "api.test"} {
		s.mustBrowse(to, host, strings.HasSuffix(to, ":443")).answers(t, "GET", "/", 403, otherSite+" is not an address of "+host)
	}
	if _, err := s.browse(site+":443", "other.test"); err == nil || !strings.Contains(err.Error(), "access denied") {
		t.Errorf("a name that no rule allows: %v", err)
	}
	if got, err := w.raw(s.id, site+":443", "SSH-2.0-x\r\n"); !errors.Is(err, unix.ECONNRESET) || got != "" {
		t.Errorf("no TLS: %q, %v", got, err)
	}
	wantCame(t, came)
	for target, want := range map[string]Explanation{
		"api.test": {Judged: true}, "open.test": {}, "bound.test": {Bound: true},
	} {
		x, err := e.Explain(s.id, record.Network{}, Target{Name: target, Port: 443})
		if err != nil || !x.Allowed || x.Judged != want.Judged || x.Bound != want.Bound {
			t.Errorf("%s: %+v, %v", target, x, err)
		}
	}
}

// TestInspectionChanges: what Register replaces holds for the next request of each connection when
// it returns, and connections end that must not go on as they are.
func TestInspectionChanges(t *testing.T) {
	w := newWorld(t)
	came := w.webs()
	pids := make(chan int, 100)
	e, _ := w.openInspecting(func(c *Config) {
		c.Inspecting = func(_ string, pid int) error { pids <- pid; return nil }
	})
	s := w.inspected(e, 0)
	all := requests(t, "GET api.test", "GET also.test", "open.test", "bound.test")
	s.set(all, "first", "bound.test")
	at := site + ":443"
	api, also, open := s.opens(at, "api.test", true), s.opens(at, "also.test", true), s.opens(at, "open.test", false)
	bound, plain := s.opens(at, "bound.test", true), s.opens(site+":80", "open.test", false)
	came()
	s.set(all, "second", "bound.test")
	for _, b := range []*browser{bound, api, open, plain} {
		b.answers(t, "GET", "/", 200, "ok")
	}
	wantCame(t, came, "GET bound.test/ Bearer second", "GET api.test/", "GET open.test/", "GET open.test/")
	s.set(requests(t, "POST api.test", "GET also.test", "open.test", "bound.test"), "third", "open.test")
	isReset(t, "a host with another rule about requests", api.Conn)
	isReset(t, "TLS to a host that is bound now", open.Conn)
	isReset(t, "HTTP to a host that is bound now", plain.Conn)
	also.answers(t, "GET", "/", 200, "ok")
	bound.answers(t, "GET", "/", 200, "ok") // still decrypted, and it gets nothing any more
	api = s.mustBrowse(at, "api.test", true)
	api.answers(t, "GET", "/", 403, "SANDBOX::FORBIDDEN")
	s.mustBrowse(at, "open.test", true).answers(t, "GET", "/", 200, "ok")
	s.mustBrowse(at, "bound.test", false).answers(t, "GET", "/", 200, "ok")
	wantCame(t, came, "GET also.test/", "GET bound.test/", "GET open.test/ Bearer third", "GET bound.test/")
	s.set(requests(t, "open.test"), "third", "open.test")
	isReset(t, "a host that is denied now", also.Conn)
	s.pid(pids)
	open = s.opens(at, "open.test", true)
	garbage := &Inspection{Vault: []byte("garbage")}
	if err := e.Register(t.Context(), s.id, addr(0), requests(t, "open.test"), garbage); err != nil {
		t.Fatal(err)
	}
	e.proxy.mu.Lock()
	left := e.proxy.of[e.lookup(addr(0))]
	e.proxy.mu.Unlock()
	if left != 0 {
		t.Errorf("%d connections are left of a child that does not take what is new", left)
	}
	isReset(t, "a connection of such a child", open.Conn)
	if b, err := s.browse(at, "open.test"); err == nil {
		t.Errorf("a connection opens by a child without its rules: %+v", b)
	}
	s.set(requests(t, "open.test"), "fourth", "open.test")
	s.mustBrowse(at, "open.test", true).answers(t, "GET", "/", 200, "ok")
	wantCame(t, came, "GET open.test/ Bearer third", "GET open.test/ Bearer fourth")
	var pid int
	for pid == 0 || len(pids) > 0 { // the last one
		pid = s.pid(pids)
	}
	if err := e.Register(t.Context(), s.id, addr(0), requests(t, "open.test"), nil); err != nil {
		t.Fatal(err)
	}
	if !gone(pid) {
		t.Error("a sandbox whose hosts are not decrypted any more has its child")
	}
	open = s.mustBrowse(at, "open.test", false)
	open.answers(t, "GET", "/", 200, "ok")
	s.set(requests(t, "open.test"), "", "")
	isReset(t, "a connection of the child that all share", open.Conn)
}

// TestOwnChild: each sandbox has a child for itself, in the place where it is to be. If it dies,
// its connections end and another one begins with the same rules; it ends with the sandbox, or
// with the daemon. There are no more of them than are allowed.
func TestOwnChild(t *testing.T) {
	w := newWorld(t)
	came := w.webs()
	pids := []chan int{make(chan int, 10), make(chan int, 10), make(chan int, 10)}
	late, release := make(chan int), make(chan bool)
	e, events := w.openInspecting(func(c *Config) {
		c.MaxInspecting = 2
		c.Inspecting = func(of string, pid int) error {
			switch of {
			case id(3):
				late <- pid
				<-release
			case id(4):
				return errors.New("no cgroup")
			}
			for i := range pids {
				if of == id(i) {
					pids[i] <- pid
				}
			}
			return nil
		}
	})
	var all []*inspected
	at, policy := site+":443", requests(t, "bound.test")
	for i := range pids {
		s := w.inspected(e, i)
		s.set(policy, fmt.Sprint("of-", i), "bound.test")
		all = append(all, s)
	}
	first, second, third := all[0], all[1], all[2]
	fifth := w.inspected(e, 4)
	fifth.set(policy, "of-4", "bound.test")
	if b, err := fifth.browse(at, "bound.test"); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a child without a place: %v, %v, want a reset", b, err)
	}
	event(t, events, fifth.id, InspectNoChild, "")
	kept := first.mustBrowse(at, "bound.test", true)
	kept.answers(t, "GET", "/", 200, "ok")
	other := second.mustBrowse(at, "bound.test", true)
	other.answers(t, "GET", "/", 200, "ok")
	wantCame(t, came, "GET bound.test/ Bearer of-0", "GET bound.test/ Bearer of-1")
	if b, err := third.browse(at, "bound.test"); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("a third child: %v, %v, want a reset", b, err)
	}
	event(t, events, third.id, InspectNoChild, "")
	one, two := first.pid(pids[0]), second.pid(pids[1])
	if err := unix.Kill(one, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	isReset(t, "a connection of a child that was killed", kept.Conn)
	if next := first.pid(pids[0]); next == one {
		t.Error("no other child was placed")
	} else {
		one = next
	}
	first.mustBrowse(at, "bound.test", true).answers(t, "GET", "/", 200, "ok")
	other.answers(t, "GET", "/", 200, "ok")
	wantCame(t, came, "GET bound.test/ Bearer of-0", "GET bound.test/ Bearer of-1")
	other.Close()
	w.idle(e, 1)
	e.lookup(addr(2)).own.Load().again()
	kept = third.mustBrowse(at, "bound.test", true)
	kept.answers(t, "GET", "/", 200, "ok")
	if !gone(two) {
		t.Error("a child without a connection lives, although another one was started for want of its place")
	}
	if err := e.Unregister(t.Context(), first.id); err != nil {
		t.Fatal(err)
	}
	if !gone(one) {
		t.Error("the child of a sandbox that has ended lives")
	}
	fourth := w.inspected(e, 3)
	fourth.set(policy, "of-3", "bound.test")
	waits, err := w.connect(w.guests[fourth.id], "tcp", at, patient)
	if err != nil {
		t.Fatal(err)
	}
	defer waits.Close()
	waits.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in the read
	three := fourth.pid(late)
	if err := e.Unregister(t.Context(), fourth.id); err != nil { // which does not wait for the start
		t.Fatal(err)
	}
	isReset(t, "a connection that waited for a child", waits)
	close(release)
	second.mustBrowse(at, "bound.test", true).answers(t, "GET", "/", 200, "ok")
	wantCame(t, came, "GET bound.test/ Bearer of-2", "GET bound.test/ Bearer of-1")
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	for _, pid := range []int{second.pid(pids[1]), third.pid(pids[2]), three} {
		if !gone(pid) {
			t.Error("a child lives longer than its daemon")
		}
	}
	isReset(t, "a connection of a daemon that has ended", kept.Conn)
}

// TestInspectedByDefault: where all is allowed, bindings alone have the proxy read names: a bound
// host is decrypted if its name has the address, and everything else passes, whatever it is called.
func TestInspectedByDefault(t *testing.T) {
	w := newWorld(t)
	came := w.webs()
	e, _ := w.openInspecting(func(*Config) {})
	s := w.inspected(e, 0)
	n := rules(t, record.NetworkOpen, "203.0.113.2:443/udp")
	s.set(n, "", "")
	before, unnamed := s.opens(site+":443", "bound.test", false), s.opens(otherSite+":443", "open.test", false)
	e.lookup(addr(0)).leases.Add("bound.test", []netip.Addr{netip.MustParseAddr(site)}, time.Hour, time.Now())
	came()
	w.allowed(s.id, "udp", "203.0.113.1:443")
	s.set(n, "t0ken", "bound.test", "far.test")
	if _, _, err := before.ask("GET", "/"); err == nil {
		t.Error("a connection to an address that DNS has given for a bound host goes on undecrypted")
	}
	unnamed.answers(t, "GET", "/", 200, "ok")
	s.opens(site+":443", "bound.test", true)
	s.opens(site+":443", "far.test", true) // without a lease
	s.opens(otherSite+":443", "nowhere.test", false)
	s.opens(otherSite+":443", "open.test", false)
	s.opens(site+":80", "bound.test", false)
	wantCame(t, came, "GET open.test/", "GET bound.test/ Bearer t0ken", "GET far.test/ Bearer t0ken", "GET nowhere.test/", "GET open.test/",
		"GET bound.test/ Bearer t0ken")
	for _, to := range []string{otherSite + ":443", otherSite + ":80"} {
		b := s.mustBrowse(to, "bound.test", strings.HasSuffix(to, ":443"))
		b.answers(t, "GET", "/", 403, otherSite+" is not an address of bound.test")
	}
	wantCame(t, came)
	got, err := w.raw(s.id, otherSite+":80", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	if err != nil || !strings.HasPrefix(got, "HTTP/1.1 ") { // the server's own refusal
		t.Errorf("what has no name: %q, %v", got, err)
	}
	came()
	w.allowed(s.id, "tcp", "203.0.113.1:8080") // another port
	w.allowed(s.id, "udp", "203.0.113.2:443")  // by a rule
	w.refused(s.id, "udp", "203.0.113.1:443")
	for _, c := range []struct {
		t       Target
		allowed bool
		rule    string
	}{
		{Target{Name: "bound.test", Port: 443}, true, ""},
		{Target{Addr: netip.MustParseAddr(otherSite), Port: 443}, true, "default"},
		{Target{Addr: netip.MustParseAddr("203.0.113.1"), Port: 443, Proto: "udp"}, false, hiddenFromBindings},
		{Target{Name: "open.test", Port: 443, Proto: "udp"}, false, hiddenFromBindings},
	} {
		x, err := e.Explain(s.id, record.Network{}, c.t)
		bound := c.t.Name == "bound.test"
		if err != nil || x.Allowed != c.allowed || x.Bound != bound || x.Judged || c.rule != "" && x.Rule != c.rule || x.ByName {
			t.Errorf("%+v: %+v, %v", c.t, x, err)
		}
	}
	e.lookup(addr(0)).leases.Add("open.test", []netip.Addr{netip.MustParseAddr(site)}, time.Hour, time.Now())
	honest, lies := s.mustBrowse(site+":443", "open.test", false), s.mustBrowse(otherSite+":443", "open.test", false)
	s.set(rules(t, record.NetworkOpen, "!denied.test"), "t0ken", "bound.test", "far.test")
	isReset(t, "a connection by a name that has not its address, when a rule denies a name", lies.Conn)
	honest.answers(t, "GET", "/", 200, "ok")
}

// TestOwnChildLies: a child that was taken over gets certificates and sockets only for what is
// marked and allowed, of its own connections; it does not flood the daemon; and what no child says
// ends it.
func TestOwnChildLies(t *testing.T) {
	w := newWorld(t)
	came := w.webs()
	e, events := w.openInspecting(func(*Config) {})
	s, neighbour := w.inspected(e, 0), w.inspected(e, 1)
	s.set(requests(t, "GET api.test", "open.test:443", "!bad.test", "bound.test", "ssh.test:22"), "t0ken", "bound.test")
	neighbour.set(requests(t, "GET api.test"), "", "")
	s.opens(site+":443", "api.test", true)
	came()
	x := w.onlyProxied(e)
	neighbour.mustBrowse(site+":443", "api.test", true)
	e.proxy.mu.Lock()
	if n, all := e.proxy.heads, len(e.proxy.flows); n != 0 || all != 2 {
		t.Errorf("%d of %d connections count for the child that all share", n, all)
	}
	e.proxy.mu.Unlock()
	own := e.lookup(addr(0)).own.Load()
	// From here on the test is the child of x.
	take := func() *child.Conn {
		t.Helper()
		ours, theirs, err := child.Pair()
		if err != nil {
			t.Fatal(err)
		}
		near, err := child.NewConn(ours, terminate.MaxBody, false)
		if err != nil {
			t.Fatal(err)
		}
		far, err := child.NewConn(theirs, 128<<10, true)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { near.Close(); far.Close() })
		go near.Run(func(m child.Message) { own.handle(near, m) }) //nolint:errcheck // ends with the test
		go far.Run(func(child.Message) {})                         //nolint:errcheck // likewise
		e.proxy.mu.Lock()
		x.line = near
		e.proxy.mu.Unlock()
		return far
	}
	far := take()
	call := func(kind uint8, body []byte) child.Message {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patient)
		defer cancel()
		m, err := far.Call(ctx, kind, body, nil)
		if err != nil {
			t.Fatal(err)
		}
		if m.File != nil {
			m.File.Close()
		}
		return m
	}
	for name, want := range map[string]bool{"api.test": true, "bound.test": false, "open.test": false, "other.test": false} {
		l, err := terminate.ParseLeaf(call(terminate.KindLeaf, []byte(name)).Body)
		if err != nil || (len(l.Chain) > 0) != want || want == (l.Text != "") {
			t.Errorf("a certificate for %s: %d, %q, %v", name, len(l.Chain), l.Text, err)
		}
	}
	for _, c := range []struct {
		kind   uint8
		name   string
		flow   uint64
		result heads.Result
	}{
		{heads.KindOpen, "api.test", x.number, heads.Inspect},
		{heads.KindDial, "api.test", x.number, heads.Granted},
		{heads.KindDial, "bound.test", x.number, heads.Granted}, // by its own bindings: the address is the name's
		{heads.KindDial, "other.test", x.number, heads.Denied},
		{heads.KindDial, "bad.test", x.number, heads.Denied},
		{heads.KindDial, "ssh.test", x.number, heads.Denied}, // which has the address
		{heads.KindOpen, "bad.test", x.number, heads.Denied},
		{heads.KindDial, "api.test", x.number + 1, heads.Failed}, // the neighbour's
	} {
		o, err := heads.ParseOpened(call(c.kind, heads.Open{Flow: c.flow, Kind: heads.TLS, Name: c.name}.Append(nil)).Body)
		if err != nil || o.Result != c.result {
			t.Errorf("message %d, %s of flow %d: %+v, %v; want %d", c.kind, c.name, c.flow, o, err, c.result)
		}
	}
	e.proxy.mu.Lock() // as if the daemon cut the flow while it dials
	e.proxy.cut(x)
	err := e.proxy.add(x, question{Open: heads.Open{Flow: x.number, Kind: heads.TLS, Name: "api.test"}, dial: true}, &outward{})
	e.proxy.mu.Unlock()
	if !errors.Is(err, errGone) || x.ctx.Err() == nil {
		t.Errorf("a socket for a flow that was cut: %v", err)
	}
	if v, err := terminate.ParseValue(call(terminate.KindValue, []byte("token")).Body); err != nil || len(v.Bytes) > 0 || v.Text == "" {
		t.Errorf("the value of a credential that no source has: %v", err)
	}
	lie := terminate.Event{Kind: terminate.Echo, Host: "lie.test"}.Append(nil)
	for range 100 {
		if err := far.Tell(terminate.KindEvent, lie, nil); err != nil {
			t.Fatal(err)
		}
	}
	call(terminate.KindValue, []byte("token")) // the events before it were taken
	event(t, events, s.id, InspectEcho, "lie.test")
	if n := len(events); n > 40 {
		t.Errorf("%d events were told", n)
	}
	for range 100 {
		if err := far.Tell(terminate.KindNote, terminate.Note{Kind: terminate.GuestLeft, Name: "left.test"}.Append(nil), nil); err != nil {
			t.Fatal(err)
		}
	}
	refuses := terminate.Note{Kind: terminate.GuestRefuses, Name: "lie.test"}
	if err := far.Tell(terminate.KindNote, refuses.Append(nil), nil); err != nil {
		t.Fatal(err)
	}
	event(t, events, s.id, InspectUntrusted, "lie.test") // whatever else leaves
	for _, m := range []child.Message{
		{Kind: heads.KindDial, Body: heads.Open{Flow: x.number, Kind: heads.H2C, Name: "api.test"}.Append(nil)},
		{Kind: heads.KindDial, Body: heads.Open{Flow: x.number, Kind: heads.TLS}.Append(nil)},
		{Kind: terminate.KindLeaf, Body: []byte("*.test")},
		{Kind: terminate.KindEvent, Body: []byte{99}},
		{Kind: 99},
	} {
		far := take()
		if err := far.Tell(m.Kind, m.Body, nil); err != nil {
			t.Fatal(err)
		}
		select {
		case <-far.Done():
		case <-time.After(patient):
			t.Errorf("a child that sent %v lives", m)
		}
	}
	wantCame(t, came)
}
