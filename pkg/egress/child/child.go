package child

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
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
	// Place, if not nil, puts each child where its processor time and memory are bounded, such
	// as a cgroup, before anything is sent to it. After an error that child ends.
	Place func(pid int) error
	// Handle is called with what a child tells or asks, as Run does it.
	Handle func(c *Conn, m Message)
	// Begin, if not nil, is called with each child before any of its messages is handled,
	// and End when it is gone, before the next one begins.
	Begin, End func(c *Conn)
	// Outlive, if not nil, makes children that outlive the daemon; their verb calls ServeOn.
	Outlive *Outlive
}

// Outlive says how a child outlives the daemon.
type Outlive struct {
	Dir string // of the sockets, which only root may enter
	// Begin is called with each child as soon as it runs, before that of the Config. After an
	// error that child ends, and one is started that ends with the daemon.
	Begin func(c *Conn, h Home) error
	// Leave decides when the Supervisor is closed: true lets the child live.
	Leave func(c *Conn) bool
}

// A Supervisor keeps a child, and starts another one when it dies.
type Supervisor struct {
	cfg    Config
	stop   context.CancelFunc
	closed <-chan struct{} // Close was called
	done   sync.WaitGroup
	mu     sync.Mutex
	conn   *Conn         // of the child that runs, or nil
	change chan struct{} // closed when conn is replaced
	fault  error         // why no child runs

	homeless bool // the log has it that children do not outlive the daemon; only start uses it
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
	s := &Supervisor{cfg: cfg, stop: stop, closed: run.Done(), change: make(chan struct{})}
	n, err := s.start(run)
	if err != nil {
		stop()
		return nil, err
	}
	s.done.Go(func() { s.keep(run, n) })
	return s, nil
}

// Close ends the child, and waits for its end, unless it is left: see Outlive.
func (s *Supervisor) Close() error {
	s.stop()
	s.done.Wait()
	return nil
}

