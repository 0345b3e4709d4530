package egress

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
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
			specs[i] = fmt.Sprintf("11.%d.%d.%d:443", salt&255, i>>8, i&255)
		}
	}
	return rules(b, "rules", specs...)
}

// BenchmarkPolicyApply adds rules that allow to the policy of a sandbox that has an open
// flow, with as many others registered.
func BenchmarkPolicyApply(b *testing.B) {
	for _, c := range []struct{ rules, others int }{{10, 0}, {1000, 0}, {10, 1999}} {
		b.Run(fmt.Sprintf("%d-at-%d", c.rules, c.others+1), func(b *testing.B) {
			w := newWorld(b)
			e := w.open()
			ctx := context.Background()
			for i := range c.others {
				if err := e.Register(ctx, id(i+1), addr(i+1), manyRules(b, 10, 0), nil); err != nil {
					b.Fatal(err)
				}
			}
			before := rules(b, "rules", "203.0.113.1:443")
			guest := w.sandbox(e, 0, before)
			open, err := w.dial(guest, "tcp", "203.0.113.1:443", patient)
			if err != nil {
				b.Fatal(err)
			}
			defer open.Close()
			after := before
			after.Rules = slices.Concat(manyRules(b, c.rules, 1).Rules, before.Rules)
			var took []time.Duration
			for b.Loop() {
				timed(b, &took, func() error { return e.Register(ctx, guest, addr(0), after, nil) })
				if err := e.Register(ctx, guest, addr(0), before, nil); err != nil {
					b.Fatal(err)
				}
			}
			quantiles(b, "apply", took)
		})
	}
}

// BenchmarkForward is a flow that is open, by a rule by address, beside one without any rule:
// a round trip of a byte, and the rate of 256 MiB.
func BenchmarkForward(b *testing.B) {
	for _, engine := range []bool{false, true} {
		b.Run(map[bool]string{false: "bare", true: "rules"}[engine], func(b *testing.B) {
			w := newWorld(b)
			w.in(w.outside, func() { returning(b, "203.0.113.1:7") })
			guest := ""
			if engine {
				guest = w.sandbox(w.open(), 0, rules(b, "rules", "203.0.113.1:7"))
			} else {
				guest = w.guest(0)
				w.run("iptables", "-t", "nat", "-A", "POSTROUTING", "-s", inst.Pool().String(), "-j", "MASQUERADE")
				defer w.run("iptables", "-t", "nat", "-F", "POSTROUTING")
			}
			var c net.Conn
			var err error
			w.in(w.guests[guest], func() { c, err = net.DialTimeout("tcp4", "203.0.113.1:7", patient) })
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(5 * time.Minute)) //nolint:errcheck // shows in the reads
			one := []byte{1}
			trip := func() error {
				if _, err := c.Write(one); err != nil {
					return err
				}
				_, err := io.ReadFull(c, one)
				return err
			}
			var took []time.Duration
			for b.Loop() {
				timed(b, &took, trip)
			}
			quantiles(b, "rtt", took)
			b.ReportMetric(echoed(b, c, 256<<20), "forward-MB/s")
		})
	}
}

// returning sends what each connection says back (RFC 862).
func returning(b *testing.B, at string) {
	l, err := net.Listen("tcp4", at)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(c, c) //nolint:errcheck // the client says
			}()
		}
	}()
}

// echoed is how fast n bytes go out and come back, in MB/s.
func echoed(b *testing.B, c net.Conn, n int64) float64 {
	start := time.Now()
	failed := make(chan error, 1)
	go func() {
		_, err := io.CopyN(c, zeros{}, n)
		failed <- err
	}()
	if _, err := io.CopyN(io.Discard, c, n); err != nil {
		b.Fatal(err)
	}
	if err := <-failed; err != nil {
		b.Fatal(err)
	}
	return float64(n) / 1e6 / time.Since(start).Seconds()
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

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
		if err := e.Register(ctx, guest, addr(0), open, nil); err != nil {
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
		timed(b, &took, func() error { return e.Register(ctx, guest, addr(0), closed, nil) })
		if n := w.touching(e, addr(0)); n != 0 {
			b.Fatalf("%d flows are left", n)
		}
		for _, c := range conns {
			c.Close()
		}
	}
	quantiles(b, "tighten", took)
}
