package server

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/output"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// A seat is a client of a terminal.
type seat struct {
	*env
	id         string
	ws         *websocket.Conn
	out        bytes.Buffer // from the terminal, or standard output
	err        bytes.Buffer
	off        int64 // where the replay began
	exit, last agent.PtyFrame
}

func (e *env) terminal(req agent.PtyRequest) string {
	e.Helper()
	var c agent.PtyCreated
	if err := json.Unmarshal([]byte(e.call(http.StatusCreated, "POST", "/pty", req)), &c); err != nil || len(c.SessionID) != 32 {
		e.Fatalf("%+v, %v", c, err)
	}
	return c.SessionID
}

func (e *env) dial(id, query string) (*websocket.Conn, *http.Response, error) {
	ctx, cancel := context.WithTimeout(e.Context(), 10*time.Second)
	defer cancel()
	return websocket.Dial(ctx, e.http.URL+"/pty/"+id+"/ws?"+query,
		&websocket.DialOptions{HTTPHeader: http.Header{agent.TokenHeader: {"tok"}}})
}

// join connects and reads up to the frame that says so.
func (e *env) join(id, query string) *seat {
	e.Helper()
	ws, _, err := e.dial(id, query)
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { ws.CloseNow() })
	ws.SetReadLimit(2 << 20)
	c := &seat{env: e, id: id, ws: ws, off: -1}
	c.until(func() bool { return c.last.Type == "connected" })
	return c
}

// next takes one message.
func (c *seat) next() error {
	ctx, cancel := context.WithTimeout(c.Context(), 20*time.Second)
	defer cancel()
	kind, b, err := c.ws.Read(ctx)
	switch {
	case err != nil:
		return err
	case kind == websocket.MessageText:
		c.last = agent.PtyFrame{}
		if err := json.Unmarshal(b, &c.last); err != nil {
			return err
		}
		if c.last.Type == "exit" {
			c.exit = c.last
		}
	case b[0] == agent.PtyReplay:
		at := int64(binary.BigEndian.Uint64(b[1:]))
		if c.off < 0 {
			c.off = at
		} else if at != c.off+int64(c.out.Len()) {
			return fmt.Errorf("a replay from %d follows one up to %d", at, c.off+int64(c.out.Len()))
		}
		c.out.Write(b[9:])
	case b[0] == agent.PtyStdout:
		c.out.Write(b[1:])
	case b[0] == agent.PtyStderr:
		c.err.Write(b[1:])
	}
	return nil
}

func (c *seat) until(done func() bool) {
	c.Helper()
	for !done() {
		if err := c.next(); err != nil {
			out := c.out.Bytes()
			c.Fatalf("%v; last of %d bytes %q, %q, last frame %+v", err, len(out), out[max(len(out)-2000, 0):], c.err.String(), c.last)
		}
	}
}

// says waits until the output ends with s.
func (c *seat) says(s string) {
	c.Helper()
	c.until(func() bool { return strings.HasSuffix(c.out.String(), s) })
}

// insists sends a frame until there is output. Once, on a busy host, a shell did
// not act on a signal that came right after another.
func (c *seat) insists(frame string) {
	c.Helper()
	c.sends(frame)
	again := time.NewTicker(2 * time.Second)
	seen := make(chan struct{})
	go func() {
		defer again.Stop()
		for {
			select {
			case <-again.C:
				c.ws.Write(c.Context(), websocket.MessageText, []byte(frame)) //nolint:errcheck // the reading end notices
			case <-seen:
				return
			}
		}
	}()
	c.until(func() bool { return c.out.Len() > 0 })
	close(seen)
}

func (c *seat) types(s string) {
	c.Helper()
	if err := c.ws.Write(c.Context(), websocket.MessageBinary, append([]byte{agent.PtyStdin}, s...)); err != nil {
		c.Fatal(err)
	}
}

func (c *seat) sends(frame string) {
	c.Helper()
	if err := c.ws.Write(c.Context(), websocket.MessageText, []byte(frame)); err != nil {
		c.Fatal(err)
	}
}

