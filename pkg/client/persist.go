package client

import (
	"context"
	"errors"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Notices are told when a stream waits for the daemon. Either may be nil.
type Notices struct {
	Lost func(error) // the connection broke, and the daemon does not answer
	Back func()      // the stream goes on
}

// How long to wait between two attempts to reach a daemon that went away. There is no
// event for one that is back.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = 2 * time.Second
	// pingLimit bounds one attempt.
	pingLimit = 10 * time.Second
	// barren is for how long a stream is tried again while the daemon answers and the
	// stream does not begin.
	barren = 30 * time.Second
)

// persist runs a stream that survives restarts of the daemon. It calls stream, which goes
// on where it was and calls up when its answer has begun, until that ends without an
// error, or for a reason that is not a broken connection, or ctx ends. While the daemon is
// away it waits, for as long as that takes.
//
// A stream whose first answer does not begin is not tried again: nothing is lost then.
func (d *daemon) persist(ctx context.Context, n Notices, stream func(up func()) error) error {
	return d.again(ctx, n, false, stream)
}

// Persist calls f again while it fails because the daemon is away.
func (c *Client) Persist(ctx context.Context, n Notices, f func() error) error {
	return c.again(ctx, n, true, func(func()) error { return f() })
}

// again is persist; joined says that stream had begun before.
func (d *daemon) again(ctx context.Context, n Notices, joined bool, stream func(up func()) error) error {
	told := false
	var since time.Time // the daemon answers, and the stream does not; zero: else
	up := func() {
		joined, since = true, time.Time{}
		if told && n.Back != nil {
			n.Back()
		}
		told = false
	}
	for wait := firstRetry; ; wait = min(2*wait, lastRetry) {
		began := time.Now()
		err := stream(up)
		if err == nil || ctx.Err() != nil || !joined || !broken(err) {
			return err
		}
		if since.IsZero() {
			since, wait = time.Now(), firstRetry
		} else if time.Since(since) > barren {
			return err
		}
		for d.reach(ctx) != nil && ctx.Err() == nil {
			since = time.Time{}
			if !told && n.Lost != nil {
				n.Lost(err)
			}
			told = true
			pause(ctx, wait)
			wait = min(2*wait, lastRetry)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if wait > firstRetry || time.Since(began) < firstRetry {
			pause(ctx, wait)
		}
	}
}

// broken reports whether a stream may go on when it is asked for again.
func broken(err error) bool { return errors.Is(err, ErrLost) || errs.Is(err, errs.Unavailable) }

// reach fails while the daemon does not answer.
func (d *daemon) reach(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, pingLimit)
	defer cancel()
	err := d.do(ctx, get("/version"), nil)
	if errs.Is(err, errs.Unavailable) || ctx.Err() != nil {
		return err
	}
	return nil // it answers, whatever that is
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
