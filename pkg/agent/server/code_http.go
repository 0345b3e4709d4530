package server

import (
	"bytes"
	"errors"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/interpreter"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// drivers starts the drivers of contexts, by the one who starts all children.
type drivers struct{ s *Server }

func (drivers) Look(name string, env map[string]string) (path string) {
	proc.BriefTurns.Do(func() {
		if !strings.Contains(name, "/") {
			path = lookPath(name, env["PATH"])
			return
		}
		found, _ := filepath.Glob(name) // the patterns are ours
		for _, p := range found {
			if executable(p) {
				path = p
			}
		}
	})
	return path
}

func (d drivers) Terminal() (*os.File, int, error) { return proc.OpenTTY(0, 0, d.s.userCred) }

func (drivers) Go(f func()) { go proc.Guarded(f) }

func (d drivers) Start(path string, argv []string, p interpreter.Place, fds []uintptr) (interpreter.Process, error) {
	started, err := proc.Start(proc.Spec{
		Path: path, Argv: argv, Env: environ(p.Env), Dir: p.Dir, Cred: d.s.userCred,
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
	_ interpreter.Listener = (*stream)(nil)
)

func (s *Server) codeRoutes(path string) map[string]handler {
	switch path {
	case "/code":
		return map[string]handler{"POST": s.runCode, "DELETE": s.interruptCode}
	case "/code/context":
		return map[string]handler{"POST": s.makeContext}
	case "/code/contexts":
		return map[string]handler{"GET": s.listContexts, "DELETE": s.removeContexts}
	}
	id, found := strings.CutPrefix(path, "/code/contexts/")
	if !found || id == "" || strings.Contains(id, "/") {
		return nil
	}
	return map[string]handler{
		"GET": func(w http.ResponseWriter, _ *http.Request) error {
			c, err := s.contexts.Get(id)
			if err != nil {
				return codeFail(err)
			}
			return writeJSON(w, http.StatusOK, describe(c))
		},
		"DELETE": func(w http.ResponseWriter, _ *http.Request) error {
			if err := s.contexts.Remove(id); err != nil {
				return codeFail(err)
			}
			return ok(w)
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
		return fail(http.StatusNotFound, noContext, "%v", err)
	case errors.Is(err, interpreter.ErrLanguage):
		return fail(http.StatusBadRequest, badBody, "%v", err)
	case errors.Is(err, interpreter.ErrProgram):
		return fail(http.StatusBadRequest, unsupported, "%v", err)
	case errors.Is(err, interpreter.ErrTooMany):
		return fail(http.StatusTooManyRequests, runtimeFail, "%v", err)
	}
	return fail(http.StatusInternalServerError, runtimeFail, "%v", err)
}

// place is where a context of this sandbox is started: as its USER, with what
// commands have for environment.
func (s *Server) place(cwd string) (interpreter.Place, error) {
	bad := func(err error) error { return fail(http.StatusBadRequest, badBody, "%v", err) }
	if strings.IndexByte(cwd, 0) >= 0 {
		return interpreter.Place{}, bad(errors.New("cwd contains a NUL byte"))
	}
	env, err := s.commandEnv(&agent.CommandRequest{}, s.user)
	if err != nil {
		return interpreter.Place{}, bad(err)
	}
	var dir, real string
	proc.BriefTurns.Do(func() { dir, real, err = s.workingDir(cwd, env) })
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
	if err := readJSON(w, r, &req); err != nil {
		return err
	}
	p, err := s.place(req.Cwd)
	if err != nil {
		return err
	}
	if s.stopping.Load() {
		return errStopping
	}
	c, err := s.contexts.Make(req.Language, p)
	if err != nil {
		return codeFail(err)
	}
	return writeJSON(w, http.StatusOK, describe(c))
}

// listContexts is GET /code/contexts.
func (s *Server) listContexts(w http.ResponseWriter, r *http.Request) error {
	list := []agent.CodeContext{}
	for _, c := range s.contexts.List(r.URL.Query().Get("language")) {
		list = append(list, describe(c))
	}
	return writeJSON(w, http.StatusOK, list)
}

// removeContexts is DELETE /code/contexts?language=.
func (s *Server) removeContexts(w http.ResponseWriter, r *http.Request) error {
	language := r.URL.Query().Get("language")
	if language == "" {
		return fail(http.StatusBadRequest, noQuery, "the query parameter language is missing: whose contexts are to be deleted? One of %s", strings.Join(interpreter.Languages(), ", "))
	}
	for _, c := range s.contexts.List(language) {
		if err := s.contexts.Remove(c.ID); err != nil && !errors.Is(err, interpreter.ErrNotFound) {
			return codeFail(err)
		}
	}
	return ok(w)
}

// interruptCode is DELETE /code: what runs in a context is interrupted.
func (s *Server) interruptCode(w http.ResponseWriter, r *http.Request) error {
	id := r.URL.Query().Get("id")
	if id == "" {
		return fail(http.StatusBadRequest, noQuery, "the query parameter id is missing: which context is to be interrupted?")
	}
	c, err := s.contexts.Get(id)
	if err != nil {
		return fail(http.StatusInternalServerError, runtimeFail, "%v", err) // not 404, as execd has it
	}
	c.Interrupt()
	return ok(w)
}

// runCode is POST /code.
func (s *Server) runCode(w http.ResponseWriter, r *http.Request) error {
	var req agent.CodeRequest
	if err := readJSON(w, r, &req); err != nil {
		return err
	}
	switch {
	case req.Code == "":
		return fail(http.StatusBadRequest, badBody, "code is missing")
	case len(req.Code) > interpreter.MaxCode:
		return fail(http.StatusRequestEntityTooLarge, badBody, "code has %d bytes, %d are possible: upload it as a file and import that", len(req.Code), interpreter.MaxCode)
	case strings.IndexByte(req.Code, 0) >= 0:
		return fail(http.StatusBadRequest, badBody, "code contains a NUL byte")
	case s.stopping.Load():
		return errStopping
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
	reply := newStream(w, r)
	reply.raw = true
	reply.begin(c.ID)
	reply.event(agent.Event{Type: "execution_count", ExecutionCount: run.Count})
	run.Start(req.Code, reply)
	reply.followCode(r, run)
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
			return nil, fail(http.StatusBadRequest, badBody, "context %s is of %s, and the code is said to be %.64q", c.ID, c.Language, req.Language)
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

// followCode sends what a call says until its end, or until the client is gone;
// then the code goes on without it.
func (s *stream) followCode(r *http.Request, run *interpreter.Run) {
	defer s.release()
	s.flush()
	t := time.NewTicker(pingEvery)
	defer t.Stop()
	for {
		select {
		case <-run.Done():
			s.finishCode(run)
			return
		case <-t.C:
			s.ping()
		case <-r.Context().Done():
			s.detach()
			return
		}
	}
}

// finishCode writes what is left of the output, and the terminal event.
func (s *stream) finishCode(run *interpreter.Run) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, at := run.Outcome()
	now := time.Now().UnixMilli()
	s.endLines(now)
	ev := agent.Event{Type: "execution_complete", ExecutionTime: max(at.Sub(run.Started).Milliseconds(), 0), Timestamp: now}
	if e != nil {
		ev = agent.Event{Type: "error", Timestamp: now, Error: &agent.EventError{Name: e.Name, Value: e.Value, Traceback: e.Traceback}}
		if ev.Error.Traceback == nil {
			ev.Error.Traceback = []string{}
		}
	}
	s.appendEvent(ev)
	s.write()
}

// Output passes on what code printed, for the interpreter.
func (s *stream) Output(from byte, b []byte) { s.output(from, b) }

// Result passes on a value. Some SDKs look for its text by the MIME type, some
// by "text".
func (s *stream) Result(formats map[string]string) {
	formats = maps.Clone(formats)
	text, found := formats["text"]
	if !found {
		text = formats["text/plain"]
	}
	formats["text"], formats["text/plain"] = text, text
	s.event(agent.Event{Type: "result", Results: formats})
}

// event sends ev, now.
func (s *stream) event(ev agent.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return
	}
	ev.Timestamp = time.Now().UnixMilli()
	s.appendEvent(ev)
	s.write()
	s.flushLocked()
}

// chunk passes on b as it is, but for a character that is not complete: that
// waits for its rest.
func (l *splitter) chunk(b []byte, emit func(chunk []byte)) {
	if len(l.held) > 0 {
		b = append(bytes.Clone(l.held), b...)
		l.clear()
	}
	cut := len(b)
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(b[len(b)-i:]) {
				cut -= i
			}
			break
		}
	}
	l.held = append(l.held, b[cut:]...)
	if cut > 0 {
		emit(b[:cut])
	}
}