// ends waits for the exit frame and the close after it.
func (c *seat) ends(code int) {
	c.Helper()
	for {
		err := c.next()
		if err == nil {
			continue
		}
		if got := websocket.CloseStatus(err); got != websocket.StatusNormalClosure {
			c.Fatalf("closed with %d (%v); output %q", got, err, c.out.String())
		}
		break
	}
	if c.exit.ExitCode == nil || *c.exit.ExitCode != code {
		c.Errorf("exit frame %+v, want code %d; output %q", c.exit, code, c.out.String())
	}
}

func (e *env) ptyStatus(id string) (st agent.PtyStatus) {
	e.Helper()
	if err := json.Unmarshal([]byte(e.call(http.StatusOK, "GET", "/pty/"+id, nil)), &st); err != nil {
		e.Fatal(err)
	}
	return st
}

func line(command string) agent.PtyRequest { return agent.PtyRequest{Command: command} }

func TestTerminal(t *testing.T) {
	e := newEnv(t)
	id := e.terminal(agent.PtyRequest{Argv: []string{"sh", "-c", "stty -echo; tty; stty size; echo $TERM; ps -o tpgid= -p $$; read x; " +
		"echo got $x; exit 7"}, Cols: 132, Rows: 43})
	if st := e.ptyStatus(id); st.Running || st.Mode != "" || st.OutputOffset != 0 {
		t.Errorf("before the first connection: %+v", st)
	}
	c := e.join(id, "")
	if c.last.Mode != "pty" || c.last.SessionID != id {
		t.Errorf("%+v", c.last)
	}
	c.until(func() bool { return strings.Count(c.out.String(), "\n") == 4 })
	lines := strings.Split(c.out.String(), "\r\n")
	if !strings.HasPrefix(lines[0], "/dev/pts/") || lines[1] != "43 132" || lines[2] != "xterm-256color" ||
		strings.TrimSpace(lines[3]) == "-1" {
		t.Errorf("%q", lines)
	}
	if st := e.ptyStatus(id); !st.Running || !st.Connected || st.Mode != "pty" || st.OutputOffset != int64(c.out.Len()) {
		t.Errorf("%+v", st)
	}
	c.types("line\r")
	c.ends(7)
	if !strings.HasSuffix(c.out.String(), "got line\r\n") {
		t.Errorf("%q", c.out.String())
	}
	// The end can be seen again, as can the output.
	again := e.join(id, "since=3")
	again.ends(7)
	if want := c.out.String()[3:]; again.off != 3 || again.out.String() != want {
		t.Errorf("from %d %q, want %q", again.off, again.out.String(), want)
	}
	eventuallyTrue(t, func() bool { return !e.ptyStatus(id).Connected })
	if st := e.ptyStatus(id); st.Running || st.ExitCode == nil || *st.ExitCode != 7 {
		t.Errorf("%+v", st)
	}
	e.call(http.StatusOK, "DELETE", "/pty/"+id, nil)
	e.call(http.StatusNotFound, "GET", "/pty/"+id, nil)
	e.call(http.StatusNotFound, "DELETE", "/pty/"+id, nil)
}

func TestTerminalResizeAndSignals(t *testing.T) {
	e := newEnv(t)
	c := e.join(e.terminal(line(`stty -echo; trap 'stty size' WINCH; trap 'echo INT' INT; trap 'echo TERM' TERM; echo ready; while :; do read -t 0.1 x && echo "$x"; done`)), "")
	c.says("ready\r\n")
	c.sends(`{"type":"resize","cols":100,"rows":50}`)
	c.says("50 100\r\n")
	for _, bad := range []string{
		`{"type":"resize","cols":0,"rows":5}`, `{"type":"resize","cols":-1,"rows":5}`,
		`{"type":"resize","cols":70000,"rows":5}`, `{"type":"signal","signal":"SIGNOPE"}`, `{"type":"what"}`, `{`, ``,
	} {
		c.sends(bad)
		c.until(func() bool { return c.last.Type == "error" })
		if c.last.Code != agent.PtyInvalidFrame || c.last.Error == "" {
			t.Errorf("%s: %+v", bad, c.last)
		}
		c.last = agent.PtyFrame{}
	}
	c.sends(`{"type":"ping"}`)
	c.until(func() bool { return c.last.Type == "pong" })
	c.types("\x03")
	c.says("INT\r\n")
	c.out.Reset()
	c.insists(`{"type":"signal","signal":"SIGINT"}`)
	c.says("INT\r\n")
	c.sends(`{"type":"signal","signal":"SIGTERM"}`)
	c.says("TERM\r\n")
	c.sends(`{"type":"stdin","data":"text\n"}`)
	c.says("text\r\n")
	c.sends(`{"type":"signal","signal":"SIGKILL"}`)
	c.ends(137)
	if c.exit.Signal != "SIGKILL" {
		t.Errorf("%+v", c.exit)
	}
}