// Conn is the line to the child that runs. While none does, it waits for the next. After Close
// the error is ErrGone.
func (s *Supervisor) Conn(ctx context.Context) (*Conn, error) {
	for {
		s.mu.Lock()
		c, change, fault := s.conn, s.change, s.fault
		s.mu.Unlock()
		if c != nil && !c.isClosed() { // that one is about to be replaced
			return c, nil
		}
		select {
		case <-change:
		case <-s.closed:
			return nil, ErrGone
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

// A newborn is a child that runs.
type newborn struct {
	p    *confine.Process
	c    *Conn
	home Home // without a name: it ends with the daemon
}

// end ends the child, and returns how it ended.
func (s *Supervisor) end(n newborn) error {
	if n.c != nil {
		n.c.Close()
	}
	n.p.Kill()
	err := n.p.Wait()
	if n.home.Name != "" {
		os.Remove(SocketPath(s.cfg.Outlive.Dir, n.home.Name)) //nolint:errcheck // the next daemon removes it
	}
	return err
}

// errNoHome says that a child cannot outlive the daemon, but may run.
var errNoHome = errors.New("no child can outlive this daemon")

// start starts a child and waits until it says so. If it cannot outlive the daemon as it
// should, it is one that does not.
func (s *Supervisor) start(ctx context.Context) (newborn, error) {
	n, err := s.startAs(ctx, s.cfg.Outlive)
	if errors.Is(err, errNoHome) {
		if !s.homeless {
			s.homeless = true
			s.cfg.Logger.Error("what a child does ends with this daemon", "child", s.cfg.Verb, "err", err)
		}
		n, err = s.startAs(ctx, nil)
	} else if err == nil {
		s.homeless = false
	}
	if err != nil {
		return n, fmt.Errorf("start the child %s: %w", s.cfg.Verb, err)
	}
	return n, nil
}

func (s *Supervisor) startAs(ctx context.Context, o *Outlive) (n newborn, err error) {
	ours, theirs, err := Pair()
	if err != nil {
		return n, err
	}
	defer theirs.Close()
	files := []*os.File{theirs}
	if o != nil {
		name := rand.Text()
		l, err := listen(o.Dir, name)
		if err != nil {
			return n, errors.Join(errNoHome, err, ours.Close())
		}
		defer l.Close()
		n.home.Name, files = name, append(files, l)
	}
	n.p, err = confine.Start(ctx, confine.Child{
		Verb: s.cfg.Verb, Args: s.cfg.Args, Files: append(files, s.cfg.Files...), Serves: true, Memory: s.cfg.Memory,
		Outlives: o != nil,
	})
	if err != nil {
		if o != nil {
			os.Remove(SocketPath(o.Dir, n.home.Name)) //nolint:errcheck // the next daemon removes it
		}
		return n, errors.Join(err, ours.Close())
	}
	n.p.Close() // it reads and writes nothing there
	theirs.Close()
	if n.c, err = NewConn(ours, s.cfg.Max, false); err == nil {
		err = greeted(n.c, n.p)
	}
	if err != nil {
		return n, cmp.Or(s.end(n), err)
	}
	if s.cfg.Place != nil {
		if err := s.cfg.Place(n.p.Pid()); err != nil {
			s.end(n) //nolint:errcheck // it was killed
			return n, fmt.Errorf("put it into its place: %w", err)
		}
	}
	if o != nil {
		n.home.Pid = n.p.Pid()
		if n.home.Started, err = started(n.home.Pid); err == nil {
			err = o.Begin(n.c, n.home)
		}
		if err != nil {
			s.end(n) //nolint:errcheck // it was killed
			return n, errors.Join(errNoHome, err)
		}
	}
	return n, nil
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
func (s *Supervisor) keep(ctx context.Context, n newborn) {
	pause := time.Duration(0)
	for {
		begun := time.Now()
		err := s.serve(ctx, n)
		if ctx.Err() != nil {
			return
		}
		s.cfg.Logger.Error("a child that reads bytes of guests died; sandboxd starts another", "child", s.cfg.Verb, "err", err)
		if time.Since(begun) > steady {
			pause = 0
		}
		for {
			if n, err = s.again(ctx, pause); ctx.Err() != nil {
				if err == nil {
					s.end(n)                                   //nolint:errcheck // it was killed
					if n.home.Name != "" && s.cfg.End != nil { // else it has not begun
						s.cfg.End(n.c)
					}
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

func (s *Supervisor) again(ctx context.Context, pause time.Duration) (newborn, error) {
	wait := time.NewTimer(pause)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-ctx.Done():
		return newborn{}, ctx.Err()
	}
	return s.start(ctx)
}

// serve serves one child to its end, and returns why it ended. When ctx ends, the child may
// be left.
func (s *Supervisor) serve(ctx context.Context, n newborn) error {
	defer context.AfterFunc(ctx, func() { n.c.Close() })()
	if s.cfg.Begin != nil {
		s.cfg.Begin(n.c)
	}
	s.set(n.c, nil)
	err := n.c.Run(func(m Message) {
		if m.File != nil {
			m.File.Close()
		}
		if s.cfg.Handle != nil {
			s.cfg.Handle(n.c, m)
		}
	})
	if n.home.Name != "" && ctx.Err() != nil && err == nil && s.cfg.Outlive.Leave(n.c) {
		return nil
	}
	died := s.end(n) // it is dead, or has sent what it must not
	if err == nil {
		err = died
	}
	s.set(nil, err)
	if s.cfg.End != nil {
		s.cfg.End(n.c)
	}
	return err
}

// Serve is what a verb does in the child: it runs the line that stands at the first of
// its files. Handle is called as Run does it; Files of the Config follow at the descriptors
// behind. Serve returns when the daemon is gone.
func Serve(max int, begin func(c *Conn, files []*os.File) (handle func(Message), err error)) error {
	c, files, err := given(max)
	if err != nil {
		return err
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

// ServeOn is Serve for a child that outlives the daemon. Begin is called with the line to
// each daemon. When a line has ended, alone is called. ServeOn returns when leave, which that
// is given, is called before the next daemon takes the line; later leave does nothing.
func ServeOn(max int, begin func(c *Conn) (handle func(Message)), alone func(leave func())) error {
	// What it writes to a daemon that is gone, to standard error too, is only lost.
	signal.Ignore(unix.SIGPIPE)
	unix.SetNonblock(confine.FirstFile+1, true) //nolint:errcheck // shows in what follows
	c, files, err := given(max)
	if err != nil {
		return err
	}
	for {
		handle := begin(c)
		if c.Tell(hello, nil, nil) == nil { // or that daemon is gone already
			err = c.Run(handle)
		}
		c.Close()
		if err != nil || len(files) == 0 {
			return err
		}
		if c, err = next(files[0], max, alone); c == nil {
			return err
		}
	}
}

// next waits for the next line; nil: leave was called.
func next(l *os.File, max int, alone func(leave func())) (*Conn, error) {
	raw, err := l.SyscallConn()
	if err == nil {
		err = l.SetReadDeadline(time.Time{})
	}
	if err != nil {
		return nil, err
	}
	alone(func() { l.SetReadDeadline(time.Unix(1, 0)) }) //nolint:errcheck // it cannot fail where that succeeded
	fd := -1
	werr := raw.Read(func(s uintptr) bool {
		for {
			fd, _, err = unix.Accept4(int(s), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			if err != unix.EINTR && err != unix.ECONNABORTED {
				return err != unix.EAGAIN
			}
		}
	})
	if errors.Is(werr, os.ErrDeadlineExceeded) {
		return nil, nil
	}
	if err := cmp.Or(werr, err); err != nil {
		return nil, fmt.Errorf("take the line of the next daemon: %w", err)
	}
	return NewConn(os.NewFile(uintptr(fd), "line to the daemon"), max, true)
}

// given are the line and the files that this child was started with.
func given(max int) (c *Conn, files []*os.File, err error) {
	if err := unix.SetNonblock(confine.FirstFile, true); err != nil {
		return nil, nil, fmt.Errorf("open the line to the daemon: %w", err)
	}
	c, err = NewConn(os.NewFile(confine.FirstFile, "line to the daemon"), max, true)
	if err != nil {
		return nil, nil, fmt.Errorf("open the line to the daemon: %w", err)
	}
	for fd := confine.FirstFile + 1; ; fd++ {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if err != nil || flags&unix.FD_CLOEXEC != 0 { // the runtime's own
			return c, files, nil
		}
		files = append(files, os.NewFile(uintptr(fd), "given"))
	}
}
