package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func sandboxPath(idOrName, rest string) string {
	return "/sandboxes/" + url.PathEscape(idOrName) + rest
}

// Create asks for a sandbox. With wait it returns when the sandbox runs or has
// failed, without it as soon as the daemon has noted it; Status.State says which. A
// sandbox that failed is not an error here.
func (c *Client) Create(ctx context.Context, r wire.CreateRequest, wait bool) (wire.Sandbox, error) {
	sb, _, err := c.CreateTimed(ctx, r, wait)
	return sb, err
}

// CreateTimed is Create that also returns how long each step took, as the
// Server-Timing header has it, if wait is set.
func (c *Client) CreateTimed(ctx context.Context, r wire.CreateRequest, wait bool) (sb wire.Sandbox, timing string, err error) {
	req := request{method: http.MethodPost, path: "/sandboxes", json: r}
	if wait {
		req.query = url.Values{"wait": {"true"}}
	} else {
		req.header = http.Header{"Prefer": {"respond-async"}}
	}
	h, err := c.exchange(ctx, req, &sb)
	if err != nil {
		return sb, "", err
	}
	if wait && coming(sb) {
		sb, err = awaitTurn(ctx, c, sb.ID)
	}
	return sb, h.Get("Server-Timing"), err
}

// coming reports whether a sandbox is being created: it waits for its turn, or is not
// ready yet. A sandbox that waits for its restart does not count: it has run and ended.
func coming(sb wire.Sandbox) bool {
	if i := sb.Sandboxd; i != nil && (i.NextStart != nil || i.Health != nil) {
		return i.Health != nil && i.Health.State == wire.HealthStarting
	}
	return sb.Status.State == wire.Pending
}

// askAgain is how often to look at a sandbox that waits behind a long queue.
const askAgain = time.Second

// awaitTurn waits for a sandbox for which the daemon does not wait any longer.
func awaitTurn(ctx context.Context, c *Client, id string) (wire.Sandbox, error) {
	tick := time.NewTicker(askAgain)
	defer tick.Stop()
	for {
		sb, err := c.Get(ctx, id)
		if err != nil || !coming(sb) {
			return sb, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return sb, ctx.Err()
		}
	}
}

// Get returns one sandbox; one that does not exist is errs.NotFound.
func (c *Client) Get(ctx context.Context, idOrName string) (wire.Sandbox, error) {
	return ask[wire.Sandbox](ctx, c.daemon, get(sandboxPath(idOrName, "")))
}

// Filter selects sandboxes; an empty field selects all.
type Filter struct {
	States   []string          // any of them
	Metadata map[string]string // all of them
}

// List returns the sandboxes that match, newest first.
func (c *Client) List(ctx context.Context, f Filter) ([]wire.Sandbox, error) {
	q := url.Values{}
	for _, s := range f.States {
		q.Add("state", s)
	}
	if len(f.Metadata) > 0 {
		m := url.Values{}
		for k, v := range f.Metadata {
			m.Set(k, v)
		}
		q.Set("metadata", m.Encode())
	}
	return pages(q, func(sb wire.Sandbox) string { return sb.ID }, func(q url.Values) ([]wire.Sandbox, wire.Pagination, error) {
		l, err := ask[wire.List](ctx, c.daemon, request{method: http.MethodGet, path: "/sandboxes", query: q})
		return l.Items, l.Pagination, err
	})
}

// Delete destroys a sandbox. When it returns, its processes are dead.
func (c *Client) Delete(ctx context.Context, idOrName string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: sandboxPath(idOrName, "")}, nil)
}

// Remove is Client.Delete for a sandbox that has ended. It fails with errs.WrongState, and does
// nothing, for one that has not.
func Remove(ctx context.Context, c *Client, idOrName string) error {
	// A daemon of an older release knows no force, and deletes what runs. One of this release looks under the lock.
	if sb, err := c.Get(ctx, idOrName); err == nil && (sb.Status.State == wire.Running || sb.Status.State == wire.Paused) {
		return errs.New(errs.WrongState, "sandbox %s is %s, and its processes and what it has in memory would be lost; stop it first "+
			"(`sandboxctl stop %s`), or remove it all the same (`sandboxctl rm -f %[1]s`)", sb.ID, strings.ToLower(sb.Status.State), sb.ID)
	}
	return c.do(ctx, request{method: http.MethodDelete, path: sandboxPath(idOrName, ""), query: url.Values{"force": {"false"}}}, nil)
}

