package terminate

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
)

// TestValues: a value is asked for once, however many want it, for a bounded time and as one of
// a bounded number.
func TestValues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		open, answer := map[string]int{}, make(chan string)
		v := &values{turns: make(chan struct{}, maxValues), open: map[string]*asked{}}
		v.ask = func(ctx context.Context, credential string) ([]byte, error) {
			v.mu.Lock()
			open[credential]++
			v.mu.Unlock()
			select {
			case s := <-answer:
				return []byte(s), nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		said := make(chan string, 1000)
		want := func(ctx context.Context, credential string) {
			go func() {
				b, err := v.of(ctx, credential)
				said <- fmt.Sprint(string(b), " ", err)
			}()
			synctest.Wait()
		}
		impatient, cancel := context.WithCancel(t.Context())
		want(impatient, "a")
		want(t.Context(), "a")
		cancel()
		if got := <-said; !strings.Contains(got, context.Canceled.Error()) {
			t.Error(got)
		}
		answer <- "1"
		if got := <-said; got != "1 <nil>" || open["a"] != 1 {
			t.Error(got, open)
		}
		want(t.Context(), "a") // nothing is kept
		answer <- "2"
		if got := <-said; got != "2 <nil>" || open["a"] != 2 {
			t.Error(got, open)
		}
		begun := time.Now()
		asked := func() int { // without "a"
			v.mu.Lock()
			defer v.mu.Unlock()
			return len(open) - 1
		}
		for i := range maxValues + 1 {
			want(t.Context(), fmt.Sprint(i))
		}
		if n := asked(); n != maxValues {
			t.Errorf("%d are asked for at a time", n)
		}
		waited := 0
		for range maxValues + 1 {
			got := <-said
			if !strings.Contains(got, context.DeadlineExceeded.Error()) || time.Since(begun) != valueLimit {
				t.Errorf("%s, after %v", got, time.Since(begun))
			}
			if strings.Contains(got, "other credentials are asked for") {
				waited++
			}
		}
		// The last one may get a turn in the instant in which the others end.
		synctest.Wait()
		if n := asked() - maxValues; waited+n != 1 {
			t.Errorf("%d waited to the end, and %d were asked for", waited, n)
		}
		want(t.Context(), "z")
		answer <- "3"
		if got := <-said; got != "3 <nil>" || len(v.open) != 0 || len(v.turns) != 0 {
			t.Error(got, v.open)
		}
	})
}

// a daemonSide is the other end of the line of an inspector.
func daemonSide(t *testing.T, i *inspector, handle func(*child.Conn, child.Message)) *child.Conn {
	t.Helper()
	ours, theirs, err := child.Pair()
	if err != nil {
		t.Fatal(err)
	}
	d, line := must(child.NewConn(ours, MaxBody, false)), must(child.NewConn(theirs, maxToChild, true))
	i.Begin(line)
	go line.Run(func(m child.Message) { i.Message(line, m) }) //nolint:errcheck // ends with the test
	go d.Run(func(m child.Message) { handle(d, m) })          //nolint:errcheck // likewise
	t.Cleanup(func() { d.Close() })
	return d
}

