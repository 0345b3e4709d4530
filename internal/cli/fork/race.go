package fork

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// A race is one command that runs in all copies at the same time.
type race struct {
	copies   []wire.ForkChild
	out, err io.Writer
	mu       sync.Mutex // held while a line is written
}

func newRace(copies []wire.ForkChild, out, err io.Writer) *race {
	return &race{copies: copies, out: out, err: err}
}

// An end is how the command ended in one copy.
type end struct {
	copy wire.ForkChild
	exit client.Exit
	err  error
}

func (e end) ok() bool { return e.err == nil && e.exit.Code == 0 }

// start runs argv in all copies and sends each end.
func (r *race) start(ctx context.Context, cl *client.Client, argv []string) <-chan end {
	ends := make(chan end, len(r.copies))
	for _, c := range r.copies {
		go func() {
			out, errw := r.lines(r.out, c), r.lines(r.err, c)
			p, err := cl.Start(ctx, c.ID, client.Command{Argv: argv})
			var exit client.Exit
			if err == nil {
				exit, err = p.Wait(out, errw)
			}
			err = errors.Join(err, out.end(), errw.end())
			ends <- end{c, exit, err}
		}()
	}
	return ends
}

// all waits until the command has ended in all copies. The exit status is that of the first copy
// in which it failed.
func (r *race) all(ctx context.Context, cl *client.Client, argv []string) error {
	ends := r.start(ctx, cl, argv)
	var failed *end
	for range r.copies {
		if e := <-ends; !e.ok() && failed == nil {
			failed = &e
		}
	}
	if failed == nil {
		return nil
	}
	return failed.error()
}

func (e end) error() error {
	if e.err != nil {
		return fmt.Errorf("run the command in %s: %w", e.copy.ID, e.err)
	}
	return command.Exit(e.exit.Code, "the command exited with %d in %s", e.exit.Code, label(e.copy))
}

// untilSuccess waits until the command has exited with 0 in one copy, removes the others, and
// prints the ID of that one, with a note beside it. If it fails in all, all are kept.
func (r *race) untilSuccess(ctx context.Context, cl *client.Client, argv []string) error {
	running, stop := context.WithCancel(ctx)
	defer stop()
	ends := r.start(running, cl, argv)
	var last end
	for n := range r.copies {
		if last = <-ends; !last.ok() {
			continue
		}
		stop()
		err := r.removeBut(ctx, cl, last.copy.ID)
		for range r.copies[n+1:] { // after the id nothing is written
			<-ends
		}
		command.Note(fmt.Sprintf("the command succeeded first in %s, which is kept; the other copies are removed", label(last.copy)))
		if _, werr := fmt.Fprintln(r.out, last.copy.ID); werr != nil {
			return werr
		}
		return err
	}
	if last.err != nil {
		return last.error()
	}
	return command.Exit(last.exit.Code, "the command failed in all copies, which are kept; `sandboxctl tree` shows them, `sandboxctl rm` "+
		"removes them")
}

// removeBut removes all copies but one, at the same time.
func (r *race) removeBut(ctx context.Context, cl *client.Client, id string) error {
	errs := make([]error, len(r.copies))
	var wg sync.WaitGroup
	for i, c := range r.copies {
		if c.ID == id {
			continue
		}
		wg.Go(func() {
			if err := cl.Delete(ctx, c.ID); err != nil {
				errs[i] = fmt.Errorf("remove copy %s: %w", c.ID, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func label(c wire.ForkChild) string {
	if c.Name != "" {
		return c.Name
	}
	return c.ID
}

// maxLine is how much of a line without an end is kept before it is written.
const maxLine = 64 << 10

// lines writes whole lines, each with the name of its copy before it.
type lines struct {
	r      *race
	w      io.Writer
	prefix string
	rest   []byte
}

func (r *race) lines(w io.Writer, c wire.ForkChild) *lines {
	return &lines{r: r, w: w, prefix: label(c) + " | "}
}

func (l *lines) Write(b []byte) (int, error) {
	n := len(b)
	for {
		i := bytes.IndexByte(b, '\n')
		if i < 0 {
			break
		}
		if err := l.line(append(l.rest, b[:i]...)); err != nil {
			return 0, err
		}
		l.rest, b = nil, b[i+1:]
	}
	l.rest = append(l.rest, b...)
	if len(l.rest) > maxLine {
		return n, l.end()
	}
	return n, nil
}

// end writes what has no line end.
func (l *lines) end() error {
	if len(l.rest) == 0 {
		return nil
	}
	line := l.rest
	l.rest = nil
	return l.line(line)
}

func (l *lines) line(b []byte) error {
	l.r.mu.Lock()
	defer l.r.mu.Unlock()
	_, err := fmt.Fprintf(l.w, "%s%s\n", l.prefix, b)
	return err
}
