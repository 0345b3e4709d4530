package server

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/files"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// maxArg is what Linux takes as one argument of a program (MAX_ARG_STRLEN).
const maxArg = 128<<10 - 1

// A launch is a request made ready to start. If its first way fails to execute,
// shell, where there is one, finds the second; looking for it costs a dozen
// system calls, so it is not done before.
type launch struct {
	way
	shell func() *way
	dir   string
	cred  *syscall.Credential
	tty   bool // standard input is a terminal, to be that of a session
	// stdin is standard input, if neither the null device nor a pipe.
	stdin  *os.File
	more   []uintptr // its descriptors 3, 4, …
	marker uint64    // see proc.Start; 0: any that is free

	// What the shell ahead must know; fit is nil if the command is not for it.
	fit  *fit
	vars map[string]string // the environment
	real string            // dir without symbolic links
}

// defaultEnv sets a variable unless the request, the sandbox or the image did.
func (l *launch) defaultEnv(name, value string) {
	set := func(w *way) *way {
		if w != nil && !slices.ContainsFunc(w.env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") }) {
			w.env = append(w.env, name+"="+value)
		}
		return w
	}
	set(&l.way)
	if shell := l.shell; shell != nil {
		l.shell = func() *way { return set(shell()) }
	}
}

type way struct {
	path string
	argv []string
	env  []string
}

// prepare checks a request and resolves all its names. Its errors are the
// client's, and of status 400.
func (s *Server) prepare(req *agent.CommandRequest) (*launch, error) {
	l, err := s.check(req)
	if err == nil {
		err = l.find(req)
	}
	return l, err
}

// check is prepare, but for the program, which is not needed where the shell
// ahead takes the command, and is then a dozen system calls.
func (s *Server) check(req *agent.CommandRequest) (l *launch, err error) {
	proc.BriefTurns.Do(func() { l, err = s.resolve(req) })
	return l, err
}

// find looks for the program or the shell.
func (l *launch) find(req *agent.CommandRequest) (err error) {
	proc.BriefTurns.Do(func() { err = l.resolve(req) })
	return err
}

func (s *Server) resolve(req *agent.CommandRequest) (*launch, error) {
	if err := checkRequest(req); err != nil {
		return nil, reply.BadRequest("%v", err)
	}
	id, err := s.identityFor(req)
	if err != nil {
		return nil, reply.BadRequest("%v", err)
	}
	env, err := s.commandEnv(req, id)
	if err != nil {
		return nil, reply.BadRequest("%v", err)
	}
	dir, real, err := s.workingDir(req.Cwd, env)
	if err != nil {
		return nil, reply.BadRequest("%v", err)
	}
	l := &launch{dir: dir, cred: s.userCred, vars: env, real: real}
	if req.UID != nil {
		l.cred = id.Credential()
	}
	if s.ahead.on && len(req.Argv) == 0 && req.UID == nil && !req.Stdin && !req.Forget {
		l.fit = fitOf(req.Command)
	}
	return l, nil
}

func (l *launch) resolve(req *agent.CommandRequest) error {
	env := l.vars
	if len(req.Argv) > 0 {
		l.way = way{path: req.Argv[0], argv: req.Argv, env: environ(env)}
		if !strings.Contains(l.path, "/") {
			l.path = lookPath(l.path, env["PATH"])
		}
		return nil
	}
	shell := func() *way {
		sh := findShell(env["PATH"])
		if sh == "" {
			return nil
		}
		return &way{path: sh, argv: []string{filepath.Base(sh), "-c", req.Command}, env: environ(env)}
	}
	if w, ok := words(req.Command); ok {
		if path, environ, ok := direct(w, env, l.real); ok {
			l.way, l.shell = way{path: path, argv: w, env: environ}, shell
			return nil
		}
	}
	w := shell()
	if w == nil {
		return reply.BadRequest("this image has neither bash nor sh: give the program and its arguments as argv")
	}
	l.way = *w
	return nil
}

func checkRequest(req *agent.CommandRequest) error {
	switch {
	case req.Command == "" && len(req.Argv) == 0:
		return errors.New("command is missing")
	case req.Command != "" && len(req.Argv) > 0:
		return errors.New("command and argv exclude each other")
	case len(req.Argv) > 0 && req.Argv[0] == "":
		return errors.New("argv[0] is empty: it names the program")
	case len(req.Command) > maxArg:
		return fmt.Errorf("command has %d bytes, the kernel takes %d: upload it as a file and run that", len(req.Command), maxArg)
	case strings.IndexByte(req.Command+req.Cwd, 0) >= 0:
		return errors.New("command or cwd contains a NUL byte")
	case req.Timeout < 0:
		return fmt.Errorf("timeout is %d ms: it must be at least 1, or absent", req.Timeout)
	case req.GID != nil && req.UID == nil:
		return errors.New("gid needs uid")
	case req.Stdin && req.Background:
		return errors.New("a background command reads /dev/null: stdin and background exclude each other")
	}
	for _, a := range req.Argv {
		if len(a) > maxArg || strings.IndexByte(a, 0) >= 0 {
			return fmt.Errorf("an argument holds a NUL byte or more than %d bytes", maxArg)
		}
	}
	for k, v := range req.Envs {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.IndexByte(v, 0) >= 0 {
			return fmt.Errorf("envs: %.64q is no name or value of an environment variable", k)
		}
	}
	for _, id := range []*int64{req.UID, req.GID} {
		if id != nil && (*id < 0 || *id >= 1<<32-1) {
			return fmt.Errorf("%d is no user or group id", *id)
		}
	}
	return nil
}