// A signal goes to the foreground, not to the shell that waits for it.
func TestTerminalSignalsForeground(t *testing.T) {
	e := newEnv(t)
	c := e.join(e.terminal(agent.PtyRequest{Argv: []string{"bash", "--norc", "--noediting"}, Envs: map[string]string{"PS1": "> "}}), "")
	c.says("> ")
	c.types("sh -c 'echo in the fore''ground; sleep 100'; echo status $?\r")
	c.says("in the foreground\r\n")
	c.sends(`{"type":"signal","signal":"SIGHUP"}`)
	c.until(func() bool { return strings.Contains(c.out.String(), "status 129\r\n> ") })
	c.types("exit 3\r")
	c.ends(3)
}

func TestTerminalPipe(t *testing.T) {
	e := newEnv(t)
	c := e.join(e.terminal(line("test -t 0 || echo no terminal; read x; echo $x; echo err >&2; sleep 100")), "pty=0")
	if c.last.Mode != "pipe" {
		t.Errorf("%+v", c.last)
	}
	c.says("no terminal\n")
	c.sends(`{"type":"resize","cols":100,"rows":50}`) // execd takes it in silence
	c.types("in\n")
	c.until(func() bool { return c.err.Len() > 0 && strings.HasSuffix(c.out.String(), "in\n") })
	if c.err.String() != "err\n" {
		t.Errorf("%q", c.err.String())
	}
	c.sends(`{"type":"signal","signal":"SIGTERM"}`)
	c.ends(143)
	if st := e.ptyStatus(c.id); st.OutputOffset != int64(c.out.Len()+c.err.Len()) || st.Mode != "pipe" {
		t.Errorf("%+v", st)
	}
	// An interactive shell reads a script.
	c = e.join(e.terminal(agent.PtyRequest{}), "pty=0")
	c.types("echo a script; exit 4\n")
	c.ends(4)
	if c.out.String() != "a script\n" {
		t.Errorf("%q", c.out.String())
	}
}

// What is written while nobody is there is replayed; a break at any byte loses none.
func TestTerminalReplay(t *testing.T) {
	e := newEnv(t)
	const lines = 300_000 // 2 MB: several replay messages
	var want strings.Builder
	for i := range lines {
		fmt.Fprintf(&want, "%d\r\n", i+1)
	}
	id := e.terminal(line(fmt.Sprintf("seq 1 %d; sleep 100", lines)))
	c := e.join(id, "")
	c.until(func() bool { return c.out.Len() > 100_000 })
	c.ws.CloseNow()
	eventuallyTrue(t, func() bool { st := e.ptyStatus(id); return !st.Connected && st.OutputOffset == int64(want.Len()) })
	got := c.out.String()
	c = e.join(id, "since="+itoa(len(got)))
	if c.off != int64(len(got)) {
		t.Errorf("replayed from %d, not %d", c.off, len(got))
	}
	if got += c.out.String(); got != want.String() {
		t.Errorf("%d bytes, want %d", len(got), want.Len())
	}
	c.ws.CloseNow()
	eventuallyTrue(t, func() bool { return !e.ptyStatus(id).Connected })
	if c = e.join(id, "since=999999999"); c.off >= 0 || c.out.Len() > 0 {
		t.Errorf("%d bytes from %d of the future", c.out.Len(), c.off)
	}
	e.call(http.StatusOK, "DELETE", "/pty/"+id, nil)
	c.ends(129)
}

