package server

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// The shell ahead is a bash that was started before the command it will run:
//
//	a command ends ── spawn ─▶ bash reads its socket ── taken ─▶ cd, export, "k" ─▶ eval 'the command' ─▶ gone
//	                                   └── idle, memory short, env changed ─▶ killed
//
// On gVisor the start of a bash is 10 ms of the 12 that `bash -c true` takes.
// It is a process as any other command's: of the default user, in a session of
// its own, with a marker, its pipes and /dev/null for standard input. It serves
// one command. What a command could tell from `bash -c`, notices finds, and that
// is started anew; so is whatever the shell can not take.
//
// None waits before the first command that could have used it, or long after
// the last: an idle sandbox has none.

const (
	aheadIdle   = time.Minute            // how long it waits for a command
	aheadLook   = 5 * time.Second        // between looks at memory and the clock while it waits
	aheadDelay  = 100 * time.Millisecond // a command that runs longer is not waited for
	aheadAnswer = 2 * time.Second        // for the shell to take a command before it counts as stuck
	aheadScript = 48 << 10               // bytes it is told at most: less than a socket holds
	aheadWasted = 5                      // shells in a row that could not be taken, before there are none
	// It is in the way of a guest that uses more of its memory than this, in percent.
	aheadMemory = 80
)

// aheadTooOld, which the loader names as well, is the exit code of a bash before 5.1, which does not replace
// itself by the last program of a list as later ones do.
const aheadTooOld = 75

// aheadLoader is what a waiting shell runs. It says "r" when it is ready. With
// -N bash reads what there is at once and not byte by byte.
const aheadLoader = `((BASH_VERSINFO[0]*100+BASH_VERSINFO[1]>500)) || exit 75; printf r >&3; read -r -N 65536 -u 3 _sandboxd; eval "$_sandboxd"`

// ahead keeps the waiting shell, of which there is one at most.
type ahead struct {
	on     bool          // by configuration
	idle   time.Duration // aheadIdle, but in tests
	answer time.Duration // aheadAnswer, but in tests

	making sync.Mutex // by who makes one

	mu     sync.Mutex
	never  bool // in this image
	shell  *waiting
	wasted int // shells in a row that could not be taken

	memory   sync.Mutex
	measured time.Time
	short    bool // at that time
}

// A waiting shell. Its command has all but a text.
type waiting struct {
	cmd   *command.Command
	talk  *os.File // to its descriptor 3
	path  string
	env   map[string]string
	dir   string      // physical
	place os.FileInfo // of dir
	ready bool
	used  time.Time // when somebody last could have used it
}

// take lets go of the waiting shell, if it is ready and can run the command,
// and returns it with what it is to be told.
func (s *Server) take(req *agent.CommandRequest, l *launch) (w *waiting, script string) {
	a := &s.ahead
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.shell == nil || !a.shell.isReady() {
		return nil, "" // a dead one goes when the next is made
	}
	ok := false
	proc.BriefTurns.Do(func() { script, ok = a.shell.script(req, l) })
	if !ok {
		return nil, ""
	}
	w, a.shell, a.wasted = a.shell, nil, 0
	return w, script
}

// isReady reports whether the shell waits and has written nothing yet: a
// warning of its start is the first output of its command, and so is what
// another process has put into its pipes.
func (w *waiting) isReady() bool {
	if !w.cmd.Alive() {
		return false
	}
	if !w.ready {
		w.ready = w.heard() == "r"
	}
	return w.ready && w.quiet()
}

// quiet reports whether nothing was written to what will be its command's output.
func (w *waiting) quiet() bool {
	for _, p := range w.cmd.Pumps {
		if n, err := p.Unread(); err != nil || n > 0 {
			return false
		}
	}
	return true
}

// heard returns what the shell has said, without waiting.
func (w *waiting) heard() string {
	b := make([]byte, 8)
	n := 0
	proc.Control(w.talk, func(fd int) (err error) { //nolint:errcheck // then it has said nothing
		n, err = unix.Read(fd, b)
		return err
	})
	return string(b[:max(n, 0)])
}

// handOver gives a command to the waiting shell. It returns nil if there is
// none, or if it is certain that the command has not started. What it returns
// is the command as launch leaves it. ooms is as in command.
func (s *Server) handOver(req *agent.CommandRequest, l *launch, ooms int64) *command.Command {
	if l.fit == nil {
		return nil
	}
	w, script := s.take(req, l)
	if w == nil {
		return nil
	}
	c := w.cmd
	c.Content, c.OOMKills = req.Command, ooms
	if !s.tell(w, script) {
		s.dismiss(w)
		return nil
	}
	w.talk.Close()
	if req.Background {
		c.Pumps[1].Close() // both streams go to the first
		c.Pumps = c.Pumps[:1]
	}
	s.commands.Started(c, command.Milliseconds(req.Timeout))
	return c
}

