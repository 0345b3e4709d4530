package terminate

import (
	"context"
	"errors"
	"time"
)

// A Daemon is what a Judge may ask, and tell, the daemon that has the line at that moment. Its
// methods may be called concurrently.
type Daemon interface {
	// Value asks for the value of a credential by its name, which the Judge's configuration has
	// without one. Whoever asks for the same name meanwhile gets the same answer; nothing is
	// kept: the daemon does that, and so knows when a value has changed. The answer comes within
	// ten seconds, or there is an error. No error has anything of a value in it.
	Value(ctx context.Context, credential string) ([]byte, error)
	// Event tells of an Event. What cannot be printed, and what is too long, is cut. If there
	// are more events than Notes let pass, the others are lost.
	Event(e Event)
	// Replaced reports whether another Config is in use: what the Judge has is old, and no more of
	// it may leave.
	Replaced() bool
}

// A daemon is the Daemon of one Judge.
type daemon struct {
	i      *inspector
	conf   *settings // with the Judge
	values values
}

func newDaemon(i *inspector, conf *settings) *daemon {
	d := &daemon{i: i, conf: conf}
	d.values = values{ask: d.ask, turns: i.turns, open: map[string]*asked{}}
	return d
}

// Value returns the value of a credential.
func (d *daemon) Value(ctx context.Context, credential string) ([]byte, error) {
	return d.values.of(ctx, credential)
}

func (d *daemon) ask(ctx context.Context, credential string) ([]byte, error) {
	if _, err := ParseValueRequest([]byte(credential)); err != nil {
		return nil, err
	}
	m, err := d.i.line.Load().Call(ctx, KindValue, []byte(credential), nil)
	if err != nil {
		return nil, err
	}
	v, err := ParseValue(m.Body)
	if err == nil && len(v.Bytes) == 0 {
		err = errors.New(v.Text)
	}
	return v.Bytes, err
}

// Event tells the daemon of an event.
func (d *daemon) Event(e Event) {
	notes := &d.i.events
	if e.Kind.OfSecret() {
		notes = &d.i.secrets
	}
	if notes.May(time.Now()) {
		d.i.line.Load().Tell(KindEvent, e.cut().Append(nil), nil) //nolint:errcheck // fails if the daemon is gone
	}
}

// Replaced reports whether another Config is in use.
func (d *daemon) Replaced() bool { return d.conf.replaced() }
