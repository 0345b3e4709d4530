package server

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/seccomp"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/files"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// Options are settings for tests; the zero value is for PID 1.
type Options struct {
	Listen   string // "" is every IPv4 address, agent.Port
	StateDir string // "" is agent.StateDir
	Root     string // of the guest's file system; "" is /
}

// stopGrace is between SIGTERM and SIGKILL for the entrypoint.
const stopGrace = 10 * time.Second

// Main is the life of the agent. It returns the exit code of the process, which is that
// of the entrypoint. It reads the bootstrap line from standard input; an error before
// the agent listens is one line on standard error. Afterwards standard input, output
// and error are the null device.
func Main(o Options) int {
	proc.OnPanic = o.state().crashed
	if err := seccomp.InstallAsked(); err != nil {
		return o.fatal(err, 1)
	}
	addr := cmp.Or(o.Listen, fmt.Sprintf("0.0.0.0:%d", agent.Port))
	ln, err := listen(addr) // connections wait in it until serve
	if err != nil {
		return o.fatal(fmt.Errorf("listen on %s: %w", addr, err), 1)
	}
	tune()
	signals, handled := make(chan os.Signal, 8), make(chan struct{})
	go func() { // beside the rest: for each signal, threads wait for one another twice
		signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT)
		close(handled)
	}()
	var s *Server
	if proc.Guarded(func() { s, err = boot(o) }); err != nil {
		return o.fatal(err, 1)
	}
	proc.BeforeChildren = sync.OnceFunc(func() { // the first answer does not wait for it
		handleIgnored()
		proc.ReserveThreads()
	})
	s.jupyter.on = o.Listen == "" // not in tests
	if err := s.jupyter.move(s.guest()); err != nil {
		fmt.Fprintf(os.Stderr, "sandbox-agent: cannot report the code interpreter as ready to its clients: %v\n", err)
	}
	<-handled
	if code, err := s.startEntrypoint(&s.start); err != nil {
		return o.fatal(err, code)
	}
	if err := detachStdio(1, 2); err != nil {
		return o.fatal(err, 1)
	}
	go proc.Guarded(func() {
		if !s.awaitStart(&s.start) {
			return // live says how it ended
		}
		s.ready.Store(true)
		s.serve(ln)
	})
	return s.live(signals)
}

// state is where the agent writes.
func (o Options) state() stateDir { return stateDir(cmp.Or(o.StateDir, agent.StateDir)) }

// fatal says why the agent does not start: in one line, and in an obituary, because nobody reads
// the standard error of a sandbox. The directory may not be there yet.
func (o Options) fatal(err error, code int) int {
	message := strings.Join(strings.Fields(err.Error()), " ")
	fmt.Fprintf(os.Stderr, "sandbox-agent: %s\n", message)
	dir := string(o.state())
	if err := makeStateDir(dir, filepath.Join(dir, "output")); err == nil {
		o.state().writeObituary(agent.Obituary{ExitCode: code, Message: message}, nil) //nolint:errcheck // nobody is left to hear
	}
	return code
}

// tune keeps the agent small: there is one in every sandbox, and it is idle.
func tune() {
	// Descriptors that the runtime left open must not reach the sandbox.
	unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC) //nolint:errcheck // an old kernel: Go's own are close-on-exec anyway
	unix.Umask(0o022)                                      // of children, whoever started this process
	debug.SetGCPercent(50)
	if runtime.GOMAXPROCS(0) > 2 {
		runtime.GOMAXPROCS(2)
	}
	if os.Getpid() != 1 {
		// As PID 1 the agent inherits orphans; elsewhere, in tests, it asks for them.
		unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) //nolint:errcheck // then orphans are not ours to reap
	}
}

// handleIgnored lets children begin with each signal at its default, whatever this
// process began with (nohup, a shell's &): execve(2) keeps one that is ignored, and
// resets one that is handled.
func handleIgnored() {
	nobody := make(chan os.Signal, 1)
	signal.Notify(nobody, unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU) // Go's runtime does not handle these
	for s := unix.Signal(1); s < 32; s++ {
		if signal.Ignored(s) {
			signal.Notify(nobody, s)
		}
	}
}

func boot(o Options) (*Server, error) {
	b, err := agent.ReadBootstrap(os.Stdin)
	if err != nil {
		return nil, err
	}
	if err := detachStdio(0); err != nil {
		return nil, err
	}
	s, err := New(Config{Bootstrap: b, StateDir: o.StateDir, Root: o.Root})
	if err != nil {
		return nil, err
	}
	s.guest().makeEnvFile(envFile)
	s.start = startOf(&b, s.guest())
	return s, nil
}

