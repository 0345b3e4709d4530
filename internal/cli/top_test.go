package cli

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestTop(t *testing.T) {
	d := newDaemon(t)
	r := d.run(t, "top")
	lines := strings.Split(r.out, "\n")
	if r.code != 0 || len(lines) != 4 || !strings.HasPrefix(lines[1], testID) || !strings.Contains(lines[1], "About an hour") ||
		!strings.HasSuffix(lines[1], " lab") || !strings.HasSuffix(lines[2], "runc      (Paused)") {
		t.Errorf("%+v", r)
	}
	if n := len(slices.DeleteFunc(d.asked(), func(s string) bool { return s != "GET /stats" })); n != 2 {
		t.Errorf("asked %d times for one look", n)
	}
	var list []struct {
		ID  string
		CPU float64 `json:"cpuPercent"`
	}
	r = d.run(t, "top", "-n", "1", "-o", "json", "--sort", "memory")
	if err := json.Unmarshal([]byte(r.out), &list); err != nil || len(list) != 2 || list[1].ID != testID || list[1].CPU < 1 ||
		list[1].CPU > 30 {
		t.Errorf("%v %+v", err, r)
	}
	if r := d.run(t, "top", "-n", "2", "-d", "100ms", "-o", "name"); strings.Count(r.out, testID) != 2 {
		t.Errorf("twice: %+v", r)
	}
	for args, text := range map[string]string{
		"--sort colour": "cpu, memory", "-d 1ms": "100ms", "-o yaml": "json", "lab": "exec lab -- ps",
	} {
		if r := d.run(t, append([]string{"top"}, strings.Fields(args)...)...); r.code != 125 || !strings.Contains(r.errout, text) {
			t.Errorf("top %s: %+v", args, r)
		}
	}
}

// TestTopOnTerminal presses q.
func TestTopOnTerminal(t *testing.T) {
	ptmx, tty := openPty(t)
	d := newDaemon(t)
	c := d.cmd("top", "-d", "100ms")
	c.Stdin, c.Stdout, c.Stderr = tty, tty, tty
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	tty.Close()
	var out strings.Builder
	buf := make([]byte, 4<<10)
	ptmx.SetReadDeadline(time.Now().Add(20 * time.Second)) //nolint:errcheck // a hang then ends with the test's own limit
	pressed := false
	for {
		n, err := ptmx.Read(buf)
		out.Write(buf[:n])
		if err != nil {
			break // EIO: the last one closed it
		}
		if !pressed && strings.Count(out.String(), testID) >= 2 {
			pressed = true
			ptmx.Write([]byte("xq")) //nolint:errcheck // seen below
		}
	}
	if err := c.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
	s := out.String()
	if !strings.HasPrefix(s, "\x1b[?1049h") || !strings.HasSuffix(s, "\x1b[?25h\x1b[?1049l") {
		t.Errorf("the screen is not given back: %q", s)
	}
	for frame := range strings.SplitSeq(s, "\x1b[H") {
		for line := range strings.SplitSeq(frame, "\r\n") {
			if strings.Contains(line, "\n") || len(line) > 60+len("\x1b[K\x1b[J\x1b[?25h\x1b[?1049l") {
				t.Errorf("line %q does not fit", line)
			}
		}
	}
}

// openPty opens a terminal of 60 columns.
func openPty(t *testing.T) (ptmx, tty *os.File) {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	ptmx = os.NewFile(uintptr(fd), "ptmx")
	t.Cleanup(func() { ptmx.Close() })
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 10, Col: 60}); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err = os.OpenFile(fmt.Sprint("/dev/pts/", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return ptmx, tty
}
