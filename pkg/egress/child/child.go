package child

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/confine"
)

// Config says which child a Supervisor keeps.
type Config struct {
	Verb   string     // as confine.Main knows it; it calls Serve
	Args   []string   // for the verb
	Files  []*os.File // for every child, the caller's to keep open
	Memory int64      // the limit of its data, in bytes
	Max    int        // the longest body that it may send
	Logger *slog.Logger
	// Handle is called with what a child tells or asks, as Run does it.
	Handle func(c *Conn, m Message)
	// Begin, if not nil, is called with each child before any of its messages is handled,
	// and End when it is gone, before the next one begins.
	Begin, End func(c *Conn)
}

// A Supervisor keeps a child, and starts another one when it dies.
type Supervisor struct {
	cfg    Config
	stop   context.CancelFunc
	done   sync.WaitGroup
	mu     sync.Mutex
	conn   *Conn         // of the child that runs, or nil
	change chan struct{} // closed when conn is replaced
	fault  error         // why no child runs
}

const (
	// startLimit is how long a start may take: it takes some tens of milliseconds.
	startLimit = 30 * time.Second
	// The pause before a start is none if the child lived for steady. Otherwise it is
	// twice the last one, from leastPause to mostPause.
	steady     = 10 * time.Second
	leastPause = 10 * time.Millisecond
	mostPause  = 5 * time.Second
)

// Start starts the first child, and returns when that runs.
func Start(ctx context.Context, cfg Config) (*Supervisor, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	s := &Supervisor{cfg: cfg, stop: stop, change: make(chan struct{})}
	p, c, err := s.start(run)
	if err != nil {
		stop()
		return nil, err
	}
	s.done.Go(func() { s.keep(run, p, c) })
	return s, nil
}

// Close ends the child, and waits for its end.
func (s *Supervisor) Close() error {
	s.stop()
	s.mu.Lock()
	c := s.conn
	s.mu.Unlock()
	if c != nil {
		c.Close()
	}
	s.done.Wait()
	return nil
}

// Conn is the line to the child that runs. While none does, it waits for the next.
func (s *Supervisor) Conn(ctx context.Context) (*Conn, error) {
	for {
		s.mu.Lock()
		c, change, fault := s.conn, s.change, s.fault
		s.mu.Unlock()
		if c != nil {
			return c, nil
		}
		select {
		case <-change:
		case <-ctx.Done():
			return nil, fmt.Errorf("the child %s does not run: %w", s.cfg.Verb, cmp.Or(fault, ctx.Err()))
		}
	}
}

func (s *Supervisor) set(c *Conn, fault error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn, s.fault = c, fault
	close(s.change)
	s.change = make(chan struct{})
}

// start starts a child and waits until it says so.
func (s *Supervisor) start(ctx context.Context) (*confine.Process, *Conn, error) {
	ours, theirs, err := Pair()
	if err != nil {
		return nil, nil, fmt.Errorf("start the child %s: %w", s.cfg.Verb, err)
	}
	defer theirs.Close()
	p, err := confine.Start(ctx, confine.Child{
		Verb: s.cfg.Verb, Args: s.cfg.Args, Files: append([]*os.File{theirs}, s.cfg.Files...), Serves: true, Memory: s.cfg.Memory,
	})
	if err != nil {
		return nil, nil, errors.Join(err, ours.Close())
	}
	p.Close() // it reads and writes nothing there
	theirs.Close()
	c, err := NewConn(ours, s.cfg.Max, false)
	if err == nil {
		err = greeted(c, p)
	}
	if err != nil {
		if c != nil {
			c.Close()
		}
		p.Kill()
		return nil, nil, fmt.Errorf("start the child %s: %w", s.cfg.Verb, cmp.Or(p.Wait(), err))
	}
	return p, c, nil
}

// greeted waits for the first message of a child.
func greeted(c *Conn, p *confine.Process) error {
	late := time.AfterFunc(startLimit, p.Kill)
	defer late.Stop()
	m, err := c.receive(make([]byte, header+c.max+1))
	if err == nil && m.Kind != hello {
		err = errForm
	}
	return err
}

// keep serves the child until ctx ends, and starts the next one whenever it dies.
func (s *Supervisor) keep(ctx context.Context, p *confine.Process, c *Conn) {
	pause := time.Duration(0)
	for {
		begun := time.Now()
		err := s.serve(p, c)
		if ctx.Err() != nil {
			return
		}
		s.cfg.Logger.Error("a child that reads bytes of guests died; sandboxd starts another", "child", s.cfg.Verb, "err", err)
		if time.Since(begun) > steady {
			pause = 0
		}
		for {
			if p, c, err = s.again(ctx, pause); ctx.Err() != nil {
				if err == nil {
					c.Close()
					p.Kill()
					p.Wait() //nolint:errcheck // it was killed
				}
				return
			}
			pause = min(max(2*pause, leastPause), mostPause)
			if err == nil {
				break
			}
			s.set(nil, err)
			s.cfg.Logger.Error("cannot start a child that reads bytes of guests; sandboxd tries again", "child", s.cfg.Verb, "in", pause,
				"err", err)
		}
	}
}

func (s *Supervisor) again(ctx context.Context, pause time.Duration) (*confine.Process, *Conn, error) {
	wait := time.NewTimer(pause)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
	return s.start(ctx)
}

// serve serves one child to its end, and returns why it ended.
func (s *Supervisor) serve(p *confine.Process, c *Conn) error {
	if s.cfg.Begin != nil {
		s.cfg.Begin(c)
	}
	s.set(c, nil)
	err := c.Run(func(m Message) {
		if m.File != nil {
			m.File.Close()
		}
		if s.cfg.Handle != nil {
			s.cfg.Handle(c, m)
		}
	})
	p.Kill() // it is dead, or has sent what it must not
	if died := p.Wait(); err == nil {
		err = died
	}
	s.set(nil, err)
	if s.cfg.End != nil {
		s.cfg.End(c)
	}
	return err
}

// Serve is what a verb does in the child: it runs the line that stands at the first of
// its files. Handle is called as Run does it; Files of the Config follow at the descriptors
// behind. Serve returns when the daemon is gone.
func Serve(max int, begin func(c *Conn, files []*os.File) (handle func(Message), err error)) error {
	if err := unix.SetNonblock(confine.FirstFile, true); err != nil {
		return fmt.Errorf("open the line to the daemon: %w", err)
	}
	c, err := NewConn(os.NewFile(confine.FirstFile, "line to the daemon"), max, true)
	if err != nil {
		return fmt.Errorf("open the line to the daemon: %w", err)
	}
	var files []*os.File
	for fd := confine.FirstFile + 1; ; fd++ {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if err != nil || flags&unix.FD_CLOEXEC != 0 { // the runtime's own
			break
		}
		files = append(files, os.NewFile(uintptr(fd), "given"))
	}
	handle, err := begin(c, files)
	if err != nil {
		return err
	}
	if err := c.Tell(hello, nil, nil); err != nil {
		return err
	}
	return c.Run(handle)
}
