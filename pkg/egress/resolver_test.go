package egress

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/egress/names"
)

func TestDNS(t *testing.T) {
	w := newWorld(t)
	asked := w.upstream()
	e := w.open()
	silent := int64(0)
	defer func() {
		if n := CountNames(e); n.Answered < 5 || n.Unanswered != silent {
			t.Errorf("queries that name servers answered: %+v; silent.test was asked for %d times", n, silent)
		}
	}()
	open := w.sandbox(e, 0, rules(t, "open", "10.98.0.0/16:80"))
	ruled := w.sandbox(e, 1, rules(t, "rules", "203.0.113.0/24"))
	named := w.sandbox(e, 3, rules(t, "rules", "one.test", "*.many.test", "rebind.test", "192.168.7.7:80"))
	none := w.sandbox(e, 2, rules(t, "none"))
	for _, c := range []struct {
		id, network, name string
		typ               uint16
		rcode             int
		want              string // data of the answers
	}{
		{open, "udp", "one.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.1"},
		{open, "tcp", "one.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.1"},
		{open, "udp", "one.test.", dns.TypeAAAA, dns.RcodeSuccess, ""},
		{open, "udp", "one.test.", dns.TypeHTTPS, dns.RcodeSuccess, ""},
		{open, "udp", "one.test.", dns.TypeANY, dns.RcodeRefused, ""},
		{open, "udp", "absent.test.", dns.TypeA, dns.RcodeNameError, ""},
		{open, "udp", "silent.test.", dns.TypeA, dns.RcodeServerFailure, ""},
		{open, "tcp", "many.test.", dns.TypeA, dns.RcodeSuccess, strings.TrimSpace(strings.Repeat("203.0.113.1 ", 100))},
		// Rebinding: everything of the host and its networks goes, but what a rule names.
		{open, "udp", "rebind.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.2 10.98.0.1"},
		{ruled, "udp", "one.test.", dns.TypeA, dns.RcodeNameError, ""},
		{ruled, "tcp", "one.test.", dns.TypeA, dns.RcodeNameError, ""},
		{none, "udp", "one.test.", dns.TypeA, dns.RcodeNameError, ""},
		{named, "udp", "oNe.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.1"},
		{named, "tcp", "one.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.1"},
		{named, "udp", "one.test.", dns.TypeAAAA, dns.RcodeSuccess, ""},
		{named, "udp", "many.test.", dns.TypeA, dns.RcodeNameError, ""}, // the wildcard means what is below it
		{named, "udp", "refused.test.", dns.TypeAAAA, dns.RcodeNameError, ""},
		{named, "udp", "a.many.test.", dns.TypeTXT, dns.RcodeRefused, ""}, // text, and any name below one
		{named, "udp", "a.many.test.", dns.TypeNULL, dns.RcodeRefused, ""},
		{named, "udp", "rebind.test.", dns.TypeA, dns.RcodeSuccess, "203.0.113.2 192.168.7.7"},
	} {
		// Whatever server it asks, one it may not reach included.
		for _, server := range []string{"8.8.8.8:53", inst.Gateway().String() + ":53", "10.99.0.1:53"} {
			limit := patient
			switch {
			case c.rcode == dns.RcodeRefused, c.rcode == dns.RcodeNameError && c.name != "absent.test.":
				limit = deniedWithin
			case c.rcode == dns.RcodeServerFailure:
				limit = 3 * time.Second // dnsTimeout, and then it is told at once
			}
			var a *dns.Msg
			took, err := hosttest.Soonest(limit, func() (err error) {
				if c.name == "silent.test." {
					silent++
				}
				a, err = w.ask(c.id, c.network, server, c.name, c.typ, patient)
				return err
			})
			if err != nil {
				t.Errorf("%s %s %s @%s: %v", c.network, c.name, dns.TypeToString[c.typ], server, err)
				continue
			}
			if took > limit {
				t.Errorf("%s %s %s @%s took %v", c.network, c.name, dns.TypeToString[c.typ], server, took)
			}
			var got []string
			for _, rr := range a.Answer {
				got = append(got, strings.TrimPrefix(rr.String(), rr.Header().String()))
			}
			if a.Rcode != c.rcode || strings.Join(got, " ") != c.want {
				t.Errorf("%s %s %s @%s: %s %v; want %s %s", c.network, c.name, dns.TypeToString[c.typ], server,
					dns.RcodeToString[a.Rcode], got, dns.RcodeToString[c.rcode], c.want)
			}
			if c.name == "silent.test." {
				break // once is two seconds
			}
		}
	}
	// Too long for UDP: truncated, so that the guest comes back by TCP.
	if a, err := w.ask(open, "udp", "8.8.8.8:53", "many.test.", dns.TypeA, patient); err != nil || !a.Truncated {
		t.Errorf("100 addresses by UDP: %v, %v", a, err)
	}
	for name := range asked() {
		if strings.HasPrefix(name, "refused") {
			t.Errorf("the upstream was asked for %s", name)
		}
	}
	if _, err := w.ask(ruled, "udp", "8.8.8.8:53", "refused.test.", dns.TypeA, patient); err != nil {
		t.Error(err)
	}
	if asked()["refused.test."] {
		t.Error("a query of a sandbox without names reached the upstream")
	}
}

