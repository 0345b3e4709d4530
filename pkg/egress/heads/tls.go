package heads

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// The alerts that a guest gets (RFC 8446, section 6): fatal, and why.
var (
	alertDenied    = []byte{recordAlert, 3, 3, 0, 2, 2, 49}
	alertMalformed = []byte{recordAlert, 3, 3, 0, 2, 2, 50}
)

// runTLS serves a flow that begins with a ClientHello, of which b has come.
func (f *flow) runTLS(b []byte, up *upstream) {
	if up != nil { // where the server may speak first, nothing has set a limit
		f.guest.SetReadDeadline(time.Now().Add(HeadLimit)) //nolint:errcheck // shows in the read
	}
	b, sni, err := f.hello(b)
	switch {
	case errors.Is(err, errHello), errors.Is(err, errLarge):
		f.told(Part, "")
		f.drop(up, alertMalformed)
		return
	case err != nil: // it does not come
		f.told(Part, "")
		f.drop(up, nil)
		return
	}
	name := PlainName(sni)
	if up != nil {
		_, err = f.open(context.Background(), Check, name)
	} else {
		up, err = f.open(context.Background(), TLS, name)
	}
	if err != nil {
		r, ok := errors.AsType[*refusal](err)
		if ok && r.Result == Inspect && f.s.inspector != nil && name != "" {
			f.inspect(b, up, name)
			return
		}
		if ok && r.Result == Denied {
			f.drop(up, alertDenied)
			return
		}
		f.drop(up, nil)
		return
	}
	_, used, _ := handshake(b) // it was read above
	f.pass(b[:used], up, nil, &watch{f: f, up: up, sni: sni, early: b[used:]})
}

// hello reads until the ClientHello is there, and returns the name that it has.
func (f *flow) hello(b []byte) ([]byte, string, error) {
	for {
		sni, err := serverName(b)
		if !errors.Is(err, errMore) {
			return b, sni, err
		}
		if len(b) > 2*MaxHead {
			return b, "", errLarge
		}
		if b, err = f.read(b); err != nil {
			return b, "", err
		}
	}
}

// told tells the daemon of a flow that goes no further.
func (f *flow) told(kind Kind, name string) {
	up, err := f.open(context.Background(), kind, name)
	if err == nil && up != nil {
		up.Close()
	}
}

// drop ends a flow with an alert, or without a word.
func (f *flow) drop(up *upstream, alert []byte) {
	if up != nil {
		up.Close()
	}
	if alert == nil {
		f.reset()
		return
	}
	f.farewell(alert)
}

// A watch looks for a second ClientHello, for which the server may ask by its first
// message. A server may take the name from that one, so it must be the same.
type watch struct {
	f   *flow
	up  *upstream
	sni string
	// early is what has come behind the first one.
	early []byte
	// asked says what the server has said: nothing yet, that it asks, that it does not. It
	// is set before the guest gets what the server said.
	asked atomic.Int32
}

const (
	unsaid = iota
	asks
	asksNot
)

// answer passes the first bytes of the server, when it can say whether they ask for a
// second ClientHello.
func (w *watch) answer() error {
	b := make([]byte, 0, 4<<10)
	for {
		n, err := w.up.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		again, ok := asksAgain(b)
		switch {
		case ok && again:
			w.asked.Store(asks)
		case ok || n == 0:
			w.asked.Store(asksNot)
		default:
			continue
		}
		if len(b) > 0 {
			if _, werr := w.f.guest.Write(b); werr != nil {
				return werr
			}
		}
		if n > 0 {
			return nil
		}
		return err
	}
}

// errSecond: the second ClientHello is not for the same name.
var errSecond = errors.New("the second ClientHello is for another name")

// second passes records of the guest until there can be no second ClientHello any more. A
// guest may send early data before it.
func (w *watch) second() error {
	b := w.early
	for {
		if w.asked.Load() == asksNot {
			return w.rest(b)
		}
		used, last, err := w.record(b)
		if errors.Is(err, errMore) {
			if b, err = w.f.read(b); err != nil {
				return errors.Join(w.rest(b), err)
			}
			continue
		}
		if err == nil && last {
			return w.rest(b)
		}
		if err == nil {
			err = w.rest(b[:used])
		}
		if err != nil {
			return err
		}
		b = append(b[:0], b[used:]...)
	}
}

func (w *watch) rest(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	_, err := w.up.Write(b)
	return err
}

// record looks at the first record of b, or at the records of a ClientHello. last: no second
// ClientHello may follow.
func (w *watch) record(b []byte) (used int, last bool, err error) {
	if len(b) < recordHeader {
		return 0, false, errMore
	}
	if b[0] == recordHandshake {
		msg, used, err := handshake(b)
		if err != nil {
			return 0, false, err
		}
		if msg[0] != typeClientHello { // TLS 1.2 goes on without one
			return used, true, nil
		}
		name, err := nameIn(msg[4:])
		if err == nil && name != w.sni {
			w.f.told(Check, PlainName(name))
			err = errSecond
		}
		return used, true, err
	}
	n := recordHeader + int(b[3])<<8 + int(b[4])
	if n > recordHeader+maxRecord+256 { // RFC 8446, section 5.2
		return 0, false, errHello
	}
	if len(b) < n {
		return 0, false, errMore
	}
	return n, false, nil
}
