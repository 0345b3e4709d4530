package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// newTerminalHost is newHost with the image of this package's own recipe.
func newTerminalHost(t *testing.T) host {
	t.Helper()
	recipes, err := filepath.Abs("testdata/rootfs")
	if err != nil {
		t.Fatal(err)
	}
	h := connect(t, daemontest.NewWith(t, daemontest.Options{Recipes: recipes}))
	daemontest.Image(t, h.Daemon, "terminal")
	return h
}

func terminalSpec(runtime string) wire.CreateRequest {
	r := spec(runtime)
	r.Image.URI = "terminal"
	return r
}

// A seat is a terminal with somebody at it, and sandboxctl running there.
type seat struct {
	*testing.T
	tty    *os.File // the far end
	near   *os.File // what sandboxctl has; kept, to look at how it is set
	before unix.Termios
	cmd    *exec.Cmd
	done   chan struct{}

	mu    sync.Mutex
	shown bytes.Buffer
	seen  int // of shown, by says
	more  chan struct{}
}

// sit runs sandboxctl at a new terminal of 100 by 30.
func (l *lab) sit(args ...string) *seat {
	l.Helper()
	far, near := openTerminal(l.T, 100, 30)
	s := &seat{T: l.T, tty: far, near: near, done: make(chan struct{}), more: make(chan struct{}, 1)}
	s.before = s.settings()
	s.cmd = l.command(context.Background(), args...)
	s.cmd.Stdin, s.cmd.Stdout, s.cmd.Stderr = near, near, near
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := s.cmd.Start(); err != nil {
		l.Fatal(err)
	}
	go s.watch()
	go func() { defer close(s.done); _ = s.cmd.Wait() }()
	l.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.done
		near.Close()
		far.Close()
	})
	return s
}

func openTerminal(t *testing.T, cols, rows uint16) (far, near *os.File) {
	t.Helper()
	far, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	fd := int(far.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: cols, Row: rows})
	}
	if err == nil {
		near, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return far, near
}

func (s *seat) settings() unix.Termios {
	s.Helper()
	t, err := unix.IoctlGetTermios(int(s.near.Fd()), unix.TCGETS)
	if err != nil {
		s.Fatal(err)
	}
	return *t
}

func (s *seat) watch() {
	b := make([]byte, 32<<10)
	for {
		n, err := s.tty.Read(b)
		s.mu.Lock()
		s.shown.Write(b[:n])
		s.mu.Unlock()
		select {
		case s.more <- struct{}{}:
		default:
		}
		if err != nil {
			return
		}
	}
}

// says waits until text is shown, after what was waited for before.
func (s *seat) says(text string) {
	s.Helper()
	limit := time.After(hosttest.Patient(30 * time.Second))
	for {
		s.mu.Lock()
		i := bytes.Index(s.shown.Bytes()[s.seen:], []byte(text))
		if i >= 0 {
			s.seen += i + len(text)
		}
		s.mu.Unlock()
		if i >= 0 {
			return
		}
		select {
		case <-s.more:
		case <-limit:
			r := s.rest()
			s.Fatalf("%q is not shown, but ends with %q", text, r[max(0, len(r)-2000):])
		}
	}
}

func (s *seat) rest() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.shown.Bytes()[s.seen:])
}

func (s *seat) types(keys string) {
	s.Helper()
	if _, err := s.tty.WriteString(keys); err != nil {
		s.Fatal(err)
	}
}

func (s *seat) resize(cols, rows uint16) {
	s.Helper()
	if err := unix.IoctlSetWinsize(int(s.tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: cols, Row: rows}); err != nil {
		s.Fatal(err)
	}
}

// isRaw waits until keys mean nothing to this end any more.
func (s *seat) isRaw() {
	s.Helper()
	eventually(s.T, 10*time.Second, func() error {
		if s.settings() == s.before {
			return errors.New("the terminal is not raw")
		}
		return nil
	})
}

