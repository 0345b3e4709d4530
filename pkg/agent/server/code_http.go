package server

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/interpreter"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
	"github.com/sandboxd/sandboxd/pkg/agent/shell"
)

// drivers starts the drivers of contexts, by the one who starts all children.
type drivers struct{ s *Server }

func (drivers) Look(name string, env map[string]string) (path string) {
	proc.BriefTurns.Do(func() {
		if !strings.Contains(name, "/") {
			path = shell.LookPath(name, env["PATH"])
			return
		}
		found, _ := filepath.Glob(name) // the patterns are ours
		for _, p := range found {
			if shell.Executable(p) {
				path = p
			}
		}
	})
	return path
}

func (d drivers) Terminal() (*os.File, int, error) { return proc.OpenTTY(0, 0, d.s.guest.cred) }

func (drivers) Go(f func()) { go proc.Guarded(f) }

func (d drivers) Start(path string, argv []string, p interpreter.Place, fds []uintptr) (interpreter.Process, error) {
	started, err := proc.Start(proc.Spec{
		Path: path, Argv: argv, Env: shell.Environ(p.Env), Dir: p.Dir, Cred: d.s.guest.cred,
		Files: [3]uintptr(fds[:3]), More: fds[3:], Mortal: true,
	})
	if err != nil {
		return nil, err
	}
	return driver{started}, nil
}

// driver is what a context's driver is to the interpreter.
type driver struct{ p *proc.Process }

func (d driver) Done() <-chan struct{}      { return d.p.Done() }
func (d driver) Status() syscall.WaitStatus { return d.p.Status }
func (d driver) Interrupt()                 { d.p.Signal(syscall.SIGINT, true) } //nolint:errcheck // gone is what is wanted
func (d driver) Urge()                      { d.p.Urge() }
func (d driver) Quit()                      { d.p.Signal(syscall.SIGQUIT, true) } //nolint:errcheck // gone is what is wanted
func (d driver) Kill()                      { d.p.KillTree() }

// KillLeft goes by the marker alone: another process may have the driver's number by now.
func (d driver) KillLeft() {
	if d.p.Marker != 0 {
		proc.KillAll(func() []int { return proc.Marked(func(m uint64) bool { return m == d.p.Marker }, 0) })
	}
}

var (
	_ interpreter.Host     = drivers{}
	_ interpreter.Process  = driver{}
	_ interpreter.Listener = (*reply.Stream)(nil)
)

func (s *Server) codeRoutes(path string) reply.Methods {
	switch path {
	case "/code":
		return reply.Methods{"POST": s.runCode, "DELETE": s.interruptCode}
	case "/code/context":
		return reply.Methods{"POST": s.makeContext}
	case "/code/contexts":
		return reply.Methods{"GET": s.listContexts, "DELETE": s.removeContexts}
	}
	id, found := strings.CutPrefix(path, "/code/contexts/")
	if !found || id == "" || strings.Contains(id, "/") {
		return nil
	}
	return reply.Methods{
		"GET": func(w http.ResponseWriter, _ *http.Request) error {
			c, err := s.contexts.Get(id)
			if err != nil {
				return codeFail(err)
			}
			return reply.JSON(w, http.StatusOK, describe(c))
		},
		"DELETE": func(w http.ResponseWriter, _ *http.Request) error {
			if err := s.contexts.Remove(id); err != nil {
				return codeFail(err)
			}
			return reply.OK(w)
		},
	}
}

func describe(c *interpreter.Context) agent.CodeContext {
	return agent.CodeContext{ID: c.ID, Language: c.Language, Cwd: c.Dir}
}

// codeFail gives an error of the interpreter its place in the protocol.
func codeFail(err error) error {
	switch {
	case errors.Is(err, interpreter.ErrNotFound):
		return reply.Fail(http.StatusNotFound, reply.NoContext, "%v", err)
	case errors.Is(err, interpreter.ErrLanguage):
		return reply.BadRequest("%v", err)
	case errors.Is(err, interpreter.ErrProgram):
		return reply.Fail(http.StatusBadRequest, reply.Unsupported, "%v", err)
	case errors.Is(err, interpreter.ErrTooMany):
		return reply.Fail(http.StatusTooManyRequests, reply.Failed, "%v", err)
	}
	return reply.Fail(http.StatusInternalServerError, reply.Failed, "%v", err)
}

// place is where a context of this sandbox is started: as its USER, with what
// commands have for environment.
func (s *Server) place(cwd string) (interpreter.Place, error) {
	bad := func(err error) error { return reply.BadRequest("%v", err) }
	if strings.IndexByte(cwd, 0) >= 0 {
		return interpreter.Place{}, bad(errors.New("cwd contains a NUL byte"))
	}
	env, err := s.guest.Env()
	if err != nil {
		return interpreter.Place{}, bad(err)
	}
	var dir, real string
	proc.BriefTurns.Do(func() { dir, real, err = s.guest.WorkingDir(cwd, env) })
	if err != nil {
		return interpreter.Place{}, bad(err)
	}
	env["PWD"] = real
	return interpreter.Place{Dir: dir, Env: env, Memory: s.limits.Load().MemoryBytes}, nil
}

