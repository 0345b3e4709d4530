package server

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// A session is one shell that lives from run to run, and the next one that
// takes its place when a run ends it:
//
//	POST …/run ─ line ─▶ socket ─▶ bash ─ stdout, stderr ─ pumps ─▶ ring, stream of the run
//	             answer ◀────────────┘
//
// A run ends when the shell answers or dies. What a dead shell had is what it
// last said it had: at the end of a run, or when it exits.
type session struct {
	id   string
	path string            // of its shells
	env  map[string]string // they begin with
	dir  string            // they begin in
	tag  uint64            // of the markers of all that runs in it

	mu      sync.Mutex
	removed bool
	run     *run   // nil: none is running
	stop    func() // ends it
	shell   *shell // nil: none yet
	runs    uint64 // so far
	last    answer // of the last shell to answer
}

// A run is one command in a session.
type run struct {
	started time.Time
	over    chan struct{} // closed when end is valid, and all output was sent
	end     command.Ending
}

// A shell is one process of a session.
type shell struct {
	cmd    *command.Command
	socket *os.File    // our end
	script chan []byte // what is to be written to it; never full
	word   string      // marks what it says when it exits

	feed sync.Mutex
	live *reply.Stream // where output goes beside the ring

	mu      sync.Mutex
	ear     ear
	want    string        // the word of the answer that is awaited
	answers chan answer   // one place: one answer is awaited at a time
	left    *answer       // what it said when it exited
	silent  chan struct{} // closed when nobody listens any more
	over    chan struct{} // closed when it is dead, and all it said was heard
}

// Markers of sessions stand above those of commands (see markerBase), and are
// multiples of 1024 because that is the unit of a shell's ulimit.
const (
	sessionMarker = 1 << 52
	sessionShift  = 32 // below: the run, times 1024
	runShift      = 10
)

// marker returns that of the n-th run.
func (ses *session) marker(n uint64) uint64 {
	return ses.tag | n<<runShift&(1<<sessionShift-1)
}

func (ses *session) owns(marker uint64) bool { return marker>>sessionShift == ses.tag>>sessionShift }

const (
	// What a run that is cut off may take to end by itself.
	cutOffGrace = 500 * time.Millisecond
	// lookEvery is between two looks at whether the shell has read all it was told.
	lookEvery = 3 * time.Second
)

// begin takes the session for one run. stop may be called at any time.
func (ses *session) begin(run *run, stop func()) error {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	switch {
	case ses.removed:
		return noSession(ses.id)
	case ses.run != nil:
		return reply.Fail(http.StatusConflict, reply.Failed, "session %s is busy: it runs one command at a time; wait for that, interrupt it by DELETE /command?id=%s, or make another session", ses.id, ses.id)
	}
	ses.run, ses.stop = run, stop
	return nil
}

// end publishes how the run went and lets the next one begin.
func (ses *session) end(e command.Ending) {
	ses.mu.Lock()
	run := ses.run
	ses.run, ses.stop = nil, nil
	ses.mu.Unlock()
	run.end = e
	close(run.over)
}

// interrupt ends the run, and reports whether there was one.
func (ses *session) interrupt() bool {
	ses.mu.Lock()
	run, stop := ses.run, ses.stop
	ses.mu.Unlock()
	if run == nil {
		return false
	}
	stop()
	<-run.over
	return true
}

// living returns the shell of a session, a new one if the last has died.
func (s *Server) living(ses *session) (*shell, error) {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	if ses.removed {
		return nil, noSession(ses.id)
	}
	if ses.shell != nil && ses.shell.cmd.Alive() {
		return ses.shell, nil
	}
	if ses.shell != nil {
		<-ses.shell.over
		if left := ses.shell.left; left != nil {
			ses.last = *left
		}
		ses.shell = nil
	}
	sh, err := s.startShell(ses)
	if err == nil {
		ses.shell = sh
	}
	return sh, err
}