// ends waits for sandboxctl to end, and finds the terminal as it was.
func (s *seat) ends(code int) {
	s.Helper()
	select {
	case <-s.done:
	case <-time.After(hosttest.Patient(30 * time.Second)):
		s.Fatalf("sandboxctl does not end; it shows %q", s.rest())
	}
	if got := s.cmd.ProcessState.ExitCode(); got != code {
		s.Errorf("exit status %d, want %d; it shows %q", got, code, s.rest())
	}
	if now := s.settings(); now != s.before {
		s.Errorf("the terminal is left as %+v, was %+v", now, s.before)
	}
}

// prompt is bash with a prompt that is easy to wait for.
var prompt = []string{"env", "PS1=$ ", "bash", "--norc", "--noediting"}

// TestTerminals has people sit at terminals in sandboxes.
func TestTerminals(t *testing.T) {
	h := newTerminalHost(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			id := h.create(t, terminalSpec(runtime)).ID
			for name, tell := range map[string]func(*testing.T, *lab, string){
				"shell": tellShell, "detach": tellDetach, "vim": tellVim, "tmux": tellTmux, "top": tellTop, "run": tellRunAtTerminal,
				"refusals": tellRefusals,
			} {
				t.Run(name, func(t *testing.T) { tell(t, &lab{host: h, T: t, runtime: runtime}, id) })
			}
			h.deleteAll(t)
		})
	}
}

func tellShell(t *testing.T, l *lab, id string) {
	s := l.sit("shell", "-e", "NAME=value", id)
	s.says("# ")
	s.types("PS1='$ '; stty size; echo $TERM; tty; readlink /proc/$$/exe; echo $NAME\r")
	s.says("30 100\r\nxterm-256color\r\n/dev/pts/")
	s.says("/bash\r\nvalue\r\n")
	// Before bash prompts, it reads the terminal's size and sets what it has read
	// (readline, set_winsize): a size that is set in between is lost.
	s.says("$ ")
	s.resize(120, 40)
	// What is typed and what a signal tells come by ways of their own.
	s.types("until [ \"$(stty size)\" = '40 120' ]; do sleep 0.1; done; stty size\r")
	s.says("40 120\r\n")
	s.types("sleep 100\r")
	s.says("sleep 100\r\n")
	eventually(t, 10*time.Second, func() error {
		if out, err := l.exec(t.Context(), id, "pgrep", "-f", "^sleep 100$"); err != nil {
			return fmt.Errorf("no sleep: %s %w", out, err)
		}
		return nil
	})
	s.types("\x03")
	s.says("$ ")
	s.types("echo status $?\r")
	s.says("status 130\r\n")
	s.types("sh -c \"trap 'echo re''sized' WINCH; echo rea''dy; while :; do sleep 0.1; done\"\r")
	s.says("ready\r\n")
	s.resize(90, 20)
	s.says("resized\r\n")
	s.types("\x03")
	s.says("$ ")
	s.types("exit 7\r")
	s.ends(7)

	s = l.sit("exec", "-it", "-w", "/tmp", "-u", "nobody", id, "--", "sh", "-c", "id -un; pwd; test -w \"$(tty)\" && echo mine; kill -9 $$")
	s.says("nobody\r\n/tmp\r\nmine\r\n")
	s.says("killed by SIGKILL")
	s.ends(137)
	s = l.sit("exec", "-it", id, "no-such-program")
	s.says("no-such-program")
	s.ends(127)
	s = l.sit("exec", "-it", "--timeout", "1s", id, "sleep", "100")
	s.says("--timeout 1s")
	s.ends(124)
	// Without -i nothing is typed, but Ctrl-C is a signal as ever.
	s = l.sit("exec", "-t", id, "--", "sh", "-c", "test -t 0 && echo terminal; exec sleep 100")
	s.says("terminal\r") // this end is not raw: it adds a return of its own
	s.types("\x03")
	s.ends(130)
}

