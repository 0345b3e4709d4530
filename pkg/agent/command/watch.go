package command

import (
	"context"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/output"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// A watch is the reply that shows a command to its client as it runs. A client whose
// connection broke, because the daemon was restarted, comes back with the numbers of the
// bytes that it has.
//
//	pump ─▶ ring, marks ─▶ live ─▶ client
//	            └── since N ── catch up ──▶ client, which is live then
//
// Output goes to the ring and then to the client. A client that reads slowly slows the
// command down. For a client of frames that is gone, the command waits before it fills half
// of the ring, since the client may come back; but not for long.
type watch struct {
	// feed is held while output goes to ring and client, and while a client catches up,
	// so that no client misses a byte or gets one twice.
	feed  sync.Mutex
	marks output.Marks  // guarded by feed
	live  *reply.Stream // has caught up; guarded by feed
	left  int64         // number of the next byte when the client left; guarded by feed
	wait  chan struct{} // closed when nobody waits for that client any more; nil: nobody does; guarded by feed

	mu     sync.Mutex
	holder *reply.Stream // of the client that is there, or catches up; guarded by mu
	hold   *time.Timer   // closes the input of a client that does not come back; guarded by mu
}

// inputHold is how long the standard input of a command stays open for a client that
// sends it in parts and is gone: as long as a run's sandbox outlives its sandboxctl.
const inputHold = 10 * time.Minute

// outputHold is how long a command waits for a client that is gone: longer than a daemon
// takes to start.
const outputHold = time.Minute

// Watch shows c on s, the reply to the request that started it. Call it before Begin, and
// Follow afterwards.
func (c *Command) Watch(s *reply.Stream) {
	c.watch.live, c.watch.holder = s, s
}

// Follow serves a watching client until c has ended or the client is gone.
func (c *Command) Follow(s *reply.Stream, r *http.Request) {
	defer c.unwatch(s)
	s.Follow(r, c.Flushed(), func() { s.Finish(c.End().Exit(c.Started), c.End().Failure()) })
}

func (c *Command) unwatch(s *reply.Stream) {
	c.watch.feed.Lock()
	if c.watch.live == s {
		c.watch.live = nil
		if s.Frames() && c.Running() {
			c.awaitClient()
		}
	}
	c.watch.feed.Unlock()
	c.watch.mu.Lock()
	defer c.watch.mu.Unlock()
	if c.watch.holder != s {
		return
	}
	c.watch.holder = nil
	if c.Stdin != nil && c.Running() {
		c.watch.hold = time.AfterFunc(inputHold, func() { proc.Guarded(c.abandonInput) })
	}
}

// awaitClient makes output wait for a client that has just left. The caller holds feed.
func (c *Command) awaitClient() {
	_, c.watch.left = c.Output.Range()
	wait := make(chan struct{})
	c.watch.wait = wait
	time.AfterFunc(outputHold, func() {
		c.watch.feed.Lock()
		defer c.watch.feed.Unlock()
		if c.watch.wait == wait {
			c.goOn()
		}
	})
}

// goOn ends the waiting for a client. The caller holds feed.
func (c *Command) goOn() {
	if c.watch.wait != nil {
		close(c.watch.wait)
	}
	c.watch.wait = nil
}

// hold waits with n bytes of output for a client that is gone, if they do not fit into half
// of the ring: the other half has what may be lost with its connection. It waits for no
// process that is dead, whose output is what the pipe held. The caller holds feed.
func (c *Command) hold(n int) {
	for c.watch.wait != nil && c.Alive() {
		_, end := c.Output.Range()
		if end+int64(n)-c.watch.left <= c.Output.Limit()/2 {
			return
		}
		wait := c.watch.wait
		c.watch.feed.Unlock()
		select {
		case <-wait:
		case <-c.Died():
		}
		c.watch.feed.Lock()
	}
}

// claim makes s the reply of the client that is there. The one before is cut off: its
// connection broke, and nobody has noticed yet.
func (c *Command) claim(s *reply.Stream) {
	c.watch.mu.Lock()
	defer c.watch.mu.Unlock()
	if c.watch.hold != nil {
		c.watch.hold.Stop()
		c.watch.hold = nil
	}
	if old := c.watch.holder; old != nil {
		old.Detach() // under mu: its handler has not returned, and the connection is its own
	}
	c.watch.holder = s
}

// loseClient ends the reply to a client that will not come back: c waits for nobody.
func (c *Command) loseClient() {
	c.watch.mu.Lock()
	s := c.watch.holder
	if s != nil {
		s.Detach() // under mu: as in claim
	}
	c.watch.mu.Unlock()
	c.watch.feed.Lock()
	defer c.watch.feed.Unlock()
	if c.watch.live == s { // so that its handler, which returns later, does not wait for it
		c.watch.live = nil
	}
	c.goOn()
}

// keep takes output of c: into the ring, and to the client that is there.
func (c *Command) keep(stream byte, framed []byte, last bool) {
	b := framed[agent.FrameHeader:]
	c.watch.feed.Lock()
	defer c.watch.feed.Unlock()
	c.hold(len(b))
	c.Output.Write(b) //nolint:errcheck // never fails
	c.watch.marks.Add(stream, len(b))
	if !last && c.watch.live != nil {
		c.watch.live.Framed(stream, framed)
	}
}

// forgetDetails frees what only a client that comes back, or asks for times, needs. A
// client that comes back just now needs it still.
func (c *Command) forgetDetails() {
	c.Output.ForgetTimes()
	if c.watch.feed.TryLock() {
		c.watch.marks.Forget()
		c.watch.feed.Unlock()
	}
}

// frames is GET /command/{id}/frames: the client comes back. The first frame says with
// which byte of each stream the reply goes on. Bytes that the ring no longer has are
// skipped.
func frames(w http.ResponseWriter, r *http.Request, c *Command) error {
	var since [2]int64
	for i, name := range []string{"stdout", "stderr"} {
		v := r.URL.Query().Get(name)
		if v == "" {
			continue
		}
		var err error
		if since[i], err = strconv.ParseInt(v, 10, 64); err != nil || since[i] < 0 {
			return reply.BadRequest("%s %.32q is not a number of bytes", name, v)
		}
	}
	s := reply.NewStream(w, r)
	if c.Owner != nil || !s.Frames() {
		return reply.BadRequest("only a command can be followed here, and only with Accept: %s", agent.FramesType)
	}
	c.claim(s)
	if err := c.catchUp(s, r, since); err != nil {
		c.unwatch(s)
		return err
	}
	c.Follow(s, r)
	return nil
}

// catchUp sends s the output since a byte of each stream; then s is live. The command
// waits meanwhile if it writes.
func (c *Command) catchUp(s *reply.Stream, r *http.Request, since [2]int64) error {
	c.watch.feed.Lock()
	defer c.watch.feed.Unlock()
	if end := c.watch.marks.End(); since[0] > end[0] || since[1] > end[1] {
		return reply.BadRequest("command %s has written %d and %d bytes, fewer than were asked for", c.ID, end[0], end[1])
	}
	stop := context.AfterFunc(r.Context(), func() { proc.Guarded(s.Detach) }) // a write that hangs is cut off
	defer stop()
	from, _ := c.Output.Range()
	pieces, first := c.watch.marks.Since(since, from)
	s.BeginWith(agent.FrameInit{ID: c.ID, Resumes: true, Stdout: first[0], Stderr: first[1]})
	for _, p := range pieces {
		if _, err := c.Output.Copy(streamWriter{s, p.Stream}, p.Off, p.End); err != nil {
			break // it never fails; a client that is gone takes all
		}
	}
	s.Flush()
	c.watch.live = s
	c.goOn()
	return nil
}

// streamWriter writes to one stream of a reply.
type streamWriter struct {
	s      *reply.Stream
	stream byte
}

func (w streamWriter) Write(b []byte) (int, error) {
	w.s.Output(w.stream, b)
	return len(b), nil
}
