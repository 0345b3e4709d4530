package shell

import (
	"maps"
	"os"
	"slices"
	"strings"

	"mvdan.cc/sh/v3/syntax"
)

// A command could notice which shell runs it. `bash -c` and the shell ahead differ in
// how they were started (BASH_EXECUTION_STRING, what ps shows), in how deep they are
// (set -x writes "++" for "+", messages about syntax say "eval") and in when they
// started (SECONDS). And only `bash -c` replaces itself by the last program of the
// command: there the agent adds the word exec. A command that could show one of the
// other differences is not for the shell ahead, and neither is a command that the
// parser cannot analyse.

// maxFit bounds the commands that are parsed, in bytes, and fitNests the brackets in
// them: the parser recurses, on the stack of PID 1.
const (
	maxFit   = 16 << 10
	fitNests = 500
)

// A Fit is a command for the shell ahead.
type Fit struct {
	text string
	// at is where the name of the last program is, by which bash replaces itself; -1:
	// it does not.
	at   int
	name string
}

// revealing are words that mean, anywhere in a command, that it may look at its shell.
var revealing = set(`BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND BASH_COMPAT BASH_ENV BASH_EXECUTION_STRING BASH_LINENO
	BASH_LOADABLES_PATH BASH_SOURCE BASH_SUBSHELL BASH_XTRACEFD BASHOPTS SHELLOPTS PIPESTATUS SECONDS FUNCNAME HISTCMD _sandboxd
	proc ps pgrep pkill pidof pstree killall top htop atop lsof fuser pmap strace ltrace gdb psutil`)

// altering are words that change how bash reads, names things or starts programs, or
// that run text which is not parsed here.
var altering = set(`. source eval trap alias unalias shopt enable hash builtin history fc compgen complete compopt bind suspend logout
	caller times ulimit declare typeset local export readonly nameref coproc disown help in else`)

// FitOf returns a command for the shell ahead, or nil. Plain words that name a
// program need no shell: see words.
func FitOf(command string) *Fit {
	if w, ok := words(command); !ok {
		return notices(command)
	} else if twins[w[0]] {
		return &Fit{text: command, at: -1}
	}
	return nil
}

// notices returns a command that cannot tell the shell ahead from another, or
// nil.
func notices(command string) (f *Fit) {
	if len(command) > maxFit || !readable(command) {
		return nil
	}
	nests := 0
	for i := range len(command) {
		if strings.IndexByte("([{`!", command[i]) >= 0 {
			nests++
		}
	}
	if nests > fitNests {
		return nil
	}
	for w := range strings.FieldsFuncSeq(command, func(r rune) bool { return !nameRune(r) }) {
		if revealing[w] {
			return nil
		}
	}
	defer func() {
		if recover() != nil { // it parses foreign text, in PID 1
			f = nil
		}
	}()
	file, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(command), "")
	if err != nil {
		return nil
	}
	v := visitor{text: command, functions: map[string]bool{}}
	syntax.Walk(file, v.visit)
	if v.noticed {
		return nil
	}
	return v.fit(file, command)
}

