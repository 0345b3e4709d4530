package client

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A View is where and how a client shows a terminal. Only Out is needed.
type View struct {
	// In is the typed input. Its end does not end the session; any other error ends
	// Attach. A read in progress outlives Attach.
	In  io.Reader
	Out io.Writer
	Err io.Writer // of pipe mode; nil: Out

	Size    func() (cols, rows int) // of the terminal, asked for at first and after Resized
	Resized <-chan struct{}

	Pipe     bool  // three pipes and no terminal; the first client that attaches decides
	Since    int64 // the byte to begin with; output that the session has forgotten is skipped
	Takeover bool  // send away the client that is attached
	Redraw   bool  // have programs that fill the screen draw it anew

	Patience time.Duration // how long to try again when the connection breaks
	Lost     func(error)   // is called when it breaks
	Back     func()        // is called when it is back
}

// pingEvery is how often a client pings. The connection is dead when no answer
// comes, and nothing else for half as long again.
const pingEvery = 30 * time.Second

// attachment is one call of Attach.
type attachment struct {
	t      *Terminal
	view   View
	offset int64         // of the next byte
	typed  chan []byte   // from read, one at a time
	unsent []byte        // typed, and perhaps not sent
	begin  func()        // start to read what is typed; once
	left   chan struct{} // closed when In failed, which ends the session
	why    error         // of In; read after left
	joined bool          // connected since the last break
	lost   bool          // view.Lost was called, and view.Back was not

	received atomic.Pointer[time.Time] // when something was last received
}

func (a *attachment) noteReceived() {
	now := time.Now()
	a.received.Store(&now)
}

// leaveLimit is how long an agent may take to let a client go.
const leaveLimit = time.Second

// read reads the typed input until that fails. An error ends the session, even if the
// agent does not answer.
func (a *attachment) read(ctx context.Context, cancel context.CancelCauseFunc) {
	for {
		b := make([]byte, 4<<10)
		n, err := a.view.In.Read(b)
		if n > 0 {
			select {
			case a.typed <- b[:n]:
			case <-ctx.Done():
				return
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				a.why = err
				close(a.left)
				time.AfterFunc(leaveLimit, func() { cancel(err) })
			}
			return
		}
	}
}

// connect serves the session over one connection.
func (a *attachment) connect(ctx context.Context, takeover bool) (Exit, error) {
	ws, err := a.t.dial(ctx, a.view.Pipe, takeover, a.offset, a.noteReceived)
	if err != nil {
		return Exit{}, err
	}
	a.noteReceived()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); a.send(ctx, ws) }()
	defer func() { cancel(); ws.CloseNow(); <-done }() //nolint:errcheck // closed already is as well
	for {
		kind, r, err := ws.Reader(ctx)
		if err != nil {
			return Exit{}, closed(err)
		}
		a.noteReceived()
		if kind == websocket.MessageBinary {
			if err := a.output(r); err != nil {
				return Exit{}, err
			}
			continue
		}
		var f agent.PtyFrame
		b, err := io.ReadAll(r)
		if err != nil {
			return Exit{}, closed(err)
		}
		if err := json.Unmarshal(b, &f); err != nil {
			return Exit{}, errs.Wrap(err, errs.Internal, "the agent of sandbox %s does not follow the protocol", a.t.in.name)
		}
		if exit, over, err := a.frame(f); over {
			return exit, err
		}
	}
}

// closed says why a connection ended.
func closed(err error) error {
	switch {
	case errors.Is(err, websocket.ErrMessageTooBig):
		return errs.Wrap(err, errs.Internal, "the sandbox sent a message to the terminal that is too long")
	case err == io.EOF, err == io.ErrUnexpectedEOF: //nolint:errorlint // of a message; a connection's is wrapped
		return errs.Wrap(err, errs.Internal, "the sandbox sent a message to the terminal that is cut off")
	}
	switch code := websocket.CloseStatus(err); code {
	case agent.PtyTakenOver:
		return ErrTakenOver
	case -1, websocket.StatusGoingAway, websocket.StatusAbnormalClosure:
		return fmt.Errorf("%w: %w", errBroke, err)
	}
	return errs.Wrap(err, errs.Internal, "the sandbox ended the connection to the terminal: %s", err)
}

