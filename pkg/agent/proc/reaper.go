package proc

import (
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reaper is the only one in this process that waits for children, and the only one that
// makes them: PID 1 inherits orphans that it never started, and a second wait4(-1)
// would steal exit statuses.
//
// It peeks at the next zombie without taking it (waitid, WNOWAIT), so the zombie keeps
// its pid until the reaper knows whose it is. A pid in procs can thus never be that of
// another process. A zombie that is not in procs is either an orphan or a child whose
// Start has not returned yet; the start lock tells the two apart.
type reaper struct {
	startMu sync.Mutex // held during fork and registration

	mu    sync.Mutex
	procs map[int]*Process // started here and not reaped
	wake  chan struct{}    // something was started: wait again
}

// A Process is a child made by Start.
type Process struct {
	PID    int
	Marker uint64 // see Start; 0: it has none

	// How it ended, by wait4(2), and when. Valid once Done is closed.
	Status syscall.WaitStatus
	Ended  time.Time

	done chan struct{}
	r    *reaper
}

// Done returns a channel that is closed when the process was reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Zombie reports whether p has ended and was not reaped yet.
func (p *Process) Zombie() bool {
	st, ok := StatOf(p.PID)
	return ok && (st.State == 'Z' || st.State == 'X') && st.Tasks <= 1
}

// Spec says what to start.
type Spec struct {
	Path   string
	Argv   []string // with the program's name
	Env    []string // KEY=VALUE
	Dir    string
	Cred   *syscall.Credential // nil: as this process
	TTY    bool                // Files[0] is to be the controlling terminal
	Marker uint64              // 0: one that no other has
	Files  [3]uintptr          // the child's 0, 1 and 2
	More   []uintptr           // the child's 3, 4, …
	// Mortal: it is killed when this process dies. The children of PID 1 die anyway;
	// elsewhere, in tests, code that spins would go on for ever. The kernel does this
	// when the thread that forked ends. No thread of this process ends before the
	// process, because no goroutine ends while it is locked to one.
	Mortal bool
}

// theReaper begins on first use: wait4 is per process, hence so is this.
var theReaper = sync.OnceValue(func() *reaper {
	r := &reaper{procs: map[int]*Process{}, wake: make(chan struct{}, 1)}
	go Guarded(r.loop)
	return r
})

// Reap starts the reaper, unless it runs. The agent calls it before any code of the guest runs,
// because the reaper waits on a thread of its own, and a guest at its limit leaves none.
func Reap() { theReaper() }

// markerBase is above every real RLIMIT_RSS and small enough to print.
const markerBase = 1 << 50

// lastMarker is guarded by startMu. It begins at a random number: a process on the host
// that uses this package, as its tests do, sees the processes of other agents.
var lastMarker = rand.Uint64N(markerBase / 2)

// BeforeChildren is called before each child is started, and no child is started before it
// has returned. The server sets it before it starts the entrypoint. There is one for the
// process, as there is one reaper.
var BeforeChildren = func() {}

// Start starts a child in a session of its own. The error of a failed exec is
// the bare errno.
//
// Every child gets a soft RLIMIT_RSS that no other has. Neither Linux (since 2.4.30)
// nor gVisor act on that limit, everything a child starts inherits it, and neither
// setsid, a double fork, an emptied environment nor exec clears it: so it says whose a
// process is after its parents are gone (see KillTree). It is set on this process under
// startMu because fork copies it; setting it on the child afterwards would be a race,
// and for a child of another user needs CAP_SYS_RESOURCE.
func Start(s Spec) (*Process, error) {
	BeforeChildren()
	r := theReaper()
	attr := &syscall.ProcAttr{
		Dir:   s.Dir,
		Env:   s.Env,
		Files: append(s.Files[:], s.More...),
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: s.TTY, Ctty: 0, Credential: s.Cred},
	}
	if s.Mortal {
		attr.Sys.Pdeathsig = syscall.SIGKILL
	}
	giveAway(attr)
	p := &Process{done: make(chan struct{}), r: r}
	r.startMu.Lock()
	if p.Marker = s.Marker; p.Marker == 0 {
		lastMarker++
		p.Marker = markerBase + lastMarker
	}
	p.Marker = mark(p.Marker)
	pid, err := syscall.ForkExec(s.Path, s.Argv, attr)
	if err != nil {
		r.startMu.Unlock()
		return nil, err
	}
	p.PID = pid
	r.mu.Lock()
	r.procs[pid] = p
	r.mu.Unlock()
	r.startMu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
	return p, nil
}