func TestTerminalTakeover(t *testing.T) {
	e := newEnv(t)
	id := e.terminal(line("stty -echo; echo ready; while read x; do echo $x; done"))
	first := e.join(id, "")
	first.says("ready\r\n")
	_, resp, err := e.dial(id, "")
	if err == nil || resp.StatusCode != http.StatusConflict {
		t.Fatalf("%v, %v", resp, err)
	}
	first.types("one\r")
	first.says("one\r\n")
	second := e.join(id, "takeover=1&since=0")
	for err = nil; err == nil; {
		err = first.next()
	}
	if ce, _ := errors.AsType[websocket.CloseError](err); ce.Code != agent.PtyTakenOver || ce.Reason != agent.PtyTaken {
		t.Errorf("%v", err)
	}
	if second.out.String() != "ready\r\none\r\n" {
		t.Errorf("replay %q", second.out.String())
	}
	second.types("two\r")
	second.says("two\r\n")
	e.call(http.StatusOK, "DELETE", "/pty/"+id, nil)
}

// Who detaches is gone when it is told so: the next one need not send it away.
func TestTerminalDetach(t *testing.T) {
	e := newEnv(t)
	id := e.terminal(line("stty -echo; while read x; do echo $x; done"))
	for i := range 100 {
		c := e.join(id, "")
		c.types(fmt.Sprintf("%d\r", i))
		c.says(fmt.Sprintf("%d\r\n", i))
		c.sends(`{"type":"detach"}`)
		var err error
		for err == nil {
			err = c.next()
		}
		if websocket.CloseStatus(err) != websocket.StatusNormalClosure {
			t.Fatal(err)
		}
	}
	if !e.ptyStatus(id).Running {
		t.Error("detaching ended the session")
	}
	e.call(http.StatusOK, "DELETE", "/pty/"+id, nil)
}

// A client that neither reads nor answers holds up its process, for a while; not
// who takes over, and not other terminals.
func TestTerminalSlowReader(t *testing.T) {
	e := newEnv(t)
	e.s.terminals.Ping = 2 * time.Second // on a busy host, who reads all may take one to answer
	id := e.terminal(line("stty raw -echo; yes"))
	stuck := e.join(id, "")         // never reads again
	eventuallyTrue(t, func() bool { // a second without output: it is held up
		before := e.ptyStatus(id).OutputOffset
		time.Sleep(50 * time.Millisecond)
		return before > 0 && (e.ptyStatus(id).OutputOffset == before || !e.ptyStatus(id).Connected)
	})
	other := e.join(e.terminal(line("echo here; sleep 100")), "")
	other.says("here\r\n")
	eventuallyTrue(t, func() bool { return !e.ptyStatus(id).Connected }) // no answer to a ping
	eventuallyTrue(t, func() bool { return e.ptyStatus(id).OutputOffset > output.OfCommand+1<<20 })
	c := e.join(id, "since=0")
	if c.off == 0 || c.out.Len() < output.OfCommand/2 {
		t.Errorf("the ring gave %d bytes from %d", c.out.Len(), c.off)
	}
	runtime.KeepAlive(stuck)
	e = newEnv(t)
	id = e.terminal(line("yes"))
	e.join(id, "")                     // reads no more, and has 30 s
	time.Sleep(300 * time.Millisecond) // until it is held up
	start := time.Now()
	e.join(id, "takeover=1&since=999999999999").next() //nolint:errcheck // that it comes is enough
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("taking over from a client that does not read took %v", took)
	}
	proc.KillDescendants(time.Second)
}

