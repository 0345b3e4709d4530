package interpreter

import (
	"fmt"
	"time"
)

// A Listener gets the output and the results of a call. Its methods may block: then the
// code waits too.
type Listener interface {
	Output(stream byte, b []byte) // 1: standard output, 2: standard error
	Result(formats map[string]string)
}

// A Run is one call of code.
type Run struct {
	Count   int // calls of its context, with this one
	Started time.Time

	c        *Context
	l        Listener      // with these, guarded by Context.mu
	stopping bool          // somebody interrupts it
	sent     bool          // the driver has it
	ending   bool          // it is being finished
	begun    chan struct{} // closed when the driver has begun with it: then it can be interrupted
	answered chan struct{} // closed when the code has ended
	done     chan struct{}
	err      *Error
	ended    time.Time
}

// Done is closed when the call has ended and its listener has got everything.
func (r *Run) Done() <-chan struct{} { return r.done }

// Outcome is valid when Done is closed: how the code failed, or nil, and when it
// ended.
func (r *Run) Outcome() (*Error, time.Time) { return r.err, r.ended }

// current is the call that runs, or nil.
func (c *Context) current() *Run {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.run
}

// begin notes that the driver has begun with a call.
func (c *Context) begin(r *Run) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.sent && !r.began() {
		close(r.begun)
	}
}

func (r *Run) began() bool {
	select {
	case <-r.begun:
		return true
	default:
		return false
	}
}

// listener is the listener of the call that runs, or nil.
func (c *Context) listener() Listener {
	r := c.current()
	if r == nil || !r.began() {
		return nil
	}
	return r.l
}

// Claim reserves c for the next call, or fails with ErrBusy or ErrDied.
func (c *Context) Claim() (*Run, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.dead:
		return nil, gone(c.ID, c.died)
	case c.run != nil:
		return nil, fmt.Errorf("%w: context %s is running other code; wait until it ends, "+
			"interrupt it with DELETE /code?id=%s, or create another context",
			ErrBusy, c.ID, c.ID)
	}
	c.count++
	c.run = &Run{Count: c.count, c: c, begun: make(chan struct{}), answered: make(chan struct{}), done: make(chan struct{})}
	return c.run, nil
}

// Start gives the code to the driver.
func (r *Run) Start(code string, l Listener) {
	c := r.c
	c.mu.Lock()
	r.l, r.Started = l, time.Now()
	dead, late := c.dead, c.late
	c.late = false
	c.mu.Unlock()
	switch {
	case dead:
		c.finish(c.lastWords())
	case late:
		c.host.Go(func() {
			if c.settle() {
				r.send(code)
			}
		})
	default:
		r.send(code)
	}
}

// settle waits until the driver has handled every SIGINT that it was sent, and reports
// whether it has. A driver that was not scheduled handles a signal late, which would
// stop the next call or print something there. A bash that was forking has thrown away
// its code, but waits for the child before it goes on. So settle interrupts it again,
// with a longer pause each time. An answer to a question from before the last interrupt
// does not count.
func (c *Context) settle() bool {
	limit := time.NewTimer(c.grace)
	defer limit.Stop()
	since := time.Now()
	pause := c.l.again
	again := time.NewTimer(pause)
	defer again.Stop()
	for {
		c.settles++
		select {
		case c.writes <- c.l.settle(c.secret, c.settles):
		default: // it does not read
		}
		for asked := true; asked; {
			select {
			case n := <-c.settled:
				if n == c.settles {
					return true
				}
			case <-again.C:
				c.signal(since)
				pause *= 2
				again.Reset(pause)
				asked = false
			case <-limit.C:
				c.kill(fmt.Sprintf("tasks of its interrupted code did not stop within %v", c.grace))
				return false
			case <-c.done:
				return false // watch ends the call
			}
		}
	}
}

// send gives the driver the code, and the listener what it prints from now on.
func (r *Run) send(code string) {
	c := r.c
	c.drain()                     // output of earlier code
	for _, p := range c.out[:2] { // nobody sees the terminal
		p.listen(r.l.Output)
	}
	c.mu.Lock()
	r.sent = true
	seed := c.seed
	c.seed = nil
	c.mu.Unlock()
	if seed != nil {
		c.writes <- c.l.reseed(c.secret, seed)
	}
	if !c.l.begins {
		c.begin(r)
	}
	c.writes <- c.l.request(c.secret, code, r.Count)
}

// finish ends the call that runs, if there is one.
func (c *Context) finish(err *Error) {
	c.mu.Lock()
	r := c.run
	if r == nil || r.l == nil || r.ending {
		c.mu.Unlock()
		return
	}
	r.ending = true
	r.err, r.ended = err, time.Now()
	close(r.answered)
	c.mu.Unlock()
	c.drain()
	for _, p := range c.out {
		p.listen(nil)
	}
	c.mu.Lock()
	c.run = nil
	c.mu.Unlock()
	close(r.done)
}

// startGrace is how many graces a driver that reports the beginning of code has for that, if the code is to
// stop: without a CPU it takes long, and is no worse for it.
const startGrace = 5

// Interrupt asks the running code to stop, and kills the context if it does not stop within the grace of
// its beginning, as far as the driver reports that (language.begins). It returns when the code has stopped,
// or at once if none runs.
func (c *Context) Interrupt() {
	c.mu.Lock()
	r := c.run
	first := r != nil && !r.stopping
	if first {
		r.stopping = true
	}
	c.mu.Unlock()
	switch {
	case r == nil:
		return
	case !first:
		select {
		case <-r.answered:
		case <-c.done:
		}
		return
	}
	since := time.Now()
	t := time.NewTimer(startGrace * c.grace)
	defer t.Stop()
	var again <-chan time.Time
	begun := r.begun
	for {
		select {
		case <-begun:
			begun, since = nil, time.Now()
			t.Reset(c.grace)
			c.interrupt(r, since)
			if c.l.again > 0 {
				tick := time.NewTicker(c.l.again)
				defer tick.Stop() //nolint:gocritic // this case is met once
				again = tick.C
			}
		case <-again:
			c.interrupt(r, since)
		case <-r.answered:
			return
		case <-c.done:
			return
		case <-t.C:
			why := fmt.Sprintf("its code did not stop within %v of an interrupt", c.grace)
			if begun != nil {
				if r.began() {
					continue // just now
				}
				why = fmt.Sprintf("its interpreter did not begin with the code within %v of an interrupt", startGrace*c.grace)
			}
			c.kill(why)
			<-c.done
			return
		}
	}
}

// interrupt tells the driver to stop a call, unless the call has stopped: a later
// message might stop the next call. The driver does not get the next call meanwhile.
func (c *Context) interrupt(r *Run, since time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.run != r || r.ending {
		return
	}
	if c.l.settle != nil {
		c.late = true
		c.signal(since)
	}
	if c.l.interrupt != nil {
		select {
		case c.writes <- c.l.interrupt(c.secret, r.Count):
		default: // it does not read
		}
	}
}

// signal interrupts the driver by a signal. A driver with urge may react late, or never
// if its code has removed the trap: after a third of the grace it gets a SIGINT all the
// same. After two thirds a SIGQUIT ends what no SIGINT ends, such as a subshell of bash
// that hangs as bashUrged describes. Bash itself and its background jobs ignore a
// SIGQUIT.
func (c *Context) signal(since time.Time) {
	past := time.Since(since)
	if c.l.urge && past < c.grace/3 {
		c.proc.Urge()
		return
	}
	c.proc.Interrupt()
	if c.l.urge && past > c.grace*2/3 {
		c.proc.Quit()
	}
}
