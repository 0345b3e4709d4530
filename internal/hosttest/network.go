package hosttest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// privateEnv marks the process that InPrivateNetwork started in a network of its own.
const privateEnv = "SANDBOXD_TEST_PRIVATE_NET"

// InPrivateNetwork is a TestMain that runs root tests in a network and mount namespace
// of their own, which is "the host" to them: their changes are invisible outside. It
// does not return.
func InPrivateNetwork(m *testing.M) {
	if os.Getenv("SANDBOXD_TEST") != "root" || os.Geteuid() != 0 {
		os.Exit(m.Run())
	}
	if os.Getenv(privateEnv) == "" {
		cmd := again(os.Args[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		signal.Notify(make(chan os.Signal, 1), os.Interrupt) // the child handles it, and starts with no signal ignored
		os.Exit(exitCode(cmd))
	}
	for _, mount := range []struct {
		src, dst, typ string
		flags         uintptr
	}{
		{"none", "/", "", unix.MS_REC | unix.MS_PRIVATE},
		{"sysfs", "/sys", "sysfs", 0}, // shows the links of the network it is mounted in
	} {
		if err := unix.Mount(mount.src, mount.dst, mount.typ, mount.flags, ""); err != nil {
			fmt.Fprintf(os.Stderr, "mount %s: %v\n", mount.dst, err)
			os.Exit(1)
		}
	}
	leaveOthers()
	os.Exit(m.Run())
}

// Private runs the test that calls it in a network and mount namespace of its own,
// where the test may change rules and links freely. Inside, it returns true; cgroups and
// files are those of the host, and the only link is lo. Outside, it calls first, which
// may use the host's network, and returns false when the test inside has ended.
func Private(t *testing.T, first func()) bool {
	t.Helper()
	Root(t)
	if os.Getenv(privateEnv) == "" {
		first()
		cmd := again("-test.run=^"+t.Name()+"$", "-test.v", "-test.count=1", "-test.timeout="+timeLeft(t).String())
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if exitCode(cmd) != 0 {
			t.Errorf("in a network of its own:\n%s", out.String())
		} else {
			t.Log(out.String())
		}
		return false
	}
	if err := OwnHost(); err != nil {
		t.Fatal(err)
	}
	return true
}

// OwnHost makes the new network and mount namespaces of this process look like a host:
// /sys shows the links of this network and the cgroups of the real host, the names of
// network namespaces are its own, lo is up, and no mounts of daemons are there.
func OwnHost() error {
	keep, err := os.MkdirTemp("", "sandboxd-cgroup-")
	if err != nil {
		return err
	}
	defer os.Remove(keep)
	for _, c := range [][]string{
		{"mount", "--make-rprivate", "/"},
		{"mount", "--rbind", "/sys/fs/cgroup", keep},
		{"mount", "-t", "sysfs", "sysfs", "/sys"},
		{"mount", "--rbind", keep, "/sys/fs/cgroup"},
		{"umount", "-l", keep},
		{"mkdir", "-p", "/run/netns"},
		{"mount", "-t", "tmpfs", "tmpfs", "/run/netns"},
		{"ip", "link", "set", "lo", "up"},
	} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(c, " "), err, out)
		}
	}
	leaveOthers()
	return nil
}

// leaveOthers unmounts what daemons have mounted on the host, in this mount namespace
// only. The namespace began with copies of these mounts: a pool that is unmounted on
// the host, and its loop device, would stay in use until this process ends.
func leaveOthers() {
	first := instance.Instance('a') // directories of other instances begin with its names
	mounts, _ := os.ReadFile("/proc/thread-self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if len(f) > 4 && (strings.HasPrefix(f[4], first.StateDir()) || strings.HasPrefix(f[4], first.RunDir())) {
			_ = unix.Unmount(f[4], unix.MNT_DETACH) // a mount below another is gone with that
		}
	}
}

// timeLeft is the time until the test's deadline, less five seconds for reporting.
func timeLeft(t *testing.T) time.Duration {
	at, ok := t.Deadline()
	if !ok {
		return time.Hour
	}
	return time.Until(at) - 5*time.Second
}

// again is this program in a network and mount namespace of its own.
func again(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), privateEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
	}
	return cmd
}

func exitCode(cmd *exec.Cmd) int {
	if err := cmd.Run(); err != nil {
		if cmd.ProcessState == nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return cmd.ProcessState.ExitCode()
	}
	return 0
}

// given keeps open what marks the ports that FreePort has returned: abstract Unix sockets (unix(7)), which
// are of a network namespace, as ports are.
var given sync.Map

// FreePort returns a loopback address on which no process listens. Until this process ends, no
// other call in this network namespace returns it, also none of another process. The port is
// outside ip_local_port_range (ip(7)), from which the kernel takes ports for clients: a client
// of another test could have such a port a moment later.
func FreePort(t testing.TB) netip.AddrPort {
	t.Helper()
	var last error
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(12000)))
		if err != nil {
			last = err
			continue
		}
		l.Close()
		addr := l.Addr().(*net.TCPAddr).AddrPort()
		mark, err := net.Listen("unix", fmt.Sprintf("@sandboxd-test-port-%d", addr.Port()))
		if err != nil {
			last = err
			continue
		}
		given.Store(mark, true)
		return addr
	}
	t.Fatal("no free port of loopback between 20000 and 32000: ", last)
	return netip.AddrPort{}
}