// identityFor returns whom the command runs as: USER, or uid with the group and
// groups the guest gives it, or gid alone.
func (s *Server) identityFor(req *agent.CommandRequest) (proc.Identity, error) {
	if req.UID == nil {
		return s.user, nil
	}
	spec := strconv.FormatInt(*req.UID, 10)
	if req.GID != nil {
		spec += ":" + strconv.FormatInt(*req.GID, 10)
	}
	return s.accounts.Resolve(spec)
}

// commandEnv stacks: image and sandbox; HOME of another user; the file named by
// EXECD_ENVS, read anew each time; the request.
func (s *Server) commandEnv(req *agent.CommandRequest, id proc.Identity) (map[string]string, error) {
	env := maps.Clone(s.env)
	if id.UID != s.user.UID {
		env["HOME"] = id.Home
	}
	if path := cmp.Or(req.Envs["EXECD_ENVS"], env["EXECD_ENVS"]); path != "" {
		if err := addEnvFile(env, path); err != nil {
			return nil, err
		}
	}
	maps.Copy(env, req.Envs)
	return env, nil
}

// workingDir expands and checks cwd. It returns the directory as named, to
// change into, and without symbolic links, to be PWD.
func (s *Server) workingDir(cwd string, env map[string]string) (dir, real string, err error) {
	if cwd == "" {
		cwd = s.workdir
	} else if cwd, err = expandFrom(s.workdir, cwd, env); err != nil {
		return "", "", err
	}
	real, err = files.Physical(cwd)
	if err != nil {
		return "", "", fmt.Errorf("cwd: %w", err)
	}
	return cwd, real, nil
}

// expandFrom is expandPath; a relative path begins at from.
func expandFrom(from, path string, env map[string]string) (string, error) {
	path, err := expandPath(path, env)
	if err == nil && !filepath.IsAbs(path) {
		path = from + "/" + path
	}
	return path, err
}

// expandPath replaces a leading ~ and every $VAR. An unknown variable is an error.
func expandPath(path string, env map[string]string) (string, error) {
	if path == "~" || strings.HasPrefix(path, "~/") {
		path = env["HOME"] + path[1:]
	}
	var missing string
	path = os.Expand(path, func(name string) string {
		v, ok := env[name]
		if !ok {
			missing = name
		}
		return v
	})
	if missing != "" {
		return "", fmt.Errorf("cwd names the variable %s, which is not set in the sandbox", missing)
	}
	if path == "" {
		return "", errors.New("cwd is empty after its variables were expanded")
	}
	return path, nil
}

// start executes l, by its second way if the first can not be executed.
func (l *launch) start(files [3]uintptr) (*proc.Process, error) {
	spec := proc.Spec{
		Path: l.path, Argv: l.argv, Env: l.env, Dir: l.dir, Cred: l.cred,
		TTY: l.tty, Marker: l.marker, Files: files, More: l.more,
	}
	p, err := proc.Start(spec)
	if err != nil && l.shell != nil {
		if w := l.shell(); w != nil {
			spec.Path, spec.Argv, spec.Env = w.path, w.argv, w.env
			p, err = proc.Start(spec)
		}
	}
	return p, err
}

// whyNot says why a program could not be started, and the exit code a shell
// would give: 127 not found, 126 found but not executable.
func whyNot(what, name, path, dir, envPath string, err error) (string, int) {
	switch {
	case path == "":
		return fmt.Sprintf("%s %q: no such file in the image's PATH (%s)", what, name, envPath), 127
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ENOTDIR):
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		if _, statErr := os.Stat(path); statErr == nil {
			return fmt.Sprintf("%s %q: the file is there, but not the interpreter or loader it names", what, name), 127
		}
		return fmt.Sprintf("%s %q: no such file in the image", what, name), 127
	case errors.Is(err, syscall.EACCES):
		if fi, statErr := os.Stat(path); statErr == nil && fi.IsDir() {
			return fmt.Sprintf("%s %q: is a directory", what, name), 126
		}
		return fmt.Sprintf("%s %q: not executable for its user, or the working directory %s is closed to it", what, name, dir), 126
	case errors.Is(err, syscall.ENOEXEC):
		return fmt.Sprintf("%s %q: not a program of this architecture, or a script without #!", what, name), 126
	case errors.Is(err, syscall.EAGAIN):
		return fmt.Sprintf("%s %q: the sandbox has no process left (its pids limit)", what, name), 126
	}
	return fmt.Sprintf("%s %q: %v", what, name, err), 126
}
