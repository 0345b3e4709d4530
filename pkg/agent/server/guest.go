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
	"sync/atomic"
	"syscall"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/files"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/shell"
)

// guest holds what a command starts with unless its request says otherwise: user, environment
// and directory. An adoption puts another in its place.
type guest struct {
	user     proc.Identity
	cred     *syscall.Credential // what a child must change to be user
	accounts *proc.Accounts
	workdir  string                            // of the image
	env      map[string]string                 // of image and sandbox, and what a pre-script exports; HOME only if these set it
	given    atomic.Pointer[map[string]string] // variables over those, which the host may replace; never nil
	files    files.Files
}

// guest is what starts now starts with.
func (s *Server) guest() *guest { return s.who.Load() }

// newGuest resolves the user of the image.
func (s *Server) newGuest(b *agent.Bootstrap) (*guest, error) {
	workdir := cmp.Or(b.Workdir, "/")
	if !filepath.IsAbs(workdir) {
		return nil, fmt.Errorf("working directory %q of the image is not absolute", workdir)
	}
	g := &guest{workdir: workdir, accounts: &proc.Accounts{Passwd: "/etc/passwd", Group: "/etc/group"}}
	var err error
	if g.user, err = g.accounts.Resolve(b.User); err != nil {
		return nil, fmt.Errorf("USER of the image: %w; build the image with a user that it has, or with a number", err)
	}
	g.cred = g.user.Credential()
	g.env = baseEnv(b)
	g.given.Store(&b.Variables)
	limits := func() agent.Limits { return *s.limits.Load() }
	g.files = files.Files{Accounts: g.accounts, Workdir: workdir, StateDir: string(s.state), User: g.user, Limits: limits}
	g.files.User.Home = home(g.env, g.user)
	return g, nil
}

// baseEnv has nothing of the agent's own environment, which the runtime has made: it adds the
// HOME of guest root.
func baseEnv(b *agent.Bootstrap) map[string]string {
	env := map[string]string{
		"PATH":       "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"EXECD_ENVS": envFile,
	}
	if b.Hostname != "" {
		env["HOSTNAME"] = b.Hostname
	}
	maps.Copy(env, b.Env)
	return env
}

// home is HOME as docker has it: that of env if it is set, also for another user, or else the
// directory that /etc/passwd has for the user.
func home(env map[string]string, id proc.Identity) string { return cmp.Or(env["HOME"], id.Home) }

// identityFor returns whom the command runs as: USER, or uid with the group and
// groups the guest gives it, or gid alone.
func (g *guest) identityFor(req *agent.CommandRequest) (proc.Identity, error) {
	if req.UID == nil {
		return g.user, nil
	}
	spec := strconv.FormatInt(*req.UID, 10)
	if req.GID != nil {
		spec += ":" + strconv.FormatInt(*req.GID, 10)
	}
	return g.accounts.Resolve(spec)
}

// envOf is the environment of a program of the guest that nobody asks for, if it runs as id.
func (g *guest) envOf(id proc.Identity) map[string]string {
	env := maps.Clone(g.env)
	maps.Copy(env, *g.given.Load())
	env["HOME"] = home(env, id)
	return env
}

// commandEnv stacks: image and sandbox; what the host gives; HOME, if they have none; the file
// named by EXECD_ENVS, read anew each time; the request.
func (g *guest) commandEnv(req *agent.CommandRequest, id proc.Identity) (map[string]string, error) {
	env := g.envOf(id)
	if path := cmp.Or(req.Envs["EXECD_ENVS"], env["EXECD_ENVS"]); path != "" {
		if err := addEnvFile(env, path); err != nil {
			return nil, err
		}
	}
	maps.Copy(env, req.Envs)
	return env, nil
}

// Env is the environment of a command that asks for none.
func (g *guest) Env() (map[string]string, error) {
	return g.commandEnv(&agent.CommandRequest{}, g.user)
}

// WorkingDir expands and checks cwd. It returns the directory as named, to
// change into, and without symbolic links, to be PWD.
func (g *guest) WorkingDir(cwd string, env map[string]string) (dir, real string, err error) {
	if cwd == "" {
		cwd = g.workdir
	} else if cwd, err = expandFrom(g.workdir, cwd, env); err != nil {
		return "", "", err
	}
	real, err = files.Physical(cwd)
	if err != nil {
		return "", "", fmt.Errorf("cwd: %w", err)
	}
	return cwd, real, nil
}

// MakeDir makes cwd, and what is missing above it, for the user.
func (g *guest) MakeDir(cwd string, env map[string]string) error {
	dir, err := expandFrom(g.workdir, cwd, env)
	if err != nil {
		return err
	}
	if err := g.files.MakeDir(dir); err != nil {
		return fmt.Errorf("cwd: %w", err)
	}
	return nil
}

// DirFrom expands and checks cwd; a relative one begins at from.
func (g *guest) DirFrom(from, cwd string, env map[string]string) (string, error) {
	dir, err := expandFrom(from, cwd, env)
	if err != nil {
		return "", err
	}
	if _, err := files.Physical(dir); err != nil {
		return "", fmt.Errorf("cwd: %w", err)
	}
	return dir, nil
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

// present is the guest of the moment, to shells.
type present struct{ s *Server }

var _ shell.Guest = present{}

func (p present) Cred() *syscall.Credential { return p.s.guest().cred }

func (p present) Env() (map[string]string, error) { return p.s.guest().Env() }

func (p present) WorkingDir(cwd string, env map[string]string) (dir, real string, err error) {
	return p.s.guest().WorkingDir(cwd, env)
}

func (p present) MakeDir(cwd string, env map[string]string) error {
	return p.s.guest().MakeDir(cwd, env)
}

func (p present) DirFrom(from, cwd string, env map[string]string) (string, error) {
	return p.s.guest().DirFrom(from, cwd, env)
}
