// Package server is the agent: PID 1 of a sandbox. It serves OpenSandbox's execd API,
// and puts the rooms together:
//
//	cmd/sandbox-agent ─ Main ─ bootstrap line ─ listen ─ entrypoint ─ serve ─ obituary
//	                                              │
//	   HTTP ─ Server ─┬─ commands ── command ─────┤  ring, pumps: output
//	                  ├─ terminals ─ terminal     │
//	                  ├─ sessions ── shell        │  every child of this process
//	                  ├─ code ────── interpreter  │  is started and waited for
//	                  ├─ files ───── files        │  by the one reaper: proc
//	                  ├─ metrics
//	                  └─ proxy to 127.0.0.1          all answer by reply
//
// An import points down, and there are no others between them:
//
//	server
//	shell, terminal           how a command is run for somebody
//	command                   one process, its output and its end
//	files, output             neither knows the other
//	proc, reply               the kernel; HTTP
//	agent                     the wire types
//
// The surprise: a process that holds a Server must neither start nor wait for
// children in any other way (no os/exec): the reaper takes all of them, as PID 1
// has to.
//
// The code runs as root of the guest, inside, so a path a client names is
// resolved by the guest's own kernel and reaches nothing but the guest.
package server

import (
	"cmp"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/output"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
	"github.com/sandboxd/sandboxd/pkg/agent/shell"
	"github.com/sandboxd/sandboxd/pkg/agent/terminal"
)

// Config is what a Server needs.
type Config struct {
	Bootstrap agent.Bootstrap
	StateDir  string // "" is agent.StateDir; wiped by New
	Root      string // of the guest's file system, for what an adoption writes; "" is /
}

// Server answers for one sandbox. Make it with New.
type Server struct {
	// What an adoption replaces; none is nil. See adopt.go.
	opens  atomic.Pointer[door]
	who    atomic.Pointer[guest]
	limits atomic.Pointer[agent.Limits]

	devNull *os.File
	root    string // of the guest's file system
	state   stateDir
	meter   meter
	conns   connections

	// rooms are tried in this order for a path, after the files; a room returns nil for
	// a path that is not its own.
	rooms     []func(path string) reply.Methods
	commands  *command.Registry
	terminals *terminal.Set
	sessions  *shell.Sessions
	ahead     *shell.Ahead
	code      code
	proxyOnce sync.Once
	proxy     http.Handler

	booted     *door                           // of the sandbox that the agent began as
	prestarted []string                        // languages whose standing contexts are made at once there
	start      start                           // what the entrypoint is made of
	entrypoint atomic.Pointer[command.Command] // nil without one
	begun      chan struct{}                   // gets one when an adoption has started the entrypoint
	failed     chan int                        // gets the exit code of an adoption that failed
	adopting   sync.Mutex
	jupyter    jupyter
	ready      atomic.Bool
	answered   sync.Once   // see afterAnswer
	stopping   atomic.Bool // the entrypoint ended: nothing new is started
}

// New makes a Server. It resolves the user, empties the state directory and
// starts nothing. An error says what of the bootstrap cannot work.
func New(c Config) (*Server, error) {
	b := c.Bootstrap
	s := &Server{
		root:       cmp.Or(c.Root, "/"),
		state:      stateDir(cmp.Or(c.StateDir, agent.StateDir)),
		prestarted: b.Prestart,
		begun:      make(chan struct{}, 1),
		failed:     make(chan int, 1),
	}
	proc.Reap()
	s.booted = newDoor(b.Token)
	close(s.booted.open)
	s.opens.Store(s.booted)
	s.limits.Store(&b.Limits)
	outputDir := filepath.Join(string(s.state), "output")
	if err := makeStateDir(string(s.state), outputDir); err != nil {
		return nil, err
	}
	g, err := s.newGuest(&b)
	if err != nil {
		return nil, err
	}
	s.who.Store(g)
	devNull, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open the null device: %w", err)
	}
	total, each := outputLimits(&b)
	s.devNull = devNull
	s.furnish(&b, command.Config{
		StateDir: string(s.state), DevNull: devNull, Grace: command.InterruptGrace,
		Limits:    func() agent.Limits { return *s.limits.Load() },
		OutputDir: outputDir, OutputLimit: total, OutputEach: each,
	})
	return s, nil
}

// outputLimits returns how many bytes of output are kept in files: in all, and of one
// command.
func outputLimits(b *agent.Bootstrap) (total, each int64) {
	total = b.OutputLimit
	if total <= 0 {
		total = output.OfAll
	}
	if d := b.Limits.DiskBytes / 4; d > 0 {
		total = min(total, d)
	}
	each = b.CommandOutputLimit
	if each <= 0 {
		each = output.OfCommand
	}
	return total, max(each, output.InMemory)
}