func tellDetach(t *testing.T, l *lab, id string) {
	s := l.sit(append([]string{"exec", "-it", id, "--"}, prompt...)...)
	s.says("$ ")
	s.types("v=still; echo 'he''re'\r")
	s.says("\nhere\r\n$ ")
	s.types("\x10\x11")
	s.says("attach again with: sandboxctl attach " + id)
	s.ends(0)
	l.left(id)

	s = l.sit("attach", id) // it is the only one that runs
	s.says("here\r\n$ ")
	s.types("echo $v '$''v'\r")
	s.says("still $v\r\n")
	// A second one is kept out, or takes over.
	l.wants(l.ctl("attach", "--no-stdin", id), 125, "--takeover")
	s2 := l.sit("attach", "--takeover", id)
	s.says("another client has taken over this terminal")
	s.ends(125)
	s2.types("echo $v$v\r")
	s2.says("stillstill\r\n")
	s2.types("\x10x\x10\x11") // Ctrl-P and x are keys, too
	s2.ends(0)

	other := l.sit("exec", "-it", "--detach-keys", "ctrl-x,q", id, "cat")
	other.isRaw()
	other.types("\x18q")
	other.ends(0)
	l.left(id)
	l.wants(l.ctl("attach", id), 125, "several terminals", "cat", "env PS1=$  bash", "detached")
	all, err := l.api.Terminals(id).List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, st := range all {
		if st.Command == "cat" && st.Running {
			s = l.sit("attach", id, st.SessionID[:12])
			s.isRaw()
			s.types("\x04")
			s.ends(0)
		}
	}
	s = l.sit("attach", id)
	s.isRaw()
	s.types("\rexit 5\r") // the line has the x of above; gVisor's terminals know no Ctrl-U
	s.ends(5)
	l.wants(l.ctl("attach", id), 125, "sandboxctl shell "+id)
	l.wants(l.ctl("attach", id, "ffff"), 125, `no terminal "ffff"`, "exited 5")
	l.wants(l.ctl("attach", "no-such-sandbox"), 125, "no-such-sandbox")
}

func tellVim(t *testing.T, l *lab, id string) {
	s := l.sit("exec", "-it", id, "vim", "-u", "NONE", "/tmp/poem")
	s.says(`"/tmp/poem"`)
	s.types("iroses are red\rviolets")
	s.says("violets")
	s.resize(60, 12) // vim draws itself anew
	s.says("violets")
	s.types("\x1b:wq\r")
	s.ends(0)
	if out, err := l.exec(t.Context(), id, "cat", "/tmp/poem"); err != nil || out != "roses are red\nviolets\n" {
		t.Errorf("%q, %v", out, err)
	}
}

func tellTmux(t *testing.T, l *lab, id string) {
	s := l.sit("exec", "-it", id, "tmux", "-f", "/dev/null", "new", "-s", "work", "env", "PS1=$ ", "bash", "--norc",
		";", "set", "-g", "assume-paste-time", "0") // or keys that a busy host delivers together count as pasted
	s.says("[work]")
	s.types("echo in$((1))tmux; tty\r")
	s.says("in1tmux")
	s.types("\x02\"") // another pane
	s.says("# ")
	s.types("\x02d")
	s.says("[detached (from session work)]")
	s.ends(0)
	s = l.sit("exec", "-it", id, "tmux", "attach")
	s.says("in1tmux")
	s.types("\x02d")
	s.says("[detached (from session work)]")
	s.ends(0)
	if _, err := l.exec(t.Context(), id, "tmux", "kill-server"); err != nil {
		t.Error(err)
	}
}

func tellTop(_ *testing.T, l *lab, id string) {
	s := l.sit("exec", "-it", id, "top", "-d", "0.5")
	s.says("Tasks:")
	s.says("sandbox-agent")
	s.types("q")
	s.ends(0)
}

