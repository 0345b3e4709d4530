package egress

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/flowlog"
	"github.com/sandboxd/sandboxd/pkg/egress/leases"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// quantiles reports p50 and p90 in microseconds.
func quantiles(b *testing.B, what string, d []time.Duration) {
	slices.Sort(d)
	b.ReportMetric(float64(d[len(d)/2])/1e3, what+"-p50-us")
	b.ReportMetric(float64(d[len(d)*9/10])/1e3, what+"-p90-us")
}

func timed(b *testing.B, to *[]time.Duration, f func() error) {
	start := time.Now()
	if err := f(); err != nil {
		b.Fatal(err)
	}
	*to = append(*to, time.Since(start))
}

// BenchmarkRegister has 500 neighbours with ten rules each.
func BenchmarkRegister(b *testing.B) {
	w := newWorld(b)
	e := w.open()
	n := rules(b, "rules", "203.0.113.0/24:443", "1.0.0.1", "1.0.0.2", "1.0.0.3", "1.0.0.4", "1.0.0.5", "1.0.0.6", "1.0.0.7", "1.0.0.8",
		"1.0.0.9")
	ctx := context.Background()
	for i := range 500 {
		if err := e.Register(ctx, id(i), addr(i), n, nil); err != nil {
			b.Fatal(err)
		}
	}
	var register, unregister, gone []time.Duration
	for b.Loop() {
		timed(b, &register, func() error { return e.Register(ctx, id(500), addr(500), n, nil) })
		timed(b, &unregister, func() error { return e.Unregister(ctx, id(500)) })
		timed(b, &gone, func() error { return e.Gone(ctx, id(500)) })
	}
	quantiles(b, "register", register)
	quantiles(b, "unregister", unregister)
	quantiles(b, "gone", gone)
}

// BenchmarkNewFlow connects from a guest to the outside: without any rules, and
// asked for by the queue, with 500 policies of ten rules. Run it with -benchtime 600x: one source may open
// 1,000 flows at once.
func BenchmarkNewFlow(b *testing.B) {
	for _, c := range []struct {
		name    string
		engine  bool
		network record.Network
		to      string
	}{
		{"bare", false, record.Network{}, "203.0.113.1:443"},
		{"allowed", true, tenth(b, "203.0.113.1:443"), "203.0.113.1:443"},
		{"denied", true, rules(b, "rules"), "203.0.113.1:443"},
	} {
		b.Run(c.name, func(b *testing.B) {
			w := newWorld(b)
			var guest string
			if c.engine {
				e := w.open()
				for i := range 499 {
					if err := e.Register(context.Background(), id(i+1), addr(i+1), manyRules(b, 10, i), nil); err != nil {
						b.Fatal(err)
					}
				}
				guest = w.sandbox(e, 0, c.network)
			} else {
				guest = w.guest(0)
				w.run("iptables", "-t", "nat", "-A", "POSTROUTING", "-s", inst.Pool().String(), "-j", "MASQUERADE")
				defer w.run("iptables", "-t", "nat", "-F", "POSTROUTING")
			}
			var took []time.Duration
			w.in(w.guests[guest], func() {
				for b.Loop() {
					start := time.Now()
					conn, err := net.Dial("tcp", c.to)
					took = append(took, time.Since(start))
					if (err == nil) == (c.name == "denied") {
						b.Fatal(err)
					}
					if err == nil {
						conn.Close()
					}
				}
			})
			quantiles(b, "connect", took)
		})
	}
}

// tenth is a policy of ten rules, the last of which allows target.
func tenth(b *testing.B, target string) record.Network {
	n := manyRules(b, 9, 0)
	n.Rules = append(n.Rules, rules(b, "rules", target).Rules...)
	return n
}

// BenchmarkOpen: the chains are there already, or not.
func BenchmarkOpen(b *testing.B) {
	for _, purge := range []bool{true, false} {
		b.Run(map[bool]string{true: "first", false: "again"}[purge], func(b *testing.B) {
			w := newWorld(b)
			var open []time.Duration
			for b.Loop() {
				var e *Engine
				timed(b, &open, func() (err error) {
					e, err = Open(context.Background(), Config{Instance: inst})
					return err
				})
				if err := e.Close(); err != nil {
					b.Fatal(err)
				}
				if purge {
					if err := Purge(context.Background(), inst); err != nil {
						b.Fatal(err)
					}
				}
			}
			_ = w
			quantiles(b, "open", open)
		})
	}
}

// BenchmarkVerdict is the daemon's part of a new flow, without and with a flow log, to one
// destination and to ever new ones.
func BenchmarkVerdict(b *testing.B) {
	for _, c := range []struct {
		name         string
		log          bool
		destinations int
	}{
		{"no log", false, 100_000}, {"one destination", true, 1}, {"100000 destinations", true, 100_000},
	} {
		b.Run(c.name, func(b *testing.B) {
			e := &Engine{
				judge:  judge{pool: inst.Pool()},
				cfg:    Config{Instance: inst, Pool: inst.Pool(), MaxOpenFlows: 1 << 40, MaxFlows: 1 << 40},
				byAddr: map[netip.Addr]*sandbox{},
			}
			e.hosts.Store(&map[netip.Addr]bool{})
			e.ledger = newLedger(e.cfg, nil)
			p, err := policy.Compile(policy.Host{}, rules(b, "open"))
			if err != nil {
				b.Fatal(err)
			}
			s := &sandbox{addr: addr(0), leases: new(leases.Table)}
			s.policy.Store(p)
			if c.log {
				s.log = new(flowlog.Log)
			}
			e.byAddr[s.addr] = s
			packet := make([]byte, 24)
			packet[0], packet[9] = 0x45, unix.IPPROTO_TCP
			copy(packet[12:], s.addr.AsSlice())
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				binary.BigEndian.PutUint32(packet[16:], 8<<24+uint32(i%c.destinations))
				binary.BigEndian.PutUint16(packet[22:], 443)
				if e.verdict(packet) != markAllow {
					b.Fatal("refused")
				}
			}
		})
	}
}