// startShell starts a shell with the state of the last one. The caller holds mu.
func (s *Server) startShell(ses *session) (*shell, error) {
	d := dialectOf(ses.path)
	l := &command.Launch{
		Way: command.Way{Path: ses.path, Argv: append([]string{filepath.Base(ses.path)}, d.argv...), Env: environ(ses.env)},
		Dir: ses.dir, Cred: s.userCred, Marker: ses.tag,
	}
	if ses.last.state != nil && d.hello != "" {
		l.Env = nil // what it had of that is in the state, and what it had no more is not
	}
	var err error
	proc.BriefTurns.Do(func() { _, err = os.Stat(l.Dir) })
	if err != nil {
		l.Dir = "/" // somebody has removed it
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	unix.SetNonblock(pair[0], true) //nolint:errcheck // can not fail on a socket
	l.Stdin = os.NewFile(uintptr(pair[1]), "script")
	defer l.Stdin.Close()
	sh := &shell{
		socket: os.NewFile(uintptr(pair[0]), "script"), script: make(chan []byte, 2), word: command.NewID(),
		answers: make(chan answer, 1), silent: make(chan struct{}), over: make(chan struct{}),
	}
	c, ends, err := s.commands.New(command.NewID(), "session "+ses.id, 2)
	if err != nil {
		sh.socket.Close()
		return nil, err
	}
	c.Forget, c.Output.Small, c.Owner = true, true, sh.output
	sh.cmd = c
	if err := s.commands.Start(c, l, 0, false, ends); err != nil {
		sh.socket.Close()
		return nil, err
	}
	c.Begin()
	go proc.Guarded(sh.listen)
	go proc.Guarded(sh.wait)
	go proc.Guarded(sh.talk)
	sh.script <- d.greeting(sh.word, ses.last.state, ses.last.dir)
	return sh, nil
}

// output keeps what the shell wrote and sends it to who runs something.
func (sh *shell) output(stream byte, b []byte) {
	sh.feed.Lock()
	defer sh.feed.Unlock()
	sh.cmd.Output.Write(b) //nolint:errcheck // never fails
	if sh.live != nil {
		sh.live.Output(stream, b)
	}
}

// attach lets output go to to; nil detaches.
func (sh *shell) attach(to *reply.Stream) {
	sh.feed.Lock()
	defer sh.feed.Unlock()
	sh.live = to
}

// talk writes the script. A shell that does not read it holds up nobody else.
func (sh *shell) talk() {
	for {
		select {
		case line := <-sh.script:
			sh.socket.Write(line) //nolint:errcheck // the shell's death says so
		case <-sh.over:
			return
		}
	}
}

// listen takes what the shell says, until it says no more.
func (sh *shell) listen() {
	defer close(sh.silent)
	b := make([]byte, 16<<10)
	for {
		n, err := sh.socket.Read(b)
		sh.hear(b[:n])
		if err != nil {
			return
		}
	}
}

func (sh *shell) hear(b []byte) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	words := []string{sh.word}
	if sh.want != "" {
		words = append(words, sh.want)
	}
	a, ok := sh.ear.hear(b, words...)
	switch {
	case !ok:
	case a.word == sh.want:
		sh.want = ""
		sh.answers <- a
	default:
		sh.left = &a
	}
}

// wait waits for the shell's death and hears what it said before. Whatever it
// left behind may hold its end of the socket, so there may be no end to wait for.
func (sh *shell) wait() {
	<-sh.cmd.Flushed()
	sh.socket.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // open until this function closes it
	<-sh.silent
	if rc, err := sh.socket.SyscallConn(); err == nil {
		b := make([]byte, 16<<10)
		for n := 1; n > 0; {
			rc.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), b) }) //nolint:errcheck // as above
			sh.hear(b[:max(n, 0)])
		}
	}
	sh.socket.Close()
	close(sh.over)
}

// heard reports whether the shell has read all that it was told. The last of it
// is an empty line, which it reads when it is done with the rest.
func (sh *shell) heard() bool {
	left := 1
	err := proc.Control(sh.socket, func(fd int) (err error) {
		left, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ)
		return err
	})
	return err == nil && left == 0
}

// errMute is the end of a run that took from its shell what it answers by.
var errMute = errors.New("the shell of this session can not say how the command ended, because that took away what it says it by (set -n, or its builtins): the session goes on in a new shell, without what this one had")

