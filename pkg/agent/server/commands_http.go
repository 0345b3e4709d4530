package server

import (
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// runCommand is POST /command.
func (s *Server) runCommand(w http.ResponseWriter, r *http.Request) error {
	var req agent.CommandRequest
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	return s.startCommand(w, r, &req)
}

// startCommand starts a command and follows it, unless it is in the background.
func (s *Server) startCommand(w http.ResponseWriter, r *http.Request, req *agent.CommandRequest) error {
	l, err := s.check(req)
	if err != nil {
		return err
	}
	if s.stopping.Load() {
		return reply.ErrStopping
	}
	content := req.Command
	if content == "" {
		content = strings.Join(req.Argv, " ")
	}
	pipes := 2
	if req.Background {
		pipes = 1 // one pipe keeps the order of both streams
	}
	stream := reply.NewStream(w, r)
	ooms := int64(-1)
	if req.Background {
		ooms = oomKills(r)
	}
	c := s.handOver(req, l, ooms)
	var startErr error
	if c == nil {
		if err := l.find(req); err != nil {
			return err
		}
		var ends []int
		if c, ends, err = s.newCommand(newID(), content, pipes); err != nil {
			return reply.Fail(http.StatusInternalServerError, reply.Failed, "make pipes for a command: %v", err)
		}
		c.forget, c.ooms = req.Forget, ooms
		startErr = s.launch(c, l, milliseconds(req.Timeout), req.Stdin, ends)
	}
	if l.fit != nil {
		go proc.Guarded(func() { s.refillAfter(c) })
	}
	if !req.Background {
		c.sink = stream
	}
	// The process runs while the first events are on their way.
	stream.Begin(c.id)
	if startErr != nil {
		stream.Finish(c.end.exit(c.started), c.end.failure())
		return nil
	}
	c.begin()
	if req.Background {
		stream.Background()
		return nil
	}
	stream.Follow(r, c.flushed, func() { stream.Finish(c.end.exit(c.started), c.end.failure()) })
	return nil
}

// milliseconds is a time that a client may give, cut to what fits.
func milliseconds(n int64) time.Duration {
	return time.Duration(min(n, 1<<62/int64(time.Millisecond))) * time.Millisecond
}

// interruptCommand is DELETE /command.
func (s *Server) interruptCommand(w http.ResponseWriter, r *http.Request) error {
	id := r.URL.Query().Get("id")
	if id == "" {
		return reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter id is missing: which command is to be interrupted?")
	}
	if id == agent.EntrypointID {
		return reply.Fail(http.StatusInternalServerError, reply.Failed, "the entrypoint is the sandbox: delete the sandbox, or signal the entrypoint")
	}
	if ses := s.sessions.get(id); ses != nil {
		if !ses.interrupt() {
			return reply.Fail(http.StatusInternalServerError, reply.Failed, "session %s runs nothing", id)
		}
		return reply.OK(w)
	}
	c := s.commands.get(id)
	if c == nil {
		return reply.Fail(http.StatusInternalServerError, reply.Failed, "no command has the id %.64q", id)
	}
	if s.interrupt(r.Context(), c, syscall.SIGTERM) != nil {
		return reply.Fail(http.StatusInternalServerError, reply.Failed, "command %s has ended already", id)
	}
	return reply.OK(w)
}

func (s *Server) withCommand(id string, h func(w http.ResponseWriter, r *http.Request, c *command) error) reply.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		c := s.commands.get(id)
		if c == nil {
			return reply.Fail(http.StatusNotFound, reply.BadBody, "no command has the id %.64q; of finished ones the last %d are remembered", id, rememberFinished)
		}
		return h(w, r, c)
	}
}

func (s *Server) commandStatus(w http.ResponseWriter, r *http.Request, c *command) error {
	c.blame(oomKills(r))
	return reply.JSON(w, http.StatusOK, c.status())
}

