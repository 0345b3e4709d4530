package server

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/files"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// maxSessions bounds the shells that are kept for clients who may never come
// back; each has some megabytes.
const maxSessions = 1024

// sessions are those of this sandbox.
type sessions struct {
	mu   sync.Mutex
	made uint64
	byID map[string]*session
}

// add makes ses known, and what runs in it recognisable, or reports that there
// are too many.
func (ss *sessions) add(ses *session) bool {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if len(ss.byID) >= maxSessions {
		return false
	}
	if ss.byID == nil {
		ss.byID = map[string]*session{}
	}
	if ss.made++; ss.made == 1 {
		ss.made = rand.Uint64N(sessionMarker >> sessionShift) // as lastMarker
	}
	ses.tag = sessionMarker | ss.made<<sessionShift&(sessionMarker-1)
	ss.byID[ses.id] = ses
	return true
}

func (ss *sessions) get(id string) *session {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.byID[id]
}

func (ss *sessions) remove(id string) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	delete(ss.byID, id)
}

func noSession(id string) error {
	return reply.Fail(http.StatusNotFound, reply.NoContext, "no session has the id %.64q", id)
}

func (s *Server) sessionRoutes(path string) reply.Methods {
	rest, ok := strings.CutPrefix(path, "/session/")
	if !ok {
		return nil
	}
	with := func(id string, h func(http.ResponseWriter, *http.Request, *session) error) reply.Handler {
		return func(w http.ResponseWriter, r *http.Request) error {
			ses := s.sessions.get(id)
			if ses == nil {
				return noSession(id)
			}
			return h(w, r, ses)
		}
	}
	id, verb, found := strings.Cut(rest, "/")
	switch {
	case !found:
		return reply.Methods{"DELETE": with(id, s.deleteSession)}
	case verb == "run":
		return reply.Methods{"POST": with(id, s.runInSession)}
	}
	return nil
}

// makeSession is POST /session. The shell is started at once, so that what is
// wrong with it is said here and the first run need not wait for it.
func (s *Server) makeSession(w http.ResponseWriter, r *http.Request) error {
	var req agent.SessionRequest
	if err := reply.ReadOptionalJSON(w, r, &req); err != nil {
		return err
	}
	if s.stopping.Load() {
		return reply.ErrStopping
	}
	c := &agent.CommandRequest{Command: ":", Cwd: req.Cwd}
	if err := checkRequest(c); err != nil {
		return reply.BadRequest("%v", err)
	}
	env, err := s.commandEnv(c, s.user)
	if err != nil {
		return reply.BadRequest("%v", err)
	}
	ses := &session{id: command.NewID(), env: env}
	proc.FileTurns.Do(func() { err = s.settle(ses, req.Cwd) })
	if err != nil {
		return err
	}
	if !s.sessions.add(ses) {
		return reply.Fail(http.StatusTooManyRequests, reply.Failed, "this sandbox has %d sessions: end some, by DELETE /session/{id}", maxSessions)
	}
	if _, err := s.living(ses); err != nil {
		s.sessions.remove(ses.id)
		return reply.Fail(http.StatusInternalServerError, reply.Failed, "start the shell of a session: %v", err)
	}
	return reply.JSON(w, http.StatusOK, agent.SessionCreated{SessionID: ses.id})
}

// settle finds the shell of a session and the directory it begins in, which is
// made if need be.
func (s *Server) settle(ses *session, cwd string) (err error) {
	if ses.path = findShell(ses.env["PATH"]); ses.path == "" {
		return reply.BadRequest("this image has neither bash nor sh, so it has no sessions: use POST /command with argv")
	}
	if cwd != "" {
		dir, err := expandFrom(s.workdir, cwd, ses.env)
		if err != nil {
			return reply.BadRequest("%v", err)
		}
		if err := s.files.MakeDir(dir); err != nil {
			return reply.BadRequest("cwd: %v", err)
		}
	}
	if ses.dir, _, err = s.workingDir(cwd, ses.env); err != nil {
		return reply.BadRequest("%v", err)
	}
	ses.last.dir = ses.dir
	return nil
}

// deleteSession is DELETE /session/{id}: what runs in it is hung up, and all
// that it has started is killed.
func (s *Server) deleteSession(w http.ResponseWriter, _ *http.Request, ses *session) error {
	s.sessions.remove(ses.id)
	s.removeSession(ses)
	return reply.OK(w)
}

// runInSession is POST /session/{id}/run.
func (s *Server) runInSession(w http.ResponseWriter, r *http.Request, ses *session) error {
	var req agent.SessionRun
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	if err := checkRequest(&agent.CommandRequest{Command: req.Command, Cwd: req.Cwd, Timeout: req.Timeout}); err != nil {
		return reply.BadRequest("%v", err)
	}
	if s.stopping.Load() {
		return reply.ErrStopping
	}
	run := &run{over: make(chan struct{})}
	var once sync.Once
	cut := make(chan struct{})
	if err := ses.begin(run, func() { once.Do(func() { close(cut) }) }); err != nil {
		return err
	}
	line := runLine{command: req.Command}
	if req.Cwd != "" {
		var err error
		if line.cwd, err = s.cwdOfRun(ses, req.Cwd); err != nil {
			ses.end(command.Ending{})
			return err
		}
	}
	stream := reply.NewStream(w, r)
	run.started = time.Now()
	stream.Begin(ses.id)
	go proc.Guarded(func() { s.execute(ses, line, command.Milliseconds(req.Timeout), cut, stream) })
	stream.Follow(r, run.over, func() { stream.Finish(run.end.Exit(run.started), run.end.Failure()) })
	return nil
}

// cwdOfRun checks the directory of one run. A relative one begins where the
// shell is.
func (s *Server) cwdOfRun(ses *session, cwd string) (string, error) {
	ses.mu.Lock()
	from := cmp.Or(ses.last.dir, ses.dir)
	ses.mu.Unlock()
	dir, err := expandFrom(from, cwd, ses.env)
	if err == nil {
		proc.BriefTurns.Do(func() { _, err = files.Physical(dir) })
		if err != nil {
			err = fmt.Errorf("cwd: %w", err)
		}
	}
	if err != nil {
		return "", reply.BadRequest("%v", err)
	}
	return dir, nil
}
