package terminal

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Times of WebSockets.
const (
	// pingEvery is between two pings; a client that has not answered one by the
	// next is gone, so 60 s after its last sign at the latest.
	pingEvery = 30 * time.Second
	// evictLimit is how long it may take to tell a client that another one has taken
	// over.
	evictLimit = time.Second
)

// A viewer is a client that is connected to a terminal.
type viewer struct {
	ws     *websocket.Conn
	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
	stops  sync.Once
	left   chan struct{} // closed when nothing of it remains
	buf    []byte        // of output; guarded by terminal.feed

	mu   sync.Mutex
	in   *os.File    // what it types into; nil before it listens; guarded by mu
	ping *time.Timer // guarded by mu

	acts atomic.Uint64 // odd while it waits for the process to take input, and reads nothing from its client
}

func newViewer(ws *websocket.Conn) *viewer {
	v := &viewer{ws: ws, left: make(chan struct{})}
	v.ctx, v.cancel = context.WithCancel(context.Background())
	return v
}

// stop cuts the connection. Calls that wait for it, or for the process to read, return.
func (v *viewer) stop() {
	v.stops.Do(func() {
		v.cancel()
		v.mu.Lock()
		if v.in != nil {
			v.in.SetWriteDeadline(time.Unix(1, 0)) //nolint:errcheck // closed: nothing waits
		}
		v.mu.Unlock()
		v.ws.CloseNow() //nolint:errcheck // closed already is as well
	})
}

// evict tells the client that another one has taken over, and cuts it off.
func (v *viewer) evict() {
	t := time.AfterFunc(evictLimit, v.cancel) // a write in progress would make Close wait
	go proc.Guarded(func() {
		v.ws.Close(agent.PtyTakenOver, agent.PtyTaken) //nolint:errcheck // who does not listen is cut off
		t.Stop()
		v.stop()
	})
}

// output sends what was written just now. It blocks while the client is slow. An
// error ends the connection, which the reading end notices.
func (v *viewer) output(stream byte, b []byte) {
	v.buf = append(append(v.buf[:0], stream), b...)
	v.ws.Write(v.ctx, websocket.MessageBinary, v.buf) //nolint:errcheck // see above
	if cap(v.buf) > 8<<10 {
		v.buf = nil // of a pipe; a terminal gives less at a time
	}
}

// replay sends the output between two byte numbers in one message.
func (v *viewer) replay(c *command.Command, off, end int64) error {
	w, err := v.ws.Writer(v.ctx, websocket.MessageBinary)
	if err != nil {
		return err
	}
	if _, err := w.Write(binary.BigEndian.AppendUint64([]byte{agent.PtyReplay}, uint64(off))); err != nil {
		return err
	}
	if _, err := c.Output.Copy(w, off, end); err != nil {
		return err
	}
	return w.Close()
}

func (v *viewer) text(f agent.PtyFrame) error {
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return v.ws.Write(v.ctx, websocket.MessageText, b)
}

func (v *viewer) fail(code string, err error) {
	v.text(agent.PtyFrame{Type: "error", Code: code, Error: err.Error()}) //nolint:errcheck // the reading end notices
}

// act runs f, which may wait for the process to read.
func (v *viewer) act(f func()) {
	v.acts.Add(1)
	defer v.acts.Add(1)
	f()
}

// attend waits for the end of the command, and reports it, or for the end of the
// connection. Meanwhile it checks that the client is there.
func (v *viewer) attend(t *terminal, every time.Duration) {
	v.mu.Lock()
	v.ping = time.AfterFunc(every, func() { proc.Guarded(func() { v.ask(every) }) })
	v.mu.Unlock()
	defer v.ping.Stop()
	select {
	case <-v.ctx.Done():
	case <-t.cmd.Flushed():
		v.text(t.cmd.End().Frame())                                 //nolint:errcheck // the reading end notices
		t.letGo(v)                                                  // before its client knows, which may come back at once
		v.ws.Close(websocket.StatusNormalClosure, "process exited") //nolint:errcheck // as above
	}
}

