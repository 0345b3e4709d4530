package expiry

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// wallAlarm is an alarm on CLOCK_REALTIME, by a timerfd that a step of the
// clock cancels.
type wallAlarm struct {
	f *os.File
	c chan struct{}
}

func newWallAlarm() (*wallAlarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_REALTIME, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a timer: %w", err)
	}
	a := &wallAlarm{f: os.NewFile(uintptr(fd), "timerfd"), c: make(chan struct{}, 1)}
	go a.read()
	return a, nil
}

// read turns the timer's events into values on C. A cancelled timer (ECANCELED) counts
// like an expired one: the clock must be read again.
func (a *wallAlarm) read() {
	var count [8]byte
	for {
		if _, err := a.f.Read(count[:]); err != nil && !errors.Is(err, unix.ECANCELED) {
			return // closed
		}
		a.wake()
	}
}

func (a *wallAlarm) wake() {
	select {
	case a.c <- struct{}{}:
	default: // one is enough
	}
}

func (a *wallAlarm) set(t time.Time) error {
	// Zero would disarm the timer: "never" is the end of time.
	spec := unix.ItimerSpec{Value: unix.Timespec{Sec: 1<<62 - 1}}
	if !t.IsZero() {
		spec.Value = unix.NsecToTimespec(max(t.UnixNano(), 1))
	}
	rc, err := a.f.SyscallConn()
	if err == nil {
		var serr error
		err = rc.Control(func(fd uintptr) {
			serr = unix.TimerfdSettime(int(fd), unix.TFD_TIMER_ABSTIME|unix.TFD_TIMER_CANCEL_ON_SET, &spec, nil)
		})
		err = errors.Join(err, serr)
	}
	if errors.Is(err, unix.ECANCELED) {
		// Armed, but the clock was set since, and read gets no event for that.
		a.wake()
		return nil
	}
	if err != nil {
		return fmt.Errorf("set the timer to %v: %w", t, err)
	}
	return nil
}

func (a *wallAlarm) C() <-chan struct{} { return a.c }

func (a *wallAlarm) close() { a.f.Close() } //nolint:errcheck // nothing to lose