// TestOneSocket: the kernel limits the queries of a guest also if all come by one socket, and
// whether they can be read or not.
func TestOneSocket(t *testing.T) {
	const many = 4000
	w := newWorld(t)
	w.upstream()
	e := w.open()
	q, err := new(dns.Msg).SetQuestion("refused.test.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	for i, send := range [][]byte{q, append(q[:4:4], append([]byte{0, 9}, q[6:]...)...)} { // one that has nine questions
		w.in(w.guests[w.sandbox(e, i, rules(t, "rules", "one.test"))], func() {
			c, err := net.Dial("udp4", "8.8.8.8:53")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			begun := time.Now()
			answers := make(chan int)
			go func() {
				n, b, wait := 0, make([]byte, 512), patient // the first answer may be late
				for ; ; n++ {
					c.SetReadDeadline(time.Now().Add(wait)) //nolint:errcheck // shows in the read
					if _, err := c.Read(b); err != nil {
						answers <- n
						return
					}
					wait = time.Second
				}
			}()
			for range many {
				c.Write(send) //nolint:errcheck // what is lost is not answered
			}
			n := <-answers
			if most := dnsBurst + int(dnsPerSecond*(time.Since(begun).Seconds()+0.1)); n == 0 || n > most {
				t.Errorf("%d of %d queries are answered, %d may be", n, many, most)
			}
		})
	}
}

// TestResolverBuffers: what all sandboxes share is large, what each connection has is not.
func TestResolverBuffers(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	if n, err := unix.GetsockoptInt(e.dns.udp, unix.SOL_SOCKET, unix.SO_RCVBUF); err != nil || n < dnsBuffer {
		t.Errorf("the socket for UDP has %d bytes, want %d: %v", n, dnsBuffer, err)
	}
	raw, err := e.dns.tcp.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	cerr := raw.Control(func(fd uintptr) {
		if n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF); err != nil || n > 1<<20 {
			t.Errorf("each connection by TCP may have %d bytes: %v", n, err)
		}
	})
	if cerr != nil {
		t.Fatal(cerr)
	}
}