// A client that does not read what it missed holds up its process no longer than
// one that reads nothing new.
func TestTerminalSlowReplay(t *testing.T) {
	e := newEnv(t)
	e.s.terminals.Ping = 100 * time.Millisecond
	id := e.terminal(line("stty raw -echo; yes")) // raw: a busy host's kernel has less to do for each line
	first, _, err := e.dial(id, "")               // begins it, and answers no ping: on a busy host it would be late
	if err != nil {
		t.Fatal(err)
	}
	eventuallyTrue(t, func() bool { return e.ptyStatus(id).OutputOffset > 0 })
	first.CloseNow()                                                                          //nolint:errcheck // gone is what it should be
	eventuallyTrue(t, func() bool { return e.ptyStatus(id).OutputOffset > output.OfCommand }) // more than sockets take
	stuck, _, err := e.dial(id, "since=0&takeover=1")
	if err != nil {
		t.Fatal(err)
	}
	defer stuck.CloseNow() //nolint:errcheck // as above
	eventuallyTrue(t, func() bool { return !e.ptyStatus(id).Connected })
	end := e.ptyStatus(id).OutputOffset
	eventuallyTrue(t, func() bool { return e.ptyStatus(id).OutputOffset > end })
	proc.KillDescendants(time.Second)
}

// Input that nobody reads holds up who typed it, not who takes over.
func TestTerminalUnreadInput(t *testing.T) {
	e := newEnv(t)
	id := e.terminal(line("stty raw -echo; echo ready; sleep 100"))
	c := e.join(id, "")
	c.says("ready\n")
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	for range 64 {
		if c.ws.Write(ctx, websocket.MessageBinary, make([]byte, 1<<19)) != nil {
			break
		}
	}
	if ctx.Err() == nil {
		t.Error("32 MiB went into a process that reads nothing")
	}
	start := time.Now()
	next := e.join(id, "takeover=1")
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("taking over took %v", took)
	}
	next.sends(`{"type":"ping"}`)
	next.until(func() bool { return next.last.Type == "pong" })
	e.call(http.StatusOK, "DELETE", "/pty/"+id, nil)
	next.ends(129)
}

// A process that reads nothing for a while costs its client neither the
// connection nor what it typed.
func TestTerminalInputWaits(t *testing.T) {
	e := newEnv(t)
	// The client may take so long to answer a ping on a busy host. The process
	// reads nothing for longer than until the second, when it would be gone.
	e.s.terminals.Ping = 2 * time.Second
	const typed = 64 << 10
	id := e.terminal(line(fmt.Sprintf("stty raw -echo; echo ready; sleep 5; head -c %d | wc -c", typed)))
	c := e.join(id, "")
	c.says("ready\n")
	c.types(strings.Repeat("x", typed))
	c.says(fmt.Sprintf("%d\n", typed))
	c.ends(0)
}

func TestTerminalBadInput(t *testing.T) {
	e := newEnv(t)
	for _, body := range []string{
		"{", "[]", `{"cwd":"/nope"}`, `{"command":"a","argv":["a"]}`, `{"argv":[""]}`, `{"command":"a\u0000"}`,
		`{"cols":-1}`, `{"rows":65536}`,
		`{"cols":1.5}`, `{"timeout":-1}`, `{"uid":-1}`, `{"gid":5}`, `{"envs":{"A=":"b"}}`,
	} {
		e.call(http.StatusBadRequest, "POST", "/pty", body)
	}
	id := e.terminal(agent.PtyRequest{})
	e.call(http.StatusUpgradeRequired, "GET", "/pty/"+id+"/ws", nil)
	e.call(http.StatusBadRequest, "GET", "/pty/"+id+"/ws?since=-1", nil)
	e.call(http.StatusBadRequest, "GET", "/pty/"+id+"/ws?since=x", nil)
	e.call(http.StatusNotFound, "GET", "/pty/nope/ws", nil)
	e.call(http.StatusNotFound, "GET", "/pty/"+id+"/what", nil)
	e.call(http.StatusMethodNotAllowed, "POST", "/pty/"+id, nil)
	c := e.join(id, "")
	if err := c.ws.Write(t.Context(), websocket.MessageBinary, make([]byte, agent.MaxPtyMessage+2)); err != nil {
		t.Fatal(err)
	}
	for {
		if err := c.next(); err != nil {
			if websocket.CloseStatus(err) != websocket.StatusMessageTooBig {
				t.Error(err)
			}
			break
		}
	}
	if !e.ptyStatus(id).Running {
		t.Error("an oversized message ended the session")
	}
	proc.KillDescendants(time.Second)
}

