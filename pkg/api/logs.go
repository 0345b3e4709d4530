package api

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sort"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// logHandlers read the output of entrypoints.
type logHandlers struct {
	sandboxes Sandboxes
	agents    gateway.Agents
	gateway   *gateway.Gateway
	left      Left // may be nil
}

// maxLogs bounds the bytes that one request for logs copies: as much as an agent may
// keep. An agent that sends more is cut off.
const maxLogs = spec.MaxLog

// logs answers the output of the entrypoint, or its last lines. The agent has it while
// the sandbox runs; afterwards it is on the disk, and the record has the end of it.
func (l *logHandlers) logs(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	q, err := logQueryOf(r.URL.Query())
	if err != nil {
		return err
	}
	if rec.State.Beginning() {
		if rec, err = l.sandboxes.Await(r.Context(), rec.ID); err != nil {
			return fmt.Errorf("wait for sandbox %s: %w", rec.ID, err)
		}
	}
	if len(rec.Spec.Entrypoint) == 0 {
		return errs.New(errs.WrongState,
			"sandbox %s was created without an entrypoint, so it has no logs; `sandboxctl command logs` prints the output of a command",
			rec.ID)
	}
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	if rec.State == record.Ended {
		if k, err := l.openKept(&rec, agent.EntrypointID); err == nil {
			defer k.Close()
			return l.keptLogs(w, &rec, q, &k)
		}
		return lastOf(w, &rec, q)
	}
	if err := l.gateway.Reachable(r.Context(), &rec, wire.AgentPort); err != nil {
		return err
	}
	out := &tail{w: w, rc: http.NewResponseController(w), header: h}
	stamps := &stamper{w: w}
	if q.stamped {
		if stamps.times, err = l.times(r.Context(), &rec); err != nil {
			return err
		}
		out.w = stamps
	}
	cursor, err := l.firstByte(out, r, rec, q)
	if err != nil {
		return err
	}
	stamps.off, stamps.inside = cursor, q.resumed && out.Inside()
	if cursor, err = l.copyLogs(out, r, rec, cursor, q.follow); err != nil || !q.follow {
		return err
	}
	l.followToEnd(out, r, rec, cursor)
	return nil
}

// A logQuery is what a request for logs asks for.
type logQuery struct {
	follow  bool
	lines   int       // the last ones; negative: all
	resumed bool      // the client goes on at cursor
	cursor  int64     // number of a byte
	since   time.Time // zero: the oldest byte that is kept
	stamped bool      // each line begins with its time
}

func logQueryOf(v url.Values) (q logQuery, err error) {
	if q.follow, err = spec.ParseBool(cmp.Or(v.Get("follow"), "false")); err != nil {
		return q, httperr.Invalid("follow: want true or false")
	}
	q.lines, err = strconv.Atoi(cmp.Or(v.Get("tail"), "-1"))
	if err != nil || v.Has("tail") && q.lines < 0 || q.lines > agent.MaxLines {
		return q, httperr.Invalid("tail %q: want a number of lines from 0 to %d; leave it out for all", httperr.Clip(v.Get("tail"), 20),
			agent.MaxLines)
	}
	q.resumed = v.Has("cursor")
	q.cursor, err = strconv.ParseInt(cmp.Or(v.Get("cursor"), "0"), 10, 64)
	if err != nil || q.cursor < 0 {
		return q, httperr.Invalid("cursor %q: want a number of bytes", httperr.Clip(v.Get("cursor"), 20))
	}
	if q.since, err = sinceOf(v); err != nil {
		return q, err
	}
	if q.stamped, err = spec.ParseBool(cmp.Or(v.Get("timestamps"), "false")); err != nil {
		return q, httperr.Invalid("timestamps: want true or false")
	}
	return q, nil
}

// firstByte returns the number of the byte with which the answer to q begins.
func (l *logHandlers) firstByte(out *tail, r *http.Request, rec record.Record, q logQuery) (first int64, err error) {
	if q.resumed {
		return l.seek(out, r, rec, q.cursor)
	}
	if q.lines >= 0 {
		if first, err = l.seekLines(out, r, rec, q.lines, q.follow); err != nil {
			return 0, err
		}
	}
	if q.stamped || !q.since.IsZero() {
		return l.skip(out, r, rec, first, q.since, q.follow)
	}
	return first, nil
}

// followToEnd goes on when the agent has sent all: the sandbox is about to end, and the
// daemon is about to notice. A person does not notice a tenth of a second.
func (l *logHandlers) followToEnd(out *tail, r *http.Request, rec record.Record, cursor int64) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		now, err := l.sandboxes.Get(r.Context(), rec.ID)
		switch {
		case err != nil || now.State == record.Deleting:
			return // its end is the end of its logs
		case now.State == record.Ended:
			if l.rest(out.w, &now, cursor) {
				return
			}
			io.WriteString(out.w, out.Missing(now.LastOutput)) //nolint:errcheck // a client that left needs no answer
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-tick.C:
		}
		if now.State != record.Running {
			continue
		}
		if next, err := l.copyLogs(out, r, rec, cursor, true); err == nil {
			cursor = next
		} // else it is about to end: the next round sees it
	}
}

