package shell

import (
	"cmp"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// maxSessions bounds the shells that are kept for clients who may never come
// back; each has some megabytes.
const maxSessions = 1024

// Sessions are the sessions of this sandbox. Make them with NewSessions.
type Sessions struct {
	host Host

	mu   sync.Mutex
	made uint64
	byID map[string]*session
}

// NewSessions makes none yet.
func NewSessions(h Host) *Sessions { return &Sessions{host: h} }

// add registers ses and gives its processes their markers, or reports that there are
// too many sessions.
func (ss *Sessions) add(ses *session) bool {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if len(ss.byID) >= maxSessions {
		return false
	}
	if ss.byID == nil {
		ss.byID = map[string]*session{}
	}
	if ss.made++; ss.made == 1 {
		ss.made = rand.Uint64N(sessionMarker >> sessionShift) // as in proc.Start
	}
	ses.tag = sessionMarker | ss.made<<sessionShift&(sessionMarker-1)
	ss.byID[ses.id] = ses
	return true
}

func (ss *Sessions) get(id string) *session {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.byID[id]
}

func (ss *Sessions) forget(id string) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	delete(ss.byID, id)
}

// Remove ends a session and all that it has started. It reports false if there is none.
func (ss *Sessions) Remove(id string) bool {
	ses := ss.get(id)
	if ses == nil {
		return false
	}
	ss.forget(id)
	ses.remove()
	return true
}

// Interrupt ends the run of a session. It reports whether there is such a session, and whether
// it ran something.
func (ss *Sessions) Interrupt(id string) (known, ran bool) {
	ses := ss.get(id)
	if ses == nil {
		return false, false
	}
	return true, ses.interrupt()
}

func noSession(id string) error {
	return reply.Fail(http.StatusNotFound, reply.NoContext, "no session has the id %.64q", id)
}

// Routes returns the handlers of a path, or nil if it is none of sessions.
func (ss *Sessions) Routes(path string) reply.Methods {
	if path == "/session" {
		return reply.Methods{"POST": ss.make}
	}
	rest, ok := strings.CutPrefix(path, "/session/")
	if !ok {
		return nil
	}
	with := func(id string, h func(http.ResponseWriter, *http.Request, *session) error) reply.Handler {
		return func(w http.ResponseWriter, r *http.Request) error {
			ses := ss.get(id)
			if ses == nil {
				return noSession(id)
			}
			return h(w, r, ses)
		}
	}
	id, verb, found := strings.Cut(rest, "/")
	switch {
	case !found:
		return reply.Methods{"DELETE": with(id, ss.delete)}
	case verb == "run":
		return reply.Methods{"POST": with(id, ss.run)}
	}
	return nil
}

// make is POST /session. It starts the shell at once, so that this answer has the
// shell's errors and the first run need not wait.
func (ss *Sessions) make(w http.ResponseWriter, r *http.Request) error {
	var req agent.SessionRequest
	if err := reply.ReadOptionalJSON(w, r, &req); err != nil {
		return err
	}
	if ss.host.Stopping() {
		return reply.ErrStopping
	}
	if err := command.Check(&agent.CommandRequest{Command: ":", Cwd: req.Cwd}); err != nil {
		return reply.BadRequest("%v", err)
	}
	env, err := ss.host.Guest.Env()
	if err != nil {
		return reply.BadRequest("%v", err)
	}
	var path, dir string
	proc.FileTurns.Do(func() { path, dir, err = ss.settle(req.Cwd, env) })
	if err != nil {
		return err
	}
	id, err := ss.Open(path, env, dir)
	if err != nil {
		return err
	}
	// A client that has gone, or whose daemon has, would never remove it.
	if err := r.Context().Err(); err != nil {
		ss.Remove(id)
		return err
	}
	return reply.JSON(w, http.StatusOK, agent.SessionCreated{SessionID: id})
}

// settle finds the shell of a session and the directory it begins in, which is
// made if need be.
func (ss *Sessions) settle(cwd string, env map[string]string) (path, dir string, err error) {
	if path = FindShell(env["PATH"]); path == "" {
		return "", "", reply.BadRequest("this image has neither bash nor sh, so it has no sessions: use POST /command with argv")
	}
	if cwd != "" {
		if err := ss.host.Guest.MakeDir(cwd, env); err != nil {
			return "", "", reply.BadRequest("%v", err)
		}
	}
	if dir, _, err = ss.host.Guest.WorkingDir(cwd, env); err != nil {
		return "", "", reply.BadRequest("%v", err)
	}
	return path, dir, nil
}

// Open makes a session of the shell at path, which begins with env and in dir, and returns its id.
func (ss *Sessions) Open(path string, env map[string]string, dir string) (id string, err error) {
	ses := &session{host: &ss.host, id: command.NewID(), path: path, env: env, dir: dir, cred: ss.host.Guest.Cred()}
	ses.last.dir = dir
	if !ss.add(ses) {
		return "", reply.Fail(http.StatusTooManyRequests, reply.Failed,
			"this sandbox has %d sessions, which is the limit: end some with DELETE /session/{id}", maxSessions)
	}
	if _, err := ses.living(); err != nil {
		ss.forget(ses.id)
		return "", reply.Fail(http.StatusInternalServerError, reply.Failed, "start the shell of a session: %v", err)
	}
	return ses.id, nil
}

// delete is DELETE /session/{id}: it hangs up the present run, and kills all that the
// session has started.
func (ss *Sessions) delete(w http.ResponseWriter, _ *http.Request, ses *session) error {
	ss.forget(ses.id)
	ses.remove()
	return reply.OK(w)
}

// run is POST /session/{id}/run.
func (ss *Sessions) run(w http.ResponseWriter, r *http.Request, ses *session) error {
	var req agent.SessionRun
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	if err := command.Check(&agent.CommandRequest{Command: req.Command, Cwd: req.Cwd, Timeout: req.Timeout}); err != nil {
		return reply.BadRequest("%v", err)
	}
	if ss.host.Stopping() {
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
		if line.cwd, err = ses.cwdOfRun(req.Cwd); err != nil {
			ses.end(command.Ending{})
			return err
		}
	}
	stream := reply.NewStream(w, r)
	run.started = time.Now()
	stream.Begin(ses.id)
	go proc.Guarded(func() { ses.execute(line, command.Milliseconds(req.Timeout), cut, stream) })
	stream.Follow(r, run.over, func() { stream.Finish(run.end.Exit(run.started), run.end.Failure()) })
	return nil
}

// cwdOfRun checks the directory of one run. A relative one begins where the
// shell is.
func (ses *session) cwdOfRun(cwd string) (string, error) {
	ses.mu.Lock()
	from := cmp.Or(ses.last.dir, ses.dir)
	ses.mu.Unlock()
	var dir string
	var err error
	proc.BriefTurns.Do(func() { dir, err = ses.host.Guest.DirFrom(from, cwd, ses.env) })
	if err != nil {
		return "", reply.BadRequest("%v", err)
	}
	return dir, nil
}