func TestTerminalNotStarted(t *testing.T) {
	e := newEnv(t)
	id := e.terminal(agent.PtyRequest{Argv: []string{"nosuchprogram-x"}})
	ws, _, err := e.dial(id, "")
	if err != nil {
		t.Fatal(err)
	}
	c := &seat{env: e, ws: ws}
	c.until(func() bool { return c.last.Type == "error" })
	if c.last.Code != agent.PtyNotStarted || c.last.ExitCode == nil || *c.last.ExitCode != 127 ||
		!strings.Contains(c.last.Error, "nosuchprogram-x") {
		t.Errorf("%+v", c.last)
	}
	if err := c.next(); websocket.CloseStatus(err) != websocket.StatusInternalError {
		t.Error(err)
	}
	if st := e.ptyStatus(id); st.Running || st.ExitCode == nil {
		t.Errorf("%+v", st)
	}
}

// Who closes the terminal and lives on is not hung up on.
func TestTerminalClosedByItsProcess(t *testing.T) {
	e := newEnv(t)
	c := e.join(e.terminal(line("exec <&- >&- 2>&-; sleep 0.3; echo again >/dev/tty; exit 5")), "")
	c.ends(5)
	if c.out.String() != "again\r\n" {
		t.Errorf("%q", c.out.String())
	}
}

// At most MaxTerminals sessions are known; one that ended makes room.
func TestTerminalsAreBounded(t *testing.T) {
	e := newEnv(t)
	ended := e.join(e.terminal(line("exit 0")), "")
	ended.ends(0)
	eventuallyTrue(t, func() bool { return !e.ptyStatus(ended.id).Connected })
	for range proc.MaxTerminals - 1 {
		e.terminal(agent.PtyRequest{})
	}
	e.terminal(agent.PtyRequest{})
	e.call(http.StatusNotFound, "GET", "/pty/"+ended.id, nil)
	e.call(http.StatusTooManyRequests, "POST", "/pty", "{}")
	var l agent.PtyList
	if err := json.Unmarshal([]byte(e.call(http.StatusOK, "GET", "/pty", nil)), &l); err != nil || len(l.Sessions) != proc.MaxTerminals {
		t.Errorf("%d sessions, %v", len(l.Sessions), err)
	}
	e.s.terminals.Forgotten = 0 // one that nobody connected to makes room as well
	e.terminal(agent.PtyRequest{})
	e.s.terminals.Forgotten = time.Minute
	e.call(http.StatusTooManyRequests, "POST", "/pty", "{}")
}

// The terminal belongs to the user of the image, and is the session's.
func TestTerminalUser(t *testing.T) {
	if os.Getuid() != 0 {
		return // only root can be somebody else
	}
	e := newEnvWith(t, agent.Bootstrap{User: "nobody", Workdir: "/"})
	c := e.join(e.terminal(line(`id -un; stat -c %U "$(tty)"; echo x > /dev/tty; echo y > "$(tty)"`)), "")
	c.ends(0)
	if c.out.String() != "nobody\r\nnobody\r\nx\r\ny\r\n" {
		t.Errorf("%q", c.out.String())
	}
}

// Many connect, leave, take over and remove at once.
func TestTerminalStorm(t *testing.T) {
	e := newEnv(t)
	id := e.terminal(line("stty -echo; while :; do echo tick; sleep 0.001; done"))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 10 {
				ws, _, err := e.dial(id, "takeover=1")
				if err != nil {
					t.Error(err)
					return
				}
				ws.SetReadLimit(-1)
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
				ws.Read(ctx) //nolint:errcheck // it may have been taken over
				cancel()
				ws.CloseNow()
			}
		})
	}
	wg.Wait()
	c := e.join(id, "takeover=1")
	c.until(func() bool { return c.out.Len() > 0 })
	e.call(http.StatusOK, "DELETE", "/pty/"+id, nil)
	c.ends(129)
}

func eventuallyTrue(t *testing.T, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it did not happen within 20 s")
		}
	}
}