// backlog bounds the connections that wait to be accepted. The kernel cuts it to its own limit.
const backlog = 4096

// listen listens on an IPv4 address. [net.Listen] would first ask what the kernel knows of
// IPv6 and MPTCP, by twenty system calls more. It would also set SO_REUSEADDR. If both sockets
// have that, gVisor, unlike Linux, lets a second one listen on a narrower address: any user of
// the sandbox could take the daemon's connections and their token.
func listen(addr string) (net.Listener, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "listener")
	defer f.Close() // FileListener makes a copy
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}); err != nil {
		return nil, err
	}
	if err := unix.Listen(fd, backlog); err != nil {
		return nil, err
	}
	return net.FileListener(f)
}

// detachStdio puts the null device in place of fds.
func detachStdio(fds ...int) error {
	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the null device: %w", err)
	}
	defer unix.Close(null)
	for _, fd := range fds {
		if err := unix.Dup3(null, fd, 0); err != nil {
			return fmt.Errorf("close file descriptor %d: %w", fd, err)
		}
	}
	return nil
}

// serve answers until the process ends.
func (s *Server) serve(ln net.Listener) {
	srv := &http.Server{
		Handler:           s,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       120 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ConnContext:       s.conns.opened,
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateIdle { // an answer is on its way
				s.afterAnswer()
			}
		},
	}
	if err := srv.Serve(files.BulkListener{Listener: ln, Closed: s.conns.closed}); err != nil && !errors.Is(err, http.ErrServerClosed) {
		o := agent.Obituary{ExitCode: 1, Message: "the agent cannot accept connections: " + err.Error()}
		s.state.writeObituary(o, nil) //nolint:errcheck // nobody is left to hear
		os.Exit(1)
	}
}

// afterAnswer does, once, what the first answer does not wait for.
func (s *Server) afterAnswer() {
	s.answered.Do(func() {
		time.AfterFunc(time.Second, debug.FreeOSMemory) // memory that only the start needed
		go proc.Guarded(func() {
			proc.BeforeChildren() // so that the first command need not wait for it
			s.state.keepCrashes()
			s.meter.cpu(s.meter.cpus())
			s.prestart(s.prestarted, s.booted)
		})
	})
}

// live waits for the end: of the entrypoint, or by a signal.
func (s *Server) live(signals <-chan os.Signal) int {
	var ended <-chan struct{}
	if c := s.entrypoint.Load(); c != nil {
		ended = c.Done()
	}
	for {
		select {
		case <-s.begun: // by an adoption
			ended = s.entrypoint.Load().Done()
		case code := <-s.failed: // as above; it has written the obituary
			proc.KillDescendants(2 * time.Second)
			return code
		case <-ended:
			return s.end(s.entrypoint.Load().End())
		case sig := <-signals:
			if sig != unix.SIGTERM && sig != unix.SIGINT {
				continue // it is for a shell: somebody signals all processes, as by kill -HUP -1
			}
			if s.entrypoint.Load() == nil {
				n := sig.(syscall.Signal)
				return s.end(command.Ending{Code: 128 + int(n), Signal: n})
			}
			s.stop(sig.(syscall.Signal))
		}
	}
}

// stop asks the entrypoint to end, and ends it if it does not.
func (s *Server) stop(sig syscall.Signal) {
	p := s.entrypoint.Load().Process
	p.Signal(sig, false)                                                   //nolint:errcheck // gone is what is wanted
	time.AfterFunc(stopGrace, func() { p.Signal(syscall.SIGKILL, false) }) //nolint:errcheck // as above
}

// end writes the obituary, kills the rest, and returns the exit code.
func (s *Server) end(e command.Ending) int {
	s.stopping.Store(true)
	o := agent.Obituary{ExitCode: e.Code, Reason: e.Reason}
	if e.Signal != 0 {
		o.Signal = proc.SignalName(e.Signal)
	}
	var last []byte
	if c := s.entrypoint.Load(); c != nil {
		last = c.Output.Tail(agent.MaxLastOutput)
	}
	if s.state.writeObituary(o, last) != nil {
		s.commands.DropAll()           // the disk is full, perhaps of old output
		s.state.writeObituary(o, last) //nolint:errcheck // the exit code remains
	}
	proc.KillDescendants(2 * time.Second)
	return e.Code
}
