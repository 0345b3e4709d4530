package hosttest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// settles is how long an idle host may take to free what was in use.
const settles = 5 * time.Second

// Settles tries f until it succeeds, and then returns nil. If f does not succeed in
// time, it returns the last error of f.
//
// The kernel frees a link with its network namespace, and a loop device with its last
// mount. It does both in the background: after grace periods of RCU, and after the file
// system on the device is written. On a host that computes and syncs without end that
// takes many times as long. So if f still fails after five seconds, Settles makes and
// frees a reference and measures that: f must succeed within another two times as long.
func Settles(t testing.TB, f func() error) error {
	t.Helper()
	start := time.Now()
	err := until(start.Add(Patient(settles)), f)
	if err == nil {
		return nil
	}
	took, refErr := letGo(t)
	took = took.Round(time.Millisecond)
	if refErr != nil {
		t.Logf("how long this host takes to let go of things is not known: %v", refErr)
	}
	err = until(time.Now().Add(2*took), f)
	waited := time.Since(start).Round(time.Millisecond)
	if err != nil {
		return fmt.Errorf("after %v, and %v that a like thing took to go: %w", waited, took, err)
	}
	t.Logf("it was gone after %v; a like thing took %v to go", waited, took)
	return nil
}

// until tries f until it succeeds, and returns the error of the first try that
// began after deadline.
func until(deadline time.Time, f func() error) error {
	for {
		began := time.Now()
		err := f()
		if err == nil || began.After(deadline) {
			return err
		}
		time.Sleep(50 * time.Millisecond) // the kernel frees links and loop devices late, without an event
	}
}

// A reference has what a sandbox has in the kernel: a process in a network and a mount
// namespace of its own, a link to the host, and a disk that is mounted only there and
// was written to. It ends when its input ends.
const reference = `mount -o loop "$1" "$2" && echo x >"$2/x" &&
ip link add "$3" type veth peer name "$3" netns "$4" && echo made && read -r _`

// letGo makes a reference, ends it, and returns how long it took until the kernel had
// freed all of it.
func letGo(t testing.TB) (time.Duration, error) {
	start := time.Now()
	dir, err := os.MkdirTemp("", "reference")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	disk, mnt, link := filepath.Join(dir, "disk"), filepath.Join(dir, "mnt"), fmt.Sprintf("ref%d", os.Getpid())
	for _, c := range [][]string{{"mkdir", mnt}, {"truncate", "-s", "16M", disk}, {"mkfs.ext4", "-q", disk}} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			return 0, fmt.Errorf("%v: %w: %s", c, err, out)
		}
	}
	cmd := exec.Command("unshare", "--net", "--mount", "sh", "-c", reference, "sh", disk, mnt, link, fmt.Sprint(os.Getpid()))
	in, err := cmd.StdinPipe()
	if err != nil {
		return 0, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	made, _ := out.Read(make([]byte, 16))
	in.Close()
	err = cmd.Wait() // the error is that of read, which finds no line
	if made == 0 {
		return 0, fmt.Errorf("the reference was not made: %w", err)
	}
	for limit := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		_, err := os.Stat("/sys/class/net/" + link)
		held := loops(dir)
		switch {
		case err != nil && len(held) == 0:
			return time.Since(start), nil
		case time.Now().After(limit):
			t.Errorf("the host does not let go of things: link %s: %v, %v", link, err, held)
			return time.Since(start), nil
		}
	}
}
