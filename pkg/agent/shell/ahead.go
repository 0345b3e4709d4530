package shell

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
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
// one command. Commands that could tell it from `bash -c` (see notices), and those that
// it cannot take, get a shell of their own.
//
// An idle sandbox has no such shell: none waits before the first command that could
// have used it, or long after the last.

const (
	aheadIdle   = time.Minute            // Ahead.Idle
	aheadLook   = 5 * time.Second        // between looks at memory and the clock while it waits
	aheadDelay  = 100 * time.Millisecond // Ahead.Delay
	aheadRest   = 3 * time.Millisecond   // Ahead.Rest
	aheadAnswer = 2 * time.Second        // Ahead.Answer
	aheadScript = 48 << 10               // bytes of a script at most: less than a socket holds
	aheadWasted = 5                      // shells in a row that could not be used, before no more are started
	// No shell waits while the guest uses more of its memory than this, in percent.
	aheadMemory = 80
)

// aheadTooOld is the exit code of a bash before 5.1, which does not replace itself by
// the last program of a list as later ones do. The loader has the same number.
const aheadTooOld = 75

// Loader is what a waiting shell runs. It says "r" when it is ready. With -N bash reads
// all that is there at once, not byte by byte.
const Loader = `((BASH_VERSINFO[0]*100+BASH_VERSINFO[1]>500)) || exit 75; printf r >&3; read -r -N 65536 -u 3 _sandboxd; eval "$_sandboxd"`

// Ahead keeps the waiting shell, of which there is one at most. Make it with NewAhead.
type Ahead struct {
	On     atomic.Bool   // else none waits
	Idle   time.Duration // how long one waits for a command; guarded by mu
	Answer time.Duration // for the shell to take a command before it counts as stuck
	Delay  time.Duration // a command that runs longer is not waited for
	Rest   time.Duration // between the end of a command and the start of the next shell

	host   Host
	usage  func() (total, used int64) // of memory, in bytes
	making sync.Mutex                 // held while a shell is made

	mu     sync.Mutex
	closed bool
	never  bool // in this image
	shell  *Waiting
	wasted int // shells in a row that could not be used

	memory   sync.Mutex
	measured time.Time
	short    bool // at that time
}

// NewAhead makes one without a shell. usage says what memory the guest has and uses.
func NewAhead(h Host, on bool, usage func() (total, used int64)) *Ahead {
	a := &Ahead{Idle: aheadIdle, Answer: aheadAnswer, Delay: aheadDelay, Rest: aheadRest, host: h, usage: usage}
	a.On.Store(on)
	return a
}

// Waiting returns the shell that waits, or nil.
func (a *Ahead) Waiting() *Waiting {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.shell
}

// AwaitReady waits until a shell could take a command, for d at most, and reports whether
// it can. Only tests wait, and hand over no command meanwhile: a command does not wait,
// and starts a shell of its own.
func (a *Ahead) AwaitReady(d time.Duration) bool {
	ready := func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.shell != nil && a.shell.isReady()
	}
	if w := a.Waiting(); w != nil && !ready() {
		w.awaitWord(d)
	}
	return ready()
}

// Never reports whether none will wait in this image again.
func (a *Ahead) Never() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.never
}

// Close ends the shell that waits; none will again.
func (a *Ahead) Close() {
	a.making.Lock()
	defer a.making.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	if a.shell != nil {
		a.shell.dismiss()
		a.shell = nil
	}
}

// Renew drops the shell that waits, because commands have another environment now, and
// forgets what the shells before it were like.
func (a *Ahead) Renew(on bool) {
	a.making.Lock() // one that is being made has the old environment
	defer a.making.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.On.Store(on)
	a.never, a.wasted = false, 0
	if a.shell != nil {
		a.shell.dismiss()
		a.shell = nil
	}
}