// prestart makes the standing contexts of languages that the sandbox behind a door wants, unless
// the agent is another's by now.
func (s *Server) prestart(languages []string, door *door) {
	s.code.prestart(languages, func() bool { return s.opens.Load() == door })
}

// furnish makes the rooms.
func (s *Server) furnish(b *agent.Bootstrap, c command.Config) {
	s.meter.limits = c.Limits
	s.commands = command.NewRegistry(c)
	host := shell.Host{Commands: s.commands, Guest: present{s}, Stopping: s.stopping.Load}
	s.ahead = shell.NewAhead(host, b.ShellAhead, s.meter.memory)
	s.sessions = shell.NewSessions(host)
	s.terminals = terminal.NewSet(terminal.Config{Commands: s.commands, Prepare: s.prepareTerminal, Stopping: s.stopping.Load})
	s.code = code{guest: s.guest, limits: c.Limits, stopping: s.stopping.Load, command: s.startCommand}
	s.code.contexts.Host = drivers{}
	s.rooms = []func(string) reply.Methods{
		s.routes, s.commands.Routes, s.terminals.Routes, s.code.routes, s.sessions.Routes, isolatedRoutes, listeningRoutes,
	}
}

// ServeHTTP answers one request. Nothing is answered without the token, /ping
// included.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	door := s.opens.Load()
	if !door.fits(r) {
		reply.WriteError(w, reply.Fail(http.StatusUnauthorized, "UNAUTHORIZED",
			"this sandbox requires its token in the header %s", agent.TokenHeader))
		return
	}
	select {
	case <-door.open:
	case <-r.Context().Done():
		return
	}
	if strings.HasPrefix(r.URL.Path, "/proxy/") {
		s.serveProxy(w, r)
		return
	}
	h, err := s.route(r)
	if err == nil {
		err = h(w, r)
	}
	if err != nil {
		reply.WriteError(w, err)
	}
}

// route finds the handler of a request.
func (s *Server) route(r *http.Request) (reply.Handler, error) {
	path := r.URL.Path
	methods, err := s.guest().files.Routes(path)
	if err != nil {
		return nil, err
	}
	for i := 0; methods == nil && i < len(s.rooms); i++ {
		methods = s.rooms[i](path)
	}
	if methods == nil {
		return nil, reply.Fail(http.StatusNotFound, reply.Unsupported, "this agent has no %s", path)
	}
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	h := methods[method]
	if h == nil {
		return nil, reply.Fail(http.StatusMethodNotAllowed, reply.Unsupported, "this agent has no %s %s", r.Method, path)
	}
	return h, nil
}

// routes are the routes that belong to no room.
func (s *Server) routes(path string) reply.Methods {
	switch path {
	case "/ping":
		return reply.Methods{"GET": s.ping}
	case "/command":
		return reply.Methods{"GET": s.commands.List, "POST": s.runCommand, "DELETE": s.interruptCommand}
	case "/limits":
		return reply.Methods{"PUT": s.setLimits}
	case "/adopt":
		return reply.Methods{"POST": s.adopt}
	case "/variables":
		return reply.Methods{"PUT": s.setVariables}
	case "/tasks":
		return reply.Methods{"GET": countTasks}
	case "/reach":
		return reply.Methods{"POST": reach}
	case "/metrics":
		return reply.Methods{"GET": s.meter.now}
	case "/metrics/watch":
		return reply.Methods{"GET": s.meter.watch}
	}
	return nil
}

func (s *Server) ping(w http.ResponseWriter, _ *http.Request) error {
	if !s.ready.Load() || s.stopping.Load() {
		return reply.Fail(http.StatusServiceUnavailable, reply.Failed, "the sandbox cannot run commands now: it is starting or ending")
	}
	w.Header().Set(agent.ProtocolHeader, strconv.Itoa(agent.Protocol))
	return reply.OK(w)
}

// setLimits is PUT /limits: the host has changed the limits of the sandbox.
func (s *Server) setLimits(w http.ResponseWriter, r *http.Request) error {
	var l agent.Limits
	if err := reply.ReadJSON(w, r, &l); err != nil {
		return err
	}
	s.limits.Store(&l)
	return reply.OK(w)
}

// setVariables is PUT /variables: what is started from now on has these.
func (s *Server) setVariables(w http.ResponseWriter, r *http.Request) error {
	v := map[string]string{}
	if err := reply.ReadJSON(w, r, &v); err != nil {
		return err
	}
	s.guest().given.Store(&v)
	return reply.OK(w)
}
