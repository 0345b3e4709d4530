package server

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/files"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// maxArg is what Linux takes as one argument of a program (MAX_ARG_STRLEN).
const maxArg = 128<<10 - 1

// A launch is a request made ready to start.
type launch struct {
	command.Launch

	// What the shell ahead must know; fit is nil if the command is not for it.
	fit  *fit
	vars map[string]string // the environment
	real string            // Dir without symbolic links
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
	l := &launch{Launch: command.Launch{Dir: dir, Cred: s.userCred}, vars: env, real: real}
	if req.UID != nil {
		l.Cred = id.Credential()
	}
	if s.ahead.on && len(req.Argv) == 0 && req.UID == nil && !req.Stdin && !req.Forget {
		l.fit = fitOf(req.Command)
	}
	return l, nil
}

func (l *launch) resolve(req *agent.CommandRequest) error {
	env := l.vars
	if len(req.Argv) > 0 {
		l.Way = command.Way{Path: req.Argv[0], Argv: req.Argv, Env: environ(env)}
		if !strings.Contains(l.Path, "/") {
			l.Path = lookPath(l.Path, env["PATH"])
		}
		return nil
	}
	shell := func() *command.Way {
		sh := findShell(env["PATH"])
		if sh == "" {
			return nil
		}
		return &command.Way{Path: sh, Argv: []string{filepath.Base(sh), "-c", req.Command}, Env: environ(env)}
	}
	if w, ok := words(req.Command); ok {
		if path, environ, ok := direct(w, env, l.real); ok {
			l.Way, l.Shell = command.Way{Path: path, Argv: w, Env: environ}, shell
			return nil
		}
	}
	w := shell()
	if w == nil {
		return reply.BadRequest("this image has neither bash nor sh: give the program and its arguments as argv")
	}
	l.Way = *w
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
