// Package server is the agent: PID 1 of a sandbox, and OpenSandbox's execd API
// over the processes and files around it.
//
//	cmd/sandbox-agent ─ Main ─ bootstrap line ─ listen ─ entrypoint ─ serve ─ obituary
//	                                              │
//	   HTTP ─ Server ─┬─ commands ─ reaper        │  every child of this process
//	                  │   │  └─ output rings      │  is started and waited for
//	                  │   ├─ terminals ─ viewer   │  by the one reaper
//	                  │   └─ sessions ─ shell     │
//	                  ├─ code ─ interpreter       │
//	                  ├─ files, directories       │
//	                  ├─ metrics
//	                  └─ proxy to 127.0.0.1
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
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/interpreter"
	"github.com/sandboxd/sandboxd/pkg/agent/output"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
	"github.com/sandboxd/sandboxd/pkg/agent/shell"
	"github.com/sandboxd/sandboxd/pkg/agent/terminal"
)

// Config is what a Server is made of.
type Config struct {
	Bootstrap agent.Bootstrap
	StateDir  string   // "" is agent.StateDir; wiped by New
	Environ   []string // the image's environment, as KEY=VALUE
}

// Server answers for one sandbox. Make it with New.
type Server struct {
	token    [sha256.Size]byte
	limits   atomic.Pointer[agent.Limits] // never nil
	stateDir string
	guest    *guest
	// prestarted are languages whose standing contexts are made at once.
	prestarted []string
	commands   *command.Registry
	terminals  *terminal.Set
	contexts   interpreter.Contexts
	sessions   *shell.Sessions
	ahead      *shell.Ahead
	devNull    *os.File
	ready      atomic.Bool
	stopping   atomic.Bool // the entrypoint ended: nothing new is started

	entrypoint *command.Command // nil without one
	start      start            // what it is started from
	cpu        cpuMeter
	proxyOnce  sync.Once
	proxy      http.Handler
}

// New makes a Server. It resolves the user, empties the state directory and
// starts nothing. An error says what of the bootstrap can not work.
func New(c Config) (*Server, error) {
	b := c.Bootstrap
	s := &Server{
		token:    sha256.Sum256([]byte(b.Token)),
		stateDir: c.StateDir,
	}
	proc.Reap()
	s.contexts.Host = drivers{s}
	s.limits.Store(&b.Limits)
	s.prestarted = b.Prestart
	if s.stateDir == "" {
		s.stateDir = agent.StateDir
	}
	workdir := cmp.Or(b.Workdir, "/")
	if !filepath.IsAbs(workdir) {
		return nil, fmt.Errorf("working directory %q of the image is not absolute", workdir)
	}
	outputDir := filepath.Join(s.stateDir, "output")
	if err := makeStateDir(s.stateDir, outputDir); err != nil {
		return nil, err
	}
	var err error
	if s.guest, err = newGuest(c.Environ, &b, workdir, s.stateDir); err != nil {
		return nil, err
	}
	if s.devNull, err = os.OpenFile(os.DevNull, os.O_RDWR, 0); err != nil {
		return nil, fmt.Errorf("open the null device: %w", err)
	}
	limit := b.OutputLimit
	if limit <= 0 {
		limit = output.OfAll
	}
	if d := b.Limits.DiskBytes / 4; d > 0 {
		limit = min(limit, d)
	}
	each := b.CommandOutputLimit
	if each <= 0 {
		each = output.OfCommand
	}
	s.commands = command.NewRegistry(command.Config{
		StateDir: s.stateDir, DevNull: s.devNull,
		Limits: func() agent.Limits { return *s.limits.Load() },
		Grace:  command.InterruptGrace,

		OutputDir: outputDir, OutputLimit: limit, OutputEach: max(each, output.InMemory),
	})
	host := shell.Host{Commands: s.commands, Guest: s.guest, Cred: s.guest.cred, Stopping: s.stopping.Load}
	s.ahead = shell.NewAhead(host, b.ShellAhead, s.memory)
	s.sessions = shell.NewSessions(host)
	s.terminals = terminal.NewSet(terminal.Config{Commands: s.commands, Prepare: s.prepareTerminal, Stopping: s.stopping.Load})
	s.cpu.read(s.cpuCount())
	return s, nil
}

// makeStateDir makes the agent's own directory afresh: what a snapshot or an
// earlier life left there is about other processes. The directory itself stays
// if there is one, because it may be a mount point.
func makeStateDir(dir, output string) error {
	if fi, err := os.Lstat(dir); err == nil && !fi.IsDir() {
		os.Remove(dir) //nolint:errcheck // the next call says it
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make the agent's directory: %w", err)
	}
	left, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("empty the agent's directory: %w", err)
	}
	for _, e := range left {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("empty the agent's directory: %w", err)
		}
	}
	if err := errors.Join(os.Chown(dir, os.Geteuid(), os.Getegid()), os.Chmod(dir, 0o700), os.Mkdir(output, 0o700)); err != nil {
		return fmt.Errorf("make the agent's directory: %w", err)
	}
	return nil
}

// ServeHTTP answers one request. Nothing is answered without the token, /ping
// included.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	sum := sha256.Sum256([]byte(r.Header.Get(agent.TokenHeader)))
	if subtle.ConstantTimeCompare(sum[:], s.token[:]) != 1 {
		reply.WriteError(w, reply.Fail(http.StatusUnauthorized, "UNAUTHORIZED", "this sandbox wants its token in the header %s", agent.TokenHeader))
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

func (s *Server) route(r *http.Request) (reply.Handler, error) {
	path := r.URL.Path
	methods := s.fixedRoutes(path)
	if methods == nil {
		var err error
		if methods, err = s.guest.files.Routes(path); err != nil {
			return nil, err
		}
	}
	if methods == nil {
		methods = s.commands.Routes(path)
	}
	if methods == nil {
		methods = s.terminals.Routes(path)
	}
	if methods == nil {
		methods = s.codeRoutes(path)
	}
	if methods == nil {
		methods = s.sessions.Routes(path)
	}
	if methods == nil {
		methods = isolatedRoutes(path)
	}
	if port, ok := strings.CutPrefix(path, "/listening/"); ok {
		methods = reply.Methods{"GET": func(w http.ResponseWriter, r *http.Request) error { return listening(w, r, port) }}
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

func (s *Server) fixedRoutes(path string) reply.Methods {
	switch path {
	case "/ping":
		return reply.Methods{"GET": s.ping}
	case "/command":
		return reply.Methods{"POST": s.runCommand, "DELETE": s.interruptCommand}
	case "/limits":
		return reply.Methods{"PUT": s.setLimits}
	case "/tasks":
		return reply.Methods{"GET": countTasks}
	case "/metrics":
		return reply.Methods{"GET": s.metrics}
	case "/metrics/watch":
		return reply.Methods{"GET": s.watchMetrics}
	}
	return nil
}

func (s *Server) ping(w http.ResponseWriter, _ *http.Request) error {
	if !s.ready.Load() || s.stopping.Load() {
		return reply.Fail(http.StatusServiceUnavailable, reply.Failed, "the sandbox can not run commands now")
	}
	w.Header().Set(agent.ProtocolHeader, strconv.Itoa(agent.Protocol))
	return reply.OK(w)
}

// setLimits is PUT /limits: the host has given the sandbox others.
func (s *Server) setLimits(w http.ResponseWriter, r *http.Request) error {
	var l agent.Limits
	if err := reply.ReadJSON(w, r, &l); err != nil {
		return err
	}
	s.limits.Store(&l)
	return reply.OK(w)
}