// TestDaemon: a Judge asks and tells the daemon that has the line, and a new one knows the old.
func TestDaemon(t *testing.T) {
	type made struct {
		d   Daemon
		old Judge
	}
	judges := make(chan made, 10)
	i := newInspector(func(config []byte, d Daemon, old Judge) (Judge, error) {
		if len(config) == 0 {
			return nil, errors.New("it is empty")
		}
		judges <- made{d, old}
		return &clerk{}, nil
	})
	events := make(chan Event, 1000)
	long := strings.Repeat("v", MaxValue)
	answers := map[string][]byte{
		"good": Value{Bytes: []byte(secret)}.Append(nil), "none": Value{Text: "no such file"}.Append(nil),
		"long":    Value{Bytes: []byte(long)}.Append(nil),
		"nothing": nil, "another form": {7}, "without its value": {1}, "a name \ufffd": Value{Bytes: []byte("x")}.Append(nil),
	}
	handle := func(who string) func(*child.Conn, child.Message) {
		return func(d *child.Conn, m child.Message) {
			switch m.Kind {
			case KindValue:
				name, err := ParseValueRequest(m.Body)
				if err != nil {
					t.Error(err)
				}
				b := answers[name]
				if name == "who" {
					b = Value{Bytes: []byte(who)}.Append(nil)
				}
				d.Answer(m, b, nil) //nolint:errcheck // the call says
			case KindEvent:
				e, err := ParseEvent(m.Body)
				if err != nil {
					t.Error(err)
				}
				e.Place = who
				events <- e
			default:
				t.Errorf("kind %d", m.Kind)
			}
		}
	}
	first := daemonSide(t, i, handle("first"))
	configure := func(line *child.Conn, judge string) error {
		return Config{Roots: public().PEM(), Judge: []byte(judge)}.Send(t.Context(), line)
	}
	if err := configure(first, "1"); err != nil {
		t.Fatal(err)
	}
	one := <-judges
	if one.old != nil {
		t.Error("there was none before")
	}
	for _, c := range []struct{ name, value, err string }{
		{"good", secret, ""},
		{"long", long, ""},
		{"a name \ufffd", "x", ""},
		{"none", "", `the credential "none": no such file`},
		{"nothing", "", errForm.Error()},
		{"another form", "", errForm.Error()},
		{"without its value", "", errForm.Error()},
		{"", "", errForm.Error()},
		{strings.Repeat("n", maxName+1), "", errForm.Error()},
		{"a\nb", "", errForm.Error()},
	} {
		b, err := one.d.Value(t.Context(), c.name)
		if string(b) != c.value || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q: %d bytes, %v", c.name, len(b), err)
		}
	}
	begun := time.Now()
	one.d.Event(Event{Kind: RuleDenied, Host: host, Method: "GE\nT", Text: strings.Repeat("\x1b", 1000)})
	if e := <-events; e != (Event{Kind: RuleDenied, Host: host, Method: "GE?T", Place: "first", Text: strings.Repeat("?", maxNote)}) {
		t.Errorf("%+v", e)
	}
	if err := configure(first, ""); err == nil {
		t.Error("an empty configuration")
	}
	old := i.conf.Load().judge
	if err := configure(first, "2"); err != nil {
		t.Fatal(err)
	}
	two := <-judges
	if two.old != old || two.old == i.conf.Load().judge {
		t.Error("it does not get the Judge before it")
	}
	// The next daemon.
	first.Close()
	daemonSide(t, i, handle("second"))
	for _, d := range []Daemon{one.d, two.d} {
		if b, err := d.Value(t.Context(), "who"); string(b) != "second" {
			t.Errorf("%s, %v", b, err)
		}
		d.Event(Event{Kind: Echo, Text: "x"})
		if e := <-events; e.Place != "second" {
			t.Errorf("%+v", e)
		}
	}
	for _, kind := range []EventKind{RuleDenied, Echo} { // the first ones do not hide the others
		for range 3 * noteBurst {
			two.d.Event(Event{Kind: kind})
		}
	}
	if _, err := two.d.Value(t.Context(), "who"); err != nil { // what was told before has come
		t.Error(err)
	}
	most, got := noteBurst+int(time.Since(begun)/time.Second), map[EventKind]int{}
	for range len(events) {
		got[(<-events).Kind]++
	}
	if got[RuleDenied] < noteBurst-1 || got[RuleDenied] > most || got[Echo] < noteBurst-2 || got[Echo] > most {
		t.Errorf("%v events", got)
	}
	i.line.Load().Close()
	if _, err := two.d.Value(t.Context(), "who"); !errors.Is(err, child.ErrGone) {
		t.Error(err)
	}
	two.d.Event(Event{Kind: Echo}) // it is lost
}

// TestValueHidden: no formatter shows a value.
func TestValueHidden(t *testing.T) {
	v := Value{Bytes: []byte(secret), Text: secret}
	if got := fmt.Sprintf("%v %+v %#v %s %q %x", v, v, v, v, v, &v); strings.Contains(got, secret) || strings.Contains(got, "733363") {
		t.Error(got)
	}
}
