package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// What OpenSandbox does not have: events, images, stats, inspect, logs. See
// api/openapi.yaml.

// heartbeat is how often a quiet event stream says that it lives, so that
// proxies between do not cut it and a dead client is noticed.
const heartbeat = 15 * time.Second

func (s *Server) events(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	ch := s.sandboxes.Subscribe(ctx)
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	rc := http.NewResponseController(w)
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for {
		if err := rc.Flush(); err != nil {
			return nil //nolint:nilerr // the client has left, which ends an event stream well
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			io.WriteString(w, ": alive\n\n") //nolint:errcheck // Flush tells
		case ev, ok := <-ch:
			if !ok {
				return nil
			}
			b, err := json.Marshal(ev)
			if err != nil {
				return fmt.Errorf("encode an event: %w", err)
			}
			fmt.Fprintf(w, "event: %s\ndata: %s\n\n", ev.Type, b)
		}
	}
}

func (s *Server) usage(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	switch rec.State {
	case record.Ended, record.Creating:
		return errs.New(errs.WrongState, "sandbox %s is %s; only one that runs or is paused uses anything", rec.ID, stateOf(&rec))
	}
	u, err := s.stats.Usage(r.Context(), rec.ID)
	if err != nil {
		return fmt.Errorf("measure sandbox %s: %w", rec.ID, err)
	}
	if u.Time.IsZero() {
		u.Time = time.Now().UTC()
	}
	u.MemoryLimitBytes, u.CPULimitMillis, u.PidsLimit = rec.Spec.MemoryBytes, rec.Spec.CPUMillis, rec.Spec.Pids
	if u.DiskLimitBytes == 0 {
		u.DiskLimitBytes = rec.Spec.DiskBytes
	}
	writeJSON(w, http.StatusOK, u)
	return nil
}

func (s *Server) inspect(w http.ResponseWriter, _ *http.Request, rec record.Record) error {
	var host map[string]string
	if s.cfg.Host != nil {
		host = s.cfg.Host(rec)
	}
	writeJSON(w, http.StatusOK, toInspection(rec, host))
	return nil
}

// maxLogs bounds what one look at the logs copies; the agent keeps less.
const maxLogs = 64 << 20

// logs answers the output of the entrypoint: the agent's while it runs, what
// the record remembers when it has ended.
func (s *Server) logs(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	follow, err := parseBool(orElse(r.URL.Query().Get("follow"), "false"))
	if err != nil {
		return invalid("follow: want true or false")
	}
	if rec.State == record.Creating {
		if rec, err = s.sandboxes.Await(r.Context(), rec.ID); err != nil {
			return fmt.Errorf("wait for sandbox %s: %w", rec.ID, err)
		}
	}
	if len(rec.Spec.Entrypoint) == 0 {
		return errs.New(errs.WrongState, "sandbox %s was made without an entrypoint, so it has no logs; commands have theirs: `sandboxctl command logs`", rec.ID)
	}
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	if rec.State == record.Ended {
		io.WriteString(w, rec.LastOutput) //nolint:errcheck // a client that left needs no answer
		return nil
	}
	if _, err := s.reachable(r.Context(), rec, wire.AgentPort); err != nil {
		return err
	}
	out := &tail{w: w, rc: http.NewResponseController(w)}
	cursor, err := s.copyLogs(out, r, rec, 0, follow)
	if err != nil || !follow {
		return err
	}
	// The agent has said all: the sandbox is about to end, and the daemon to
	// see it. A person does not see a tenth of a second.
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		now, err := s.sandboxes.Get(r.Context(), rec.ID)
		switch {
		case err != nil || now.State == record.Deleting:
			return nil //nolint:nilerr // its end is the end of its logs
		case now.State == record.Ended:
			io.WriteString(w, out.missing(now.LastOutput)) //nolint:errcheck // a client that left needs no answer
			return nil
		}
		select {
		case <-r.Context().Done():
			return nil
		case <-tick.C:
		}
		if now.State != record.Running {
			continue
		}
		if next, err := s.copyLogs(out, r, rec, cursor, true); err == nil {
			cursor = next
		} // else it is about to end, and the next look tells
	}
}

// tail passes output on at once, and remembers the end of it.
type tail struct {
	w    io.Writer
	rc   *http.ResponseController
	last []byte
}

// maxTail is how much an ended sandbox remembers of its output.
const maxTail = 8 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.last = append(t.last, b...)
	if n := len(t.last) - maxTail; n > 0 {
		t.last = append(t.last[:0], t.last[n:]...)
	}
	n, err := t.w.Write(b)
	if err == nil {
		err = t.rc.Flush()
	}
	return n, err
}

// missing is what of the last output was written between the last look and the end.
func (t *tail) missing(final string) string {
	for n := min(len(final), len(t.last)); n > 0; n-- {
		if string(t.last[len(t.last)-n:]) == final[:n] {
			return final[n:]
		}
	}
	return final
}

