package proc

import (
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// SignalNumber takes SIGINT, INT and 2; 0 is none of them.
func SignalNumber(name string) syscall.Signal {
	if n, err := strconv.Atoi(name); err == nil {
		if n < 1 || n > 64 {
			return 0
		}
		return syscall.Signal(n)
	}
	name = strings.ToUpper(name)
	if !strings.HasPrefix(name, "SIG") {
		name = "SIG" + name
	}
	return unix.SignalNum(name)
}

// SignalName returns a name as SIGINT, or "signal 40" of one that has none.
func SignalName(sig syscall.Signal) string {
	if n := unix.SignalName(sig); n != "" {
		return n
	}
	return "signal " + strconv.Itoa(int(sig))
}