// Restart runs an ended sandbox again, with its files. With wait it returns when the
// sandbox runs or has failed; Status.State says which.
func (c *Client) Restart(ctx context.Context, idOrName string, wait bool) (sb wire.Sandbox, err error) {
	r := request{method: http.MethodPost, path: sandboxPath(idOrName, "/start")}
	if wait {
		r.query = url.Values{"wait": {"true"}}
	}
	err = c.do(ctx, r, &sb)
	if err == nil && wait && coming(sb) {
		sb, err = awaitTurn(ctx, c, sb.ID)
	}
	return sb, err
}

// Stop ends a sandbox and keeps it until it expires or is deleted. Its
// entrypoint gets its stop signal (SIGTERM, or what the image says) and has grace, in whole seconds, to end by itself.
func (c *Client) Stop(ctx context.Context, idOrName string, grace time.Duration) error {
	return c.do(ctx, request{
		method: http.MethodPost, path: sandboxPath(idOrName, "/stop"),
		query: url.Values{"grace": {strconv.Itoa(int(grace / time.Second))}},
	}, nil)
}

// Pause freezes all processes of a sandbox.
func (c *Client) Pause(ctx context.Context, idOrName string) error {
	return c.do(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, "/pause")}, nil)
}

// Hibernate puts the memory of a sandbox on disk and ends its processes, until Resume brings them back.
func Hibernate(ctx context.Context, c *Client, idOrName string) error {
	return c.do(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, "/hibernate")}, nil)
}

// Resume undoes Pause and Hibernate.
func (c *Client) Resume(ctx context.Context, idOrName string) error {
	return c.do(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, "/resume")}, nil)
}

// Renew sets when a sandbox expires and returns that time.
func (c *Client) Renew(ctx context.Context, idOrName string, expires time.Time) (time.Time, error) {
	var out wire.Renewal
	err := c.do(ctx, request{
		method: http.MethodPost, path: sandboxPath(idOrName, "/renew-expiration"),
		json: wire.Renewal{ExpiresAt: expires.UTC()},
	}, &out)
	return out.ExpiresAt, err
}

// Update changes limits of a sandbox that runs or is paused; the keys are those
// of CreateRequest.ResourceLimits.
func (c *Client) Update(ctx context.Context, idOrName string, limits map[string]string) (wire.Inspection, error) {
	return ask[wire.Inspection](ctx, c.daemon, request{
		method: http.MethodPatch, path: sandboxPath(idOrName, "/limits"), json: wire.LimitsPatch{ResourceLimits: limits},
	})
}

// PatchMetadata sets metadata, and removes the keys whose value is nil.
func (c *Client) PatchMetadata(ctx context.Context, idOrName string, patch map[string]*string) (sb wire.Sandbox, err error) {
	if patch == nil {
		patch = map[string]*string{}
	}
	err = c.do(ctx, request{method: http.MethodPatch, path: sandboxPath(idOrName, "/metadata"), json: patch}, &sb)
	return sb, err
}

// Rename gives a sandbox another name.
func (c *Client) Rename(ctx context.Context, idOrName, name string) (sb wire.Sandbox, err error) {
	err = c.do(ctx, request{
		method: http.MethodPost, path: sandboxPath(idOrName, "/rename"), json: wire.RenameRequest{Name: name},
	}, &sb)
	return sb, err
}

// Commit makes an image, NAME[:TAG], of the files of a sandbox.
func (c *Client) Commit(ctx context.Context, idOrName, name string) (im wire.ImageInfo, err error) {
	err = c.do(ctx, request{
		method: http.MethodPost, path: sandboxPath(idOrName, "/commit"), json: wire.CommitRequest{Name: name}, patient: true,
	}, &im)
	return im, err
}