// ask pings the client, and sets the time of the next ping.
//
// While the process takes no input, no answer to a ping is read, so a missing answer
// proves nothing. The next ping follows at once: it shows the client that the agent is
// there, and fails if the connection is gone or takes nothing.
func (v *viewer) ask(every time.Duration) {
	ctx, cancel := context.WithTimeout(v.ctx, every)
	defer cancel()
	before := v.acts.Load()
	err := v.ws.Ping(ctx)
	now := v.acts.Load()
	deaf := now != before || now%2 == 1
	if err != nil && (!deaf || ctx.Err() == nil || v.ctx.Err() != nil) { // to be sent takes 5 s at most
		v.stop()
		return
	}
	wait := every
	if err != nil {
		wait = 0
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.ping.Reset(wait)
}

// listen handles the client's messages until it is gone.
func (v *viewer) listen(t *terminal) {
	in := t.input()
	in.SetWriteDeadline(time.Time{}) //nolint:errcheck // closed: writing says it
	v.mu.Lock()
	v.in = in
	v.mu.Unlock()
	for v.ctx.Err() == nil { // a stop before v.in was set is seen here
		kind, r, err := v.ws.Reader(v.ctx)
		if err != nil {
			return
		}
		if kind == websocket.MessageText {
			err = v.control(t, r)
		} else {
			err = v.typed(r)
		}
		if err != nil {
			return
		}
	}
}

// typed passes the bytes of a binary message on. Its error is the connection's.
func (v *viewer) typed(r io.Reader) error {
	var buf [4 << 10]byte
	if _, err := io.ReadFull(r, buf[:1]); err != nil || buf[0] != agent.PtyStdin {
		_, err = io.CopyBuffer(io.Discard, r, buf[:]) // execd ignores it
		return err
	}
	for {
		n, err := r.Read(buf[:])
		if n > 0 {
			v.write(buf[:n])
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// write types b. It reports no error if the process has ended: the end itself is
// reported.
func (v *viewer) write(b []byte) {
	var err error
	v.act(func() { _, err = v.in.Write(b) })
	if err != nil && !errors.Is(err, os.ErrClosed) && v.ctx.Err() == nil {
		v.fail(agent.PtyInputFailed, err)
	}
}

// errDetached is the end of a connection that its client asked for.
var errDetached = errors.New("detached")

// control handles a text message. Its error is the connection's.
func (v *viewer) control(t *terminal, r io.Reader) error {
	b, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	var f agent.PtyFrame
	if err := json.Unmarshal(b, &f); err != nil {
		v.fail(agent.PtyInvalidFrame, err)
		return nil
	}
	switch f.Type {
	case "stdin":
		v.write([]byte(f.Data))
	case "signal":
		sig := record.Signal(f.Signal)
		if sig == 0 {
			v.fail(agent.PtyInvalidFrame, errors.New("signal: want a name such as SIGINT"))
			return nil
		}
		v.act(func() { t.signal(sig) }) //nolint:errcheck // what has ended needs none
	case "resize":
		if t.tty == nil {
			return nil // a pipe has no size; execd ignores it too
		}
		if !isSize(f.Cols) || !isSize(f.Rows) || f.Cols == 0 || f.Rows == 0 {
			v.fail(agent.PtyInvalidFrame, errors.New("resize: want cols and rows from 1 to 65535"))
			return nil
		}
		proc.Resize(t.tty, f.Cols, f.Rows) //nolint:errcheck // what has ended needs none
	case "detach":
		v.mu.Lock()
		v.in = nil // it belongs to the next viewer: v must not touch it from here on
		v.mu.Unlock()
		t.letGo(v)                                            // before its client knows, which may come back at once
		v.ws.Close(websocket.StatusNormalClosure, "detached") //nolint:errcheck // over either way
		return errDetached
	case "ping":
		return v.text(agent.PtyFrame{Type: "pong"})
	default:
		v.fail(agent.PtyInvalidFrame, errors.New("unknown type of frame: want stdin, signal, resize, ping or detach"))
	}
	return nil
}

func isSize(n int) bool { return n >= 0 && n <= 65535 }
