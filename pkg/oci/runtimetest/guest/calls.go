package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/seccomp"
)

// numbers are all that a kernel may know, now and for some years, and some of x32.
func numbers() (all []uint32) {
	for nr := range uint32(601) {
		all = append(all, nr)
	}
	return append(all, x32, x32|41, x32|59, x32|512, x32|547)
}

const x32 = 0x40000000

// untried are calls that a test cannot make and go on, or that disturb others.
var untried = map[string]string{
	"fork":         "two processes would go on with the test",
	"vfork":        "two processes would run on one stack",
	"rt_sigreturn": "takes all registers from the stack; each signal that Go handles makes it",
	"sync":         "waits for all disks of the host",
}

// waits are calls that do not come back, whatever their arguments are: pause waits for a
// signal, exit ends one thread of many.
var waits = map[string]bool{"pause": true, "exit": true}

// calls makes each system call with arguments that do nothing: all bits set is no address,
// no descriptor, no process and no flag. A child makes them, because some end it. The answer
// has an errno, "ok", "died" or "untried" for each number.
func calls() any {
	answers, all := map[uint32]string{}, numbers()
	for i := 0; i < len(all); {
		cmd := exec.Command("/proc/self/exe", "calls", strconv.Itoa(i))
		// Go would wake a thread that waits in a call, to run something else on it.
		cmd.Env = append(os.Environ(), "GODEBUG=asyncpreemptoff=1")
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			return err.Error()
		}
		for lines := bufio.NewScanner(out); lines.Scan() && i < len(all); i++ {
			answers[all[i]] = lines.Text()
		}
		cmd.Wait() //nolint:errcheck // that it died is what the answer says
		if i < len(all) {
			answers[all[i]] = "died"
			i++
		}
	}
	return answers
}

// makeCalls makes the calls from index i on, and writes a line for each that comes back.
func makeCalls(i int) {
	runtime.LockOSThread()
	for _, nr := range numbers()[i:] {
		name, answer := seccomp.Lookup(runtime.GOARCH, nr).Name, "untried"
		if untried[name] == "" {
			limit := 10 * time.Second
			if waits[name] || nr >= x32 { // the first filter may end the thread only
				limit = 100 * time.Millisecond
			}
			dieAfter(limit)
			const bits = ^uintptr(0)
			answer = "ok"
			if errno := call(uintptr(nr), bits, bits, bits, bits, bits, bits); errno != 0 {
				answer = unix.ErrnoName(errno)
			}
		}
		fmt.Println(answer)
	}
	os.Exit(0)
}

// dieAfter lets the kernel kill this process after d. Go handles SIGALRM, so its handler is
// taken away (struct sigaction of zeros is SIG_DFL).
func dieAfter(d time.Duration) {
	var action [4]uint64
	unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGALRM), uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
	timer := unix.Itimerval{Value: unix.NsecToTimeval(d.Nanoseconds())}
	unix.Setitimer(unix.ITIMER_REAL, timer) //nolint:errcheck // without it the test's own time ends
}