// left waits until no client is at a terminal of the sandbox: one that leaves does not wait long for the agent.
func (l *lab) left(sandbox string) {
	l.Helper()
	eventually(l.T, patience, func() error {
		all, err := l.api.Terminals(sandbox).List(l.Context())
		for _, st := range all {
			if st.Connected {
				return fmt.Errorf("a client is at the terminal %s of %s", st.SessionID, sandbox)
			}
		}
		return err
	})
}

func tellRunAtTerminal(t *testing.T, l *lab, _ string) {
	s := l.sit("run", "--runtime", l.runtime, "-it", "terminal")
	s.says("# ")
	s.types("exit 3\r")
	s.ends(3)
	s = l.sit("run", "--runtime", l.runtime, "--name", "left", "-it", "terminal", "cat")
	s.types("typed\r")
	s.says("typed\r\ntyped\r\n")
	s.types("\x10\x11")
	s.says("will be removed at")
	s.ends(0)
	l.left("left")
	sb, err := l.api.Get(t.Context(), "left")
	if err != nil || sb.ExpiresAt == nil || time.Until(*sb.ExpiresAt) < 23*time.Hour {
		t.Errorf("%+v, %v", sb, err)
	}
	s = l.sit("attach", "left")
	s.says("typed\r\n")
	s.types("\x04")
	s.ends(0)
	l.ok("rm", "-f", "left")
}

func tellRefusals(_ *testing.T, l *lab, id string) {
	l.wants(l.ctl("exec", "-it", id, "true"), 125, "the input device is not a TTY")
	l.wants(l.ctl("run", "-it", "terminal", "true"), 125, "the input device is not a TTY")
	l.wants(l.ctl("shell", id), 125, "the input device is not a TTY")
	l.wants(l.ctl("exec", "-d", "-t", id, "true"), 125, "-d and -t")
	l.wants(l.ctl("exec", "-t", "--detach-keys", "ctrl-9", id, "true"), 125, "ctrl-9")
	if r := l.ctl("exec", "-t", id, "echo", "no", "-i"); r.out != "no -i\r\n" || r.code != 0 {
		l.Errorf("%+v", r)
	}
}

// TestTerminalSurvivesDaemon kills the daemon under a terminal that writes. The
// one who sits there sees a line about it, and every byte.
func TestTerminalSurvivesDaemon(t *testing.T) {
	h := newTerminalHost(t)
	const lines = 20_000
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: runtime}
			id := h.create(t, terminalSpec(runtime)).ID
			script := append([]string{"stty -echo; echo begin; "}, numbers(lines)[2], "; read x; echo got $x; read x; echo and $x; exit 6")
			s := l.sit("exec", "-it", id, "--", "bash", "-c", strings.Join(script, ""))
			s.says("begin\r\n")
			s.says("\r\n2000\r\n") // in the middle of it
			h.Kill()
			s.says("the connection broke")
			s.types("typed\r") // what is typed now is not lost either
			time.Sleep(500 * time.Millisecond)
			if err := h.TryStart(); err != nil {
				t.Fatal(err)
			}
			s.says("reconnected\r\n")
			s.says("got typed\r\n") // after all lines, of which some may have come before the word of the connection
			h.Kill()                // once more, while nothing is written
			if err := h.TryStart(); err != nil {
				t.Fatal(err)
			}
			s.says("reconnected\r\n")
			s.types("more\r")
			s.says("and more\r\n")
			s.ends(6)
			s.mu.Lock()
			shown := s.shown.String()
			s.mu.Unlock()
			_, shown, _ = strings.Cut(shown, "begin\r\n")
			for _, own := range []string{
				"\r\nsandboxctl: the connection broke; trying again for 1m0s\r\n",
				"sandboxctl: reconnected\r\n",
			} {
				shown = strings.ReplaceAll(shown, own, "")
			}
			want := strings.ReplaceAll(numbered(lines), "\n", "\r\n") + "got typed\r\nand more\r\n"
			if shown != want {
				t.Errorf("%d bytes, want %d; the first line that differs is %q", len(shown), len(want), difference(shown, want))
			}
			h.deleteAll(t)
		})
	}
}
