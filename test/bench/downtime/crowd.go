package downtime

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// writes prints ever higher numbers, one a line, and starts no process for that: on gVisor each
// takes milliseconds, and a hundred sandboxes would measure the CPU.
const writes = `mkfifo /tmp/never && exec 3<>/tmp/never; i=0
while [ ! -e /tmp/enough ]; do echo $((i++)); read -t 0.1 -u 3; done; exit 7`

// A Crowd is sandboxes in each of which a command writes.
type Crowd struct {
	cl      *client.Client
	ids     []string
	command []string // of each sandbox

	follow  context.CancelFunc
	readers sync.WaitGroup
	read    []*reader  // of the first sandboxes
	watched chan error // how the stream of events ended
}

// A reader follows a command.
type reader struct {
	bytes.Buffer
	exit      client.Exit
	forgotten int64
	err       error
}

// A Loss is what a Crowd has lost.
type Loss struct {
	Sandboxes int   // do not answer any more
	Bytes     int64 // were written, and cannot be read
	Unread    int64 // did not reach those who followed; they could come back
}

// Write begins a Crowd of sandboxes that run. The commands of the first followed ones have a
// client each that reads along, and there is a client that reads events. All have begun to read when
// it returns: a stream that has not begun does not outlive a restart.
func Write(ctx context.Context, cl *client.Client, ids []string, followed int) (*Crowd, error) {
	c := &Crowd{
		cl: cl, ids: ids, command: make([]string, len(ids)), read: make([]*reader, min(followed, len(ids))), watched: make(chan error, 1),
	}
	ctx, c.follow = context.WithCancel(ctx)
	err := each(ids, func(i int, id string) error {
		p, err := cl.Start(ctx, id, client.Command{Argv: []string{"bash", "-c", writes}, Background: i >= followed})
		if err != nil {
			return err
		}
		c.command[i] = p.ID
		if i >= followed {
			return p.Close()
		}
		r := &reader{}
		c.readers.Go(func() {
			r.exit, r.err = p.WaitOn(ctx, client.Notices{}, func(n int64) { r.forgotten += n }, r, r)
		})
		c.read[i] = r
		return nil
	})
	watching := make(chan struct{})
	go func() {
		var broken error
		begun := sync.OnceFunc(func() { close(watching) })
		for _, err := range cl.Events(ctx, time.Now().Add(-time.Hour), client.Notices{}) { // they tell of its sandboxes
			begun()
			if err != nil && ctx.Err() == nil {
				broken = fmt.Errorf("the stream of events: %w", err)
			}
		}
		begun()
		c.watched <- broken
	}()
	select {
	case <-watching:
	case <-ctx.Done(): // nothing has happened in the last hour: no event came
		return c, errors.Join(err, ctx.Err())
	}
	return c, err
}

// End ends the commands, and compares what was written with what was read.
func (c *Crowd) End(ctx context.Context) (lost Loss, err error) {
	defer c.follow()
	var mu sync.Mutex
	wrote := make([]int64, len(c.ids))
	err = each(c.ids, func(i int, id string) error {
		n, missing, err := c.endOne(ctx, id, c.command[i])
		mu.Lock()
		defer mu.Unlock()
		wrote[i] = n
		lost.Bytes += missing
		var gone *goneError
		if errors.As(err, &gone) {
			lost.Sandboxes++
			return nil
		}
		return err
	})
	if err != nil || lost.Sandboxes > 0 {
		return lost, err
	}
	late := time.AfterFunc(backAgain, c.follow)
	c.readers.Wait()
	late.Stop()
	c.follow()
	for _, r := range c.read {
		lost.Unread += r.forgotten
		if _, whole := lines(r.Bytes()); r.err != nil || r.exit.Code != 7 || !whole {
			err = errors.Join(err, fmt.Errorf("a client that followed got %d bytes, exit status %d: %w", r.Len(), r.exit.Code, r.err))
		}
	}
	return lost, errors.Join(err, <-c.watched)
}

// backAgain is how long clients that follow may take to come back after the last restart.
const backAgain = 30 * time.Second

// A goneError is about a sandbox that does not answer.
type goneError struct{ error }

// endOne ends the command of one sandbox, and returns how many bytes it wrote and how many of them
// cannot be read.
func (c *Crowd) endOne(ctx context.Context, id, command string) (wrote, missing int64, err error) {
	sb, err := c.cl.Get(ctx, id)
	if err == nil && sb.Status.State != wire.Running {
		err = fmt.Errorf("it is %s: %s", sb.Status.State, sb.Status.Message)
	}
	if err == nil {
		err = c.run(ctx, id, "touch", "/tmp/enough")
	}
	if err != nil {
		return 0, 0, &goneError{fmt.Errorf("sandbox %s: %w", id, err)}
	}
	var out bytes.Buffer
	if err := c.cl.Commands(id).Follow(ctx, command, 0, client.Notices{}, &out); err != nil {
		return 0, 0, fmt.Errorf("sandbox %s: %w", id, err)
	}
	st, err := c.cl.Commands(id).Status(ctx, command)
	if err != nil {
		return 0, 0, fmt.Errorf("sandbox %s: %w", id, err)
	}
	if st.ExitCode == nil || *st.ExitCode != 7 {
		return 0, 0, &goneError{fmt.Errorf("sandbox %s: its command ended as %+v", id, st)}
	}
	last, whole := lines(out.Bytes())
	if whole {
		return int64(out.Len()), 0, nil
	}
	all := int64(0)
	for i := range last + 1 {
		all += int64(len(strconv.Itoa(i))) + 1
	}
	return all, max(1, all-int64(out.Len())), nil
}

func (c *Crowd) run(ctx context.Context, id string, argv ...string) error {
	p, err := c.cl.Start(ctx, id, client.Command{Argv: argv})
	if err != nil {
		return err
	}
	exit, err := p.Wait(io.Discard, io.Discard)
	if err == nil && exit.Code != 0 {
		err = fmt.Errorf("%q: exit status %d", argv, exit.Code)
	}
	return err
}

// lines returns the last number of an output of writes, and whether it has all before.
func lines(out []byte) (last int, whole bool) {
	whole = true
	next := 0
	for line := range bytes.Lines(out) {
		n, err := strconv.Atoi(string(bytes.TrimSuffix(line, []byte("\n"))))
		if err != nil || n != next || !bytes.HasSuffix(line, []byte("\n")) {
			whole = false
		}
		if err == nil {
			last, next = max(last, n), n+1
		}
	}
	return last, whole && next > 0
}

// workers is how many sandboxes are asked at once.
const workers = 8

// each calls do for all ids, and joins the errors.
func each(ids []string, do func(i int, id string) error) error {
	var wg sync.WaitGroup
	turn := make(chan struct{}, workers)
	errz := make([]error, len(ids))
	for i, id := range slices.All(ids) {
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			errz[i] = do(i, id)
		})
	}
	wg.Wait()
	return errors.Join(errz...)
}
