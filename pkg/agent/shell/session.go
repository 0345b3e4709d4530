package shell

import (
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
// A run ends when the shell answers or dies. The state of a dead shell is the one that
// it reported last: at the end of a run, or when it exited.
type session struct {
	host *Host
	id   string
	path string            // of its shells
	env  map[string]string // they begin with
	dir  string            // they begin in
	cred *syscall.Credential
	tag  uint64 // of the markers of all that runs in it

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

// Markers of sessions stand above those of commands (see proc.Start), and are
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

// begin takes the session for one run. stop may be called at any time.
func (ses *session) begin(run *run, stop func()) error {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	switch {
	case ses.removed:
		return noSession(ses.id)
	case ses.run != nil:
		return reply.Fail(http.StatusConflict, reply.Failed,
			"session %s is busy: it runs one command at a time; wait until that ends, "+
				"interrupt it with DELETE /command?id=%s, or create another session", ses.id, ses.id)
	}
	ses.run, ses.stop = run, stop
	return nil
}

// end publishes how the run ended and lets the next one begin.
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
func (ses *session) living() (*shell, error) {
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
	sh, err := ses.startShell()
	if err == nil {
		ses.shell = sh
	}
	return sh, err
}

// startShell starts a shell with the state of the last one. The caller holds mu.
func (ses *session) startShell() (*shell, error) {
	d := dialectOf(ses.path)
	l := &command.Launch{
		Way: command.Way{Path: ses.path, Argv: append([]string{filepath.Base(ses.path)}, d.argv...), Env: Environ(ses.env)},
		Dir: ses.dir, Cred: ses.cred, Marker: ses.tag,
	}
	if ses.last.state != nil && d.hello != "" {
		l.Env = nil // the state has the variables that the shell had, without those that it had unset
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
	unix.SetNonblock(pair[0], true) //nolint:errcheck // cannot fail on a socket
	l.Stdin = os.NewFile(uintptr(pair[1]), "script")
	defer l.Stdin.Close()
	sh := &shell{
		socket: os.NewFile(uintptr(pair[0]), "script"), script: make(chan []byte, 2), word: command.NewID(),
		answers: make(chan answer, 1), silent: make(chan struct{}), over: make(chan struct{}),
	}
	c, ends, err := ses.host.Commands.New(command.NewID(), "session "+ses.id, 2)
	if err != nil {
		sh.socket.Close()
		return nil, err
	}
	c.Forget, c.Output.Small, c.Owner = true, true, sh.output
	sh.cmd = c
	if err := ses.host.Commands.Start(c, l, 0, false, ends); err != nil {
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

// execute does one run and ends it. It goes on when its client is gone.
func (ses *session) execute(r runLine, timeout time.Duration, cut <-chan struct{}, out *reply.Stream) {
	sh, err := ses.living()
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
	e, a := sh.await(ses.host.Commands, r.marker, timeout, cut)
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

// remove ends the session and all that it has started.
func (ses *session) remove() {
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
