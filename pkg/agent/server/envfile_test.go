package server

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func TestEnvFile(t *testing.T) {
	for text, want := range map[string]map[string]string{
		"":                                 {},
		"A=1":                              {"A": "1"},
		"A=1\nB=2\n":                       {"A": "1", "B": "2"},
		"# A=1\n  # B=2\n\n \t\nC=3":       {"C": "3"},
		"  A  =  two words  \r\n":          {"A": "two words"},
		"A=b=c==":                          {"A": "b=c=="},
		"A=":                               {"A": ""},
		"=1\nA\n =2\nB=3":                  {"B": "3"},
		"A=$HOME/x:${HOME}:$NOPE.":         {"A": "/home/x:/home:."},
		"A=1\nB=$A$A":                      {"A": "1", "B": "11"},
		"A='$HOME \"x\" \\n #'":            {"A": `$HOME "x" \n #`},
		"A='line1\nline2'\nB=2":            {"A": "line1\nline2", "B": "2"},
		"A=' x '  \r\nB=2":                 {"A": " x ", "B": "2"},
		"A=''\nB=\"\"":                     {"A": "", "B": ""},
		`A="it's $HOME"`:                   {"A": "it's /home"},
		`A="a\nb\rc\td\\n\"e\" \x \$HOME"`: {"A": "a\nb\rc\td\\n\"e\" \\x \\/home"},
		"A=\"two\nlines\"\nB=2":            {"A": "two\nlines", "B": "2"},
		`A="ends with \\"`:                 {"A": `ends with \`},
		"A='x' y\nB=2":                     {"B": "2"},                // text after the quote
		"A=\"x\" # y\nB=2":                 {"B": "2"},                // no comments there either
		"A='x\nB=2":                        {"B": "2"},                // never closed
		"A=\"x\\\"\nB=2":                   {"B": "2"},                // as well
		"A=x'y'\nB=a\"b":                   {"A": "x'y'", "B": `a"b`}, // quotes count at the beginning
		"A=1\nA=2":                         {"A": "2"},
		"A=a\x00b\nB=2":                    {"B": "2"},
		"A = 'x'":                          {"A": "x"},
		"A='":                              {},
	} {
		env := map[string]string{"HOME": "/home"}
		addEnv(env, text)
		delete(env, "HOME")
		if !maps.Equal(env, want) {
			t.Errorf("%q: %q, want %q", text, env, want)
		}
	}
}

// TestEnvFileDoubles: a short file does not make a large environment.
func TestEnvFileDoubles(t *testing.T) {
	env := map[string]string{}
	addEnv(env, "A=0123456789\n"+strings.Repeat("A=$A$A\n", 100)+"B=1\nC=$B")
	if len(env["A"]) > maxEnvFile || env["A"] == "" || env["B"] != "1" || env["C"] != "1" {
		t.Errorf("A has %d bytes, B is %q, C is %q", len(env["A"]), env["B"], env["C"])
	}
}

// FuzzEnvFile: a file is read to its end, and what it sets are variables of a bounded size.
func FuzzEnvFile(f *testing.F) {
	f.Add("A='x\ny'\nB=\"a\\\"\" \n#\nC=$A")
	f.Add("A=0123456789\n" + strings.Repeat("A=$A$A\n", 24) + strings.Repeat("B${A}=$A\n", 3))
	f.Fuzz(func(t *testing.T, text string) {
		for rest := text; rest != ""; {
			before := len(rest)
			if _, _, _, rest = envEntry(rest); len(rest) >= before {
				t.Fatalf("%q is never read to its end", text)
			}
		}
		env := map[string]string{}
		addEnv(env, text)
		size := 0
		for k, v := range env {
			if size += len(k) + len(v); !record.IsVariable(k) || strings.TrimSpace(k) != k || strings.IndexByte(v, 0) >= 0 {
				t.Fatalf("%q sets %q to %q", text, k, v)
			}
		}
		if size > len(text)+maxEnvFile {
			t.Fatalf("%d bytes make an environment of %d", len(text), size)
		}
	})
}

// TestEnvFileOfCommands: every command is told where the file is, and what it says.
func TestEnvFileOfCommands(t *testing.T) {
	e := newEnv(t)
	if got := e.events(agent.CommandRequest{Command: "echo $EXECD_ENVS; env | grep -c ^EXECD_ENVS="}); got != says(envFile, "1") {
		t.Error(got)
	}
	at := filepath.Join(e.dir, "env")
	e = newEnvWith(t, agent.Bootstrap{Env: map[string]string{"EXECD_ENVS": at, "A": "boot"}})
	// As SDKs do it.
	set := `mkdir -p "$(dirname "$EXECD_ENVS")"; printf '%s\n' 'A='\''it is
$5'\''' >> "$EXECD_ENVS"`
	if got := e.events(agent.CommandRequest{Command: set}); got != "complete" {
		t.Error(got)
	}
	if got := e.events(agent.CommandRequest{Command: `echo "[$A]"`}); got != says("[it is", "$5]") {
		t.Error(got)
	}
	if got := e.in(e.session(nil), `echo "[$A]"`); got != says("[it is", "$5]") {
		t.Errorf("in a session: %s", got)
	}
	if got := e.events(agent.CommandRequest{Command: `echo $A`, Envs: map[string]string{"A": "mine"}}); got != says("mine") {
		t.Error(got)
	}
	if err := os.Remove(at); err != nil {
		t.Fatal(err)
	}
	if got := e.events(agent.CommandRequest{Command: `echo $A`}); got != says("boot") {
		t.Error(got)
	}
}

// TestEnvFileOfAnotherUser: who is not root finds a file to write to.
func TestEnvFileOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		return // only root can give files away; the root tests come here as root
	}
	e := newEnvWith(t, agent.Bootstrap{User: "65534:65534"})
	at := filepath.Join(e.dir, "opt", "env")
	e.s.guest().makeEnvFile(at)
	fi, err := os.Stat(at)
	if err != nil || fi.Mode().Perm() != 0o600 || fi.Sys().(*syscall.Stat_t).Uid != 65534 {
		t.Errorf("%v, %v", fi, err)
	}
}
