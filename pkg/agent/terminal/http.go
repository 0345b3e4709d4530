package terminal

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// Routes returns the handlers of a path, or nil if it is none of terminals.
func (ts *Set) Routes(path string) reply.Methods {
	if path == "/pty" {
		return reply.Methods{"POST": ts.make, "GET": ts.index}
	}
	rest, ok := strings.CutPrefix(path, "/pty/")
	if !ok {
		return nil
	}
	with := func(id string, h func(http.ResponseWriter, *http.Request, *terminal) error) reply.Handler {
		return func(w http.ResponseWriter, r *http.Request) error {
			t := ts.get(id)
			if t == nil {
				return reply.Fail(http.StatusNotFound, reply.NoContext, "no terminal has the id %.64q", id)
			}
			return h(w, r, t)
		}
	}
	id, verb, found := strings.Cut(rest, "/")
	switch {
	case !found:
		return reply.Methods{"GET": with(id, ts.status), "DELETE": with(id, ts.delete)}
	case verb == "ws":
		return reply.Methods{"GET": with(id, ts.connect)}
	}
	return nil
}

// make is POST /pty. The body may be absent.
func (ts *Set) make(w http.ResponseWriter, r *http.Request) error {
	var req agent.PtyRequest
	if err := reply.ReadOptionalJSON(w, r, &req); err != nil {
		return err
	}
	if !isSize(req.Cols) || !isSize(req.Rows) {
		return reply.BadRequest("cols and rows are %d and %d: want 1 to 65535", req.Cols, req.Rows)
	}
	if _, err := ts.Prepare(&req); err != nil {
		return err
	}
	if ts.Stopping() {
		return reply.ErrStopping
	}
	t := &terminal{id: command.NewID(), req: req, made: time.Now()}
	if !ts.add(t) {
		return reply.Fail(http.StatusTooManyRequests, reply.Failed,
			"this sandbox has %d terminals, and all of them are in use: end some with DELETE /pty/{id}", proc.MaxTerminals)
	}
	return reply.JSON(w, http.StatusCreated, agent.PtyCreated{SessionID: t.id})
}

// index is GET /pty.
func (ts *Set) index(w http.ResponseWriter, _ *http.Request) error {
	l := agent.PtyList{Sessions: []agent.PtyStatus{}}
	for _, t := range ts.list() {
		l.Sessions = append(l.Sessions, t.status())
	}
	return reply.JSON(w, http.StatusOK, l)
}

// status is GET /pty/{id}.
func (ts *Set) status(w http.ResponseWriter, _ *http.Request, t *terminal) error {
	return reply.JSON(w, http.StatusOK, t.status())
}

// delete is DELETE /pty/{id}: the session hangs up, and processes that ignore that are
// killed.
func (ts *Set) delete(w http.ResponseWriter, r *http.Request, t *terminal) error {
	ts.remove(t)
	t.mu.Lock()
	t.removed = true
	c := t.cmd
	t.mu.Unlock()
	if c != nil {
		ts.Commands.Interrupt(r.Context(), c, syscall.SIGHUP) //nolint:errcheck // ended is what is wanted
	}
	return reply.OK(w)
}

// connect is GET /pty/{id}/ws.
func (ts *Set) connect(w http.ResponseWriter, r *http.Request, t *terminal) error {
	q := r.URL.Query()
	var since int64
	if n := q.Get("since"); n != "" {
		var err error
		if since, err = strconv.ParseInt(n, 10, 64); err != nil || since < 0 {
			return reply.BadRequest("since %.32q is not a number of bytes", n)
		}
	}
	takeover := q.Get("takeover") == "1"
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		w.Header().Set("Upgrade", "websocket")
		return reply.Fail(http.StatusUpgradeRequired, reply.BadBody, "a terminal needs a WebSocket: send the headers of an upgrade")
	}
	if !takeover && t.status().Connected {
		return reply.Fail(http.StatusConflict, agent.PtyConnected,
			"another client is connected to terminal %s: add takeover=1 to disconnect it", t.id)
	}
	// The token decides, so the page that a request comes from does not matter.
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
	if err != nil {
		return nil // it has answered
	}
	ws.SetReadLimit(agent.MaxPtyMessage + 1) // it needs one more to see the end
	v := newViewer(ws)
	defer v.stop()
	if !t.claim(v, takeover) { // somebody was faster
		v.fail(agent.PtyConnected, errors.New("another client is connected to this terminal"))
		ws.Close(websocket.StatusPolicyViolation, agent.PtyConnected) //nolint:errcheck // over either way
		return nil
	}
	defer t.release(v)
	if err := ts.launch(t, q.Get("pty") != "0"); err != nil {
		f := agent.PtyFrame{Type: "error", Code: agent.PtyNotStarted, Error: err.Error()}
		if t.cmd != nil {
			end := t.cmd.End()
			f.ExitCode = &end.Code
		}
		v.text(f)                                                    //nolint:errcheck // over either way
		ws.Close(websocket.StatusInternalError, agent.PtyNotStarted) //nolint:errcheck // as above
		return nil
	}
	if t.catchUp(v, since, 2*ts.Ping) != nil {
		return nil
	}
	go proc.Guarded(func() { v.attend(t, ts.Ping) })
	v.listen(t)
	return nil
}