// prestart makes the standing contexts of languages, one after the other, so
// that the first calls need not wait for them. What can not be made is made, or
// refused, when somebody asks for it.
func (s *Server) prestart(languages []string) {
	for _, language := range languages {
		p, err := s.place("")
		if err != nil || s.stopping.Load() {
			return
		}
		s.contexts.Standing(language, p) //nolint:errcheck // the first call will say it
	}
}

// makeContext is POST /code/context.
func (s *Server) makeContext(w http.ResponseWriter, r *http.Request) error {
	var req agent.CodeContext
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	p, err := s.place(req.Cwd)
	if err != nil {
		return err
	}
	if s.stopping.Load() {
		return reply.ErrStopping
	}
	c, err := s.contexts.Make(req.Language, p)
	if err != nil {
		return codeFail(err)
	}
	return reply.JSON(w, http.StatusOK, describe(c))
}

// listContexts is GET /code/contexts.
func (s *Server) listContexts(w http.ResponseWriter, r *http.Request) error {
	list := []agent.CodeContext{}
	for _, c := range s.contexts.List(r.URL.Query().Get("language")) {
		list = append(list, describe(c))
	}
	return reply.JSON(w, http.StatusOK, list)
}

// removeContexts is DELETE /code/contexts?language=.
func (s *Server) removeContexts(w http.ResponseWriter, r *http.Request) error {
	language := r.URL.Query().Get("language")
	if language == "" {
		return reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter language is missing: whose contexts are to be deleted? One of %s", strings.Join(interpreter.Languages(), ", "))
	}
	for _, c := range s.contexts.List(language) {
		if err := s.contexts.Remove(c.ID); err != nil && !errors.Is(err, interpreter.ErrNotFound) {
			return codeFail(err)
		}
	}
	return reply.OK(w)
}

// interruptCode is DELETE /code: what runs in a context is interrupted.
func (s *Server) interruptCode(w http.ResponseWriter, r *http.Request) error {
	id := r.URL.Query().Get("id")
	if id == "" {
		return reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter id is missing: which context is to be interrupted?")
	}
	c, err := s.contexts.Get(id)
	if err != nil {
		return reply.Fail(http.StatusInternalServerError, reply.Failed, "%v", err) // not 404, as execd has it
	}
	c.Interrupt()
	return reply.OK(w)
}

// runCode is POST /code.
func (s *Server) runCode(w http.ResponseWriter, r *http.Request) error {
	var req agent.CodeRequest
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	switch {
	case req.Code == "":
		return reply.BadRequest("code is missing")
	case len(req.Code) > interpreter.MaxCode:
		return reply.Fail(http.StatusRequestEntityTooLarge, reply.BadBody, "code has %d bytes, %d are possible: upload it as a file and import that", len(req.Code), interpreter.MaxCode)
	case strings.IndexByte(req.Code, 0) >= 0:
		return reply.BadRequest("code contains a NUL byte")
	case s.stopping.Load():
		return reply.ErrStopping
	case req.Context.ID == "" && req.Context.Language == "":
		return s.startCommand(w, r, &agent.CommandRequest{Command: req.Code, Cwd: req.Context.Cwd})
	}
	c, err := s.contextFor(&req.Context)
	if err != nil {
		return err
	}
	run, err := c.Claim()
	if err != nil {
		return codeFail(err)
	}
	stream := reply.NewStream(w, r)
	stream.Raw = true
	stream.Begin(c.ID)
	stream.Event(agent.Event{Type: "execution_count", ExecutionCount: run.Count})
	run.Start(req.Code, stream)
	stream.Flush()
	stream.Follow(r, run.Done(), func() { finishCode(stream, run) })
	return nil
}

// contextFor is the context that a call names, or the standing one of its
// language.
func (s *Server) contextFor(req *agent.CodeContext) (*interpreter.Context, error) {
	if req.ID != "" {
		c, err := s.contexts.Get(req.ID)
		if err != nil {
			return nil, codeFail(err)
		}
		if req.Language != "" && req.Language != c.Language {
			return nil, reply.BadRequest("context %s is of %s, and the code is said to be %.64q", c.ID, c.Language, req.Language)
		}
		return c, nil
	}
	p, err := s.place(req.Cwd)
	if err != nil {
		return nil, err
	}
	c, err := s.contexts.Standing(req.Language, p)
	if err != nil {
		return nil, codeFail(err)
	}
	return c, nil
}

// finishCode tells how a call ended.
func finishCode(stream *reply.Stream, run *interpreter.Run) {
	e, at := run.Outcome()
	var failed *agent.EventError
	if e != nil {
		failed = &agent.EventError{Name: e.Name, Value: e.Value, Traceback: e.Traceback}
		if failed.Traceback == nil {
			failed.Traceback = []string{}
		}
	}
	stream.FinishCode(max(at.Sub(run.Started).Milliseconds(), 0), failed)
}
