package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	vns "github.com/vishvananda/netns"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// inst is the instance of the tests, and other one beside it.
var inst, other = hosttest.Instances()

// patient is how long what is to happen may take where how soon it does proves
// nothing: only a test that fails waits for it.
const patient = 30 * time.Second

// never is how often the guard looks by itself in tests: what is mended was heard of.
const never = time.Hour

// outsideAddrs are where the outside answers, beside 198.51.100.2.
var outsideAddrs = []string{
	"203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.53",
	"10.98.0.1", "10.99.0.1", "192.168.7.7", "169.254.169.254",
}

// A world is the private "host" that TestMain made, an outside behind its one
// uplink, and sandboxes. What listens outside answers with what it was sent.
//
//	guest ── sb-<id> [host 198.51.100.1] up0 ── 198.51.100.2 [outside]
//	                 also 192.0.2.99                203.0.113.1-3, 10.98.0.1, 10.99.0.1, 192.168.7.7, 169.254.169.254
type world struct {
	t       testing.TB
	outside vns.NsHandle
	guests  map[string]vns.NsHandle

	mu      sync.Mutex
	denied  []Denial
	uplinks []string
	unread  error // in place of uplinks
}

func newWorld(t testing.TB) *world {
	t.Helper()
	hosttest.Root(t)
	hosttest.Leaks(t, inst)
	w := &world{t: t, guests: map[string]vns.NsHandle{}}
	t.Cleanup(func() {
		for id, ns := range w.guests {
			w.try("ip", "link", "del", "sb-"+id)
			ns.Close()
		}
		for range 2 {
			if err := Purge(context.Background(), inst); err != nil {
				t.Error(err)
			}
		}
		w.try("ip", "link", "del", "up0")
		w.try("ip", "addr", "del", inst.Gateway().String()+"/32", "dev", "lo")
		w.try("ip", "addr", "del", "192.0.2.99/32", "dev", "lo")
		w.outside.Close()
	})
	w.outside = w.newNS()
	for _, c := range []string{
		"link set lo up",
		"addr replace " + inst.Gateway().String() + "/32 dev lo",
		"addr replace 192.0.2.99/32 dev lo",
		"link add up0 type veth peer name eth0 netns NS",
		"addr add 198.51.100.1/24 dev up0",
		"link set up0 up",
		"route replace default via 198.51.100.2",
	} {
		w.ip(w.outside, c)
	}
	w.write("net/ipv4/conf/up0/forwarding", "1")
	// The kernel answers one host with six ICMP errors and then one a second.
	// Here one guest is refused dozens of times.
	w.write("net/ipv4/icmp_ratemask", "0") // neither of the two limits: that of a host, and that of all
	w.in(w.outside, func() {
		for _, c := range []string{
			"link set lo up", "addr add 198.51.100.2/24 dev eth0", "link set eth0 up",
			"route add default via 198.51.100.1",
		} {
			w.run("ip", strings.Fields(c)...)
		}
		for _, a := range outsideAddrs {
			w.run("ip", "addr", "add", a+"/32", "dev", "lo")
		}
		w.carries("eth0")
	})
	w.carries("up0")
	for _, port := range []int{80, 443, 8080} {
		for _, a := range append(outsideAddrs, "198.51.100.2") {
			w.serve(w.outside, a, port)
		}
	}
	return w
}

func (w *world) newNS() vns.NsHandle {
	w.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := vns.Get()
	if err != nil {
		w.t.Fatal(err)
	}
	defer here.Close()
	ns, err := vns.New()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := vns.Set(here); err != nil {
		w.t.Fatal(err)
	}
	return ns
}

// in runs f on a thread in ns; sockets made there stay there.
func (w *world) in(ns vns.NsHandle, f func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := vns.Get()
	if err != nil {
		w.t.Fatal(err)
	}
	defer here.Close()
	if err := vns.Set(ns); err != nil {
		w.t.Fatal(err)
	}
	defer func() {
		if err := vns.Set(here); err != nil {
			panic(err)
		}
	}()
	f()
}

func (w *world) run(name string, args ...string) string {
	w.t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		w.t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (w *world) try(name string, args ...string) { _ = exec.Command(name, args...).Run() }

// ip runs ip on the host; NS in args is ns.
func (w *world) ip(ns vns.NsHandle, args string) {
	w.t.Helper()
	args = strings.ReplaceAll(args, "NS", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), int(ns)))
	w.run("ip", strings.Fields(args)...)
}

// carries waits until link does: until the kernel's link watch has run, what is
// sent there is lost.
func (w *world) carries(link string) {
	w.t.Helper()
	for range 3000 {
		if strings.Contains(w.run("ip", "link", "show", "dev", link), "state UP") {
			return
		}
		time.Sleep(time.Millisecond)
	}
	w.t.Fatalf("%s does not come up", link)
}

