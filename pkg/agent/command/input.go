package command

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// input is the standard input of a command that comes in parts, each with the number of
// its first byte. So a part that is sent again, because its answer was lost, is not
// written twice.
type input struct {
	turn   chan struct{} // holds a value while a part is written, which guards the rest
	file   *os.File      // nil: no part has come
	n      int64         // bytes written, or taken for a command that reads no more
	closed bool
}

// abandonInput ends the input of c, whose client did not come back. The input that comes
// as one body ends with that.
func (c *Command) abandonInput() {
	c.input.turn <- struct{}{}
	defer func() { <-c.input.turn }()
	if c.input.file == nil && c.stdinBusy.Load() {
		return
	}
	c.input.closed = true
	c.Stdin.Close()
}

// part is POST /command/{id}/stdin?offset=N&more=true: the body is the bytes from number
// N on. With more, others follow; without, they are the last. The answer comes when the
// command, or the pipe to it, has taken the bytes.
func part(w http.ResponseWriter, r *http.Request, c *Command) error {
	offset, err := strconv.ParseInt(r.URL.Query().Get("offset"), 10, 64)
	if err != nil || offset < 0 {
		return reply.BadRequest("offset %.32q is not a number of bytes", r.URL.Query().Get("offset"))
	}
	more := r.URL.Query().Get("more") == "true"
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, agent.MaxStdinPart))
	if err != nil { // nothing was written: the client sends it again
		return reply.BadRequest("a part of the standard input of command %s was cut off, or has more than %d bytes: %v", c.ID,
			agent.MaxStdinPart, err)
	}
	in := &c.input
	select {
	case in.turn <- struct{}{}:
	case <-r.Context().Done():
		return reply.BadRequest("the client is gone")
	}
	defer func() { <-in.turn }()
	in.file = c.Stdin
	if offset > in.n {
		return reply.Fail(http.StatusConflict, reply.Failed,
			"the standard input of command %s has %d bytes, and this part begins with byte %d", c.ID, in.n, offset)
	}
	rest := b[min(in.n-offset, int64(len(b))):]
	if in.closed && (len(rest) > 0 || more) {
		return reply.Fail(http.StatusConflict, reply.Failed, "the standard input of command %s has ended", c.ID)
	}
	if err := in.write(r.Context(), rest); err != nil {
		switch {
		case !c.Alive(), errors.Is(err, syscall.EPIPE), errors.Is(err, os.ErrClosed):
			in.n = offset + int64(len(b)) // the command reads no more
		default:
			return reply.BadRequest("the client is gone")
		}
	}
	if !more && !in.closed {
		in.closed = true
		in.file.Close()
	}
	return reply.OK(w)
}

// write writes b, and counts what is written, until the client is gone.
func (in *input) write(ctx context.Context, b []byte) error {
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		in.file.SetWriteDeadline(time.Unix(1, 0)) //nolint:errcheck // then it is closed
		close(cut)
	})
	n, err := in.file.Write(b)
	in.n += int64(n)
	if !stop() {
		<-cut // else the next part could meet this deadline
	}
	in.file.SetWriteDeadline(time.Time{}) //nolint:errcheck // then it is closed
	return err
}