// copyLogs copies what the entrypoint wrote since byte number cursor, with
// follow until it has ended, and returns the number to go on with.
func (s *Server) copyLogs(w io.Writer, r *http.Request, rec record.Record, cursor int64, follow bool) (int64, error) {
	q := url.Values{"cursor": {strconv.FormatInt(cursor, 10)}}
	if follow {
		q.Set("follow", "true")
	}
	ctx, cancel := s.untilEnd(r.Context(), rec.ID)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet,
		"http://sandbox/command/"+agent.EntrypointID+"/logs?"+q.Encode(), nil)
	if err != nil {
		return cursor, err
	}
	resp, err := s.agents.Transport(rec).RoundTrip(req)
	if err != nil {
		return cursor, unreachable(err, rec.ID, wire.AgentPort)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return cursor, fmt.Errorf("logs of sandbox %s: the agent answers %d: %.200q", rec.ID, resp.StatusCode, b)
	}
	next, err := strconv.ParseInt(resp.Header.Get(agent.CursorHeader), 10, 64)
	if err != nil || next < 0 {
		return cursor, errs.New(errs.Internal, "the agent of sandbox %s gave no cursor with the logs", rec.ID)
	}
	if !follow {
		if _, err := io.Copy(w, io.LimitReader(resp.Body, maxLogs)); err != nil {
			return cursor, fmt.Errorf("copy logs of sandbox %s: %w", rec.ID, err)
		}
		return next, nil
	}
	n, _ := io.Copy(w, resp.Body) // where it breaks off, the sandbox died or the client left: either ends logs well
	return next + n, nil
}

// imageRoutes finds what stands under /images; seg[0] is "images".
func (s *Server) imageRoutes(seg []string) (route, map[string]handler) {
	switch {
	case len(seg) == 1:
		return route{name: "/images"}, only(http.MethodGet, s.listImages)
	case len(seg) == 2 && seg[1] == "build":
		return route{name: "/images/build"}, only(http.MethodPost, s.buildImage)
	}
	ref := unescape(strings.Join(seg[1:], "/"))
	return route{name: "/images/{ref}"}, only(http.MethodDelete, func(w http.ResponseWriter, r *http.Request) error {
		if err := s.images.Remove(context.WithoutCancel(r.Context()), ref); err != nil {
			return wireIf(fmt.Errorf("remove image %q: %w", clip(ref, 200), err), errs.NotFound, "IMAGE::NOT_FOUND")
		}
		writeEmpty(w, http.StatusNoContent)
		return nil
	})
}

func (s *Server) listImages(w http.ResponseWriter, r *http.Request) error {
	all, err := s.images.List(r.Context())
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	out := wire.ImageList{Items: []wire.ImageInfo{}}
	for _, i := range all {
		out.Items = append(out.Items, toImageInfo(i))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// buildImage streams what the build says, one JSON object a line; the last
// line tells the image or the error, because the status is long gone then. It
// goes on when the client hangs up: the next to ask finds the image.
func (s *Server) buildImage(w http.ResponseWriter, r *http.Request) error {
	var req wire.BuildRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if !isName(req.Name) {
		return invalid("name %q is not the name of a recipe; recipes are directories of rootfs/, as base or python", clip(req.Name, 80))
	}
	lw := &lineWriter{w: w}
	im, err := s.images.Build(context.WithoutCancel(r.Context()), req.Name, lw)
	lw.flush()
	if err != nil {
		err = fmt.Errorf("build image %q: %w", req.Name, err)
		if !infoOf(r).wrote {
			return wireIf(err, errs.NotFound, "IMAGE::NOT_FOUND")
		}
		infoOf(r).err = err
		_, body := describe(err, infoOf(r).requestID)
		lw.send(wire.BuildLine{Error: &body})
		return nil
	}
	out := toImageInfo(im)
	lw.send(wire.BuildLine{Image: &out})
	return nil
}

// lineWriter turns what a build writes into JSON lines.
type lineWriter struct {
	mu   sync.Mutex
	w    http.ResponseWriter
	part []byte
}

// maxLine cuts a line that does not end.
const maxLine = 4 << 10

func (l *lineWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.part = append(l.part, b...)
	for {
		i := bytes.IndexAny(l.part, "\r\n")
		if i < 0 && len(l.part) < maxLine {
			return len(b), nil
		}
		next := i + 1
		if i < 0 {
			i, next = maxLine, maxLine
		}
		if line := strings.TrimRight(string(l.part[:i]), " \t"); line != "" {
			l.sendLocked(wire.BuildLine{Line: line})
		}
		l.part = l.part[next:]
	}
}

func (l *lineWriter) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.part) > 0 {
		l.sendLocked(wire.BuildLine{Line: string(l.part)})
		l.part = nil
	}
}

func (l *lineWriter) send(v wire.BuildLine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sendLocked(v)
}

// sendLocked does not tell of a client that has left: the build goes on.
func (l *lineWriter) sendLocked(v wire.BuildLine) {
	l.w.Header().Set("Content-Type", "application/x-ndjson")
	b, err := json.Marshal(v)
	if err != nil {
		return
	}
	l.w.Write(append(b, '\n'))              //nolint:errcheck // see above
	http.NewResponseController(l.w).Flush() //nolint:errcheck // see above
}