func (w *world) write(sysctl, value string) {
	w.t.Helper()
	if err := os.WriteFile("/proc/sys/"+sysctl, []byte(value), 0); err != nil {
		w.t.Fatal(err)
	}
}

func id(i int) string {
	return fmt.Sprintf("%cgress%c%c%cxyz", inst, 'a'+i/26/26%26, 'a'+i/26%26, 'a'+i%26)
}

func addr(i int) netip.Addr {
	a := inst.Pool().Addr().As4()
	a[2], a[3] = byte((i+2)>>8), byte(i+2)
	return netip.AddrFrom4(a)
}

// guest links the i-th sandbox, as pkg/netns does, and serves on port 80 in it.
func (w *world) guest(i int) string {
	w.t.Helper()
	w.link(id(i), addr(i), inst.Gateway().String())
	return id(i)
}

func (w *world) link(id string, a netip.Addr, gw string) {
	w.t.Helper()
	ns := w.newNS()
	w.guests[id] = ns
	link := "sb-" + id
	w.ip(ns, "link add "+link+" address 02:00:00:00:00:01 type veth peer name eth0 address 02:00:00:00:00:02 netns NS")
	w.write("net/ipv6/conf/"+link+"/disable_ipv6", "1")
	w.write("net/ipv4/conf/"+link+"/rp_filter", "1")
	w.write("net/ipv4/conf/"+link+"/forwarding", "1")
	w.in(ns, func() { w.run("ip", "link", "set", "eth0", "up") })
	for _, c := range []string{
		"link set " + link + " up",
		"neigh replace " + a.String() + " lladdr 02:00:00:00:00:02 dev " + link + " nud permanent",
		"route replace " + a.String() + "/32 dev " + link + " src " + gw,
	} {
		w.run("ip", strings.Fields(c)...)
	}
	w.in(ns, func() {
		w.write("net/ipv6/conf/all/disable_ipv6", "1")
		for _, c := range []string{
			"link set lo up", "addr add " + a.String() + "/32 dev eth0",
			"neigh add " + gw + " lladdr 02:00:00:00:00:01 dev eth0 nud permanent",
			"route add " + gw + " dev eth0 scope link", "route add default via " + gw,
		} {
			w.run("ip", strings.Fields(c)...)
		}
		w.carries("eth0")
	})
	w.carries(link)
	w.serve(ns, a.String(), 80)
}

// serve echoes on port, TCP and UDP.
func (w *world) serve(ns vns.NsHandle, at string, port int) {
	w.t.Helper()
	at = fmt.Sprintf("%s:%d", at, port)
	w.in(ns, func() {
		l, err := net.Listen("tcp4", at)
		if err != nil {
			w.t.Fatal(err)
		}
		pc, err := net.ListenPacket("udp4", at)
		if err != nil {
			w.t.Fatal(err)
		}
		w.t.Cleanup(func() { l.Close(); pc.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go answer(c)
			}
		}()
		go func() {
			buf := make([]byte, 2048)
			for {
				n, from, err := pc.ReadFrom(buf)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					pc.WriteTo(append(buf[:n], 0), from) //nolint:errcheck // who asked says
				}
			}
		}()
	})
}

// open opens an Engine that the test closes. Its guard goes by what it hears.
func (w *world) open() *Engine {
	w.t.Helper()
	return w.openEvery(never)
}

// openEvery opens one whose guard looks that often by itself, too.
func (w *world) openEvery(every time.Duration) *Engine {
	w.t.Helper()
	return w.openWith(func(c *Config) { c.every = every })
}

// openWith opens one with another configuration.
func (w *world) openWith(change func(*Config)) *Engine {
	w.t.Helper()
	c := Config{
		every:     never,
		Instance:  inst,
		Upstreams: []Upstream{{Addr: netip.MustParseAddrPort("203.0.113.53:53")}},
		Logger:    slog.New(slog.NewTextHandler(w.t.Output(), nil)),
		Uplinks: func() ([]string, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.uplinks, w.unread
		},
		OnDeny: func(d Denial) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.denied = append(w.denied, d)
		},
	}
	change(&c)
	e, err := Open(w.t.Context(), c)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if err := e.Close(); err != nil {
			w.t.Error(err)
		}
	})
	return e
}

// sandbox links and registers a guest.
func (w *world) sandbox(e *Engine, i int, n record.Network) string {
	w.t.Helper()
	id := w.guest(i)
	for range 2 {
		if err := e.Register(w.t.Context(), id, addr(i), n, nil); err != nil {
			w.t.Fatal(err)
		}
	}
	return id
}

