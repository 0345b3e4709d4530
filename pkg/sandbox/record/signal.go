package record

import (
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// The first and the last real-time signal, as the C library of guests numbers them: it keeps
// 32 and 33 for itself. (signal(7))
const (
	minRealTime = 34
	maxRealTime = 64
)

// Signal is the number of SIGQUIT, QUIT, 3, RTMIN+3 or SIGRTMAX-1, in capitals or not; 0: it
// is none.
func Signal(name string) syscall.Signal {
	if n, err := strconv.Atoi(name); err == nil {
		if n < 1 || n > maxRealTime {
			return 0
		}
		return syscall.Signal(n)
	}
	short := strings.TrimPrefix(strings.ToUpper(name), "SIG")
	from, by := minRealTime, 1
	offset, ok := strings.CutPrefix(short, "RTMIN")
	if !ok {
		from, by = maxRealTime, -1
		offset, ok = strings.CutPrefix(short, "RTMAX")
	}
	if !ok {
		return unix.SignalNum("SIG" + short)
	}
	if offset == "" {
		return syscall.Signal(from)
	}
	n, err := strconv.ParseUint(offset[1:], 10, 8)
	if offset[0] != "-+"[(by+1)/2] || err != nil || n > maxRealTime-minRealTime {
		return 0
	}
	return syscall.Signal(from + by*int(n))
}

// StopWith is the signal that asks the entrypoint to end: that of the client, else that of the
// image, else SIGTERM.
func (s *Spec) StopWith() syscall.Signal {
	for _, name := range []string{s.StopSignal, s.Image.Config.StopSignal} {
		if n := Signal(name); n != 0 {
			return n
		}
	}
	return syscall.SIGTERM
}