// take returns the waiting shell with its script, if it is ready and can run the
// command. That shell waits no longer.
func (a *Ahead) take(req *agent.CommandRequest, o *Offer) (w *Waiting, script string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.shell == nil || !a.shell.isReady() {
		return nil, "" // a dead one goes when the next is made
	}
	ok := false
	proc.BriefTurns.Do(func() { script, ok = a.shell.script(req, o) })
	if !ok {
		return nil, ""
	}
	w, a.shell, a.wasted = a.shell, nil, 0
	return w, script
}

// An Offer is a command for the shell ahead, resolved.
type Offer struct {
	Fit *Fit              // nil: the command is not for the shell ahead
	Env map[string]string // all of it
	Dir string            // where it runs, without symbolic links
}

// HandOver gives a command to the waiting shell. It returns nil if there is
// none, or if it is certain that the command has not started. Otherwise it
// returns the command as Registry.Start leaves it. ooms is as in Command.
func (a *Ahead) HandOver(req *agent.CommandRequest, o *Offer, ooms int64) *command.Command {
	if o.Fit == nil {
		return nil
	}
	w, script := a.take(req, o)
	if w == nil {
		return nil
	}
	c := w.Command
	c.Content, c.OOMKills = req.Command, ooms
	if !a.tell(w, script) {
		w.dismiss()
		return nil
	}
	w.talk.Close()
	if req.Background {
		c.Pumps[1].Close() // both streams go to the first
		c.Pumps = c.Pumps[:1]
	}
	a.host.Commands.Started(c, command.Milliseconds(req.Timeout))
	return c
}

// tell gives the shell its script, and reports whether the command has started
// or may have.
func (a *Ahead) tell(w *Waiting, script string) bool {
	w.Command.Started = time.Now()
	w.talk.SetDeadline(time.Now().Add(a.Answer)) //nolint:errcheck // a socket has deadlines
	_, err := w.talk.Write([]byte(script))
	if err == nil {
		// The shell has not read the whole line, so it has run nothing of it.
		err = proc.Control(w.talk, func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
	}
	if err == nil {
		var b [1]byte
		if n, _ := w.talk.Read(b[:]); n == 1 {
			return true
		}
	}
	// It could not do what comes before the command, or it died, or it hangs.
	w.Command.Process.Signal(syscall.SIGKILL, true) //nolint:errcheck // gone is what is wanted
	<-w.Command.Process.Done()
	return w.said() != ""
}

// RefillAfter makes the next shell when c has ended, so that it does not slow c down,
// or when c takes long. The rest after the end is for the answer: the start of a shell
// would take a CPU from the daemon and the client that the answer passes.
func (a *Ahead) RefillAfter(c *command.Command) {
	t := time.NewTimer(a.Delay)
	defer t.Stop()
	select {
	case <-c.Flushed():
		t.Reset(a.Rest)
		<-t.C
	case <-t.C:
	}
	a.Refill()
}

// Refill starts a shell that waits, unless one waits that could run the next command.
func (a *Ahead) Refill() {
	if a.host.Stopping() || a.isShort() {
		return
	}
	a.making.Lock()
	defer a.making.Unlock()
	a.mu.Lock()
	needless := a.shell != nil && !a.renew() || a.never || a.closed
	a.mu.Unlock()
	if needless {
		return
	}
	w, err := a.makeWaiting()
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case err != nil: // commands start as they did before; the end of the next tries again
	case w == nil:
		a.never = true
	case a.isShort(): // meanwhile: Look has seen no shell that it could drop
		w.dismiss()
	default:
		a.shell = w
		a.lookLater(w)
	}
}

