package cli

import (
	"io"
	"slices"
	"strings"
	"testing"
)

// onTerminal runs sandboxctl with standard error, and with both also standard output, at a
// terminal, and returns what that shows.
func (d *daemon) onTerminal(t *testing.T, both bool, args ...string) (shown, out string) {
	t.Helper()
	ptmx, tty := openPty(t)
	c := d.cmd(args...)
	var stdout strings.Builder
	c.Stderr, c.Stdout = tty, &stdout
	if both {
		c.Stdout = tty
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	tty.Close()
	b, _ := io.ReadAll(ptmx) // EIO: the last one closed it
	if err := c.Wait(); err != nil {
		t.Errorf("%q ended with %v", args, err)
	}
	return string(b), stdout.String()
}

// TestPullShown: at a terminal, run and create show how an image comes that is not there
// yet. Elsewhere they print nothing but the result.
func TestPullShown(t *testing.T) {
	for _, args := range [][]string{{"run", "absent", "--", "true"}, {"create", "absent"}} {
		d := newDaemon(t)
		shown, out := d.onTerminal(t, false, args...)
		const want = "Unable to find image 'absent' locally\r\n" +
			"\r\x1b[Kdownloading  [===============               ] 1MiB of 2MiB…" +
			"\r\x1b[KStatus: Downloaded newer image for absent:latest\r\n"
		if shown != want || strings.Contains(out, "image") {
			t.Errorf("%q shows %q and prints %q", args, shown, out)
		}
		if r := d.run(t, args...); r.code != 0 || r.errout != "" {
			t.Errorf("without a terminal: %+v", r)
		}
		if n := len(slices.DeleteFunc(d.asked(), func(s string) bool { return s != "POST /images/pull" })); n != 1 {
			t.Errorf("%q: pulled %d times", args, n)
		}
	}
	d := newDaemon(t)
	if shown, _ := d.onTerminal(t, false, "run", "python", "--", "true"); shown != "" {
		t.Errorf("an image that is there: %q", shown)
	}
	if slices.Contains(d.asked(), "POST /images/pull") {
		t.Error("an image that is there was pulled")
	}
}

// TestBarLeavesNothing: what image pull prints stands on a line of its own.
func TestBarLeavesNothing(t *testing.T) {
	d := newDaemon(t)
	if shown, _ := d.onTerminal(t, true, "image", "pull", "absent"); !strings.HasSuffix(shown, "2MiB…\r\x1b[Kabsent:latest\r\n") {
		t.Errorf("%q", shown)
	}
}
