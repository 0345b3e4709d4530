package egress

import (
	"context"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// TestOperator: chains flushed, changed, or pushed back by others.
func TestOperator(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	c, err := w.dial(id, "tcp", "203.0.113.1:443", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for name, commands := range map[string][]string{
		"flush filter":       {"-F"},
		"flush all":          {"-F", "-t nat -F", "-t mangle -F", "-t raw -F"},
		"flush and delete":   {"-F", "-X", "-t mangle -F", "-t mangle -X"},
		"one rule more":      {"-A " + inst.Chain("BACK") + " -j ACCEPT"},
		"one rule less":      {"-t raw -D " + inst.Chain("RAW") + " 2"},
		"one in front of us": {"-I FORWARD -j ACCEPT"},
	} {
		t.Run(name, func(t *testing.T) {
			e.guarding.Lock() // the guard hears each command
			for _, c := range commands {
				for i := range 2 { // one may be in the other generation's chain
					out, err := exec.Command("iptables", strings.Fields(c)...).CombinedOutput()
					if err == nil {
						break
					}
					if i == 1 || !strings.Contains(c, inst.Chain("")) {
						e.guarding.Unlock()
						t.Fatalf("%s: %s", c, out)
					}
					c = strings.NewReplacer(inst.Chain("BACK"), inst.Chain("BACK")+"-B", inst.Chain("RAW"),
						inst.Chain("RAW")+"-B").Replace(c)
				}
			}
			e.guarding.Unlock()
			e.check(t.Context())
			e.guarding.Lock()
			ok, err := e.chains.standing(context.Background())
			e.guarding.Unlock()
			if err != nil || !ok {
				t.Errorf("the chains do not stand: %v\n%s", err, rulesNow(w))
			}
			if err := echo(c, patient); err != nil {
				t.Errorf("an established flow: %v", err)
			}
			w.allowed(id, "tcp", "203.0.113.1:443")
			w.refused(id, "tcp", "203.0.113.1:80")
			w.run("iptables", "-t", "filter", "-S")
		})
	}
	w.try("iptables", "-D", "FORWARD", "-j", "ACCEPT")
}

// TestFlood: a sandbox that opens as fast as it can is answered, but not for
// ever, and its neighbour does not feel it.
func TestFlood(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	bad := w.sandbox(e, 0, rules(t, "none"))
	good := w.sandbox(e, 1, rules(t, "rules", "203.0.113.1:443"))
	start := time.Now()
	for range 3000 {
		w.in(w.guests[bad], func() {
			if c, err := net.DialTimeout("tcp", "203.0.113.1:443", time.Second); err == nil {
				c.Close()
				t.Error("denied flow opened")
			}
		})
	}
	w.allowed(good, "tcp", "203.0.113.1:443")
	w.mu.Lock()
	defer w.mu.Unlock()
	// Counted in whole seconds of the clock, of which the first and the last are parts.
	seconds := int(time.Now().Unix() - start.Unix() + 1)
	if n := len(w.denied); n == 0 || n > deniedPerSecond*seconds {
		t.Errorf("told of %d denials in %d seconds", n, seconds)
	}
}
