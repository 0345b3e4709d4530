package cli

import (
	"io"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

func TestSession(t *testing.T) {
	d := newDaemon(t)
	const at = " /sandboxes/lab/proxy/44772/session"
	if r := d.run(t, "command", "session", "create", "-w", "/tmp", "lab"); r.code != 0 || r.out != commandID+"\n" || d.line.Cwd != "/tmp" {
		t.Errorf("%+v, %+v", r, d.line)
	}
	d.exec = func(w io.Writer, _ <-chan string) {
		frame(w, 1, "out\n")
		frame(w, 2, "err\n")
		exit(w, 3)
	}
	r := d.run(t, "command", "session", "run", "--timeout", "30s", "-w", "/usr", "lab", commandID, "--", "echo", "a b", "-x")
	if r != (result{3, "out\n", "err\n"}) || d.line != (agent.SessionRun{Command: "echo 'a b' -x", Cwd: "/usr", Timeout: 30000}) {
		t.Errorf("%+v, %+v", r, d.line)
	}
	for end, want := range map[string]result{
		`{"exit_code":137,"signal":"SIGKILL","timed_out":true}`: {
			124, "",
			"sandboxctl: the command was ended: it ran longer than --timeout 0s\n",
		},
		`{"exit_code":0,"error":"the shell cannot say"}`: {1, "", "sandboxctl: the shell cannot say\n"},
		`{"exit_code":1,"reason":"disk_full","hint":"the limit is 64Mi"}`: {
			1, "",
			"sandboxctl: the command failed (disk_full): the limit is 64Mi; give it more with --disk\n",
		},
	} {
		d.exec = func(w io.Writer, _ <-chan string) { frame(w, agent.FrameEnd, end) }
		if r := d.run(t, "command", "session", "run", "lab", commandID, "cd /; ls"); r != want || d.line.Command != "cd /; ls" {
			t.Errorf("%s: %+v, %q", end, r, d.line.Command)
		}
	}
	for _, verb := range []string{"rm", "delete"} {
		if r := d.run(t, "command", "session", verb, "lab", commandID); r.code != 0 || r.out != commandID+"\n" ||
			!slices.Contains(d.asked(), "DELETE"+at+"/"+commandID) {
			t.Errorf("%+v, %q", r, d.asked())
		}
	}
	before := len(d.asked())
	for args, says := range map[string]string{
		"run lab x":                   "COMMAND",
		"run lab x --":                "no command",
		"run lab x -w /tmp pwd":       "put flags of",
		"run --timeout -1s lab x pwd": "negative",
		"create":                      "SANDBOX",
		"rm lab":                      "SESSION",
	} {
		if r := d.run(t, append([]string{"command", "session"}, strings.Fields(args)...)...); r.code != 125 ||
			!strings.Contains(r.errout, says) {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if got := d.asked()[before:]; len(got) != 0 {
		t.Errorf("the daemon was asked %q", got)
	}
}

// TestSessionInterrupt: Ctrl-C ends what runs in the session, which is not a
// command and takes no signals.
func TestSessionInterrupt(t *testing.T) {
	d := newDaemon(t)
	d.exec = func(w io.Writer, signals <-chan string) {
		frame(w, 1, "up\n")
		if sig := <-signals; sig == "interrupt "+commandID {
			exit(w, 143)
		}
	}
	c := d.cmd("command", "session", "run", "lab", commandID, "--", "sleep", "9")
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	guard := time.AfterFunc(10*time.Second, func() { c.Process.Kill() })
	defer guard.Stop()
	io.ReadFull(out, make([]byte, 3)) //nolint:errcheck // it is up
	c.Process.Signal(syscall.SIGINT)  //nolint:errcheck // it lives
	c.Wait()                          //nolint:errcheck // the code is looked at
	if c.ProcessState.ExitCode() != 143 {
		t.Errorf("status %d, %q", c.ProcessState.ExitCode(), d.asked())
	}
}