// renew drops the shell that waits if it is dead, has been written to, or is not
// what would be started now, and reports whether it did. The caller holds mu.
func (a *Ahead) renew() bool {
	w := a.shell
	alive := w.Command.Alive()
	if alive && w.quiet() {
		var now *Waiting
		proc.BriefTurns.Do(func() { now, _ = a.prepareWaiting() }) //nolint:errcheck // then it is none that would be started
		if now != nil && now.path == w.path && now.dir == w.dir && os.SameFile(now.place, w.place) && maps.Equal(now.env, w.env) {
			w.Used = time.Now()
			return false
		}
	} else {
		a.wasted++
		if a.wasted == aheadWasted || !alive && w.Command.Process.Status.ExitStatus() == aheadTooOld {
			a.never = true // a shell that dies each time, or prints warnings, is only a cost
		}
	}
	a.shell = nil
	w.dismiss()
	return true
}

// lookLater checks w after some time, and drops it if it has waited for too long or
// memory is short. The caller holds mu.
func (a *Ahead) lookLater(w *Waiting) {
	time.AfterFunc(min(aheadLook, a.Idle), func() {
		proc.Guarded(func() { a.look(w, true) })
	})
}

// look drops w if it is not needed any more. Otherwise, with again, it checks again
// later.
func (a *Ahead) look(w *Waiting, again bool) {
	short := a.isShort()
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.shell != w:
	case w.Command.Alive() && time.Since(w.Used) < a.Idle && !short:
		if again {
			a.lookLater(w)
		}
	default:
		a.shell = nil
		w.dismiss()
	}
}

// Look measures the memory, and drops the waiting shell if memory is short. That also
// happens by itself every few seconds.
func (a *Ahead) Look() {
	a.memory.Lock()
	a.measured = time.Time{}
	a.memory.Unlock()
	if w := a.Waiting(); w != nil {
		a.look(w, false)
	}
}

// isShort reports whether the guest uses so much of its memory that it may need
// what a waiting shell takes.
func (a *Ahead) isShort() bool {
	a.memory.Lock()
	defer a.memory.Unlock()
	if time.Since(a.measured) >= aheadLook {
		total, used := a.usage()
		a.measured, a.short = time.Now(), used > total/100*aheadMemory
	}
	return a.short
}

// makeWaiting starts a shell that waits, with environment and directory of a command
// that asks for none. Nil without an error means that this image can have none.
func (a *Ahead) makeWaiting() (w *Waiting, err error) {
	proc.BriefTurns.Do(func() { w, err = a.prepareWaiting() })
	if w == nil {
		return nil, err
	}
	c, ends, err := a.host.Commands.New(command.NewID(), "", 2)
	if err != nil {
		return nil, err
	}
	defer command.CloseAll(ends)
	w.Command = c
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		c.ClosePumps()
		return nil, err
	}
	defer unix.Close(pair[1])
	unix.SetNonblock(pair[0], true) //nolint:errcheck // cannot fail on a socket
	w.talk = os.NewFile(uintptr(pair[0]), "shell ahead")
	c.Process, err = proc.Start(proc.Spec{
		Path: w.path, Argv: []string{filepath.Base(w.path), "-c", Loader}, Env: Environ(w.env), Dir: w.dir, Cred: a.host.Guest.Cred(),
		Files: [3]uintptr{a.host.Commands.DevNull.Fd(), uintptr(ends[0]), uintptr(ends[1])},
		More:  []uintptr{uintptr(pair[1])},
	})
	if err != nil {
		w.talk.Close()
		c.ClosePumps()
		return nil, fmt.Errorf("start the shell ahead: %w", err)
	}
	return w, nil
}

func (a *Ahead) prepareWaiting() (*Waiting, error) {
	env, err := a.host.Guest.Env()
	if err != nil {
		return nil, err
	}
	path := FindShell(env["PATH"])
	if filepath.Base(path) != "bash" {
		return nil, nil //nolint:nilnil // see makeWaiting
	}
	for k := range env {
		if ownName(k) {
			return nil, nil //nolint:nilnil // as above
		}
	}
	_, dir, err := a.host.Guest.WorkingDir("", env)
	if err != nil {
		return nil, err
	}
	place, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}
	return &Waiting{path: path, env: maps.Clone(env), dir: dir, place: place, Used: time.Now()}, nil
}