// execute does one run and ends it. It goes on when its client is gone.
func (s *Server) execute(ses *session, r runLine, timeout time.Duration, cut <-chan struct{}, out *reply.Stream) {
	sh, err := s.living(ses)
	if err != nil {
		ses.end(command.Ending{Code: 126, Err: err.Error(), At: time.Now(), Reason: agent.ReasonExited})
		return
	}
	ses.mu.Lock()
	ses.runs++
	r.marker = ses.marker(ses.runs)
	r.trace, r.back, r.older = ses.last.trace, ses.last.dir, ses.last.older
	ses.mu.Unlock()
	r.word = command.NewID()
	sh.mu.Lock()
	sh.want = r.word
	sh.mu.Unlock()
	sh.attach(out)
	sh.script <- dialectOf(ses.path).line(r)
	e, a := s.await(sh, r.marker, timeout, cut)
	sh.attach(nil)
	ses.mu.Lock()
	switch {
	case e.Err != "":
		ses.last = answer{}
	case a != nil:
		if r.cwd != "" {
			a.dir, a.older = r.back, r.older
		}
		ses.last = *a
	}
	ses.mu.Unlock()
	ses.end(e)
}

// await waits for the end of a run: the shell's answer, or its death, after
// which the answer may be what it said when it exited.
func (s *Server) await(sh *shell, marker uint64, timeout time.Duration, cut <-chan struct{}) (e command.Ending, a *answer) {
	var late <-chan time.Time
	if timeout > 0 {
		t := time.NewTimer(timeout)
		defer t.Stop()
		late = t.C
	}
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	mute := 0
	var cuts sync.WaitGroup
	cutOff := func(sig syscall.Signal, grace time.Duration) {
		cuts.Go(func() { proc.Guarded(func() { s.cutOff(sh, marker, sig, grace) }) })
	}
	for {
		select {
		case got := <-sh.answers:
			limit := time.NewTimer(command.DrainLimit)
			for _, p := range sh.cmd.Pumps {
				p.Settle(limit.C)
			}
			limit.Stop()
			e.Code, e.At = got.code, time.Now()
			s.commands.Explain(sh.cmd, &e)
			return e, &got
		case <-sh.over:
			select {
			case got := <-sh.answers: // it died of what came after
				e.Code, e.At, e.Reason = got.code, time.Now(), agent.ReasonExited
				return e, &got
			default:
			}
			cuts.Wait()
			end := sh.cmd.End()
			end.Err = e.Err
			if e.TimedOut {
				end = command.Ending{
					Code: 128 + int(syscall.SIGKILL), Signal: syscall.SIGKILL,
					TimedOut: true, Timeout: timeout, At: end.At, Reason: agent.ReasonTimeout,
				}
			}
			return end, sh.left
		case <-late:
			e.TimedOut = true
			cutOff(syscall.SIGKILL, cutOffGrace)
		case <-cut:
			cut = nil
			cutOff(syscall.SIGTERM, s.commands.Grace)
		case <-look.C:
			if !sh.heard() {
				mute = 0
			} else if mute++; mute == 2 {
				e.Err = errMute.Error()
				cutOff(syscall.SIGKILL, 0)
			}
		}
	}
}

// cutOff ends a run with its shell. What earlier runs left in the background
// goes on. The shell is asked first, because one that exits says what it has.
func (s *Server) cutOff(sh *shell, marker uint64, sig syscall.Signal, grace time.Duration) {
	sh.cmd.Process.Signal(syscall.SIGTERM, false) //nolint:errcheck // gone is what is wanted
	find := func() []int {
		return proc.Marked(func(m uint64) bool { return m == marker }, sh.cmd.Process.PID)
	}
	for _, pid := range find() {
		syscall.Kill(pid, sig) //nolint:errcheck // gone is what is wanted
	}
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-sh.cmd.Died():
	case <-t.C:
	}
	sh.cmd.Process.Signal(syscall.SIGKILL, false) //nolint:errcheck // as above
	proc.KillAll(find)
}

// removeSession ends the session and all that it has started.
func (s *Server) removeSession(ses *session) {
	ses.mu.Lock()
	ses.removed = true
	sh := ses.shell
	ses.mu.Unlock()
	if sh == nil {
		return
	}
	sh.cmd.Process.Signal(syscall.SIGHUP, true) //nolint:errcheck // gone is what is wanted
	t := time.NewTimer(cutOffGrace)
	defer t.Stop()
	select {
	case <-sh.cmd.Died():
	case <-t.C:
	}
	sh.cmd.Process.KillTree()
	proc.KillAll(func() []int { return proc.Marked(ses.owns, 0) })
}
