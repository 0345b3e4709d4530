package shell

import (
	"cmp"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/agent/command"
)

// A shell line of nothing but plain words needs no shell: `bash -c 'ls /tmp'` ends as
// execve("/bin/ls") in the very process bash ran in. Doing that at once saves the start
// of bash, 10 ms under gVisor. The program cannot see a difference: pid, process group,
// parent, signals, exit code, and the three variables that bash exports (PWD, SHLVL, _)
// are the same. Words that may have a meaning for a shell go to the shell. So do
// programs that cannot be found or executed, because the shell gives the message and
// the 126 or 127.

// Ways returns how a line is executed in dir, which has no symbolic links: by itself if
// it is plain words, with the shell as the second way, or by the shell. It reports
// false if a shell is needed and the image has none.
func Ways(line string, env map[string]string, dir string) (first command.Way, second func() *command.Way, ok bool) {
	sh := func() *command.Way {
		path := FindShell(env["PATH"])
		if path == "" {
			return nil
		}
		return &command.Way{Path: path, Argv: []string{filepath.Base(path), "-c", line}, Env: Environ(env)}
	}
	if w, ok := words(line); ok {
		if path, environ, ok := direct(w, env, dir); ok {
			return command.Way{Path: path, Argv: w, Env: environ}, sh, true
		}
	}
	w := sh()
	if w == nil {
		return first, nil, false
	}
	return *w, nil, true
}

// words splits line into words without a special meaning, or reports false.
func words(line string) ([]string, bool) {
	for i := range len(line) {
		c := line[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		case strings.IndexByte(" ./_-=:,+@%", c) >= 0:
		default:
			return nil, false
		}
	}
	w := strings.Fields(line)
	if len(w) == 0 {
		return nil, false
	}
	first := w[0]
	if strings.ContainsAny(first, "=%") || shellOwn[first] {
		return nil, false // an assignment, a job, or the shell's own
	}
	if first == "echo" {
		for _, a := range w[1:] {
			if a[0] == '-' {
				return nil, false // options differ between builtin and coreutils
			}
		}
	}
	return w, true
}

// shellOwn is what bash or dash execute themselves, but for three builtins
// whose twins in coreutils do the same with plain words: true, false, echo.
var shellOwn = set(`. : [ alias bg bind break builtin caller cd chdir command compgen complete compopt continue declare dirs
		disown enable eval exec exit export fc fg getopts hash help history jobs kill let local logout
		mapfile popd printf pushd pwd read readarray readonly return set shift shopt source suspend test
		times trap type typeset ulimit umask unalias unset wait
		if then else elif fi case esac for select while until do done in function time coproc`)

// twins are those three builtins.
var twins = set("true false echo")

func set(words string) map[string]bool {
	m := map[string]bool{}
	for _, w := range strings.Fields(words) {
		m[w] = true
	}
	return m
}

// quirks are variables that change what bash does or that bash changes.
var quirks = []string{
	"ENV", "SHELLOPTS", "POSIXLY_CORRECT", "POSIX_PEDANTIC", "SSH_CLIENT", "SSH2_CLIENT", "OLDPWD", "PWD", "UID", "EUID",
	"PPID", "SECONDS", "RANDOM", "SRANDOM",
	"EPOCHSECONDS", "EPOCHREALTIME", "LINENO", "DIRSTACK", "GROUPS", "FUNCNAME", "HISTCMD", "IFS", "OPTIND", "_",
}

// direct returns the program and its environment for plain words, or reports
// false if the shell must do it. dir is the physical working directory.
func direct(argv []string, env map[string]string, dir string) (path string, environ []string, ok bool) {
	for k := range env {
		if strings.HasPrefix(k, "BASH") {
			return "", nil, false // BASH_ENV, BASHOPTS, exported functions
		}
	}
	for _, q := range quirks {
		if _, set := env[q]; set {
			return "", nil, false
		}
	}
	level, err := strconv.Atoi(cmp.Or(env["SHLVL"], "0"))
	if err != nil || level < 0 || level > 998 {
		return "", nil, false
	}
	path = argv[0]
	if !strings.Contains(path, "/") {
		if path = LookPath(path, env["PATH"]); path == "" {
			return "", nil, false
		}
	}
	environ = make([]string, 0, len(env)+3)
	for k, v := range env {
		if k != "SHLVL" {
			environ = append(environ, k+"="+v)
		}
	}
	return path, append(environ, "PWD="+dir, "SHLVL="+strconv.Itoa(level), "_="+path), true
}
