package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/history"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// diagnosticHandlers answer with texts that say what is wrong with a sandbox, for
// people and for AI agents (OpenSandbox's diagnostic-api.yml). They answer in every
// state, and soon: a part that is not available is a warning, not an error.
type diagnosticHandlers struct {
	history  *history.Book // may be nil
	logs     *logHandlers
	describe func(record.Record) wire.Inspection
}

const (
	maxDiagnostic   = 1 << 20         // bytes of output in one answer
	diagnosticLimit = 5 * time.Second // for the agent to send its output
)

// scopes are the parts of a sandbox's life that a text may be about.
var scopes = map[string]map[string][]history.Kind{
	"logs": {
		"container": nil, // output of the entrypoint
		"lifecycle": {history.Operation},
		"all":       {history.Operation},
	},
	"events": {
		"lifecycle": {history.State},
		"runtime":   {history.Operation},
		"network":   {history.Network},
		"all":       {history.State, history.Operation, history.Network},
	},
}

// answer answers GET /sandboxes/{id}/diagnostics/{kind}: with a scope a
// descriptor, without one the plain text of OpenSandbox's older routes.
//
// since bounds what logs tell; the other kinds ignore it.
func (d *diagnosticHandlers) answer(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	kind, q := r.PathValue("kind"), r.URL.Query()
	var since time.Time
	if kind == "logs" {
		var err error
		if since, err = sinceOf(q); err != nil {
			return err
		}
	}
	_, scoped := scopes[kind]
	if scoped && q.Has("scope") {
		return d.describeScope(w, r, rec, kind, q.Get("scope"), since)
	}
	if q.Has("scope") {
		return httperr.Invalid("scope: %s takes no scope; only logs and events do", kind)
	}
	text, err := d.diagnosticText(r, rec, kind, q, since)
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Deprecation", "true") // as OpenSandbox says of these forms
	h.Set("Content-Length", strconv.Itoa(len(text)))
	w.Write([]byte(text)) //nolint:errcheck // a client that left needs no answer
	return nil
}

func (d *diagnosticHandlers) describeScope(
	w http.ResponseWriter, r *http.Request, rec record.Record, kind, scope string, since time.Time,
) error {
	scope = strings.ToLower(strings.TrimSpace(scope))
	about, known := scopes[kind][scope]
	if !known {
		return errs.Wire(httperr.Invalid("scope %q: the scopes of %s are %s", httperr.Clip(scope, 40), kind,
			strings.Join(slices.Sorted(maps.Keys(scopes[kind])), ", ")), "DIAGNOSTICS_SCOPE_UNSUPPORTED")
	}
	out := wire.Diagnostic{SandboxID: rec.ID, Kind: kind, Scope: scope, Delivery: "inline", ContentType: "text/plain; charset=utf-8"}
	var text strings.Builder
	if len(about) > 0 {
		lines, warnings := d.remembered(&rec, about, since)
		out.Warnings = append(out.Warnings, warnings...)
		for _, l := range lines {
			text.WriteString(l)
		}
	}
	if kind == "logs" && scope != "lifecycle" {
		last := d.lastOutput(r, rec, since)
		out.Truncated = last.cut
		out.Warnings = append(out.Warnings, last.warnings...)
		text.WriteString(last.text)
	}
	out.Content = text.String()
	out.ContentLength = len(out.Content)
	writeJSON(w, http.StatusOK, out)
	return nil
}

// diagnosticText is one of the texts without a scope.
func (d *diagnosticHandlers) diagnosticText(
	r *http.Request, rec record.Record, kind string, q url.Values, since time.Time,
) (string, error) {
	switch kind {
	case "logs":
		n, err := number(q, "tail", 100, 10_000)
		if err != nil {
			return "", err
		}
		return d.logText(r, rec, n, since), nil
	case "events":
		n, err := number(q, "limit", 50, 500)
		return d.eventText(&rec, n), err
	case "inspect":
		return d.inspectText(rec), nil
	}
	tail, err := number(q, "tail", 50, 10_000)
	if err != nil {
		return "", err
	}
	limit, err := number(q, "event_limit", 20, 500)
	if err != nil {
		return "", err
	}
	return "== inspect\n" + d.inspectText(rec) + "\n== events\n" + d.eventText(&rec, limit) + "\n== logs\n" +
		d.logText(r, rec, tail, since), nil
}

// number reads a query parameter of 1 to most.
func number(q url.Values, name string, def, most int) (int, error) {
	if !q.Has(name) {
		return def, nil
	}
	n, err := strconv.Atoi(q.Get(name))
	if err != nil || n < 1 || n > most {
		return 0, httperr.Invalid("%s %q: want a whole number from 1 to %d", name, httperr.Clip(q.Get(name), 20), most)
	}
	return n, nil
}