// frame takes a text message; over says that the session is.
func (a *attachment) frame(f agent.PtyFrame) (exit Exit, over bool, err error) {
	switch f.Type {
	case "connected":
		a.begin()
		if a.joined = true; a.lost && a.view.Back != nil {
			a.view.Back()
		}
		a.lost = false
	case "exit":
		if !isExitCode(f.ExitCode) {
			return exit, true, errs.New(errs.Internal, "the agent of sandbox %s sent an invalid exit status of the terminal", a.t.in.name)
		}
		return Exit{Code: *f.ExitCode, Signal: f.Signal, TimedOut: f.TimedOut, Error: f.Error}, true, nil
	case "error":
		switch {
		case f.Code == agent.PtyConnected:
			return exit, true, errs.New(errs.WrongState, "%s", f.Error)
		case f.Code == agent.PtyNotStarted && isExitCode(f.ExitCode):
			return Exit{Code: *f.ExitCode, Error: f.Error}, true, nil
		case f.Code == agent.PtyNotStarted:
			return exit, true, errs.New(errs.Internal, "%s", f.Error)
		}
	}
	return exit, false, nil
}

// isExitCode reports whether an agent says one. Of 256 this process would make 0: success.
func isExitCode(code *int) bool { return code != nil && *code >= 0 && *code <= 255 }

// output writes the bytes of a message, which may be large, as they come.
func (a *attachment) output(r io.Reader) error {
	var head [9]byte
	if _, err := io.ReadFull(r, head[:1]); err != nil {
		return closed(err)
	}
	w := a.view.Out
	switch head[0] {
	case agent.PtyStdout:
	case agent.PtyStderr:
		if a.view.Err != nil {
			w = a.view.Err
		}
	case agent.PtyReplay:
		if _, err := io.ReadFull(r, head[1:]); err != nil {
			return closed(err)
		}
		a.offset = int64(binary.BigEndian.Uint64(head[1:]) &^ (3 << 62)) // positive, also with what follows
	default:
		_, err := io.Copy(io.Discard, r)
		return err
	}
	out := &counted{w: w, n: &a.offset, onWrite: a.noteReceived}
	if _, err := io.Copy(out, r); out.err != nil {
		return fmt.Errorf("write the terminal's output: %w", out.err)
	} else if err != nil {
		return closed(err)
	}
	return nil
}

// counted counts the bytes written, and remembers its own errors.
type counted struct {
	w       io.Writer
	n       *int64
	onWrite func()
	err     error
}

func (c *counted) Write(b []byte) (n int, err error) {
	c.onWrite()
	n, c.err = c.w.Write(b)
	*c.n += int64(n)
	return n, c.err
}

// send sends typed input, sizes and pings, until the connection ends.
func (a *attachment) send(ctx context.Context, ws *websocket.Conn) {
	every := a.t.in.ping
	ping := time.NewTicker(every)
	defer ping.Stop()
	if a.view.Redraw && a.resize(ctx, ws, 1) != nil { // programs draw anew when the size changes
		return
	}
	if a.resize(ctx, ws, 0) != nil {
		return
	}
	for {
		if len(a.unsent) > 0 {
			if ws.Write(ctx, websocket.MessageBinary, append([]byte{agent.PtyStdin}, a.unsent...)) != nil {
				return // the next connection sends it
			}
			a.unsent = nil
		}
		select {
		case <-ctx.Done():
			return
		case a.unsent = <-a.typed:
		case <-a.left: // the agent closes, once somebody else may connect
			a.text(ctx, ws, agent.PtyFrame{Type: "detach"}) //nolint:errcheck // it is over either way
			return
		case <-a.view.Resized:
			if a.resize(ctx, ws, 0) != nil {
				return
			}
		case <-ping.C:
			hold, cancel := context.WithTimeout(ctx, every)
			err := ws.Ping(hold)
			cancel()
			// While the process takes no input its agent reads no pings, but it
			// goes on sending its own, or output.
			if err != nil && time.Since(*a.received.Load()) > every*3/2 {
				ws.CloseNow() //nolint:errcheck // the reader notices
				return
			}
		}
	}
}

// resize sends the size of the terminal, plus some rows.
func (a *attachment) resize(ctx context.Context, ws *websocket.Conn, more int) error {
	if a.view.Size == nil {
		return nil
	}
	cols, rows := a.view.Size()
	if cols <= 0 || rows <= 0 {
		return nil
	}
	return a.text(ctx, ws, agent.PtyFrame{Type: "resize", Cols: cols, Rows: rows + more})
}

func (a *attachment) text(ctx context.Context, ws *websocket.Conn, f agent.PtyFrame) error {
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return ws.Write(ctx, websocket.MessageText, b)
}
