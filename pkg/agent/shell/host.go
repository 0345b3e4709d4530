// Package shell runs lines of shell. It runs lines that need no shell without one.
//
//	POST /command ─ Ways ─ plain words ──────────────▶ the program itself
//	                 └──── FitOf ─ Ahead ─ Waiting ──▶ a bash that was started before
//	                         └─────────────────────▶ bash -c
//	POST /session ─ Sessions ─ session ─ shell ──────▶ one bash from run to run
//
// The surprise: a command cannot tell which way it went. A parser of bash's language
// finds commands that could tell (notice.go), and those get a bash of their own.
package shell

import (
	"syscall"

	"github.com/sandboxd/sandboxd/pkg/agent/command"
)

// Host is what the shells of a sandbox need to start.
type Host struct {
	Commands *command.Registry
	Guest    Guest
	Stopping func() bool // nothing new is started
}

// Guest finds environments and directories as for commands. The server implements it.
// All methods except Env and Cred access files, so call them in a turn.
type Guest interface {
	// Cred is whose shells are; nil: the agent's own.
	Cred() *syscall.Credential
	// Env is the environment of a command that asks for none. The caller may change it.
	Env() (map[string]string, error)
	// WorkingDir expands and checks a directory, "" for the image's. It returns it as named and
	// without symbolic links.
	WorkingDir(cwd string, env map[string]string) (dir, real string, err error)
	// MakeDir makes a directory, and what is missing above it, for the user.
	MakeDir(cwd string, env map[string]string) error
	// DirFrom expands and checks a directory; a relative path begins at from.
	DirFrom(from, cwd string, env map[string]string) (string, error)
}
