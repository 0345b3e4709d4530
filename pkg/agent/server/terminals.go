package server

import (
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// forgotten is when a session that nobody ever connected to may go.
const forgotten = time.Minute

// terminals are the sessions of this sandbox, oldest first. At most MaxTerminals
// are known; the oldest that has ended goes for a new one.
type terminals struct {
	mu  sync.Mutex
	all []*terminal
}

// add makes room for t, or reports that there is none.
func (ts *terminals) add(t *terminal) bool {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if len(ts.all) >= proc.MaxTerminals {
		i := slices.IndexFunc(ts.all, (*terminal).ended)
		if i < 0 {
			i = slices.IndexFunc(ts.all, (*terminal).forgotten)
		}
		if i < 0 {
			return false
		}
		ts.all = slices.Delete(ts.all, i, i+1)
	}
	ts.all = append(ts.all, t)
	return true
}

func (t *terminal) ended() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.holder == nil && t.cmd != nil && !t.cmd.Running()
}

// forgotten reports, of a session that never started, whether it never will. If
// so it can not any more.
func (t *terminal) forgotten() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.removed = t.removed || t.holder == nil && t.cmd == nil && time.Since(t.made) > forgotten
	return t.removed
}

func (ts *terminals) get(id string) *terminal {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, t := range ts.all {
		if t.id == id {
			return t
		}
	}
	return nil
}

func (ts *terminals) list() []*terminal {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	return slices.Clone(ts.all)
}

func (ts *terminals) remove(t *terminal) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.all = slices.DeleteFunc(ts.all, func(o *terminal) bool { return o == t })
}

func (s *Server) terminalRoutes(path string) reply.Methods {
	rest, ok := strings.CutPrefix(path, "/pty/")
	if !ok {
		return nil
	}
	with := func(id string, h func(http.ResponseWriter, *http.Request, *terminal) error) reply.Handler {
		return func(w http.ResponseWriter, r *http.Request) error {
			t := s.terminals.get(id)
			if t == nil {
				return reply.Fail(http.StatusNotFound, reply.NoContext, "no terminal has the id %.64q", id)
			}
			return h(w, r, t)
		}
	}
	id, verb, found := strings.Cut(rest, "/")
	switch {
	case !found:
		return reply.Methods{"GET": with(id, s.terminalStatus), "DELETE": with(id, s.removeTerminal)}
	case verb == "ws":
		return reply.Methods{"GET": with(id, s.connectTerminal)}
	}
	return nil
}

// makeTerminal is POST /pty. The body may be absent.
func (s *Server) makeTerminal(w http.ResponseWriter, r *http.Request) error {
	var req agent.PtyRequest
	if err := reply.ReadOptionalJSON(w, r, &req); err != nil {
		return err
	}
	if !isSize(req.Cols) || !isSize(req.Rows) {
		return reply.BadRequest("cols and rows are %d and %d: want 1 to 65535", req.Cols, req.Rows)
	}
	if _, err := s.prepareTerminal(&req, true); err != nil {
		return err
	}
	if s.stopping.Load() {
		return reply.ErrStopping
	}
	t := &terminal{id: command.NewID(), req: req, made: time.Now()}
	if !s.terminals.add(t) {
		return reply.Fail(http.StatusTooManyRequests, reply.Failed, "this sandbox has %d terminals and all of them live: end some, by DELETE /pty/{id}", proc.MaxTerminals)
	}
	return reply.JSON(w, http.StatusCreated, agent.PtyCreated{SessionID: t.id})
}

// listTerminals is GET /pty.
func (s *Server) listTerminals(w http.ResponseWriter, _ *http.Request) error {
	l := agent.PtyList{Sessions: []agent.PtyStatus{}}
	for _, t := range s.terminals.list() {
		l.Sessions = append(l.Sessions, t.status())
	}
	return reply.JSON(w, http.StatusOK, l)
}

func (s *Server) terminalStatus(w http.ResponseWriter, _ *http.Request, t *terminal) error {
	return reply.JSON(w, http.StatusOK, t.status())
}

// removeTerminal is DELETE /pty/{id}: the session hangs up, and what does not
// mind is killed.
func (s *Server) removeTerminal(w http.ResponseWriter, r *http.Request, t *terminal) error {
	s.terminals.remove(t)
	t.mu.Lock()
	t.removed = true
	c := t.cmd
	t.mu.Unlock()
	if c != nil {
		s.commands.Interrupt(r.Context(), c, syscall.SIGHUP) //nolint:errcheck // ended is what is wanted
	}
	return reply.OK(w)
}

// connectTerminal is GET /pty/{id}/ws.
func (s *Server) connectTerminal(w http.ResponseWriter, r *http.Request, t *terminal) error {
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
		return reply.Fail(http.StatusUpgradeRequired, reply.BadBody, "a terminal is talked to by WebSocket: send the headers of an upgrade")
	}
	if !takeover && t.status().Connected {
		return reply.Fail(http.StatusConflict, agent.PtyConnected, "somebody is connected to terminal %s: add takeover=1 to send them away", t.id)
	}
	// The token lets in, so the page it comes from does not matter.
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
	if err != nil {
		return nil // it has answered
	}
	ws.SetReadLimit(agent.MaxPtyMessage + 1) // it wants one more to see the end
	v := newViewer(ws)
	defer v.stop()
	if !t.claim(v, takeover) { // somebody was faster
		v.fail(agent.PtyConnected, errors.New("somebody is connected to this terminal"))
		ws.Close(websocket.StatusPolicyViolation, agent.PtyConnected) //nolint:errcheck // over either way
		return nil
	}
	defer t.release(v)
	if err := s.launchTerminal(t, q.Get("pty") != "0"); err != nil {
		f := agent.PtyFrame{Type: "error", Code: agent.PtyNotStarted, Error: err.Error()}
		if t.cmd != nil {
			end := t.cmd.End()
			f.ExitCode = &end.Code
		}
		v.text(f)                                                    //nolint:errcheck // over either way
		ws.Close(websocket.StatusInternalError, agent.PtyNotStarted) //nolint:errcheck // as above
		return nil
	}
	if t.catchUp(v, since, 2*s.wsPing) != nil {
		return nil
	}
	go proc.Guarded(func() { v.attend(t, s.wsPing) })
	v.listen(s, t)
	return nil
}
