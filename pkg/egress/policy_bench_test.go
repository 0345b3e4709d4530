package egress

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// manyRules makes n rules that allow, half of them names. They differ by salt.
func manyRules(b *testing.B, n, salt int) record.Network {
	specs := make([]string, n)
	for i := range specs {
		if i%2 == 0 {
			specs[i] = fmt.Sprintf("host%d-%d.example.org:443", salt, i)
		} else {
			specs[i] = fmt.Sprintf("11.%d.%d.%d:443", salt, i>>8, i&255)
		}
	}
	return rules(b, "rules", specs...)
}

// BenchmarkPolicyApply replaces the policy of a sandbox, with as many others registered.
func BenchmarkPolicyApply(b *testing.B) {
	for _, c := range []struct{ rules, others int }{{10, 0}, {1000, 0}, {10, 1999}} {
		b.Run(fmt.Sprintf("%d-at-%d", c.rules, c.others+1), func(b *testing.B) {
			w := newWorld(b)
			e := w.open()
			ctx := context.Background()
			for i := range c.others {
				if err := e.Register(ctx, id(i+1), addr(i+1), manyRules(b, 10, 0)); err != nil {
					b.Fatal(err)
				}
			}
			w.sandbox(e, 0, record.Network{Mode: record.NetworkRules})
			two := []record.Network{manyRules(b, c.rules, 1), manyRules(b, c.rules, 2)}
			var took []time.Duration
			for i := 0; b.Loop(); i++ {
				timed(b, &took, func() error { return e.Register(ctx, id(0), addr(0), two[i%2]) })
			}
			quantiles(b, "apply", took)
		})
	}
}

// BenchmarkPolicyTighten denies 1,000 open flows of one sandbox.
func BenchmarkPolicyTighten(b *testing.B) {
	const flows = 1000
	w := newWorld(b)
	e := w.open()
	ctx := context.Background()
	open, closed := rules(b, "rules", "203.0.113.1:80/udp"), rules(b, "rules", "203.0.113.2:80")
	guest := w.sandbox(e, 0, open)
	var took []time.Duration
	for b.Loop() {
		if err := e.Register(ctx, guest, addr(0), open); err != nil {
			b.Fatal(err)
		}
		conns := make([]net.Conn, 0, flows)
		w.in(w.guests[guest], func() {
			for len(conns) < flows {
				c, err := net.Dial("udp4", "203.0.113.1:80")
				if err == nil {
					err = echo(c, patient)
				}
				if err == nil {
					conns = append(conns, c)
				} else if c != nil {
					c.Close() // over the rate of new flows
				}
			}
		})
		timed(b, &took, func() error { return e.Register(ctx, guest, addr(0), closed) })
		if n := w.touching(e, addr(0)); n != 0 {
			b.Fatalf("%d flows are left", n)
		}
		for _, c := range conns {
			c.Close()
		}
	}
	quantiles(b, "tighten", took)
}