// remembered returns lines that say what happened to a sandbox since a time. Those that
// come from its record outlive a restart of the daemon.
func (d *diagnosticHandlers) remembered(rec *record.Record, about []history.Kind, since time.Time) (lines, warnings []string) {
	line := func(at time.Time, kind, text string) {
		if at.Before(since) {
			return
		}
		text = strings.Join(strings.Fields(text), " ") // one line, whatever a guest has put into it
		lines = append(lines, at.UTC().Format("2006-01-02T15:04:05.000Z")+" "+kind+" "+text+"\n")
	}
	var entries []history.Entry
	var dropped int
	began := time.Now()
	if d.history != nil {
		entries, dropped = d.history.Of(rec.ID, about...)
		began = d.history.Began()
	}
	if rec.Created.Before(began) {
		line(rec.Created, "lifecycle", "created")
		if rec.Changed.Before(began) {
			line(rec.Changed, "lifecycle", history.Change(string(rec.State), string(rec.Reason), rec.Message))
		}
		warnings = append(warnings,
			"sandboxd was started at "+began.UTC().Format(time.RFC3339)+"; of earlier events only creation and last change are known")
	}
	for _, e := range entries {
		text := e.Text
		if e.Times > 1 {
			text += fmt.Sprintf(" (%d times)", e.Times)
		}
		line(e.Time, e.Kind.String(), text)
	}
	if dropped > 0 {
		warnings = append(warnings, fmt.Sprintf("%d older entries were dropped", dropped))
	}
	return lines, warnings
}

func (d *diagnosticHandlers) eventText(rec *record.Record, n int) string {
	lines, warnings := d.remembered(rec, scopes["events"]["all"], time.Time{})
	return comments(warnings) + strings.Join(lines[max(0, len(lines)-n):], "")
}

func (d *diagnosticHandlers) logText(r *http.Request, rec record.Record, n int, since time.Time) string {
	out := d.lastOutput(r, rec, since)
	return comments(out.warnings) + lastLines(out.text, n)
}

// inspectText is the answer of GET …/inspect as text for people.
func (d *diagnosticHandlers) inspectText(rec record.Record) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(d.describe(rec)); err != nil {
		return "# " + err.Error() + "\n"
	}
	return b.String()
}

func comments(warnings []string) string {
	var b strings.Builder
	for _, w := range warnings {
		b.WriteString("# " + w + "\n")
	}
	return b.String()
}

// lastLines returns the last n lines of text.
func lastLines(text string, n int) string {
	at := len(strings.TrimSuffix(text, "\n"))
	for ; n > 0 && at >= 0; n-- {
		at = strings.LastIndexByte(text[:at], '\n')
	}
	return text[at+1:]
}

// output is the end of what an entrypoint wrote.
type output struct {
	text     string
	cut      bool // it had more than maxDiagnostic bytes
	warnings []string
}

// lastOutput reads the end of the entrypoint's output since a time, if that is available.
func (d *diagnosticHandlers) lastOutput(r *http.Request, rec record.Record, since time.Time) output {
	none := func(format string, args ...any) output {
		return output{warnings: []string{fmt.Sprintf(format, args...)}}
	}
	switch {
	case len(rec.Spec.Entrypoint) == 0:
		return none("the sandbox was created without an entrypoint; commands have logs of their own")
	case rec.State == record.Ended && rec.Changed.Before(since):
		return none("the sandbox ended at %s (%s), and has written nothing since", rec.Changed.UTC().Format(time.RFC3339), rec.Reason)
	case rec.State == record.Ended:
		if k, err := d.logs.openKept(&rec, agent.EntrypointID); err == nil {
			defer k.Close()
			end := &ending{}
			io.Copy(end, k.Since(k.End-2*maxDiagnostic)) //nolint:errcheck // what can be read is the answer
			return output{
				text: strings.ToValidUTF8(string(end.last()), "\ufffd"), cut: end.cut || k.From > 0,
				warnings: []string{fmt.Sprintf("the sandbox has ended (%s); this is what is kept of its output", rec.Reason)},
			}
		}
		return output{
			text: strings.ToValidUTF8(rec.LastOutput, "\ufffd"),
			warnings: []string{fmt.Sprintf("the sandbox has ended (%s); the last %d KiB of its output are kept", rec.Reason,
				agent.MaxLastOutput>>10)},
		}
	case rec.State != record.Running:
		return none("the sandbox is %s; its output can be read while it runs", spec.StateOf(&rec))
	}
	ctx, cancel := context.WithTimeout(r.Context(), diagnosticLimit)
	defer cancel()
	end := &ending{}
	known, err := d.logs.copySince(end, r.WithContext(ctx), rec, since)
	if err != nil {
		text := "the agent of the sandbox did not return its output"
		if e, ok := asClientError(err); ok {
			text = e
		}
		infoOf(r).err = err
		return none("%s", text)
	}
	out := output{text: strings.ToValidUTF8(string(end.last()), "\ufffd"), cut: end.cut}
	if !known {
		out.warnings = []string{"since is ignored: the sandbox was started by an older release, whose agent keeps no times"}
	}
	return out
}

