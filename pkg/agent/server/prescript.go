package server

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/shell"
)

// Variables of the image or the sandbox select what OpenSandbox's bootstrap.sh does
// before and with the entrypoint:
//
//	EXECD_BOOTSTRAP_PRE_SCRIPT  a file that a shell reads first (as by "."): what it exports
//	                            the entrypoint has, and every command. It ends the sandbox
//	                            where it fails.
//	BOOTSTRAP_CMD               shell text to run in place of the entrypoint
//	BOOTSTRAP_SHELL             the shell of that, and of an entrypoint "-c", TEXT
const (
	preScriptVar = "EXECD_BOOTSTRAP_PRE_SCRIPT"
	shellTextVar = "BOOTSTRAP_CMD"
	shellVar     = "BOOTSTRAP_SHELL"
)

// maxExported bounds the environment that a pre-script exports, in bytes. It is more
// than the kernel allows a program.
const maxExported = 8 << 20

// entrypointArgs is the entrypoint as it is executed.
func (g *guest) entrypointArgs(argv []string) ([]string, error) {
	text := g.env[shellTextVar]
	switch {
	case text != "":
	case len(argv) > 0 && argv[0] == "-c":
		text = strings.Join(argv[1:], " ")
	default:
		return argv, nil
	}
	sh := g.env[shellVar]
	if sh == "" {
		sh = shell.FindShell(g.env["PATH"])
	}
	if sh == "" {
		return nil, fmt.Errorf("run %.64q: this image has neither bash nor sh; "+
			"set the entrypoint to a program and its arguments, or name a shell in %s", text, shellVar)
	}
	return []string{sh, "-c", text}, nil
}

// A preScript is the shell that becomes the entrypoint once it has read a file.
type preScript struct {
	exported *os.File // the environment then, each entry ended by NUL
	end      int      // the shell's
}

// withPreScript puts the shell that reads the pre-script, if there is one, before the entrypoint.
func (g *guest) withPreScript(argv []string) ([]string, *preScript, error) {
	script, path := g.env[preScriptVar], g.env["PATH"]
	if script == "" {
		return argv, nil, nil
	}
	sh := shell.LookPath("sh", path)
	if sh == "" {
		if sh = shell.FindShell(path); sh == "" {
			return nil, nil, fmt.Errorf("read %s=%.64q: this image has neither bash nor sh", preScriptVar, script)
		}
	}
	env := shell.LookPath("env", path)
	if env == "" {
		return nil, nil, fmt.Errorf("read %s=%.64q: the program env, which reads the variables that the script exports, "+
			"is not in the image's PATH (%s)", preScriptVar, script, path)
	}
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("make a pipe for the pre-script: %w", err)
	}
	syscall.SetNonblock(p[0], true) //nolint:errcheck // cannot fail on a pipe
	file := script
	if !strings.Contains(file, "/") {
		file = "./" + file // "." would look for it in PATH
	}
	text := fmt.Sprintf(`if [ -f %[1]s ] && [ -r %[1]s ]; then echo %[2]s; set -e; . %[1]s 3>&-; else echo %[3]s >&2; fi; `+
		`set -e; %[4]s -0 >&3; exec 3>&-; exec "$@"`,
		shell.Quote(file), shell.Quote("sourcing pre-script "+script),
		shell.Quote("warning: "+preScriptVar+"="+script+" not found or not readable"), shell.Quote(env))
	return append([]string{sh, "-c", text, "sh"}, argv...), &preScript{exported: os.NewFile(uintptr(p[0]), "pre-script"), end: p[1]}, nil
}

// endDelay is how long a shell may take to end after it has closed its pipe.
const endDelay = time.Second

// take waits until the shell has read the script, and gives everything that is started
// from now on the environment it had then. It reports false if the script ended it.
func (p *preScript) take(g *guest, entrypoint *command.Command) bool {
	b, err := io.ReadAll(io.LimitReader(p.exported, maxExported))
	p.exported.Close()
	if err != nil || len(b) == 0 { // it ends, or the script has executed another program in its place
		t := time.NewTimer(endDelay)
		defer t.Stop()
		select {
		case <-entrypoint.Done():
			return false
		case <-t.C:
			if entrypoint.Alive() && !entrypoint.Process.Zombie() {
				return true // another program
			}
			<-entrypoint.Done() // it is dead; the reaper is only late
			return false
		}
	}
	env := map[string]string{}
	for kv := range bytes.SplitSeq(b, []byte{0}) {
		if k, v, ok := strings.Cut(string(kv), "="); ok && k != "" {
			env[k] = v
		}
	}
	back := func(k string) {
		if old, ok := g.env[k]; ok {
			env[k] = old
		} else {
			delete(env, k)
		}
	}
	for _, k := range []string{"_", "SHLVL", "PWD", "OLDPWD"} { // the shell's own
		back(k)
	}
	for k, v := range *g.given.Load() { // which the host may take away
		if env[k] == v {
			back(k)
		}
	}
	if env["HOME"] == g.user.Home { // each user has another
		back("HOME")
	}
	g.env = env
	g.files.User.Home = home(env, g.user)
	return true
}
