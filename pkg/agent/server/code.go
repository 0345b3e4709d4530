package server

import (
	"errors"
	"net/http"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/interpreter"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// code is the code interpreter over HTTP.
type code struct {
	contexts interpreter.Contexts
	guest    func() *guest // that of the moment
	limits   func() agent.Limits
	stopping func() bool // nothing new is started
	// command runs code without a language.
	command func(http.ResponseWriter, *http.Request, *agent.CommandRequest) error
}

func (c *code) routes(path string) reply.Methods {
	switch path {
	case "/code":
		return reply.Methods{"POST": c.run, "DELETE": c.interrupt}
	case "/code/context":
		return reply.Methods{"POST": c.make}
	case "/code/contexts":
		return reply.Methods{"GET": c.list, "DELETE": c.remove}
	}
	id, found := strings.CutPrefix(path, "/code/contexts/")
	if !found || id == "" || strings.Contains(id, "/") {
		return nil
	}
	return reply.Methods{
		"GET": func(w http.ResponseWriter, _ *http.Request) error {
			x, err := c.contexts.Get(id)
			if err != nil {
				return codeFail(err)
			}
			return reply.JSON(w, http.StatusOK, describe(x))
		},
		"DELETE": func(w http.ResponseWriter, _ *http.Request) error {
			if err := c.contexts.Remove(id); err != nil {
				return codeFail(err)
			}
			return reply.OK(w)
		},
	}
}

func describe(c *interpreter.Context) agent.CodeContext {
	return agent.CodeContext{ID: c.ID, Language: c.Language, Cwd: c.Dir}
}

// codeFail gives an error of the interpreter its status and code in the protocol.
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

// place is where a context of this sandbox is started: as its USER, with the
// environment of commands.
func (c *code) place(cwd string) (interpreter.Place, error) {
	bad := func(err error) error { return reply.BadRequest("%v", err) }
	if strings.IndexByte(cwd, 0) >= 0 {
		return interpreter.Place{}, bad(errors.New("cwd contains a NUL byte"))
	}
	moves, g := c.contexts.Moves(), c.guest()
	env, err := g.Env()
	if err != nil {
		return interpreter.Place{}, bad(err)
	}
	var dir, real string
	proc.BriefTurns.Do(func() { dir, real, err = g.WorkingDir(cwd, env) })
	if err != nil {
		return interpreter.Place{}, bad(err)
	}
	env["PWD"] = real
	return interpreter.Place{Dir: dir, Env: env, Memory: c.limits().MemoryBytes, Cred: g.cred, Moves: moves}, nil
}

// prestart makes the standing contexts of languages, one after the other, so
// that the first calls need not wait for them. A context that cannot be made now is
// made, or refused, when a client asks for it. It ends when still returns false.
func (c *code) prestart(languages []string, still func() bool) {
	for _, language := range languages {
		p, err := c.place("")
		if err != nil || c.stopping() || !still() {
			return
		}
		c.contexts.Standing(language, p) //nolint:errcheck // the first call will say it
	}
}

// move has the contexts that were made before an adoption be those that the new sandbox
// wants, or none.
func (c *code) move(wanted []string) {
	p, err := c.place("")
	if err != nil {
		wanted = nil // its environment file cannot be read, and calls will say so
	}
	c.contexts.Move(p, wanted)
}

// make is POST /code/context.
func (c *code) make(w http.ResponseWriter, r *http.Request) error {
	var req agent.CodeContext
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	p, err := c.place(req.Cwd)
	if err != nil {
		return err
	}
	if c.stopping() {
		return reply.ErrStopping
	}
	x, err := c.contexts.Make(req.Language, p)
	if err != nil {
		return codeFail(err)
	}
	return reply.JSON(w, http.StatusOK, describe(x))
}

// list is GET /code/contexts.
func (c *code) list(w http.ResponseWriter, r *http.Request) error {
	list := []agent.CodeContext{}
	for _, x := range c.contexts.List(r.URL.Query().Get("language")) {
		list = append(list, describe(x))
	}
	return reply.JSON(w, http.StatusOK, list)
}

// remove is DELETE /code/contexts?language=.
func (c *code) remove(w http.ResponseWriter, r *http.Request) error {
	language := r.URL.Query().Get("language")
	if language == "" {
		return reply.Fail(http.StatusBadRequest, reply.NoQuery,
			"the query parameter language is missing: choose the language whose contexts to delete: %s",
			strings.Join(interpreter.Languages(), ", "))
	}
	for _, x := range c.contexts.List(language) {
		if err := c.contexts.Remove(x.ID); err != nil && !errors.Is(err, interpreter.ErrNotFound) {
			return codeFail(err)
		}
	}
	return reply.OK(w)
}

// interrupt is DELETE /code: it interrupts the code that runs in a context.
func (c *code) interrupt(w http.ResponseWriter, r *http.Request) error {
	id := r.URL.Query().Get("id")
	if id == "" {
		return reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter id is missing: use the id of the context to interrupt")
	}
	x, err := c.contexts.Get(id)
	if err != nil {
		return reply.Fail(http.StatusInternalServerError, reply.Failed, "%v", err) // not 404, as execd has it
	}
	x.Interrupt()
	return reply.OK(w)
}

// run is POST /code.
func (c *code) run(w http.ResponseWriter, r *http.Request) error {
	var req agent.CodeRequest
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	switch {
	case req.Code == "":
		return reply.BadRequest("code is missing")
	case len(req.Code) > interpreter.MaxCode:
		return reply.Fail(http.StatusRequestEntityTooLarge, reply.BadBody,
			"code has %d bytes; at most %d are allowed: upload it as a file and import the file", len(req.Code), interpreter.MaxCode)
	case strings.IndexByte(req.Code, 0) >= 0:
		return reply.BadRequest("code contains a NUL byte")
	case c.stopping():
		return reply.ErrStopping
	case req.Context.ID == "" && req.Context.Language == "":
		return c.command(w, r, &agent.CommandRequest{Command: req.Code, Cwd: req.Context.Cwd})
	}
	x, err := c.contextFor(&req.Context)
	if err != nil {
		return err
	}
	run, err := x.Claim()
	if err != nil {
		return codeFail(err)
	}
	stream := reply.NewStream(w, r)
	stream.Raw = true
	stream.Begin(x.ID)
	stream.Event(agent.Event{Type: "execution_count", ExecutionCount: run.Count})
	run.Start(req.Code, stream)
	stream.Flush()
	stream.Follow(r, run.Done(), func() { finishCode(stream, run) })
	return nil
}

// contextFor is the context that a call names, or the standing one of its
// language.
func (c *code) contextFor(req *agent.CodeContext) (*interpreter.Context, error) {
	if req.ID != "" {
		x, err := c.contexts.Get(req.ID)
		if err != nil {
			return nil, codeFail(err)
		}
		if req.Language != "" && req.Language != x.Language {
			return nil, reply.BadRequest("context %s runs %s, but the request has language %.64q", x.ID, x.Language, req.Language)
		}
		return x, nil
	}
	p, err := c.place(req.Cwd)
	if err != nil {
		return nil, err
	}
	x, err := c.contexts.Standing(req.Language, p)
	if err != nil {
		return nil, codeFail(err)
	}
	return x, nil
}

// finishCode writes how a call ended.
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
