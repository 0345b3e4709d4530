package api

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// What OpenSandbox does not have: events, stats, inspect, logs; images.go has
// images. See api/openapi.yaml.

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
	case record.Ended, record.Creating, record.Starting:
		return errs.New(errs.WrongState, "sandbox %s is %s; only one that runs or is paused uses anything", rec.ID, spec.StateOf(&rec))
	}
	u, err := s.measure(r.Context(), &rec)
	if err != nil {
		return fmt.Errorf("measure sandbox %s: %w", rec.ID, err)
	}
	writeJSON(w, http.StatusOK, u)
	return nil
}

// measuredAtOnce bounds how many sandboxes are measured at the same time.
const measuredAtOnce = 16

// usageOfAll answers GET /stats. Who went away meanwhile is left out.
func (s *Server) usageOfAll(w http.ResponseWriter, r *http.Request) error {
	all, err := s.sandboxes.List(r.Context())
	if err != nil {
		return fmt.Errorf("list sandboxes: %w", err)
	}
	all = slices.DeleteFunc(all, func(rec *record.Record) bool {
		switch rec.State {
		case record.Running, record.Pausing, record.Paused, record.Resuming:
			return false
		}
		return true
	})
	// A few at once: on gVisor one is asked, and may take its time.
	items := make([]*wire.SandboxStats, len(all))
	var g errgroup.Group
	g.SetLimit(measuredAtOnce)
	for i, rec := range all {
		g.Go(func() error {
			if err := r.Context().Err(); err != nil {
				return err
			}
			u, err := s.measure(r.Context(), rec)
			if err != nil {
				s.cfg.Log.Debug("a sandbox is left out of the measurement of all", "sandbox", rec.ID, "err", err)
				return nil
			}
			items[i] = &wire.SandboxStats{
				ID: rec.ID, Name: rec.Spec.Name, Runtime: rec.Spec.Runtime, State: spec.StateOf(rec), CreatedAt: spec.Micros(rec.Created), Usage: u,
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	out := wire.StatsList{Items: []wire.SandboxStats{}}
	for _, item := range items {
		if item != nil {
			out.Items = append(out.Items, *item)
		}
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// measure reads what a sandbox uses. Nothing of it comes from inside, but for how
// many tasks there are on gVisor, which is said again and not relied upon.
func (s *Server) measure(ctx context.Context, rec *record.Record) (wire.Usage, error) {
	u, err := s.stats.Usage(ctx, rec)
	if err != nil {
		return u, err
	}
	if u.Time.IsZero() {
		u.Time = time.Now().UTC()
	}
	u.MemoryLimitBytes, u.CPULimitMillis, u.PidsLimit = rec.Spec.MemoryBytes, rec.Spec.CPUMillis, rec.Spec.Pids
	if u.DiskLimitBytes == 0 {
		u.DiskLimitBytes = rec.Spec.DiskBytes
	}
	return u, nil
}

func (s *Server) inspect(w http.ResponseWriter, _ *http.Request, rec record.Record) error {
	writeJSON(w, http.StatusOK, s.inspection(rec))
	return nil
}

func (s *Server) inspection(rec record.Record) wire.Inspection {
	var host map[string]string
	if s.cfg.Host != nil {
		host = s.cfg.Host(rec)
	}
	out := s.toInspection(rec, host)
	if s.cfg.Notes != nil {
		out.Notes = s.cfg.Notes(rec)
	}
	return out
}

// maxLogs bounds what one look at the logs copies: what an agent may be told to
// keep. One that goes on is cut off.
const maxLogs = spec.MaxLog

// logs answers the output of the entrypoint, or its last lines: the agent's while
// it runs, what the record remembers when it has ended.
func (s *Server) logs(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	q := r.URL.Query()
	follow, err := spec.ParseBool(cmp.Or(q.Get("follow"), "false"))
	if err != nil {
		return httperr.Invalid("follow: want true or false")
	}
	lines, err := strconv.Atoi(cmp.Or(q.Get("tail"), "-1"))
	if err != nil || q.Has("tail") && lines < 0 || lines > agent.MaxLines {
		return httperr.Invalid("tail %q: want a number of lines from 0 to %d; leave it out for all", httperr.Clip(q.Get("tail"), 20), agent.MaxLines)
	}
	if rec.State.Beginning() {
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
		text := rec.LastOutput
		if lines >= 0 {
			count := agent.LastLines{Lines: lines}
			io.WriteString(&count, text) //nolint:errcheck // never fails
			text = text[len(text)-int(count.Bytes()):]
		}
		io.WriteString(w, text) //nolint:errcheck // a client that left needs no answer
		return nil
	}
	if _, err := s.gateway.Reachable(r.Context(), rec, wire.AgentPort); err != nil {
		return err
	}
	out := &tail{w: w, rc: http.NewResponseController(w)}
	cursor := int64(0)
	if lines >= 0 {
		if cursor, err = s.seekLines(out, r, rec, lines, follow); err != nil {
			return err
		}
	}
	if cursor, err = s.copyLogs(out, r, rec, cursor, follow); err != nil || !follow {
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

// seekLines returns the number of the byte that the last lines begin with, for
// which it reads all the agent has. out has then seen what is before, and without
// follow it passes on no more than those lines.
func (s *Server) seekLines(out *tail, r *http.Request, rec record.Record, lines int, follow bool) (int64, error) {
	count := agent.LastLines{Lines: lines}
	end, err := s.copyLogs(io.MultiWriter(seen{out}, &count), r, rec, 0, false)
	if err != nil {
		return 0, err
	}
	n := count.Bytes()
	out.last = out.last[:max(0, len(out.last)-int(n))]
	if !follow {
		out.w = agent.FirstBytes(out.w, n)
	}
	return max(0, end-n), nil
}

// tail passes output on at once, and remembers the end of it.
type tail struct {
	w    io.Writer
	rc   *http.ResponseController
	last []byte
}

// maxTail is how much an ended sandbox remembers of its output.
const maxTail = 8 << 10

func (t *tail) remember(b []byte) {
	t.last = append(t.last, b...)
	if n := len(t.last) - maxTail; n > 0 {
		t.last = append(t.last[:0], t.last[n:]...)
	}
}

// seen is output that is remembered and not passed on.
type seen struct{ *tail }

func (s seen) Write(b []byte) (int, error) {
	s.remember(b)
	return len(b), nil
}

func (t *tail) Write(b []byte) (int, error) {
	t.remember(b)
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
	ctx, cancel := s.gateway.UntilEnd(r.Context(), rec)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet,
		"http://sandbox/command/"+agent.EntrypointID+"/logs?"+q.Encode(), nil)
	if err != nil {
		return cursor, err
	}
	resp, err := s.agents.Transport(rec).RoundTrip(req)
	if err != nil {
		return cursor, gateway.Unreachable(err, rec.ID, wire.AgentPort)
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
