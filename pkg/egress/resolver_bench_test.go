package egress

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// outsideServer answers every name, so that a query of any name is served.
func (w *world) outsideServer(ttl uint32) {
	w.in(w.outside, func() {
		w.nameServer(dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) {
			m := new(dns.Msg).SetReply(q)
			h := dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: ttl}
			m.Answer = []dns.RR{&dns.A{Hdr: h, A: net.IPv4(203, 0, 113, 1)}}
			rw.WriteMsg(m) //nolint:errcheck // whoever asks says
		}))
	})
}

// askBy asks by a socket that exists: a stub resolver of a guest makes one for each query.
func askBy(c net.Conn, name string) (time.Duration, error) {
	conn := &dns.Conn{Conn: c}
	q := new(dns.Msg).SetQuestion(name, dns.TypeA)
	start := time.Now()
	c.SetDeadline(start.Add(10 * time.Second)) //nolint:errcheck // shows in the read
	if err := conn.WriteMsg(q); err != nil {
		return 0, err
	}
	a, err := conn.ReadMsg()
	took := time.Since(start)
	if err == nil && (a.Rcode != dns.RcodeSuccess || len(a.Answer) == 0) {
		err = fmt.Errorf("%v", a)
	}
	return took, err
}

// BenchmarkDNS asks from a guest's namespace by UDP, each time by a new socket: the name server
// outside directly (before there is any rule), for a name in the cache, and for one that is
// not. A sandbox may ask 400 times at once and 200 times a second, so each has several guests:
// run it with -benchtime 2000x.
func BenchmarkDNS(b *testing.B) {
	const guests = 8
	measure := func(b *testing.B, w *world, ids []string, to string, name func(i int) string) {
		var took []time.Duration
		for i := 0; b.Loop(); i++ {
			w.in(w.guests[ids[i%len(ids)]], func() {
				c, err := net.Dial("udp4", to)
				if err != nil {
					b.Fatal(err)
				}
				defer c.Close()
				d, err := askBy(c, name(i))
				if err != nil {
					b.Fatal(err)
				}
				took = append(took, d)
			})
		}
		quantiles(b, "query", took)
	}
	b.Run("direct", func(b *testing.B) {
		w := newWorld(b)
		w.outsideServer(60)
		var ids []string
		for i := range guests {
			ids = append(ids, w.guest(i))
		}
		w.run("iptables", "-t", "nat", "-A", "POSTROUTING", "-s", inst.Pool().String(), "-j", "MASQUERADE")
		defer w.run("iptables", "-t", "nat", "-F", "POSTROUTING")
		measure(b, w, ids, "203.0.113.53:53", func(int) string { return "one.test." })
	})
	for what, name := range map[string]func(int) string{
		"cached": func(int) string { return "one.test." }, "uncached": func(i int) string { return fmt.Sprintf("n%d.test.", i) },
	} {
		b.Run(what, func(b *testing.B) {
			w := newWorld(b)
			w.outsideServer(60)
			e := w.open()
			var ids []string
			for i := range guests {
				ids = append(ids, w.sandbox(e, i, rules(b, "rules", "*.test")))
			}
			measure(b, w, ids, "203.0.113.53:53", name)
		})
	}
}

// BenchmarkDNSFlood asks for a name in the cache while another guest sends 10,000 queries a
// second, and without. It reports the slow end.
func BenchmarkDNSFlood(b *testing.B) {
	for _, flood := range []bool{false, true} {
		b.Run(map[bool]string{false: "calm", true: "flood"}[flood], func(b *testing.B) {
			w := newWorld(b)
			w.outsideServer(60)
			e := w.open()
			const guests = 8
			var ids []string
			for i := range guests + 1 {
				ids = append(ids, w.sandbox(e, i, rules(b, "rules", "*.test")))
			}
			ctx, stop := context.WithCancel(context.Background())
			var done sync.WaitGroup
			sent := 0
			start := time.Now()
			if flood {
				done.Go(func() {
					w.in(w.guests[ids[guests]], func() { sent = sendMany(ctx, b) })
				})
			}
			var took []time.Duration
			for i := 0; b.Loop(); i++ {
				w.in(w.guests[ids[i%guests]], func() {
					c, err := net.Dial("udp4", "203.0.113.53:53")
					if err != nil {
						b.Fatal(err)
					}
					defer c.Close()
					d, err := askBy(c, "one.test.")
					if err != nil {
						b.Fatal(err)
					}
					took = append(took, d)
				})
				time.Sleep(time.Millisecond) // others are no flood
			}
			stop()
			done.Wait()
			if flood {
				rate := float64(sent) / time.Since(start).Seconds()
				b.ReportMetric(rate, "sent/s")
				if b.N > 100 && rate < 9000 {
					b.Errorf("the flood was %.0f queries a second", rate)
				}
			}
			quantiles(b, "query", took)
			b.ReportMetric(float64(took[len(took)*99/100])/1e3, "query-p99-us")
		})
	}
}

// sendMany sends 10,000 queries a second until ctx ends, by 100 sockets.
func sendMany(ctx context.Context, b *testing.B) (sent int) {
	var socks []net.Conn
	for range 100 {
		c, err := net.Dial("udp4", "203.0.113.53:53")
		if err != nil {
			b.Error(err)
			return 0
		}
		defer c.Close()
		socks = append(socks, c)
	}
	q, err := new(dns.Msg).SetQuestion("one.test.", dns.TypeA).Pack()
	if err != nil {
		b.Error(err)
		return 0
	}
	tick := time.NewTicker(time.Millisecond) // no bursts
	defer tick.Stop()
	for begun := time.Now(); ; {
		select {
		case <-ctx.Done():
			return sent
		case <-tick.C:
		}
		for due := int(time.Since(begun) / (time.Millisecond / 10)); sent < due; { // it may have lost ticks
			c := socks[sent%len(socks)]
			c.Write(q) //nolint:errcheck // what is lost is not answered
			sent++
		}
	}
}

// BenchmarkResolver is the way of a query without kernel rules and without another process:
// what the code itself costs.
func BenchmarkResolver(b *testing.B) {
	e, _ := near(b, testZone)
	s := e.lookup(netip.MustParseAddr("127.0.0.5"))
	d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP("127.0.0.5")}}
	c, err := d.Dial("udp4", localOf(b, e.dns.udp))
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	var took []time.Duration
	for b.Loop() {
		s.dns.left = dnsBurst
		d, err := askBy(c, "one.test.")
		if err != nil {
			b.Fatal(err)
		}
		took = append(took, d)
	}
	quantiles(b, "query", took)
}
