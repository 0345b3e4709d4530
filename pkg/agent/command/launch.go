package command

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// A Launch is what a command is started from. If its first way cannot be executed,
// Shell, if set, finds the second. That costs a dozen system calls, so it is not done
// before.
type Launch struct {
	Way
	Shell func() *Way
	Dir   string
	Cred  *syscall.Credential // nil: as this process
	TTY   bool                // standard input is a terminal, to be that of a session
	// Stdin is standard input, if neither the null device nor a pipe.
	Stdin  *os.File
	More   []uintptr // its descriptors 3, 4, …
	Marker uint64    // see proc.Start; 0: any that is free
}

// A Way is a program with its arguments, the name first, and its environment.
type Way struct {
	Path string // "": there is none of that name
	Argv []string
	Env  []string // KEY=VALUE
}

// DefaultEnv sets a variable unless the environment has it.
func (l *Launch) DefaultEnv(name, value string) {
	set := func(w *Way) *Way {
		if w != nil && !slices.ContainsFunc(w.Env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") }) {
			w.Env = append(w.Env, name+"="+value)
		}
		return w
	}
	set(&l.Way)
	if shell := l.Shell; shell != nil {
		l.Shell = func() *Way { return set(shell()) }
	}
}

// start executes l, by its second way if the first cannot be executed.
func (l *Launch) start(files [3]uintptr) (*proc.Process, error) {
	spec := proc.Spec{
		Path: l.Path, Argv: l.Argv, Env: l.Env, Dir: l.Dir, Cred: l.Cred,
		TTY: l.TTY, Marker: l.Marker, Files: files, More: l.More,
	}
	p, err := proc.Start(spec)
	if err != nil && l.Shell != nil {
		if w := l.Shell(); w != nil {
			spec.Path, spec.Argv, spec.Env = w.Path, w.Argv, w.Env
			p, err = proc.Start(spec)
		}
	}
	return p, err
}

// whyNot says why a program could not be started, and the exit code a shell
// would give: 127 not found, 126 found but not executable.
func whyNot(what, name, path, dir, envPath string, cred *syscall.Credential, err error) (string, int) {
	switch {
	case errors.Is(err, syscall.EINVAL) && beyond(cred): // as setuid(2) and setgid(2) say it of ids without a mapping
		return fmt.Sprintf("%s %q: its user is %d:%d, and on runc a sandbox has only the ids 0 to %d: use another user", what, name,
			cred.Uid, cred.Gid, proc.MaxID), 126
	case path == "":
		return fmt.Sprintf("%s %q: no such file in the image's PATH (%s)", what, name, envPath), 127
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ENOTDIR):
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		if _, statErr := os.Stat(path); statErr == nil {
			return fmt.Sprintf("%s %q: the file exists, but %s does not", what, name, interpreterOf(path)), 127
		}
		return fmt.Sprintf("%s %q: no such file in the image", what, name), 127
	case errors.Is(err, syscall.EACCES):
		if fi, statErr := os.Stat(path); statErr == nil && fi.IsDir() {
			return fmt.Sprintf("%s %q: is a directory", what, name), 126
		} else if statErr == nil && fi.Mode()&0o111 == 0 {
			return fmt.Sprintf("%s %q: not executable: its mode is %#o (chmod +x)", what, name, fi.Mode().Perm()), 126
		}
		return fmt.Sprintf("%s %q: not executable by its user, or its user may not enter the working directory %s", what, name, dir), 126
	case errors.Is(err, syscall.ENOEXEC):
		return fmt.Sprintf("%s %q: not a program of this architecture, or a script without #!", what, name), 126
	case errors.Is(err, syscall.EAGAIN):
		return fmt.Sprintf("%s %q: the sandbox has reached its pids limit", what, name), 126
	}
	return fmt.Sprintf("%s %q: %v", what, name, err), 126
}

// interpreterOf says for people which program a script asks for in its first line (execve(2)), or
// a program by its loader.
func interpreterOf(path string) string {
	const unknown = "the loader that it names"
	f, err := proc.OpenRegular(path)
	if err != nil {
		return unknown
	}
	defer f.Close()
	b := make([]byte, 256) // all that the kernel reads
	n, _ := f.Read(b)
	line, ok := strings.CutPrefix(string(b[:n]), "#!")
	if !ok {
		return unknown
	}
	line, _, _ = strings.Cut(line, "\n")
	name, _, _ := strings.Cut(strings.Trim(line, " \t"), " ")
	if strings.HasSuffix(name, "\r") {
		return fmt.Sprintf("its interpreter %.80q (its lines end as on Windows)", name)
	}
	return fmt.Sprintf("its interpreter %.80q", name)
}

// beyond reports whether one of the ids of cred is above proc.MaxID.
func beyond(cred *syscall.Credential) bool {
	return cred != nil && slices.Max(append([]uint32{cred.Uid, cred.Gid}, cred.Groups...)) > proc.MaxID
}

// pathOf is the PATH of an environment.
func pathOf(env []string) string {
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			return v
		}
	}
	return ""
}