// Endpoint says where a port of a sandbox is reached from outside, and with which headers.
func (c *Client) Endpoint(ctx context.Context, idOrName string, port uint16) (wire.Endpoint, error) {
	return ask[wire.Endpoint](ctx, c.daemon, get(sandboxPath(idOrName, fmt.Sprintf("/endpoints/%d", port))))
}

// SignedEndpoint is an Endpoint that opens its port by itself until a time, but at
// most as long as the sandbox lives; only what the agent's port needs is in Headers.
func (c *Client) SignedEndpoint(ctx context.Context, idOrName string, port uint16, until time.Time) (wire.Endpoint, error) {
	return ask[wire.Endpoint](ctx, c.daemon, request{
		method: http.MethodGet, path: sandboxPath(idOrName, fmt.Sprintf("/endpoints/%d", port)),
		query: url.Values{"expires": {strconv.FormatInt(until.Unix(), 10)}},
	})
}

// Inspect returns all there is to know of a sandbox except its secrets.
func (c *Client) Inspect(ctx context.Context, idOrName string) (wire.Inspection, error) {
	return ask[wire.Inspection](ctx, c.daemon, get(sandboxPath(idOrName, "/inspect")))
}

// Stats measures a sandbox.
func (c *Client) Stats(ctx context.Context, idOrName string) (wire.Usage, error) {
	return ask[wire.Usage](ctx, c.daemon, get(sandboxPath(idOrName, "/stats")))
}

// AllStats measures all sandboxes that run or are paused, in one request.
func (c *Client) AllStats(ctx context.Context) ([]wire.SandboxStats, error) {
	var l wire.StatsList
	err := c.do(ctx, get("/stats"), &l)
	return l.Items, err
}

// AllLines asks for all lines of an output.
const AllLines = -1

// LogTimes are what to read of an output by time. The zero LogTimes is all of it.
type LogTimes struct {
	Since  time.Time // begin with what was written then
	Stamps bool      // before each line is its time, as RFC 3339 and a space
}

func (t LogTimes) ask(q url.Values) {
	if !t.Since.IsZero() {
		q.Set("since", t.Since.UTC().Format(time.RFC3339Nano))
	}
	if t.Stamps {
		q.Set("timestamps", "true")
	}
}

// Logs reads the last lines of the output of the entrypoint, or AllLines.
func (c *Client) Logs(ctx context.Context, idOrName string, lines int, t LogTimes) (io.ReadCloser, error) {
	r := request{method: http.MethodGet, path: sandboxPath(idOrName, "/logs"), query: url.Values{}}
	if lines != AllLines {
		r.query.Set("tail", strconv.Itoa(lines))
	}
	t.ask(r.query)
	resp, err := c.stream(ctx, r)
	if err != nil {
		return nil, err
	}
	return c.followed(ctx, resp.Body), nil
}

// FollowLogs copies the last lines of the output of the entrypoint, or AllLines, to w, and
// what comes, until the sandbox has ended. When the daemon is restarted, it waits for it
// and goes on at the byte where it was.
func (c *Client) FollowLogs(ctx context.Context, idOrName string, lines int, t LogTimes, n Notices, w io.Writer) error {
	const unknown = -1
	cursor := int64(unknown)
	had := output{stamped: t.Stamps}
	return c.persist(ctx, n, func(up func()) error {
		q := url.Values{"follow": {"true"}}
		t.ask(q)
		again := cursor != unknown
		if again {
			q.Set("cursor", strconv.FormatInt(cursor, 10))
		} else if lines != AllLines {
			q.Set("tail", strconv.Itoa(lines))
		}
		resp, err := c.stream(ctx, request{method: http.MethodGet, path: sandboxPath(idOrName, "/logs"), query: q, patient: true})
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		first, err := strconv.ParseInt(resp.Header.Get(agent.CursorHeader), 10, 64)
		if again && err != nil { // of the record: the sandbox has ended
			b, err := io.ReadAll(io.LimitReader(c.followed(ctx, resp.Body), agent.MaxLastOutput*utf8.UTFMax))
			if err == nil {
				_, err = io.WriteString(w, had.Missing(string(b)))
			}
			return err
		}
		if err == nil {
			cursor = first
			up() // else it cannot go on
		}
		had.n = 0
		body := c.followed(ctx, resp.Body)
		if had.at > 0 && had.at <= stampLen { // of this line its time has come, or a part of that, which comes again
			io.CopyN(io.Discard, body, int64(had.at)) //nolint:errcheck // the next read fails likewise
		}
		_, err = io.Copy(io.MultiWriter(w, &had), body)
		cursor += had.n
		return err
	})
}

