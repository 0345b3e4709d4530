package foreground

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// Signals passes signals on to a command. A signal that comes before the command
// has started waits for it. The second of a kind cancels Context, which ends
// everything; the third ends this process, whatever it waits for.
type Signals struct {
	Context context.Context

	cancel context.CancelFunc
	ch     chan os.Signal
	passed sync.WaitGroup // signals on their way

	mu      sync.Mutex
	process Signaled // nil: not started yet
	held    []os.Signal
	restore func() // of this terminal; nil: nothing to restore
	away    bool   // the daemon is: nobody can be sent a signal
}

// Signaled is what takes a signal: a command, a terminal, or code in a sandbox.
type Signaled interface {
	Signal(ctx context.Context, name string) error
}

// Catch begins to catch SIGINT, SIGTERM, SIGHUP and SIGQUIT.
func Catch() *Signals {
	s := &Signals{ch: make(chan os.Signal, 8)}
	s.Context, s.cancel = context.WithCancel(context.Background())
	signal.Ignore(syscall.SIGPIPE) // a reader that leaves is an error of Write, after which we clean up
	signal.Notify(s.ch, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	go s.watch()
	return s
}

// Stop ends the catching; Context ends too.
func (s *Signals) Stop() {
	signal.Stop(s.ch)
	close(s.ch)
	s.cancel()
	s.passed.Wait()
}

// passing bounds how long a signal may be on its way.
const passing = 2 * time.Second

// Once is the time within which two signals of a kind count as one: timeout(1)
// sends its signal to the process and then to the group of the process.
const Once = 20 * time.Millisecond

// Noticed is called after each signal that was acted upon; tests wait for it.
var Noticed = func() {}

func (s *Signals) watch() {
	seen, last := map[os.Signal]int{}, map[os.Signal]time.Time{}
	for got := range s.ch {
		if time.Since(last[got]) < Once {
			continue
		}
		last[got] = time.Now()
		switch seen[got]++; seen[got] {
		case 1:
			if !s.pass(got) {
				s.cancel()
			}
		case 2:
			s.cancel()
		default:
			s.mu.Lock()
			if s.restore != nil {
				s.restore()
			}
			os.Exit(command.ExitInterrupted)
		}
		Noticed()
	}
}

// pass sends a signal on its way, unless the daemon is away.
func (s *Signals) pass(got os.Signal) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return false
	}
	if s.process == nil {
		s.held = append(s.held, got)
		return true
	}
	p := s.process
	s.passed.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), passing)
		defer cancel()
		p.Signal(ctx, signalNames[got]) //nolint:errcheck // a command that ended meanwhile needs none
	})
	return true
}

// Notices tell a person at a terminal that the daemon is away. While it is, the first
// signal cancels Context: there is nobody to pass it on.
func (s *Signals) Notices() client.Notices {
	n := command.Notices()
	away := func(is bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.away = is
	}
	return client.Notices{
		Lost: func(err error) {
			away(true)
			if n.Lost != nil {
				n.Lost(err)
			}
		},
		Back: func() {
			away(false)
			if n.Back != nil {
				n.Back()
			}
		},
	}
}

// To names the command that signals are for.
func (s *Signals) To(p Signaled) {
	s.mu.Lock()
	s.process = p
	held := s.held
	s.held = nil
	s.mu.Unlock()
	for _, got := range held {
		s.pass(got)
	}
}

// onExit names what must be done before this process ends at once.
func (s *Signals) onExit(restore func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restore = restore
}

// Pending reports whether a signal came for a command that has not started.
func (s *Signals) Pending() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.held) > 0
}

var signalNames = map[os.Signal]string{
	syscall.SIGINT: "SIGINT", syscall.SIGTERM: "SIGTERM", syscall.SIGHUP: "SIGHUP", syscall.SIGQUIT: "SIGQUIT",
}