// commandLogs is GET /command/{id}/logs. The cursor is the number of a byte of
// the output; what the ring has forgotten is skipped. With follow=true the
// reply goes on as the output does, until the command has ended; its cursor
// header then tells the number of its first byte.
func (s *Server) commandLogs(w http.ResponseWriter, r *http.Request, c *command) error {
	q := r.URL.Query()
	off := int64(0)
	if q := q.Get("cursor"); q != "" {
		var err error
		if off, err = strconv.ParseInt(q, 10, 64); err != nil || off < 0 {
			return reply.BadRequest("cursor %.32q is not a number of bytes", q)
		}
	}
	follow := false
	if q := q.Get("follow"); q != "" {
		var err error
		if follow, err = strconv.ParseBool(q); err != nil {
			return reply.BadRequest("follow %.32q is neither true nor false", q)
		}
	}
	from, end := c.out.Range()
	off = max(off, from)
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if follow && r.Method != http.MethodHead {
		w.Header().Set(agent.CursorHeader, strconv.FormatInt(off, 10))
		c.out.Follow(r.Context(), w, http.NewResponseController(w).Flush, c.flushed, off)
		return nil
	}
	w.Header().Set(agent.CursorHeader, strconv.FormatInt(max(end, off), 10))
	if off >= end || r.Method == http.MethodHead {
		return reply.OK(w)
	}
	c.out.Copy(w, off, end) //nolint:errcheck // the client is gone
	return nil
}

// commandStdin is POST /command/{id}/stdin: the body becomes the command's
// standard input, which ends where the body ends, or where it breaks off: a
// command whose client is gone would wait forever.
func (s *Server) commandStdin(w http.ResponseWriter, r *http.Request, c *command) error {
	switch {
	case c.stdin == nil && c.proc == nil:
		return reply.Fail(http.StatusConflict, reply.Failed, "command %s could not be started, so nobody reads its standard input", c.id)
	case c.stdin == nil:
		return reply.BadRequest(`command %s reads /dev/null: start it with "stdin": true`, c.id)
	}
	if c.stdinBusy.Swap(true) {
		return reply.Fail(http.StatusConflict, reply.Failed, "the standard input of command %s was or is being sent by another request", c.id)
	}
	defer c.stdin.Close()
	rc := http.NewResponseController(w)
	rc.EnableFullDuplex() //nolint:errcheck // only saves waiting for the rest of the body
	over := make(chan struct{})
	defer close(over)
	go proc.Guarded(func() { // the client may be a terminal at which nobody types: wake the read
		select {
		case <-c.died():
			rc.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // then it reads on in vain
		case <-over:
		}
	})
	_, err := io.Copy(onlyWriter{c.stdin}, r.Body)
	switch {
	case err == nil:
	case !c.alive(), errors.Is(err, syscall.EPIPE), errors.Is(err, os.ErrClosed):
		w.Header().Set("Connection", "close") // the command wants no more: the rest of the body is nobody's
	default:
		return reply.BadRequest("the standard input of command %s broke off: %v", c.id, err)
	}
	return reply.OK(w)
}

// onlyWriter hides the file's ReadFrom: it would splice from a connection whose
// reads must stay interruptible.
type onlyWriter struct{ io.Writer }

func (c *command) alive() bool {
	select {
	case <-c.died():
		return false
	default:
		return true
	}
}

// signalCommand is POST /command/{id}/signal.
func (s *Server) signalCommand(w http.ResponseWriter, r *http.Request, c *command) error {
	name := r.URL.Query().Get("signal")
	if name == "" {
		return reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter signal is missing, as in signal=SIGINT")
	}
	sig := proc.SignalNumber(name)
	if sig == 0 {
		return reply.BadRequest("%.32q is not a signal; use a name as SIGINT, or its number", name)
	}
	if sig == syscall.SIGKILL {
		c.byHand.Store(true)
	}
	if c.proc.Signal(sig, true) != nil {
		return reply.Fail(http.StatusConflict, reply.Failed, "command %s has ended already", c.id)
	}
	return reply.OK(w)
}
