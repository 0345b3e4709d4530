package gateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// explainKills returns a function that changes the answer to a command, or to code: its
// stream then says that the kernel killed it for its memory. It is nil for other
// requests. The agent sees only a SIGKILL; the host counts the kills.
//
// Only this code reads the bytes that pass, and only the end of each piece: the event
// that says how a command ended is the last of its stream, and the agent writes it at
// once.
func (g *Gateway) explainKills(method, path string, rec *record.Record, before int64) func(*http.Response) {
	if before == unknownKills || method != http.MethodPost {
		return nil
	}
	why := func() string {
		if now, err := g.cfg.Kills(rec.ID); err != nil || now <= before {
			return ""
		}
		what := "command was killed"
		if path == "/code" {
			what = "the context was killed and its state is lost"
		}
		return fmt.Sprintf("%s: %s: out of memory (sandbox limit %s)", agent.ReasonOOM, what, record.Mebibytes(rec.Spec.MemoryBytes))
	}
	return func(resp *http.Response) {
		if resp.Header.Get("Content-Type") == "text/event-stream" {
			resp.Body = &killedStream{ReadCloser: resp.Body, why: why}
		}
	}
}

// unknownKills stands for a count of OOM kills that is not needed, or not known.
const unknownKills = -1

// kills counts the OOM kills of a sandbox, if a request to its agent runs something or
// asks how it ended.
func (g *Gateway) kills(method, path string, rec *record.Record) int64 {
	if !(method == http.MethodPost && runs(path)) && !strings.HasPrefix(path, "/command/status/") {
		return unknownKills
	}
	n, err := g.cfg.Kills(rec.ID)
	if err != nil {
		return unknownKills
	}
	return n
}

// setKills puts the number of OOM kills so far into a request to the agent, or into its
// answer. For a background command the agent compares the number at its start with the
// number when somebody asks how it ended, as explainKills does for a watched command. A
// client compares them as well. setKills always replaces the header, so neither the
// client nor the agent can send the other a number of its own.
func setKills(h http.Header, n int64) {
	h.Del(agent.OOMKillsHeader)
	if n != unknownKills {
		h.Set(agent.OOMKillsHeader, strconv.FormatInt(n, 10))
	}
}

// runs reports whether a request to the agent's path has a command or code run.
func runs(path string) bool {
	id, ok := strings.CutPrefix(path, "/session/")
	return path == "/command" || path == "/code" || ok && strings.HasSuffix(id, "/run")
}

// killedStream is a stream of events. Its last event gets a line more if the kernel
// killed the command.
type killedStream struct {
	io.ReadCloser
	why  func() string // empty: nothing to add
	rest []byte        // what did not fit into the reader's buffer
}

func (k *killedStream) Read(p []byte) (int, error) {
	if len(k.rest) > 0 {
		n := copy(p, k.rest)
		k.rest = k.rest[n:]
		return n, nil
	}
	n, err := k.ReadCloser.Read(p)
	from, line := lastEvent(p[:n])
	if line == nil {
		return n, err
	}
	if more := k.explain(line); more != nil {
		m := copy(p[from:], more)
		k.rest = more[m:]
		n = from + m
	}
	if len(k.rest) > 0 {
		err = nil // it comes again
	}
	return n, err
}

// maxEvent is longer than any event about the end of a command.
const maxEvent = 16 << 10

var (
	eventEnd   = []byte("\n\n")
	errorEvent = []byte(`{"type":"error"`)
)

// lastEvent returns the event about an error that b ends with, and where it
// begins; nil if b ends with something else.
func lastEvent(b []byte) (from int, line []byte) {
	if !bytes.HasSuffix(b, eventEnd) {
		return 0, nil
	}
	line = b[:len(b)-len(eventEnd)]
	from = bytes.LastIndexByte(line, '\n') + 1
	if line = line[from:]; len(line) > maxEvent || !bytes.HasPrefix(line, errorEvent) {
		return 0, nil
	}
	return from, line
}

// explain returns the event of a killed command with the reason added, or nil
// if it is another event or there is no reason.
func (k *killedStream) explain(line []byte) []byte {
	var ev agent.Event
	if json.Unmarshal(line, &ev) != nil || ev.Error == nil || ev.Error.Value != "-1" && ev.Error.Name != agent.ContextDied {
		return nil
	}
	if len(ev.Error.Traceback) != 1 || ev.Error.Traceback[0] != "signal: killed" { // a timeout says so itself
		return nil
	}
	why := k.why()
	if why == "" {
		return nil
	}
	ev.Error.Traceback = append(ev.Error.Traceback, why)
	if ev.Error.Name == agent.ContextDied {
		ev.Error.Value = why // SDKs show this; it is no exit code
	}
	b, err := json.Marshal(ev)
	if err != nil {
		return nil
	}
	return append(b, eventEnd...)
}