// seek makes out remember what is before byte number cursor, where a client goes on, and
// returns cursor. If there is less output, it is that of a later run of the sandbox, of
// which the client has nothing.
func (l *logHandlers) seek(out *tail, r *http.Request, rec record.Record, cursor int64) (int64, error) {
	out.Tail = agent.Tail{}
	before := min(cursor, agent.MaxLastOutput)
	end, err := l.copyLogs(agent.FirstBytes(&out.Tail, before), r, rec, cursor-before, false)
	if err != nil {
		return 0, err
	}
	if end < cursor {
		out.Tail, cursor = agent.Tail{}, 0
	}
	return cursor, nil
}

// skip returns the number of the first byte from cursor on that the agent has and that was
// written at a time or later. With follow, out remembers what is before.
func (l *logHandlers) skip(
	out *tail, r *http.Request, rec record.Record, cursor int64, since time.Time, follow bool,
) (int64, error) {
	first, err := l.seekTime(r.Context(), &rec, since)
	switch {
	case err != nil || first <= cursor:
		return cursor, err
	case follow:
		return l.seek(out, r, rec, first)
	}
	return first, nil
}

func errNoStamps(rec *record.Record) error {
	return errs.New(errs.WrongState, "sandbox %s has ended, and of its last output no times are kept; leave out timestamps", rec.ID)
}

// lastOf answers what the record of an ended sandbox has, whose agent has left no output on the disk.
func lastOf(w io.Writer, rec *record.Record, q logQuery) error {
	if q.stamped {
		return errNoStamps(rec)
	}
	text := rec.LastOutput
	if rec.Changed.Before(q.since) {
		text = ""
	}
	if q.lines >= 0 {
		count := agent.LastLines{Lines: q.lines}
		io.WriteString(&count, text) //nolint:errcheck // never fails
		text = text[len(text)-int(count.Bytes()):]
	}
	io.WriteString(w, text) //nolint:errcheck // a client that left needs no answer
	return nil
}

// seekLines returns the number of the byte that the last lines begin with. To find it,
// it reads all that the agent has. out then remembers what is before, and without
// follow it passes on no more than those lines.
func (l *logHandlers) seekLines(out *tail, r *http.Request, rec record.Record, lines int, follow bool) (int64, error) {
	count := agent.LastLines{Lines: lines}
	end, err := l.copyLogs(io.MultiWriter(&out.Tail, &count), r, rec, 0, false)
	if err != nil {
		return 0, err
	}
	n := count.Bytes()
	out.Cut(n)
	if !follow {
		out.w = agent.FirstBytes(out.w, n)
	}
	return max(0, end-n), nil
}

// tail passes output on at once, and remembers the end of it.
type tail struct {
	agent.Tail
	w      io.Writer
	rc     *http.ResponseController
	header http.Header // nil: sent
}

// begin tells the client the number of the byte that it gets first.
func (t *tail) begin(first int64) {
	if t.header != nil {
		t.header.Set(agent.CursorHeader, strconv.FormatInt(first, 10))
	}
	t.header = nil
	t.rc.Flush() //nolint:errcheck // Write tells
}

func (t *tail) Write(b []byte) (int, error) {
	t.Tail.Write(b) //nolint:errcheck // never fails
	n, err := t.w.Write(b)
	if err == nil {
		err = t.rc.Flush()
	}
	return n, err
}

// sinceOf reads since of a query: a time, or a duration before now. The zero time is none.
func sinceOf(q url.Values) (time.Time, error) {
	text := q.Get("since")
	if text == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return time.Now().Add(-d), nil
	}
	at, err := spec.ParseTime(text)
	if err != nil {
		return at, httperr.Invalid("since %q: want a duration such as 10m, or a time in RFC 3339 such as 2030-01-02T15:04:05Z",
			httperr.Clip(text, 60))
	}
	return at, nil
}

// errNoTimes is about a sandbox whose agent is older than the daemon.
func errNoTimes(rec *record.Record) error {
	return errs.New(errs.WrongState, "sandbox %s was started by an older release, whose agent keeps no times of its output; leave out "+
		"since and timestamps", rec.ID)
}

// seekTime returns the number of the first byte that the agent has of what the entrypoint
// wrote at a time or later.
func (l *logHandlers) seekTime(ctx context.Context, rec *record.Record, at time.Time) (int64, error) {
	ctx, cancel := l.gateway.UntilEnd(ctx, rec)
	defer cancel()
	resp, err := l.ask(ctx, rec, http.MethodHead, "logs", url.Values{"since": {at.UTC().Format(time.RFC3339Nano)}})
	if err != nil {
		return 0, err
	}
	resp.Body.Close()
	first, err := strconv.ParseInt(resp.Header.Get(agent.SinceHeader), 10, 64)
	if err != nil || first < 0 {
		return 0, errNoTimes(rec)
	}
	return first, nil
}

// maxTimes bounds the answer of an agent, in bytes.
const maxTimes = 64 << 10

