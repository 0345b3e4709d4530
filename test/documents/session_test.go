package documents

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// commandLimit is the time after which a command of a document counts as hanging.
const commandLimit = 2 * time.Minute

// A session is one bash, in which all commands of a document run.
type session struct {
	t      *testing.T
	dir    string
	env    []string
	cmd    *exec.Cmd
	script *os.File // bash reads its commands here; their stdin is /dev/null
	lines  chan string
}

// endOf is printed after each command, before its exit status.
const endOf = "end-of-command-of-the-document"

// newSession starts bash in an empty directory.
func newSession(t *testing.T, env []string) *session {
	t.Helper()
	s := &session{t: t, dir: t.TempDir(), env: env, lines: make(chan string)}
	script, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	s.script = w
	s.cmd = s.command("bash", "--noprofile", "--norc", "/dev/fd/3")
	s.cmd.ExtraFiles = []*os.File{script}
	printed, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	s.cmd.Stdout, s.cmd.Stderr = out, out
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	script.Close()
	out.Close()
	go func() {
		defer close(s.lines)
		for lines := bufio.NewScanner(printed); lines.Scan(); {
			s.lines <- lines.Text()
		}
	}()
	t.Cleanup(func() {
		w.Close()
		_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL)
		for range s.lines { // until the last process closes it
		}
		_ = s.cmd.Wait()
		printed.Close()
	})
	return s
}

func (s *session) command(name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(s.t.Context(), name, args...)
	cmd.Dir, cmd.Env = s.dir, s.env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// run runs a command and returns what it prints, on stdout and stderr, and its
// exit status, which is $? of the next command.
func (s *session) run(text string) (printed []string, status int, err error) {
	// A command need not end its last line: the line before the end may be empty.
	if _, err := fmt.Fprintf(s.script, "%s\nstatus=$?; printf '\\n%s %%d\\n' $status; (exit $status)\n", text, endOf); err != nil {
		return nil, 0, fmt.Errorf("the shell has ended: %w", err)
	}
	limit := time.After(hosttest.Patient(commandLimit))
	for {
		select {
		case line, ok := <-s.lines:
			if !ok {
				return printed, 0, fmt.Errorf("the shell has ended")
			}
			if end, ok := strings.CutPrefix(line, endOf+" "); ok {
				status, err := strconv.Atoi(end)
				if n := len(printed); n > 0 && printed[n-1] == "" {
					printed = printed[:n-1]
				}
				return printed, status, err
			}
			printed = append(printed, line)
		case <-limit:
			return printed, 0, fmt.Errorf("it runs for more than %s", commandLimit)
		}
	}
}

// prompt is a line at a terminal in a sandbox: the prompt and what is typed there.
var prompt = regexp.MustCompile(`^(root@\w+:\S*# )(.+)$`)

// atTerminal reports whether a command shows a prompt, and so runs at a terminal.
func (c command) atTerminal() bool {
	return len(c.prints) > 0 && prompt.MatchString(c.prints[0])
}

// unseen matches what a terminal does not show: carriage returns, and the sequences that
// switch bracketed paste on and off.
var unseen = regexp.MustCompile(`\r|\x1b\[\?2004[hl]`)

// keys are how a document writes keys that are no text.
var keys = strings.NewReplacer("^P", "\x10", "^Q", "\x11")

// runAtTerminal runs a command at a terminal. When a prompt appears, it types what the
// document shows after that prompt. It returns what the terminal shows.
func (s *session) runAtTerminal(c command) (printed []string, status int, err error) {
	cmd := s.command("script", "--quiet", "--return", "--flush", "--command", c.text, "/dev/null")
	cmd.Env = append(cmd.Env, "TERM=dumb", "SHELL=/bin/bash")
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, 0, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, 0, err
	}
	if err := cmd.Start(); err != nil {
		return nil, 0, err
	}
	limit := time.AfterFunc(hosttest.Patient(commandLimit), func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	defer limit.Stop()
	var shown []byte
	fresh := 0 // where the output since the last keys begins; the next prompt comes after it
	for _, line := range c.prints {
		m := prompt.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		var b [4096]byte
		for err == nil && !bytes.HasSuffix(shown[fresh:], []byte(m[1])) {
			var n int
			n, err = out.Read(b[:])
			shown = append(shown, b[:n]...)
		}
		typed := keys.Replace(m[2])
		if typed == m[2] {
			typed += "\r"
		} else {
			shown = append(shown, m[2]...) // a terminal does not show them
		}
		fresh = len(shown)
		if _, err := io.WriteString(in, typed); err != nil {
			break
		}
	}
	rest, _ := io.ReadAll(out)
	_ = cmd.Wait()
	text := unseen.ReplaceAllString(string(append(shown, rest...)), "")
	return strings.Split(strings.TrimRight(text, "\n"), "\n"), cmd.ProcessState.ExitCode(), nil
}
