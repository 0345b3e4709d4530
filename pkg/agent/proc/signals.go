package proc

import (
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// SignalName returns a name as SIGINT, or "signal 40" of one that has none.
func SignalName(sig syscall.Signal) string {
	if n := unix.SignalName(sig); n != "" {
		return n
	}
	return "signal " + strconv.Itoa(int(sig))
}