// TestManyAddresses: whatever DNS answers with can be connected to as soon as the answer is
// there.
func TestManyAddresses(t *testing.T) {
	const guests, each, perAnswer = 10, 1000, 4 // a sandbox may open 1,000 flows at once, and ask 400 times
	w := newWorld(t)
	w.in(w.outside, func() {
		w.run("ip", "route", "add", "local", "11.0.0.0/8", "dev", "lo")
		w.nameServer(dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) {
			m := new(dns.Msg).SetReply(q)
			var n uint32
			fmt.Sscanf(strings.ToLower(q.Question[0].Name), "n%d.", &n) //nolint:errcheck // 0 is a name as well
			for i := range uint32(perAnswer) {
				a := make(net.IP, 4)
				binary.BigEndian.PutUint32(a, 11<<24+n*perAnswer+i)
				h := dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET}
				m.Answer = append(m.Answer, &dns.A{Hdr: h, A: a})
			}
			rw.WriteMsg(m) //nolint:errcheck // the guest says
		}))
	})
	w.serve(w.outside, "0.0.0.0", 9000)
	e := w.open()
	var ids []string
	for g := range guests {
		ids = append(ids, w.sandbox(e, g, rules(t, "rules", "*.test")))
	}
	var done sync.WaitGroup
	for g, id := range ids {
		done.Go(func() {
			for i := range each / perAnswer {
				name := fmt.Sprintf("n%d.test.", g*each/perAnswer+i)
				a, err := w.ask(id, "udp", "8.8.8.8:53", name, dns.TypeA, patient)
				if err != nil || len(a.Answer) != perAnswer {
					t.Errorf("%s: %v, %v", name, a, err)
					return
				}
				for _, rr := range a.Answer {
					c, err := w.connect(w.guests[id], "tcp", rr.(*dns.A).A.String()+":9000", patient)
					if err != nil {
						t.Errorf("%s: %v", rr, err)
						return
					}
					reset(c)
				}
			}
		})
	}
	done.Wait()
	// Without an answer the address is closed.
	if _, err := w.connect(w.guests[id(0)], "tcp", "11.200.0.1:9000", patient); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("an address that nobody asked for: %v", err)
	}
}

// TestChildOfResolver: when the child dies, another one answers, and nothing of a sandbox's
// budget is lost.
func TestChildOfResolver(t *testing.T) {
	w := newWorld(t)
	w.upstream()
	e := w.open()
	guest := w.sandbox(e, 0, rules(t, "rules", "one.test", "silent.test"))
	s := e.lookup(addr(0))
	// asked returns how many queries are under way, and how many of them the server does not answer.
	asked := func() (all, silent int) {
		e.dns.mu.Lock()
		defer e.dns.mu.Unlock()
		for _, a := range e.dns.asking {
			if strings.HasPrefix(a.Name, "silent") {
				silent++
			}
		}
		return len(e.dns.asking), silent
	}
	for range 3 {
		go w.ask(guest, "udp", "8.8.8.8:53", "silent.test.", dns.TypeA, time.Second) //nolint:errcheck // nobody answers
		for n, silent := asked(); n != 1 || silent != 1; n, silent = asked() {
			time.Sleep(time.Millisecond) // the child says it to the daemon only
		}
		e.dns.mu.Lock()
		line := e.dns.line
		e.dns.mu.Unlock()
		e.dns.tell(line, names.Message{Kind: names.Setup, Body: []byte("no JSON")}, nil) // it panics
		<-line.Done()
		// The dying child may take one more query with it: a guest asks again.
		var a *dns.Msg
		for deadline := time.Now().Add(patient); ; {
			var err error
			if a, err = w.ask(guest, "udp", "8.8.8.8:53", "one.test.", dns.TypeA, time.Second); err == nil {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal(err)
			}
		}
		if len(a.Answer) != 1 {
			t.Error(a)
		}
		// A query that was asked again may still be under way.
		for deadline := time.Now().Add(patient); ; time.Sleep(time.Millisecond) {
			counted := int(s.dns.queries.Load())
			all, silent := asked()
			if silent > 0 {
				t.Error("the query of the child that died is under way")
			}
			if all == 0 && counted == 0 {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d queries are counted, %d are under way", counted, all)
			}
		}
	}
}

// truncated answers by UDP that TCP must be asked.
var truncated = dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	m.Truncated = true
	rw.WriteMsg(m) //nolint:errcheck // the other side says
})
