package server

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/pkg/agent/interpreter"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
	"github.com/sandboxd/sandboxd/pkg/agent/shell"
)

// drivers starts the drivers of contexts, as the guest's user.
type drivers struct{}

func (drivers) Look(name string, env map[string]string) (path string) {
	proc.BriefTurns.Do(func() {
		if !strings.Contains(name, "/") {
			path = shell.LookPath(name, env["PATH"])
			return
		}
		found, _ := filepath.Glob(name) // the patterns are ours
		for _, p := range found {
			if shell.Executable(p) {
				path = p
			}
		}
	})
	return path
}

func (drivers) Terminal(p interpreter.Place) (*os.File, int, error) {
	return proc.OpenTTY(0, 0, p.Cred)
}

func (drivers) Go(f func()) { go proc.Guarded(f) }

func (drivers) Start(path string, argv []string, p interpreter.Place, fds []uintptr) (interpreter.Process, error) {
	started, err := proc.Start(proc.Spec{
		Path: path, Argv: argv, Env: shell.Environ(p.Env), Dir: p.Dir, Cred: p.Cred,
		Files: [3]uintptr(fds[:3]), More: fds[3:], Mortal: true,
	})
	if err != nil {
		return nil, err
	}
	return driver{started}, nil
}

// driver is what a context's driver is to the interpreter.
type driver struct{ p *proc.Process }

func (d driver) Done() <-chan struct{}      { return d.p.Done() }
func (d driver) Status() syscall.WaitStatus { return d.p.Status }
func (d driver) Interrupt()                 { d.p.Signal(syscall.SIGINT, true) } //nolint:errcheck // gone is what is wanted
func (d driver) Urge()                      { d.p.Urge() }
func (d driver) Quit()                      { d.p.Signal(syscall.SIGQUIT, true) } //nolint:errcheck // gone is what is wanted
func (d driver) Kill()                      { d.p.KillTree() }

// KillLeft uses only the marker: another process may have the driver's pid by now.
func (d driver) KillLeft() {
	if d.p.Marker != 0 {
		proc.KillAll(func() []int { return proc.Marked(func(m uint64) bool { return m == d.p.Marker }, 0) })
	}
}

var (
	_ interpreter.Host     = drivers{}
	_ interpreter.Process  = driver{}
	_ interpreter.Listener = (*reply.Stream)(nil)
)
