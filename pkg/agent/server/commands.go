package server

import (
	"net/http"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
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
		ooms = command.OOMKills(r)
	}
	c := s.ahead.HandOver(req, &l.offer, ooms)
	var startErr error
	if c == nil {
		if err := l.find(req); err != nil {
			return err
		}
		var ends []int
		if c, ends, err = s.commands.New(command.NewID(), content, pipes); err != nil {
			return reply.Fail(http.StatusInternalServerError, reply.Failed, "make pipes for a command: %v", err)
		}
		c.Forget, c.Output.Small, c.OOMKills = req.Forget, req.Forget, ooms // forgotten with it: no file
		startErr = s.commands.Start(c, &l.Launch, command.Milliseconds(req.Timeout), req.Stdin, ends)
	}
	if l.offer.Fit != nil {
		go proc.Guarded(func() { s.ahead.RefillAfter(c) })
	}
	if !req.Background && startErr == nil {
		c.Watch(stream)
	}
	// The process runs while the first events are on their way.
	stream.BeginWith(agent.FrameInit{ID: c.ID, Resumes: !req.Background})
	if startErr != nil {
		stream.Finish(c.End().Exit(c.Started), c.End().Failure())
		return nil
	}
	c.Begin()
	if req.Background {
		stream.Background()
		return nil
	}
	c.Follow(stream, r)
	return nil
}

// interruptCommand is DELETE /command.
func (s *Server) interruptCommand(w http.ResponseWriter, r *http.Request) error {
	id := r.URL.Query().Get("id")
	if id == "" {
		return reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter id is missing: use the id of the command to interrupt")
	}
	if id == agent.EntrypointID {
		return reply.Fail(http.StatusInternalServerError, reply.Failed,
			"the entrypoint cannot be interrupted: delete the sandbox, or send the entrypoint a signal")
	}
	if known, ran := s.sessions.Interrupt(id); known {
		if !ran {
			return reply.Fail(http.StatusInternalServerError, reply.Failed, "session %s runs no command", id)
		}
		return reply.OK(w)
	}
	c := s.commands.Get(id)
	if c == nil {
		return reply.Fail(http.StatusInternalServerError, reply.Failed, "no command has the id %.64q", id)
	}
	if s.commands.Interrupt(r.Context(), c, syscall.SIGTERM) != nil {
		return reply.Fail(http.StatusInternalServerError, reply.Failed, "command %s has ended already", id)
	}
	return reply.OK(w)
}