// output is what was read of an output, without the times before its lines.
type output struct {
	agent.Tail
	stamped bool
	n       int64 // bytes of it
	at      int   // bytes of the present line, with its time
}

// stampLen is the length of the time before a line, in docker's form, with the space.
const stampLen = len("2006-01-02T15:04:05.000000000Z ")

func (o *output) Write(b []byte) (int, error) {
	if !o.stamped {
		o.n += int64(len(b))
		return o.Tail.Write(b)
	}
	for line := range bytes.Lines(b) {
		text := line[min(len(line), max(0, stampLen-o.at)):]
		o.n += int64(len(text))
		o.Tail.Write(text) //nolint:errcheck // never fails
		if o.at += len(line); line[len(line)-1] == '\n' {
			o.at = 0
		}
	}
	return len(b), nil
}

// Version returns the version of the daemon.
func (c *Client) Version(ctx context.Context) (wire.Version, error) {
	return ask[wire.Version](ctx, c.daemon, get("/version"))
}

// Events yields what happens on the daemon until ctx ends or the loop breaks, and before
// that what has happened since a time, unless that is zero. If the daemon does not remember
// all of it, the first event is of the type "lost". When the daemon is restarted, Events
// waits for it; what happened meanwhile comes first, as far as the daemon knows it. The last
// thing it yields is an error, if one ended it.
func (c *Client) Events(ctx context.Context, since time.Time, n Notices) iter.Seq2[wire.Event, error] {
	return func(yield func(wire.Event, error) bool) {
		cursor, enough := "", false
		err := c.persist(ctx, n, func(up func()) error {
			r := get("/events")
			switch {
			case cursor != "":
				r.header = http.Header{"Last-Event-Id": {cursor}}
			case !since.IsZero():
				r.query = url.Values{"since": {since.UTC().Format(time.RFC3339Nano)}}
			}
			resp, err := c.stream(ctx, r)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			for ev, err := range parseEvents(resp.Body) {
				if err != nil {
					return c.lost(ctx, err)
				}
				if ev.Cursor != "" { // an older daemon has none, and nobody can come back to it
					cursor = ev.Cursor
					up()
				}
				if ev.Type != "" && !yield(ev, nil) {
					enough = true
					return nil
				}
			}
			return nil
		})
		if err != nil && !enough {
			yield(wire.Event{}, err)
		}
	}
}

// parseEvents reads server-sent events (WHATWG HTML §9.2.6) whose data is one
// line of JSON, and of the other fields the id. An id alone is an event without a type.
func parseEvents(r io.Reader) iter.Seq2[wire.Event, error] {
	return func(yield func(wire.Event, error) bool) {
		sc := bufio.NewScanner(r)
		sc.Buffer(nil, maxLine)
		var ev wire.Event
		for sc.Scan() {
			line := sc.Text()
			if id, ok := strings.CutPrefix(line, "id:"); ok {
				ev.Cursor = strings.TrimSpace(id)
			}
			if line == "" { // the end of one that had no data
				if ev.Cursor != "" && !yield(ev, nil) {
					return
				}
				ev = wire.Event{}
			}
			data, ok := strings.CutPrefix(line, "data:")
			if !ok {
				continue
			}
			if err := json.Unmarshal([]byte(data), &ev); err != nil {
				yield(wire.Event{}, fmt.Errorf("decode an event: %w", err))
				return
			}
			if !yield(ev, nil) {
				return
			}
			ev = wire.Event{}
		}
		err := sc.Err()
		if err == nil {
			err = io.ErrUnexpectedEOF // an event stream has no end of its own
		}
		yield(wire.Event{}, err)
	}
}