// readable reports whether bash's read takes s as it is.
func readable(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' && c != '\n' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

func nameRune(r rune) bool {
	return r == '_' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
}

// A visitor sees all of a command once.
type visitor struct {
	text      string
	functions map[string]bool
	heredoc   bool
	noticed   bool
}

func (v *visitor) visit(node syntax.Node) bool {
	switch n := node.(type) {
	case *syntax.CoprocClause, *syntax.ProcSubst, *syntax.ExtGlob, *syntax.TestDecl, *syntax.LetClause:
		v.noticed = true
	case *syntax.FuncDecl:
		v.functions[n.Name.Value] = true
		v.noticed = v.noticed || !compound(n.Body) // the parser takes f() ls, bash does not
	case *syntax.TestClause:
		v.noticed = v.noticed || n.Pos().Line() != n.End().Line() // the parser takes more line ends than bash
	case *syntax.TimeClause:
		v.noticed = v.noticed || n.Stmt == nil
	case *syntax.BinaryCmd:
		if _, ok := n.Y.Cmd.(*syntax.TimeClause); ok && n.Op != syntax.AndStmt && n.Op != syntax.OrStmt {
			v.noticed = true // after a pipe it is a program
		}
	case *syntax.Redirect:
		v.heredoc = v.heredoc || n.Hdoc != nil
		v.noticed = v.noticed || !v.target(n)
	case *syntax.ParamExp:
		// ${!a} is any variable, ${a@P} any text.
		v.noticed = v.noticed || n.Excl || n.Exp != nil && n.Exp.Op == syntax.OtherParamOps
	case *syntax.DeclClause:
		v.noticed = v.noticed || !declares(n)
	case *syntax.CallExpr:
		v.noticed = v.noticed || len(n.Args) > 0 && !v.plain(n)
	}
	return !v.noticed
}

// target reports whether bash, like the parser, reads r's word as the target of r: not
// the 2 of "> 2>&1", and nothing after a comment.
func (v *visitor) target(r *syntax.Redirect) bool {
	end := int(r.Word.End().Offset())
	digits := strings.Trim(r.Word.Lit(), "0123456789") == ""
	return r.OpPos.Line() == r.Word.Pos().Line() && !(digits && end < len(v.text) && strings.IndexByte("<>", v.text[end]) >= 0)
}

// compound reports whether bash takes s as the body of a function.
func compound(s *syntax.Stmt) bool {
	switch s.Cmd.(type) {
	case *syntax.Block, *syntax.Subshell, *syntax.IfClause, *syntax.ForClause, *syntax.WhileClause,
		*syntax.CaseClause, *syntax.ArithmCmd, *syntax.TestClause:
		return !s.Negated
	}
	return false
}

// declares reports whether d gives variables values or one of a few attributes.
// Without a name it would list all variables, also the shell's own.
func declares(d *syntax.DeclClause) bool {
	named := false
	for _, a := range d.Args {
		if a.Name != nil {
			named = true
			continue
		}
		if flags := a.Value.Lit(); len(flags) < 2 || flags[0] != '-' || strings.Trim(flags[1:], "aAilrxg") != "" {
			return false
		}
	}
	return named && d.Variant.Value != "nameref"
}

// plain reports whether the name that c calls is known, and is not altering.
func (v *visitor) plain(c *syntax.CallExpr) bool {
	name := c.Args[0].Lit()
	if name == "" || altering[name] || name != "[" && strings.ContainsAny(name, `*?[]{}\!`) {
		return false
	}
	switch name {
	case "command":
		return len(c.Args) > 1 && c.Args[1].Lit() == "-v"
	case "mapfile", "readarray", "jobs":
		// Their -C and -x run what follows.
		return !slices.ContainsFunc(c.Args[1:], func(w *syntax.Word) bool {
			s := w.Lit()
			return s == "" || s[0] == '-' && strings.ContainsAny(s, "Cx")
		})
	case "printf":
		last := c.Args[len(c.Args)-1]
		return !strings.Contains(v.text[c.Pos().Offset():last.End().Offset()], "%(") // %(…)T can print when the shell was started
	case "set":
		return harmlessSet(c.Args[1:])
	}
	return true
}

// harmlessSet accepts the options that scripts begin with, and positional parameters.
func harmlessSet(args []*syntax.Word) bool {
	for i := 0; i < len(args); i++ {
		switch w := args[i].Lit(); w {
		case "--":
			return i+1 < len(args)
		case "-e", "-u", "-f", "-eu", "-ue", "+e", "+u", "+f":
		case "-o", "+o", "-eo", "-euo", "-ueo":
			i++
			if i == len(args) {
				return false
			}
			switch args[i].Lit() {
			case "pipefail", "errexit", "nounset", "noglob":
			default:
				return false
			}
		default:
			return false
		}
	}
	return len(args) > 0
}

// fit finds the program that `bash -c` would replace itself by, as bash 5.1 and
// 5.2 do (should_suppress_fork and can_optimize_connection in its execute_cmd.c):
// a simple command without redirections that ends the text, alone, or behind
// ";", "&&" or "||".
func (v *visitor) fit(file *syntax.File, command string) *Fit {
	f := &Fit{text: command, at: -1}
	n := len(file.Stmts)
	if n == 0 {
		return f
	}
	last, line := file.Stmts[n-1], false // line: bash reads it together with something before it
	if n > 1 {
		line = file.Stmts[n-2].End().Line() == last.Pos().Line()
	}
	c, alone := simple(last), n == 1
	if b, ok := last.Cmd.(*syntax.BinaryCmd); ok && !line && (b.Op == syntax.AndStmt || b.Op == syntax.OrStmt) && runs(last) {
		c, alone = simple(b.Y), false
	} else if line && file.Stmts[n-2].Background {
		c = nil
	}
	if c == nil {
		return f
	}
	name := c.Args[0].Lit()
	switch {
	case v.functions[name]:
		if !defines(file, name) || mentions(command, "unset") {
			return nil // it may not be one when it is called
		}
		return f
	case shellOwn[name], twins[name]:
		return f
	}
	rest := command[last.End().Offset():]
	if i := strings.IndexByte(rest, '\n'); i >= 0 && i != len(rest)-1 {
		if v.heredoc {
			return nil // it is a part of the line, or several lines
		}
		return f // bash sees that the text goes on, but not that nothing follows
	}
	switch {
	case v.functions["exec"]:
		return nil
	case strings.Contains(name, "/") && name[0] != '/':
		return nil // exec would make it absolute, and a script sees its name
	case !alone && strings.Contains(command, "\\\n"):
		return nil // what looks like two lines may be one
	case mentions(command, "PATH"), mentions(command, "SHLVL"):
		return nil // the program may be another, and exec counts SHLVL down
	}
	f.at, f.name = int(c.Args[0].Pos().Offset()), name
	return f
}

// simple returns the call of s, if s is nothing but a call.
func simple(s *syntax.Stmt) *syntax.CallExpr {
	c, ok := s.Cmd.(*syntax.CallExpr)
	if !ok || !runs(s) || len(c.Args) == 0 {
		return nil
	}
	return c
}

// runs reports whether s runs in the foreground, without redirections and without
// negation.
func runs(s *syntax.Stmt) bool {
	return !s.Background && !s.Negated && !s.Coprocess && !s.Disown && len(s.Redirs) == 0
}

// defines reports whether file defines a function whatever else happens in it.
func defines(file *syntax.File, name string) bool {
	return slices.ContainsFunc(file.Stmts, func(s *syntax.Stmt) bool {
		d, ok := s.Cmd.(*syntax.FuncDecl)
		return ok && d.Name.Value == name && runs(s)
	})
}

func mentions(command, name string) bool {
	for w := range strings.FieldsFuncSeq(command, func(r rune) bool { return !nameRune(r) }) {
		if w == name {
			return true
		}
	}
	return false
}

// complete returns the text for the shell ahead, or reports false if the last program
// may not exist or not be executable.
func (f *Fit) complete(env map[string]string) (string, bool) {
	if f.at < 0 {
		return f.text, true
	}
	path := f.name
	if path[0] != '/' {
		path = LookPath(path, env["PATH"])
	}
	fi, err := os.Stat(path)
	if err != nil || !fi.Mode().IsRegular() || fi.Mode().Perm()&0o111 != 0o111 {
		return "", false // the message is the shell's to give
	}
	// Unlike a program that bash calls, a program started by exec gets no "_".
	return f.text[:f.at] + "_=" + quoteLine(path) + " exec " + f.text[f.at:], true
}

// ownName reports whether bash treats a variable of this name differently if it is set
// when bash starts than if it is set later.
func ownName(k string) bool {
	return strings.HasPrefix(k, "BASH") || slices.Contains(quirks, k)
}

// laterNames may be in the environment with which the shell ahead starts, but cannot be
// set later.
var laterNames = set(`SHLVL PS4 LANG LANGUAGE TEXTDOMAIN TEXTDOMAINDIR TZ GLOBIGNORE EXECIGNORE FIGNORE FUNCNEST OPTERR CHILD_MAX TIMEFORMAT
	TMOUT PROMPT_COMMAND HISTFILE HISTSIZE HISTFILESIZE HISTCONTROL HISTIGNORE HISTTIMEFORMAT IGNOREEOF MAILCHECK MAILPATH MAIL histchars
	COLUMNS LINES TERM TERMCAP TERMINFO CDPATH READLINE_LINE READLINE_POINT INPUTRC COPROC REPLY HOSTNAME HOSTTYPE MACHTYPE OSTYPE
	INSIDE_EMACS EMACS
	PS1 PS2 COMP_WORDBREAKS GLIBC_TUNABLES GCONV_PATH LOCPATH NLSPATH TZDIR OUTPUT_CHARSET`)

// laterPrefixes begin such names: of the locale, of the loader, and of malloc.
var laterPrefixes = []string{"LC_", "LD_", "MALLOC_"}

// exports returns the words of an export that makes env of base, or reports
// false if none does.
func exports(base, env map[string]string) (words string, ok bool) {
	for k := range base {
		if _, ok := env[k]; !ok {
			return "", false
		}
	}
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(env)) {
		v := env[k]
		if old, ok := base[k]; ok && old == v {
			continue
		}
		prefixed := slices.ContainsFunc(laterPrefixes, func(p string) bool { return strings.HasPrefix(k, p) })
		if !identifier(k) || ownName(k) || laterNames[k] || prefixed || !readable(v) {
			return "", false
		}
		b.WriteString(" " + k + "=" + quoteLine(v))
	}
	return b.String(), true
}

// quoteLine is quote without line ends, which would change the numbers of lines.
func quoteLine(s string) string { return strings.ReplaceAll(Quote(s), "\n", `'$'\n''`) }

func identifier(s string) bool {
	return s != "" && (s[0] < '0' || s[0] > '9') && strings.IndexFunc(s, func(r rune) bool { return !nameRune(r) }) < 0
}