// dial connects from id and sends a word there and back.
func (w *world) dial(id, network, to string, timeout time.Duration) (c net.Conn, err error) {
	c, err = w.connect(w.guests[id], network, to, timeout)
	if err != nil {
		return nil, err
	}
	if err := echo(c, timeout); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// connect connects from ns: the first SYN must be answered.
func (w *world) connect(ns vns.NsHandle, network, to string, timeout time.Duration) (c net.Conn, err error) {
	w.in(ns, func() { c, err = hosttest.Dial(network, to, timeout) })
	return c, err
}

// answer sends back each word that comes, and how many segments its side of the
// connection has sent again.
func answer(c net.Conn) {
	defer c.Close()
	for word := make([]byte, 5); ; {
		if _, err := io.ReadFull(c, word[:4]); err != nil {
			return
		}
		n, err := hosttest.Resent(c)
		word[4] = byte(n)
		if err != nil {
			return
		}
		if _, err := c.Write(word); err != nil {
			return
		}
	}
}

// maxResent is how often TCP sends a segment again in a second without an answer: as
// a probe, and after 0.2 and 0.6 s (RFC 8985, section 7; RFC 6298, section 5).
const maxResent = 3

// echo sends a word and reads it again. Neither side may have sent more often than in
// a second: the kernels' own counts do not make a slow host look like a cut flow.
func echo(c net.Conn, timeout time.Duration) error {
	c.SetDeadline(time.Now().Add(timeout)) //nolint:errcheck // shows in the read
	before, err := hosttest.Resent(c)
	if err != nil {
		return err
	}
	var theirs [2]int
	for i := range theirs { // the second answer tells how often the first was sent
		if _, err := c.Write([]byte("word")); err != nil {
			return err
		}
		buf := make([]byte, 5)
		if _, err := io.ReadFull(c, buf); err != nil {
			return err
		}
		theirs[i] = int(buf[4])
	}
	ours, err := hosttest.Resent(c)
	if n := max(ours-before, theirs[1]-theirs[0]); err == nil && n > maxResent {
		err = fmt.Errorf("a word was sent %d times", n+1)
	}
	return err
}

// ask sends a DNS query from id.
func (w *world) ask(id, network, server, name string, typ uint16, timeout time.Duration) (*dns.Msg, error) {
	c, err := w.connect(w.guests[id], network, server, timeout)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	q := new(dns.Msg)
	q.SetQuestion(name, typ)
	client := dns.Client{Net: network, Timeout: timeout}
	a, _, err := client.ExchangeWithConn(q, &dns.Conn{Conn: c})
	return a, err
}

// upstream is a name server outside, at 203.0.113.53. What it returns says
// which names it was asked for.
func (w *world) upstream() func() map[string]bool {
	var mu sync.Mutex
	asked := map[string]bool{}
	handler := dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) {
		name := strings.ToLower(q.Question[0].Name)
		mu.Lock()
		asked[name] = true
		mu.Unlock()
		m := new(dns.Msg)
		m.SetReply(q)
		add := func(addrs ...string) {
			for _, a := range addrs {
				rr, err := dns.NewRR(q.Question[0].Name + " 60 IN A " + a)
				if err != nil {
					panic(err)
				}
				m.Answer = append(m.Answer, rr)
			}
		}
		switch name {
		case "one.test.":
			add("203.0.113.1")
		case "rebind.test.":
			add("203.0.113.2", "127.0.0.1", "10.98.0.1", "10.99.0.1", "169.254.169.254", "198.51.100.1", "192.0.2.99",
				inst.Gateway().String(), addr(1).String(), "0.0.0.0", "100.64.0.1", "192.168.7.7")
		case "many.test.":
			for range 100 {
				add("203.0.113.1")
			}
		case "silent.test.":
			return
		default:
			m.Rcode = dns.RcodeNameError
		}
		if _, isUDP := rw.RemoteAddr().(*net.UDPAddr); isUDP {
			m.Truncate(dns.MinMsgSize)
		}
		rw.WriteMsg(m) //nolint:errcheck // the other side says
	})
	w.in(w.outside, func() { w.nameServer(handler) })
	return func() map[string]bool {
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(asked)
	}
}

// nameServer serves at 203.0.113.53. It is called outside.
func (w *world) nameServer(h dns.Handler) {
	w.t.Helper()
	l, err := net.Listen("tcp4", "203.0.113.53:53")
	if err != nil {
		w.t.Fatal(err)
	}
	pc, err := net.ListenPacket("udp4", "203.0.113.53:53")
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { l.Close(); pc.Close() })
	go (&dns.Server{Listener: l, Handler: h}).ActivateAndServe()    //nolint:errcheck // ends with the test
	go (&dns.Server{PacketConn: pc, Handler: h}).ActivateAndServe() //nolint:errcheck // likewise
}