// tell gives the shell its script, and reports whether the command has started
// or may have.
func (s *Server) tell(w *waiting, script string) bool {
	w.cmd.Started = time.Now()
	w.talk.SetDeadline(time.Now().Add(s.ahead.answer)) //nolint:errcheck // a socket has deadlines
	_, err := w.talk.Write([]byte(script))
	if err == nil {
		// Until here it waits for more, so it has done nothing of it.
		err = proc.Control(w.talk, func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
	}
	if err == nil {
		var b [1]byte
		if n, _ := w.talk.Read(b[:]); n == 1 {
			return true
		}
	}
	// It could not do what comes before the command, or died, or does not move.
	w.cmd.Process.Signal(syscall.SIGKILL, true) //nolint:errcheck // gone is what is wanted
	<-w.cmd.Process.Done()
	return w.heard() != ""
}

// dismiss ends a shell that nobody uses.
func (s *Server) dismiss(w *waiting) {
	w.cmd.Process.Signal(syscall.SIGKILL, true) //nolint:errcheck // gone is what is wanted
	w.talk.Close()
	for _, p := range w.cmd.Pumps {
		p.Close()
	}
}

// refillAfter makes the next shell when c has ended, so that it takes no time
// from it, or when c goes on for long.
func (s *Server) refillAfter(c *command.Command) {
	t := time.NewTimer(aheadDelay)
	defer t.Stop()
	select {
	case <-c.Flushed():
	case <-t.C:
	}
	s.refill()
}

// refill makes a shell wait, if none does that could run the next command.
func (s *Server) refill() {
	a := &s.ahead
	if s.stopping.Load() || s.short() {
		return
	}
	a.making.Lock()
	defer a.making.Unlock()
	a.mu.Lock()
	needless := a.shell != nil && !s.renew() || a.never
	a.mu.Unlock()
	if needless {
		return
	}
	w, err := s.makeWaiting()
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case err != nil: // commands start as they did before; the end of the next tries again
	case w == nil:
		a.never = true
	default:
		a.shell = w
		s.lookLater(w)
	}
}

// renew drops the shell that waits if it is dead, has been written to, or is not
// what would be started now, and reports whether it did. The caller holds mu.
func (s *Server) renew() bool {
	a := &s.ahead
	w := a.shell
	alive := w.cmd.Alive()
	if alive && w.quiet() {
		var now *waiting
		proc.BriefTurns.Do(func() { now, _ = s.prepareWaiting() }) //nolint:errcheck // then it is none that would be started
		if now != nil && now.path == w.path && now.dir == w.dir && os.SameFile(now.place, w.place) && maps.Equal(now.env, w.env) {
			w.used = time.Now()
			return false
		}
	} else {
		a.wasted++
		if a.wasted == aheadWasted || !alive && w.cmd.Process.Status.ExitStatus() == aheadTooOld {
			a.never = true // what dies each time, or warns of something, only costs
		}
	}
	a.shell = nil
	s.dismiss(w)
	return true
}

// lookLater drops w, some time later, when it has waited for too long or memory
// is short.
func (s *Server) lookLater(w *waiting) {
	time.AfterFunc(min(aheadLook, s.ahead.idle), func() {
		proc.Guarded(func() {
			short := s.short()
			s.ahead.mu.Lock()
			defer s.ahead.mu.Unlock()
			switch {
			case s.ahead.shell != w:
			case w.cmd.Alive() && time.Since(w.used) < s.ahead.idle && !short:
				s.lookLater(w)
			default:
				s.ahead.shell = nil
				s.dismiss(w)
			}
		})
	})
}

// short reports whether the guest uses so much of its memory that it may need
// what a waiting shell takes.
func (s *Server) short() bool {
	a := &s.ahead
	a.memory.Lock()
	defer a.memory.Unlock()
	if time.Since(a.measured) >= aheadLook {
		total, used := s.memory()
		a.measured, a.short = time.Now(), used > total/100*aheadMemory
	}
	return a.short
}

// makeWaiting starts a shell that waits, with environment and directory of a
// command that asks for none. Nil without an error means that here none can be.
func (s *Server) makeWaiting() (w *waiting, err error) {
	proc.BriefTurns.Do(func() { w, err = s.prepareWaiting() })
	if w == nil {
		return nil, err
	}
	c, ends, err := s.commands.New(command.NewID(), "", 2)
	if err != nil {
		return nil, err
	}
	defer command.CloseAll(ends)
	w.cmd = c
	closePumps := func() {
		for _, p := range c.Pumps {
			p.Close()
		}
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		closePumps()
		return nil, err
	}
	defer unix.Close(pair[1])
	unix.SetNonblock(pair[0], true) //nolint:errcheck // can not fail on a socket
	w.talk = os.NewFile(uintptr(pair[0]), "shell ahead")
	c.Process, err = proc.Start(proc.Spec{
		Path: w.path, Argv: []string{filepath.Base(w.path), "-c", aheadLoader}, Env: environ(w.env), Dir: w.dir, Cred: s.userCred,
		Files: [3]uintptr{s.devNull.Fd(), uintptr(ends[0]), uintptr(ends[1])},
		More:  []uintptr{uintptr(pair[1])},
	})
	if err != nil {
		w.talk.Close()
		closePumps()
		return nil, fmt.Errorf("start the shell ahead: %w", err)
	}
	return w, nil
}

func (s *Server) prepareWaiting() (*waiting, error) {
	env, err := s.commandEnv(&agent.CommandRequest{}, s.user)
	if err != nil {
		return nil, err
	}
	path := findShell(env["PATH"])
	if filepath.Base(path) != "bash" {
		return nil, nil //nolint:nilnil // see makeWaiting
	}
	for k := range env {
		if ownName(k) {
			return nil, nil //nolint:nilnil // as above
		}
	}
	_, dir, err := s.workingDir("", env)
	if err != nil {
		return nil, err
	}
	place, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}
	return &waiting{path: path, env: maps.Clone(env), dir: dir, place: place, used: time.Now()}, nil
}
