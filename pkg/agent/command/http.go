package command

import (
	"cmp"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Routes returns the handlers of a path below /command/, or nil.
func (g *Registry) Routes(path string) reply.Methods {
	rest, ok := strings.CutPrefix(path, "/command/")
	if !ok {
		return nil
	}
	if id, ok := strings.CutPrefix(rest, "status/"); ok && id != "" && !strings.Contains(id, "/") {
		return reply.Methods{"GET": g.with(id, status)}
	}
	id, verb, _ := strings.Cut(rest, "/")
	switch verb {
	case "logs":
		return reply.Methods{"GET": g.with(id, logs)}
	case "frames":
		return reply.Methods{"GET": g.with(id, frames)}
	case "times":
		return reply.Methods{"GET": g.with(id, times)}
	case "stdin":
		return reply.Methods{"POST": g.with(id, stdin)}
	case "signal":
		return reply.Methods{"POST": g.with(id, signal)}
	}
	return nil
}

// listedContent bounds the text of a command in a list, in bytes: there may be a thousand
// commands, and a text may have megabytes.
const listedContent = 1 << 10

// List is GET /command: the entrypoint, commands and terminals that are known, the newest
// first. The interpreters and shells of sessions are no commands of a client.
func (g *Registry) List(w http.ResponseWriter, r *http.Request) error {
	g.mu.Lock()
	var all []*Command
	for _, c := range g.byID {
		if !c.Forget && c.Owner == nil {
			all = append(all, c)
		}
	}
	g.mu.Unlock()
	slices.SortFunc(all, func(a, b *Command) int { return cmp.Or(b.Started.Compare(a.Started), cmp.Compare(a.ID, b.ID)) })
	kills, list := OOMKills(r), make([]agent.CommandStatus, len(all))
	for i, c := range all {
		c.Blame(kills)
		list[i] = c.Status()
		if len(list[i].Content) > listedContent {
			list[i].Content = strings.ToValidUTF8(list[i].Content[:listedContent], "") + "…"
		}
	}
	return reply.JSON(w, http.StatusOK, list)
}

func (g *Registry) with(id string, h func(w http.ResponseWriter, r *http.Request, c *Command) error) reply.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		c := g.Get(id)
		if c == nil {
			return reply.Fail(http.StatusNotFound, reply.BadBody,
				"no command has the id %.64q; the agent keeps the last %d finished commands", id, RememberFinished)
		}
		return h(w, r, c)
	}
}

// status is GET /command/status/{id}.
func status(w http.ResponseWriter, r *http.Request, c *Command) error {
	c.Blame(OOMKills(r))
	return reply.JSON(w, http.StatusOK, c.Status())
}

// logs is GET /command/{id}/logs. The cursor is the number of a byte of the output.
// Bytes that the ring no longer has are skipped, and with since=TIME those that are older.
// With follow=true the reply goes on as the output does, until the command has ended; its
// cursor header then tells the number of its first byte.
func logs(w http.ResponseWriter, r *http.Request, c *Command) error {
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
	from, end := c.Output.Range()
	off = max(off, from)
	if q := q.Get("since"); q != "" {
		at, err := time.Parse(time.RFC3339Nano, q)
		if err != nil {
			return reply.BadRequest("since %.64q is not a time; send RFC 3339, such as 2030-01-02T15:04:05Z", q)
		}
		off = max(off, c.Output.Since(at))
		w.Header().Set(agent.SinceHeader, strconv.FormatInt(off, 10))
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if follow && r.Method != http.MethodHead {
		w.Header().Set(agent.CursorHeader, strconv.FormatInt(off, 10))
		c.Output.Follow(r.Context(), w, http.NewResponseController(w).Flush, c.flushed, off)
		return nil
	}
	w.Header().Set(agent.CursorHeader, strconv.FormatInt(max(end, off), 10))
	if off >= end || r.Method == http.MethodHead {
		return reply.OK(w)
	}
	c.Output.Copy(w, off, end) //nolint:errcheck // the client is gone
	return nil
}

// times is GET /command/{id}/times.
func times(w http.ResponseWriter, _ *http.Request, c *Command) error {
	return reply.JSON(w, http.StatusOK, c.Output.Times())
}

// stdin is POST /command/{id}/stdin: the body becomes the command's
// standard input, which ends where the body ends, or where it breaks off: a
// command whose client is gone would wait forever.
func stdin(w http.ResponseWriter, r *http.Request, c *Command) error {
	switch {
	case c.Stdin == nil && c.Process == nil:
		return reply.Fail(http.StatusConflict, reply.Failed, "command %s could not be started, so nothing reads its standard input", c.ID)
	case c.Stdin == nil:
		return reply.BadRequest(`command %s reads /dev/null: start it with "stdin": true`, c.ID)
	}
	inParts := r.URL.Query().Has("offset")
	if busy := c.stdinBusy.Swap(true); busy && !inParts {
		return reply.Fail(http.StatusConflict, reply.Failed,
			"another request sends or has sent the standard input of command %s", c.ID)
	}
	if inParts {
		return part(w, r, c)
	}
	defer c.Stdin.Close()
	rc := http.NewResponseController(w)
	rc.EnableFullDuplex() //nolint:errcheck // only saves waiting for the rest of the body
	over := make(chan struct{})
	defer close(over)
	go proc.Guarded(func() { // the client may be a terminal at which nobody types, so interrupt the read
		select {
		case <-c.Died():
			rc.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // then it reads on in vain
		case <-over:
		}
	})
	_, err := io.Copy(onlyWriter{c.Stdin}, r.Body)
	switch {
	case err == nil:
	case !c.Alive(), errors.Is(err, syscall.EPIPE), errors.Is(err, os.ErrClosed):
		w.Header().Set("Connection", "close") // the command reads no more, and nobody reads the rest of the body
	default:
		return reply.BadRequest("the standard input of command %s was cut off: %v", c.ID, err)
	}
	return reply.OK(w)
}

// onlyWriter hides the file's ReadFrom: it would splice from a connection whose
// reads must stay interruptible.
type onlyWriter struct{ io.Writer }

// signal is POST /command/{id}/signal.
func signal(w http.ResponseWriter, r *http.Request, c *Command) error {
	name := r.URL.Query().Get("signal")
	if name == "" {
		return reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter signal is missing; example: signal=SIGINT")
	}
	sig := record.Signal(name)
	if sig == 0 {
		return reply.BadRequest("%.32q is not a signal; use a name such as SIGINT, or its number", name)
	}
	if sig == syscall.SIGKILL {
		c.byHand.Store(true)
	}
	if c.Process.Signal(sig, true) != nil {
		return reply.Fail(http.StatusConflict, reply.Failed, "command %s has ended already", c.ID)
	}
	return reply.OK(w)
}
