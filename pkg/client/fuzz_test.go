package client

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// FuzzTerminal: whatever an agent sends to a terminal, an exit status is one that a
// process may have, and the bytes that were shown are counted.
func FuzzTerminal(f *testing.F) {
	f.Add([]byte(`{"type":"exit","exit_code":256,"signal":"SIGKILL"}`), []byte("\x01output"))
	f.Add([]byte(`{"type":"error","code":"START_FAILED","exit_code":127,"error":"x"}`),
		[]byte("\x03\xff\xff\xff\xff\xff\xff\xff\xffreplay"))
	f.Add([]byte(`{"type":"connected","mode":"pty"}`), []byte("\x02"))
	f.Fuzz(func(t *testing.T, text, message []byte) {
		var out, errOut bytes.Buffer
		a := &attachment{t: &Terminal{}, view: View{Out: &out, Err: &errOut}, begin: func() {}}
		var fr agent.PtyFrame
		if json.Unmarshal(text, &fr) == nil {
			exit, over, err := a.frame(fr)
			if !over && (err != nil || exit != Exit{}) || exit.Code < 0 || exit.Code > 255 {
				t.Fatalf("%q ends with %+v, %v, %v", text, exit, over, err)
			}
		}
		err := a.output(bytes.NewReader(message))
		shown := int64(out.Len() + errOut.Len())
		if a.offset < shown || shown > int64(len(message)) || len(message) == 0 && err == nil {
			t.Fatalf("%q: %d bytes are shown, and the next is number %d, %v", message, shown, a.offset, err)
		}
	})
}

// FuzzStreams: every stream of a daemon or an agent has one end, and one that is cut off is
// an error. Of a command the output is shown, and its exit status is one that a process may
// have.
func FuzzStreams(f *testing.F) {
	f.Add([]byte("data: {\"id\":\"x\"}\n\n"))
	f.Add(frames(1, "x", 3, `{"exit_code":1}`))
	f.Add([]byte("{\"type\":\"init\",\"text\":\"c1\"}\n\n{\"type\":\"stdout\",\"text\":\"42\\n\"}\n\n" +
		"{\"type\":\"execution_complete\"}\n\n"))
	f.Add([]byte("{\"type\":\"stderr\",\"text\":\"x\"}\n{\"type\":\"error\",\"error\":{\"ename\":\"E\",\"traceback\":[\"a\"]}}\n"))
	f.Add([]byte("\r\n\n{\"type\":\"result\",\"results\":{\"text/plain\":\"1\"}}\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		ended := false
		for _, err := range parseEvents(bytes.NewReader(b)) {
			if ended {
				t.Fatal("an event after the error")
			}
			ended = err != nil
		}
		if !ended {
			t.Fatal("a stream that ended without an error")
		}
		checkEvaluation(t, b)
		p := &Process{body: io.NopCloser(bytes.NewReader(b)), frames: agent.NewFrameReader(bytes.NewReader(b))}
		if p.first(agent.FramesType) != nil {
			return
		}
		var out, errOut bytes.Buffer
		if e, err := p.Wait(&out, &errOut); err == nil && (e.Code < 0 || e.Code > 255) || out.Len()+errOut.Len() > len(b) {
			t.Fatalf("%+v", e)
		}
	})
}

// checkEvaluation reads b as the events of code: they become its output, in order, and a
// stream that does not say how the code ended is an error.
func checkEvaluation(t *testing.T, b []byte) {
	t.Helper()
	var got bytes.Buffer
	values := 0
	e := &Evaluation{body: io.NopCloser(bytes.NewReader(b)), events: bufio.NewReaderSize(bytes.NewReader(b), 16)}
	err := e.Wait(&got, &got, func(map[string]string) error { values++; return nil })
	var want strings.Builder
	ended := false
	for line := range bytes.Lines(b) {
		var ev agent.Event
		if !bytes.HasSuffix(line, []byte("\n")) || len(bytes.TrimRight(line, "\r\n")) == 0 {
			continue
		}
		if json.Unmarshal(line, &ev) != nil {
			break
		}
		if ev.Type == "stdout" || ev.Type == "stderr" {
			want.WriteString(ev.Text)
		}
		if ended = ev.Type == "execution_complete"; ended || ev.Type == "error" {
			break
		}
	}
	if got.String() != want.String() || (err == nil) != ended {
		t.Fatalf("%q prints %q, want %q; %v", b, got.String(), want.String(), err)
	}
	if ce, ok := errors.AsType[*CodeError](err); ok && ce == nil {
		t.Fatal("the code failed with nothing")
	}
}

// FuzzRefusal: an answer that is no success is an error with a text, of the kind that its
// status says, and never one that says to come back before now.
func FuzzRefusal(f *testing.F) {
	f.Add(uint16(404), []byte(`{"code":"DOCKER::SANDBOX_NOT_FOUND","message":"no sandbox"}`), "")
	f.Add(uint16(503), []byte("<html>"), "9223372036854775807")
	f.Add(uint16(400), []byte("Client sent an HTTP request to an HTTPS server."), "-1")
	f.Fuzz(func(t *testing.T, status uint16, body []byte, retry string) {
		status = 400 + status%200
		resp := &http.Response{
			StatusCode: int(status), Status: http.StatusText(int(status)), Header: http.Header{"Retry-After": {retry}},
			Body: io.NopCloser(bytes.NewReader(body)),
		}
		e, ok := errors.AsType[*errs.Error](fromResponse(resp))
		if !ok || e.Text == "" || e.Retry < 0 || e.Retry > 0 && e.Retry < time.Second || len(e.Text) > 4*len(body)+200 {
			t.Fatalf("%d %q: %+v", status, body, e)
		}
	})
}
