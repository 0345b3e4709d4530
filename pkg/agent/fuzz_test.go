package agent

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// FuzzBootstrap: the line that PID 1 reads is the one that was written, and any other
// text is refused unless it has a token and speaks a known protocol.
func FuzzBootstrap(f *testing.F) {
	f.Add([]byte(`{"protocol":1,"token":"t","env":{"A":"1"},"entrypoint":["tail","-f"],"limits":{"pids":5}}`))
	f.Add([]byte("{\"protocol\":1,\"token\":\"t\"}\nrest"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := ReadBootstrap(bytes.NewReader(b))
		if err != nil {
			return
		}
		if got.Token == "" || got.Protocol < MinProtocol || got.Protocol > Protocol {
			t.Fatalf("%q is %+v", b, got)
		}
		line, err := got.Line()
		if err != nil {
			t.Fatal(err)
		}
		if again, err := ReadBootstrap(bytes.NewReader(line)); err != nil || string(must(again.Line())) != string(line) {
			t.Fatalf("%s comes back as %+v, %v", line, again, err)
		}
	})
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// FuzzPing: whatever answers in the agent's place, it is ready only after a whole answer
// as an agent gives it, with nothing behind it on the connection.
func FuzzPing(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nX-Sandboxd-Agent-Protocol: 1\r\nContent-Length: 0\r\n\r\n"))
	f.Add([]byte("HTTP/1.1 401 Unauthorized\r\nContent-Length: 1\r\n\r\nx"))
	f.Add([]byte("HTTP/1.1 200 OK\r\nX-Sandboxd-Agent-Protocol: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nHTTP/1.1 200 OK"))
	f.Fuzz(func(t *testing.T, answer []byte) {
		here, there := net.Pipe()
		defer here.Close()
		go func() {
			defer there.Close()
			http.ReadRequest(bufio.NewReader(there)) //nolint:errcheck // it is ours
			there.Write(answer)                      //nolint:errcheck // the client may have closed
		}()
		err := (&Client{token: "tok"}).ping(t.Context(), here)
		r := bufio.NewReader(bytes.NewReader(answer))
		resp, rerr := http.ReadResponse(r, nil)
		if err != nil {
			if len(err.Error()) > 2*maxError {
				t.Fatalf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		if rerr != nil || resp.StatusCode != http.StatusOK || resp.Close {
			t.Fatalf("%q is an agent", answer)
		}
		body, _ := io.ReadAll(resp.Body)
		p, perr := strconv.Atoi(resp.Header.Get(ProtocolHeader))
		if perr != nil || p < MinProtocol || p > Protocol || len(bytes.TrimSpace(body)) > 0 || r.Buffered() > 0 {
			t.Fatalf("%q is an agent, with %d bytes behind its answer", answer, r.Buffered())
		}
	})
}

// FuzzProbeOutput: of what a probe prints the end is kept, as text, and no number of the
// agent's is out of range.
func FuzzProbeOutput(f *testing.F) {
	frames := AppendFrame(nil, FrameControl, []byte(`{"id":"entrypoint"}`))
	frames = AppendFrame(frames, FrameStdout, []byte("one\n\xc3"))
	frames = AppendFrame(frames, FrameStderr, bytes.Repeat([]byte("\u00e4"), MaxProbeOutput))
	f.Add(AppendFrame(frames, FrameEnd, []byte(`{"exit_code":1,"reason":"killed\u001b[2J","hint":"x"}`)))
	f.Add(frames)
	f.Fuzz(func(t *testing.T, b []byte) {
		got, exit, err := outcome(NewFrameReader(bytes.NewReader(b)))
		if !utf8.ValidString(got) || len(got) > 3*MaxProbeOutput {
			t.Fatalf("%d bytes: %q", len(got), got)
		}
		var all []byte
		r := NewFrameReader(bytes.NewReader(b))
		for {
			s, p, ferr := r.Next()
			if ferr != nil || s == FrameEnd {
				if (ferr == nil) != (err == nil) && ferr != nil {
					t.Fatalf("%v of a body that ends with %v", err, ferr)
				}
				break
			}
			if s != FrameControl {
				all = append(all, p...)
			}
		}
		if want := text(all[max(0, len(all)-MaxProbeOutput):]); got != want {
			t.Fatalf("%q, want %q", got, want)
		}
		if err != nil {
			return
		}
		said := exit.Signal + exit.Error + exit.Reason + exit.Hint
		if exit.ExitCode < 0 || exit.ExitCode > 255 || exit.ExecutionTime < 0 || len(said) > 16<<10 ||
			strings.ContainsAny(said, "\x1b\n\x00\u009b") {
			t.Fatalf("%+v", exit)
		}
	})
}

// FuzzTail: the last lines are those of the whole text, in whatever pieces it comes, and
// the end of an output completes what was read of it.
func FuzzTail(f *testing.F) {
	f.Add([]byte("a\nb\n\nc"), uint8(2), uint8(3), []byte("c\nd"))
	f.Add([]byte("\n\n"), uint8(0), uint8(1), []byte(""))
	f.Fuzz(func(t *testing.T, b []byte, lines, step uint8, final []byte) {
		l := LastLines{Lines: int(lines)}
		var tail Tail
		for rest := b; len(rest) > 0; {
			n := min(int(step)+1, len(rest))
			l.Write(rest[:n])    //nolint:errcheck // never fails
			tail.Write(rest[:n]) //nolint:errcheck // never fails
			rest = rest[n:]
		}
		all := bytes.SplitAfter(b, []byte("\n"))
		if len(all[len(all)-1]) == 0 {
			all = all[:len(all)-1]
		}
		if want := bytes.Join(all[max(0, len(all)-int(lines)):], nil); l.Bytes() != int64(len(want)) {
			t.Fatalf("the last %d lines of %q have %d bytes, want %d", lines, b, l.Bytes(), len(want))
		}
		if !bytes.HasSuffix(b, tail.last) || len(tail.last) > MaxLastOutput || tail.Inside() != (len(b) > 0 && b[len(b)-1] != '\n') {
			t.Fatalf("%q of %q", tail.last, b)
		}
		if missing := tail.Missing(string(final)); !strings.HasSuffix(string(final), missing) ||
			!strings.HasSuffix(string(tail.last)+missing, string(final)) {
			t.Fatalf("%q misses %q of %q", tail.last, missing, final)
		}
	})
}

// FuzzInit: what the first frame says of a command is in range, and is read back as it
// is written.
func FuzzInit(f *testing.F) {
	f.Add([]byte(`{"id":"0123456789abcdef0123456789abcdef","resumes":true,"stdout":5}`))
	f.Add([]byte(`{"id":"entrypoint","stderr":-1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		i, err := ParseInit(b)
		if err != nil {
			return
		}
		again, err := ParseInit(jsonOf(t, i))
		if err != nil || !reflect.DeepEqual(again, i) || !IsCommandID(i.ID) || i.Stdout < 0 || i.Stderr < 0 {
			t.Fatalf("%q is %+v, then %+v, %v", b, i, again, err)
		}
	})
}

func jsonOf(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
