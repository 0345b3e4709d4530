package server

import (
	"cmp"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
	"github.com/sandboxd/sandboxd/pkg/agent/shell"
)

// A launch is a request made ready to start.
type launch struct {
	command.Launch

	offer shell.Offer // the same for the shell ahead
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
	proc.BriefTurns.Do(func() {
		l, err = s.guest().resolve(req)
		if err == nil && s.ahead.On.Load() && len(req.Argv) == 0 && req.UID == nil && !req.Stdin && !req.Forget {
			l.offer.Fit = shell.FitOf(req.Command)
		}
	})
	return l, err
}

// find looks for the program or the shell.
func (l *launch) find(req *agent.CommandRequest) (err error) {
	proc.BriefTurns.Do(func() { err = l.resolve(req) })
	return err
}

func (g *guest) resolve(req *agent.CommandRequest) (*launch, error) {
	if err := command.Check(req); err != nil {
		return nil, reply.BadRequest("%v", err)
	}
	id, err := g.identityFor(req)
	if err != nil {
		return nil, reply.BadRequest("%v", err)
	}
	env, err := g.commandEnv(req, id)
	if err != nil {
		return nil, reply.BadRequest("%v", err)
	}
	dir, real, err := g.WorkingDir(req.Cwd, env)
	if err != nil {
		return nil, reply.BadRequest("%v", err)
	}
	l := &launch{Launch: command.Launch{Dir: dir, Cred: g.cred}, offer: shell.Offer{Env: env, Dir: real}}
	if req.UID != nil {
		l.Cred = id.Credential()
	}
	return l, nil
}

func (l *launch) resolve(req *agent.CommandRequest) error {
	env := l.offer.Env
	if len(req.Argv) > 0 {
		l.Way = command.Way{Path: req.Argv[0], Argv: req.Argv, Env: shell.Environ(env)}
		if !strings.Contains(l.Path, "/") {
			l.Path = shell.LookPath(l.Path, env["PATH"])
		}
		return nil
	}
	var ok bool
	if l.Way, l.Shell, ok = shell.Ways(req.Command, env, l.offer.Dir); !ok {
		return reply.BadRequest("this image has neither bash nor sh: send the program and its arguments as argv")
	}
	return nil
}

// prepareTerminal is prepare for a terminal.
func (s *Server) prepareTerminal(req *agent.PtyRequest) (*command.Launch, error) {
	c := &agent.CommandRequest{
		Command: req.Command, Argv: req.Argv, Cwd: req.Cwd, UID: req.UID, GID: req.GID,
		Envs: req.Envs, Timeout: req.Timeout,
	}
	if c.Command == "" && len(c.Argv) == 0 {
		sh := shell.FindShell(cmp.Or(req.Envs["PATH"], s.guest().env["PATH"]))
		if sh == "" {
			return nil, reply.BadRequest("this image has neither bash nor sh: send the program and its arguments as argv")
		}
		c.Argv = []string{sh}
	}
	l, err := s.prepare(c)
	if err != nil {
		return nil, err
	}
	return &l.Launch, nil
}
