package hosttest

import (
	"os"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// HoldExit keeps a process in the kernel once it is killed, as the kernel itself does
// while it closes what the process had open. It holds until the returned function is
// called or the test ends. (ptrace(2), PTRACE_O_TRACEEXIT, also holds what SIGKILL ends.)
//
// Any other signal to the first thread of the process stops that thread meanwhile.
func HoldExit(t testing.TB, pid int) (release func()) {
	t.Helper()
	held, let := make(chan error), make(chan struct{})
	onThread(func() { // it is the tracer: when it ends, the kernel lets its tracees go
		_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(pid), 0, unix.PTRACE_O_TRACEEXIT, 0, 0)
		if errno != 0 {
			held <- os.NewSyscallError("ptrace", errno)
			return
		}
		held <- nil
		<-let
	})
	if err := <-held; err != nil {
		t.Fatalf("hold the end of process %d: %v", pid, err)
	}
	release = sync.OnceFunc(func() { close(let) })
	t.Cleanup(release)
	return release
}

// onThread runs f on a thread that ends with it. The first thread of a process would not.
func onThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		defer runtime.UnlockOSThread()
		began := make(chan struct{})
		onThread(func() { close(began); f() })
		<-began
	}()
}
