package agent

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

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
		err := New(nil, "tok").ping(t.Context(), here)
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

// FuzzFrames: the frames of a body are those that a plain reader finds, of what a probe prints
// the end is kept, as text, and no word or number of the agent's is out of range.
func FuzzFrames(f *testing.F) {
	frames := AppendFrame(nil, FrameControl, []byte(`{"id":"entrypoint","resumes":true,"stdout":5}`))
	f.Add(AppendFrame(frames, FrameEnd, []byte(`{"exitCode":137,"signal":"SIGKILL","message":"x"}`)))
	frames = AppendFrame(frames, FrameStdout, []byte("one\n\xc3"))
	frames = AppendFrame(frames, FrameStderr, bytes.Repeat([]byte("\u00e4"), MaxProbeOutput))
	f.Add(AppendFrame(frames, FrameEnd, []byte(`{"exit_code":1,"reason":"killed\u001b[2J","hint":"x"}`)))
	f.Add(AppendFrame(nil, FrameControl, []byte(`{"id":"0123456789abcdef0123456789abcdef","stderr":-1}`)))
	f.Add([]byte{0, 0, 16, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		var output []byte
		var end []byte
		r, rest := NewFrameReader(bytes.NewReader(b)), b
		for {
			stream, payload, err := r.Next()
			if err != nil {
				if err == io.EOF && (len(rest) > 0 || len(b) == 0) {
					t.Fatalf("%q ends before %q", b, rest)
				}
				break
			}
			n := 0
			if len(rest) >= FrameHeader {
				n = FrameHeader + int(binary.BigEndian.Uint32(rest[1:]))
			}
			if len(rest) < max(n, FrameHeader) || end != nil ||
				stream != rest[0] || stream > FrameEnd || !bytes.Equal(payload, rest[FrameHeader:n]) {
				t.Fatalf("%q has the frame %d %q before %q", b, stream, payload, rest)
			}
			switch rest = rest[n:]; stream {
			case FrameStdout, FrameStderr:
				output = append(output, payload...)
			case FrameEnd:
				end = append([]byte{}, payload...)
			}
			checkReplies(t, payload)
		}
		got, _, err := outcome(NewFrameReader(bytes.NewReader(b)))
		if want := text(output[max(0, len(output)-MaxProbeOutput):]); got != want || !utf8.ValidString(got) || len(got) > 3*MaxProbeOutput {
			t.Fatalf("%d bytes: %q, want %q", len(got), got, want)
		}
		_, eerr := ParseExit(end)
		if (err == nil) != (end != nil && eerr == nil) {
			t.Fatalf("%v of a body that ends with %q, %v", err, end, eerr)
		}
	})
}

// checkReplies reads b as each document that an agent sends.
func checkReplies(t *testing.T, b []byte) {
	t.Helper()
	clean := func(limit int, said ...string) {
		if s := strings.Join(said, ""); len(s) > limit || strings.ContainsAny(s, "\x1b\n\x00\u009b") || !utf8.ValidString(s) {
			t.Fatalf("%q says %q", b, s)
		}
	}
	if i, err := ParseInit(b); err == nil {
		said, err := json.Marshal(i)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseInit(said)
		if err != nil || again != i || !IsCommandID(i.ID) || i.Stdout < 0 || i.Stderr < 0 {
			t.Fatalf("%q is %+v, then %+v, %v", b, i, again, err)
		}
	}
	if x, err := ParseExit(b); err == nil {
		if x.ExitCode < 0 || x.ExitCode > 255 || x.ExecutionTime < 0 {
			t.Fatalf("%q is %+v", b, x)
		}
		clean(16<<10, x.Signal, x.Error, x.Reason, x.Hint)
	}
	if o, err := ParseObituary(b); err == nil {
		if o.ExitCode < 0 || o.ExitCode > 255 {
			t.Fatalf("%q is %+v", b, o)
		}
		clean(3<<10, o.Message, o.Signal, o.Reason)
	}
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