// times asks when the entrypoint wrote its output.
func (l *logHandlers) times(ctx context.Context, rec *record.Record) (t agent.OutputTimes, err error) {
	ctx, cancel := l.gateway.UntilEnd(ctx, rec)
	defer cancel()
	resp, err := l.ask(ctx, rec, http.MethodGet, "times", nil)
	if errs.Is(err, errs.NotFound) {
		return t, errNoTimes(rec)
	}
	if err != nil {
		return t, err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxTimes)).Decode(&t); err != nil {
		return t, errNoTimes(rec)
	}
	return t, nil
}

// stamper puts before each line of an output when it was written, as docker does. What
// comes after the times were asked for is written as it comes.
type stamper struct {
	w      io.Writer
	times  agent.OutputTimes
	off    int64 // number of the next byte
	inside bool  // a line
}

// stamp is docker's form of a time: RFC 3339 with all nanoseconds.
const stamp = "2006-01-02T15:04:05.000000000Z07:00 "

func (s *stamper) Write(b []byte) (int, error) {
	var out bytes.Buffer
	for rest := b; len(rest) > 0; {
		if !s.inside {
			out.WriteString(s.now().UTC().Format(stamp))
		}
		n := bytes.IndexByte(rest, '\n') + 1
		if s.inside = n == 0; s.inside {
			n = len(rest)
		}
		out.Write(rest[:n])
		rest = rest[n:]
		s.off += int64(n)
	}
	if _, err := s.w.Write(out.Bytes()); err != nil {
		return 0, err
	}
	return len(b), nil
}

// now is when the next byte was written.
func (s *stamper) now() time.Time {
	after := sort.Search(len(s.times.Marks), func(i int) bool { return s.times.Marks[i][0] > s.off })
	if s.off >= s.times.End || after == 0 {
		return time.Now()
	}
	at, now := time.UnixMilli(s.times.Marks[after-1][1]), time.Now()
	if at.Unix() < 0 || at.After(now) { // an agent may say anything, and clients count on the length of a time
		return now
	}
	return at
}

// copyLogs copies what the entrypoint wrote since byte number cursor, with
// follow until it has ended, and returns the number to go on with.
func (l *logHandlers) copyLogs(w io.Writer, r *http.Request, rec record.Record, cursor int64, follow bool) (int64, error) {
	q := url.Values{"cursor": {strconv.FormatInt(cursor, 10)}}
	if follow {
		q.Set("follow", "true")
	}
	ctx, cancel := l.gateway.UntilEnd(r.Context(), &rec)
	defer cancel()
	resp, err := l.ask(ctx, &rec, http.MethodGet, "logs", q)
	if err != nil {
		return cursor, err
	}
	defer resp.Body.Close()
	next, err := strconv.ParseInt(resp.Header.Get(agent.CursorHeader), 10, 64)
	if err != nil || next < 0 {
		return cursor, errs.New(errs.Internal, "the agent of sandbox %s sent logs without a cursor", rec.ID)
	}
	if !follow {
		if _, err := io.Copy(w, io.LimitReader(resp.Body, maxLogs)); err != nil {
			return cursor, fmt.Errorf("copy logs of sandbox %s: %w", rec.ID, err)
		}
		return next, nil
	}
	if t, ok := w.(*tail); ok {
		t.begin(next)
	}
	n, _ := io.Copy(w, resp.Body) // where it breaks off, the sandbox died or the client left: either ends logs well
	return next + n, nil
}

// copySince copies what the entrypoint wrote at a time or later; the zero time is all. It
// reports false if the agent is of a release that knows no times: then it copies all.
func (l *logHandlers) copySince(w io.Writer, r *http.Request, rec record.Record, at time.Time) (known bool, err error) {
	ctx, cancel := l.gateway.UntilEnd(r.Context(), &rec)
	defer cancel()
	resp, err := l.ask(ctx, &rec, http.MethodGet, "logs", queryFrom(at))
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(w, io.LimitReader(resp.Body, maxLogs)); err != nil {
		return false, fmt.Errorf("copy logs of sandbox %s: %w", rec.ID, err)
	}
	return at.IsZero() || resp.Header.Get(agent.SinceHeader) != "", nil
}

// queryFrom is the query for output from a time on; the zero time is all.
func queryFrom(at time.Time) url.Values {
	if at.IsZero() {
		return nil
	}
	return url.Values{"since": {at.UTC().Format(time.RFC3339Nano)}}
}

// ask asks the agent for the logs of the entrypoint, or what else it knows of its output.
// errs.NotFound: the agent is too old for that.
func (l *logHandlers) ask(ctx context.Context, rec *record.Record, method, what string, q url.Values) (*http.Response, error) {
	u := url.URL{Scheme: "http", Host: "sandbox", Path: "/command/" + agent.EntrypointID + "/" + what, RawQuery: q.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := l.agents.Transport(rec).RoundTrip(req)
	if err != nil {
		return nil, gateway.Unreachable(err, rec.ID, wire.AgentPort)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNotFound {
		return nil, errs.New(errs.NotFound, "the agent of sandbox %s has no %s of its entrypoint", rec.ID, what)
	}
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	return nil, fmt.Errorf("read %s of sandbox %s: the agent answered %d: %.200q", what, rec.ID, resp.StatusCode, b)
}
