package proc

import (
	"os"
	"runtime"
	"sync"
)

// threads is how many threads the agent has before any code of the guest's runs: about 4
// of Go's runtime, one for each turn below, one that forks (startMu), and the rest for
// requests that the kernel preempts inside a system call, which Go treats as one that
// blocks. Together with the shell ahead and a child that is being started they are
// record.AgentTasks.
const threads = 30

// A goroutine in a system call that blocks needs a thread, so those that may
// block on a disk take turns. On a busy one 32 uploads at once would need 32.
var (
	FileTurns  = make(Turns, 6) // requests about files
	BriefTurns = make(Turns, 3) // kept output, what a command needs to start, measurements
)

// ReserveThreads makes the agent's threads before any code of the guest's
// runs. Go starts a thread when it needs one and dies if it cannot ("failed to
// create new OS thread"), and a guest at its limit of processes leaves none: a
// fork bomb would take PID 1 with it. Threads once made are kept and used again.
//
// It takes 5 ms on gVisor, so the agent's first answer does not wait for it: see
// BeforeChildren.
//
// It counts them, because the runtime has made 3 to 6 of its own by then: a guest may
// use what the agent leaves of its tasks, and that must not depend on chance.
func ReserveThreads() {
	for n := threads - 4; ; {
		occupy(n)
		have, err := os.ReadDir("/proc/self/task")
		if err != nil || len(have) >= threads {
			return
		}
		n += threads - len(have)
	}
}

// occupy has n goroutines hold a thread each at the same time, so that there are n.
func occupy(n int) {
	var there, done sync.WaitGroup
	there.Add(n)
	for range n {
		done.Go(func() {
			runtime.LockOSThread() // one goroutine, one thread
			defer runtime.UnlockOSThread()
			there.Done()
			there.Wait()
		})
	}
	done.Wait()
}

// Turns bounds how many goroutines do something at once.
type Turns chan struct{}

// Do calls f, which takes no turn itself, in one.
func (t Turns) Do(f func()) {
	t <- struct{}{}
	defer func() { <-t }()
	f()
}

// Lend calls f outside the turn that the caller has.
func (t Turns) Lend(f func()) {
	<-t
	defer func() { t <- struct{}{} }()
	f()
}