// giveAway gives the pipes of a child that is to run as another user to that user, as runc does
// (fixStdioPermissions). Programs open them once more by the name /dev/stdout or /proc/self/fd/1,
// and only their owner may. OpenTTY does the same with terminals. What else a child may have is
// everybody's, as the null device, or has no name to open.
func giveAway(attr *syscall.ProcAttr) {
	if attr.Sys.Credential == nil {
		return
	}
	to := attr.Sys.Credential.Uid
	for _, fd := range attr.Files {
		var st unix.Stat_t
		if unix.Fstat(int(fd), &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO && st.Uid != to {
			unix.Fchown(int(fd), int(to), -1) //nolint:errcheck // the child has the pipe all the same; an id that is none fails its start
		}
	}
}

// hardRSS is the hard RLIMIT_RSS of this process.
var hardRSS = sync.OnceValue(func() uint64 {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_RSS, &lim) != nil {
		return 0
	}
	return lim.Max
})

// mark sets the limit that children inherit, and returns it, or 0 where the
// hard limit is too low for a marker.
func mark(marker uint64) uint64 {
	hard := hardRSS()
	if hard < marker || unix.Setrlimit(unix.RLIMIT_RSS, &unix.Rlimit{Cur: marker, Max: hard}) != nil {
		return 0
	}
	return marker
}

func (r *reaper) loop() {
	for {
		pid, err := peek()
		switch {
		case err == unix.ECHILD:
			<-r.wake // no child, hence no orphan either, until something is started
		case err != nil:
			fmt.Fprintf(os.Stderr, "sandbox-agent: wait for children: %v\n", err)
			<-r.wake
		default:
			r.reap(pid)
		}
	}
}

// reap takes the zombie pid, and all that have become zombies meanwhile.
func (r *reaper) reap(pid int) {
	r.mu.Lock()
	p := r.procs[pid]
	if p != nil {
		r.take(pid, p)
	}
	r.mu.Unlock()
	if p != nil {
		return
	}
	r.startMu.Lock() // a child that is being started is registered after this
	defer r.startMu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.take(pid, r.procs[pid])
}

// take waits for pid and publishes its status to p, if there is one. The caller
// holds mu, so that Signal never hits a pid that was freed.
func (r *reaper) take(pid int, p *Process) {
	var ws syscall.WaitStatus
	for {
		got, err := syscall.Wait4(pid, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || got != pid {
			return // a failed exec, waited for by ForkExec itself
		}
		break
	}
	if p != nil {
		delete(r.procs, pid)
		p.Status, p.Ended = ws, time.Now()
		close(p.done)
	}
}

// Signal sends sig to p, or to its process group, unless p was reaped or, being
// nil, never was: then the error is os.ErrProcessDone.
func (p *Process) Signal(sig syscall.Signal, group bool) error {
	if p == nil {
		return os.ErrProcessDone
	}
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	if p.r.procs[p.PID] != p {
		return os.ErrProcessDone
	}
	pid := p.PID
	if group {
		pid = -pid
	}
	return syscall.Kill(pid, sig)
}

// peek blocks until a child is a zombie and returns its pid; the zombie stays.
func peek() (int, error) {
	// siginfo_t of waitid(2): signo, errno and code are ints, then, on 64-bit
	// padded to 8 bytes, pid.
	var info unix.Siginfo
	for {
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, err
		}
		return int(*(*int32)(unsafe.Add(unsafe.Pointer(&info), 16))), nil
	}
}
