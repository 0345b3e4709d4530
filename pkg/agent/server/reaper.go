package server

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reaper is the only one in this process that waits for children, and the only
// one that makes them: PID 1 inherits orphans it never started, and a wait4(-1)
// that knows nothing of the others would steal exit statuses.
//
// It peeks at the next zombie without taking it (waitid, WNOWAIT), so the
// zombie keeps its pid until it is known whose it is. A pid in procs can thus
// never be that of another process. What is not in procs is either an orphan or
// a child whose spawn has not returned yet; the spawn lock tells the two apart.
type reaper struct {
	spawnMu sync.Mutex // held over fork and registration

	mu    sync.Mutex
	procs map[int]*process // started here and not reaped
	wake  chan struct{}    // something was started: wait again
}

// process is a child started by spawn.
type process struct {
	pid    int
	marker uint64
	done   chan struct{} // closed when reaped; status and ended are valid then
	status syscall.WaitStatus
	ended  time.Time
}

// zombie reports whether p has ended and was not reaped yet.
func (p *process) zombie() bool {
	b, err := readSmall("/proc/" + strconv.Itoa(p.pid) + "/stat")
	st, ok := parseStat(b)
	return err == nil && ok && (st.state == 'Z' || st.state == 'X') && st.tasks <= 1
}

// spawnSpec says what to start. Its files are the child's 0, 1 and 2.
type spawnSpec struct {
	path   string
	argv   []string
	env    []string
	dir    string
	cred   *syscall.Credential // nil: as this process
	tty    bool                // files[0] is to be the controlling terminal
	marker uint64              // 0: one that no other has
	files  [3]uintptr
	more   []uintptr // the child's 3, 4, …
	// mortal: it is killed when this process dies. What PID 1 leaves behind dies
	// anyway; elsewhere, in tests, code that spins would go on for ever. It is the
	// thread that forked whose death counts, and no thread of this process ends
	// before the process: none is left by a goroutine that holds it.
	mortal bool
}

// theReaper starts on first use: wait4 is per process, hence so is this.
var theReaper = sync.OnceValue(func() *reaper {
	r := &reaper{procs: map[int]*process{}, wake: make(chan struct{}, 1)}
	go guarded(r.loop)
	return r
})

// markerBase is above every real RLIMIT_RSS and small enough to print.
const markerBase = 1 << 50

// lastMarker is guarded by spawnMu. Where it begins is drawn: a process on the host
// that has this package in it, as its tests do, sees the processes of other agents.
var lastMarker = rand.Uint64N(markerBase / 2)

// spawn starts a child in a session of its own. The error of a failed exec is
// the bare errno.
//
// Every child gets a soft RLIMIT_RSS that no other has. Neither Linux (since
// 2.4.30) nor gVisor act on that limit, everything a child starts inherits it,
// and neither setsid, a double fork, an emptied environment nor exec clears
// it: so it tells whose a process is after its parents are gone (see killTree).
// It is set on this process under spawnMu because fork copies it; setting it on
// the child afterwards would be a race, and for a child of another user needs
// CAP_SYS_RESOURCE.
func (r *reaper) spawn(s spawnSpec) (*process, error) {
	attr := &syscall.ProcAttr{
		Dir:   s.dir,
		Env:   s.env,
		Files: append(s.files[:], s.more...),
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: s.tty, Ctty: 0, Credential: s.cred},
	}
	if s.mortal {
		attr.Sys.Pdeathsig = syscall.SIGKILL
	}
	p := &process{done: make(chan struct{})}
	r.spawnMu.Lock()
	if p.marker = s.marker; p.marker == 0 {
		lastMarker++
		p.marker = markerBase + lastMarker
	}
	p.marker = mark(p.marker)
	pid, err := syscall.ForkExec(s.path, s.argv, attr)
	if err != nil {
		r.spawnMu.Unlock()
		return nil, err
	}
	p.pid = pid
	r.mu.Lock()
	r.procs[pid] = p
	r.mu.Unlock()
	r.spawnMu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
	return p, nil
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

// reap takes the zombie pid, and what has become one meanwhile.
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
	r.spawnMu.Lock() // whoever is being started is registered after this
	defer r.spawnMu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.take(pid, r.procs[pid])
}

// take waits for pid and publishes its status to p, if there is one. The caller
// holds mu, so that signal never hits a pid that was freed.
func (r *reaper) take(pid int, p *process) {
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
		p.status, p.ended = ws, time.Now()
		close(p.done)
	}
}

// signal sends sig to p, or to its process group, unless p was reaped or, being
// nil, never was.
func (r *reaper) signal(p *process, sig syscall.Signal, group bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p == nil || r.procs[p.pid] != p {
		return os.ErrProcessDone
	}
	pid := p.pid
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