func asClientError(err error) (string, bool) {
	if errs.CodeOf(err) == errs.Internal {
		return "", false
	}
	_, body := httperr.Body(err, "")
	return body.Message, true
}

// ending keeps the last maxDiagnostic bytes of what is written to it.
type ending struct {
	b   []byte
	cut bool
}

func (e *ending) Write(p []byte) (int, error) {
	e.b = append(e.b, p...)
	if len(e.b) > 2*maxDiagnostic { // seldom, so that a byte is moved at most once more
		e.trim()
	}
	return len(p), nil
}

func (e *ending) trim() {
	if n := len(e.b) - maxDiagnostic; n > 0 {
		e.b, e.cut = append(e.b[:0], e.b[n:]...), true
	}
}

func (e *ending) last() []byte { e.trim(); return e.b }

// A kept output is what the entrypoint or a command of a sandbox that has ended has printed.
type kept struct {
	agent.KeptOutput
	io.Closer
}

// openKept opens the output of a command of an ended sandbox. It fails with errs.NotFound if none
// is kept: it printed nothing, or its agent is of a release that did not keep it.
func (l *logHandlers) openKept(rec *record.Record, command string) (k kept, err error) {
	none := errs.New(errs.NotFound, "sandbox %s has ended (%s), and no output of command %.64q is kept: it printed nothing, or there is "+
		"no such command", rec.ID, rec.Reason, command)
	if l.left == nil {
		return k, none
	}
	f, err := l.left(rec.ID, command)
	if err != nil {
		return k, errs.Wrap(err, errs.NotFound, "%s", none.Error())
	}
	fi, err := f.Stat()
	if err != nil {
		f.Close()
		return k, fmt.Errorf("read output of sandbox %s: %w", rec.ID, err)
	}
	return kept{agent.OpenOutput(f, fi.Size(), maxLogs), f}, nil
}

// keptLogs answers a request for the logs of an entrypoint from what is kept.
func (l *logHandlers) keptLogs(w http.ResponseWriter, rec *record.Record, q logQuery, k *kept) error {
	first := k.From
	switch {
	case q.stamped:
		return errNoStamps(rec)
	case rec.Changed.Before(q.since):
		first = k.End
	case q.resumed && q.cursor <= k.End: // else it is the output of a later run, of which the client has nothing
		first = max(first, q.cursor)
	case q.lines >= 0:
		count := agent.LastLines{Lines: q.lines}
		if _, err := io.Copy(&count, k.Since(first)); err != nil {
			return fmt.Errorf("read output of sandbox %s: %w", rec.ID, err)
		}
		first = k.End - count.Bytes()
	}
	if q.follow {
		w.Header().Set(agent.CursorHeader, strconv.FormatInt(first, 10))
	}
	io.Copy(w, k.Since(first)) //nolint:errcheck // a client that left needs no answer
	return nil
}

// logsPath is the path of an agent for the output of a command.
var logsPath = regexp.MustCompile(`^/command/([^/]+)/logs/?$`)

// ofEnded answers in the place of the agent of a sandbox that has ended, as far as that is possible
// without it: with the output of a command. It reports whether it did.
func (l *logHandlers) ofEnded(w http.ResponseWriter, r *http.Request, rec *record.Record, path string) (bool, error) {
	m := logsPath.FindStringSubmatch(path)
	if m == nil || r.Method != http.MethodGet {
		return false, nil
	}
	q, v := r.URL.Query(), int64(0)
	if text := q.Get("cursor"); text != "" {
		var err error
		if v, err = strconv.ParseInt(text, 10, 64); err != nil || v < 0 {
			return true, httperr.Invalid("cursor %q: want a number of bytes", httperr.Clip(text, 20))
		}
	}
	k, err := l.openKept(rec, m[1])
	if err != nil {
		return true, err
	}
	defer k.Close()
	first := min(max(v, k.From), k.End)
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	next := k.End
	if q.Get("follow") == "true" { // then it is the number of the first byte
		next = first
	}
	h.Set(agent.CursorHeader, strconv.FormatInt(next, 10))
	io.Copy(w, k.Since(first)) //nolint:errcheck // a client that left needs no answer
	return true, nil
}

// rest writes what is kept of the output of a sandbox that has just ended from byte number cursor on.
// It reports false if nothing is kept, or the output is that of a later run.
func (l *logHandlers) rest(w io.Writer, rec *record.Record, cursor int64) bool {
	k, err := l.openKept(rec, agent.EntrypointID)
	if err != nil {
		return false
	}
	defer k.Close()
	if cursor > k.End {
		return false
	}
	io.Copy(w, k.Since(cursor)) //nolint:errcheck // a client that left needs no answer
	return true
}
