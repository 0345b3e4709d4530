package shell

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// A shell is one process of a session.
type shell struct {
	cmd    *command.Command
	socket *os.File    // our end
	script chan []byte // what is to be written to it; never full
	word   string      // marks what it says when it exits

	feed sync.Mutex
	live *reply.Stream // where output goes beside the ring

	mu      sync.Mutex
	scanner scanner
	want    string        // the word of the answer that is awaited
	answers chan answer   // of size 1: one answer is awaited at a time
	left    *answer       // what it said when it exited
	silent  chan struct{} // closed when listen has ended
	over    chan struct{} // closed when it is dead and its last answer was read
}

const (
	// cutOffGrace is how long a run that is cut off may take to end by itself.
	cutOffGrace = 500 * time.Millisecond
	// lookEvery is between two looks at whether the shell has read all of its script.
	lookEvery = 3 * time.Second
)

// output keeps the shell's output and sends it to the client of the present run.
func (sh *shell) output(stream byte, b []byte) {
	sh.feed.Lock()
	defer sh.feed.Unlock()
	sh.cmd.Output.Write(b) //nolint:errcheck // never fails
	if sh.live != nil {
		sh.live.Output(stream, b)
	}
}

// attach sends output to to; nil detaches.
func (sh *shell) attach(to *reply.Stream) {
	sh.feed.Lock()
	defer sh.feed.Unlock()
	sh.live = to
}

// talk writes the script. A shell that does not read it holds up nobody else.
func (sh *shell) talk() {
	for {
		select {
		case line := <-sh.script:
			sh.socket.Write(line) //nolint:errcheck // the shell's death says so
		case <-sh.over:
			return
		}
	}
}

// listen reads the shell's answers until the socket ends.
func (sh *shell) listen() {
	defer close(sh.silent)
	b := make([]byte, 16<<10)
	for {
		n, err := sh.socket.Read(b)
		sh.scan(b[:n])
		if err != nil {
			return
		}
	}
}

func (sh *shell) scan(b []byte) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	words := []string{sh.word}
	if sh.want != "" {
		words = append(words, sh.want)
	}
	a, ok := sh.scanner.scan(b, words...)
	switch {
	case !ok:
	case a.word == sh.want:
		sh.want = ""
		sh.answers <- a
	default:
		sh.left = &a
	}
}

// wait waits for the shell's death and reads its last answers. Processes that it left
// behind may hold its end of the socket, so the socket may have no end.
func (sh *shell) wait() {
	<-sh.cmd.Flushed()
	sh.socket.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // open until this function closes it
	<-sh.silent
	if rc, err := sh.socket.SyscallConn(); err == nil {
		b := make([]byte, 16<<10)
		for n := 1; n > 0; {
			rc.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), b) }) //nolint:errcheck // as above
			sh.scan(b[:max(n, 0)])
		}
	}
	sh.socket.Close()
	close(sh.over)
}

// hasRead reports whether the shell has read all of its script. The script's last line
// is empty: the shell reads it when it is done with the rest.
func (sh *shell) hasRead() bool {
	left := 1
	err := proc.Control(sh.socket, func(fd int) (err error) {
		left, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ)
		return err
	})
	return err == nil && left == 0
}

// ErrMute is the end of a run that closed the descriptor with which its shell answers.
var ErrMute = errors.New("the shell of this session cannot report how the command ended, because the command disabled what it reports " +
	"with (set -n, or its builtins): the session continues in a new shell, and the state of this one is lost")

// await waits for the end of a run: the shell's answer, or its death, after
// which the answer may be what it said when it exited.
func (sh *shell) await(
	commands *command.Registry, marker uint64, timeout time.Duration, cut <-chan struct{},
) (e command.Ending, a *answer) {
	var late <-chan time.Time
	if timeout > 0 {
		t := time.NewTimer(timeout)
		defer t.Stop()
		late = t.C
	}
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	mute := 0
	var cuts sync.WaitGroup
	cutOff := func(sig syscall.Signal, grace time.Duration) {
		cuts.Go(func() { proc.Guarded(func() { sh.cutOff(marker, sig, grace) }) })
	}
	for {
		select {
		case got := <-sh.answers:
			limit := time.NewTimer(command.DrainLimit)
			for _, p := range sh.cmd.Pumps {
				p.Settle(limit.C)
			}
			limit.Stop()
			e.Code, e.At = got.code, time.Now()
			commands.Explain(sh.cmd, &e)
			return e, &got
		case <-sh.over:
			select {
			case got := <-sh.answers: // it died after its answer
				e.Code, e.At, e.Reason = got.code, time.Now(), agent.ReasonExited
				return e, &got
			default:
			}
			cuts.Wait()
			end := sh.cmd.End()
			end.Err = e.Err
			if e.TimedOut {
				end = command.Ending{
					Code: 128 + int(syscall.SIGKILL), Signal: syscall.SIGKILL,
					TimedOut: true, Timeout: timeout, At: end.At, Reason: agent.ReasonTimeout,
				}
			}
			return end, sh.left
		case <-late:
			e.TimedOut = true
			cutOff(syscall.SIGKILL, cutOffGrace)
		case <-cut:
			cut = nil
			cutOff(syscall.SIGTERM, commands.Grace)
		case <-look.C:
			if !sh.hasRead() {
				mute = 0
			} else if mute++; mute == 2 {
				e.Err = ErrMute.Error()
				cutOff(syscall.SIGKILL, 0)
			}
		}
	}
}

// cutOff ends a run with its shell. Processes that earlier runs left in the background
// go on. The shell gets a signal first, because a shell that exits reports its state.
func (sh *shell) cutOff(marker uint64, sig syscall.Signal, grace time.Duration) {
	sh.cmd.Process.Signal(syscall.SIGTERM, false) //nolint:errcheck // gone is what is wanted
	find := func() []int {
		return proc.Marked(func(m uint64) bool { return m == marker }, sh.cmd.Process.PID)
	}
	for _, pid := range find() {
		syscall.Kill(pid, sig) //nolint:errcheck // gone is what is wanted
	}
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-sh.cmd.Died():
	case <-t.C:
	}
	sh.cmd.Process.Signal(syscall.SIGKILL, false) //nolint:errcheck // as above
	proc.KillAll(find)
}
