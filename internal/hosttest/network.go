package hosttest

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// privateEnv marks the process that InPrivateNetwork started in a network of its own.
const privateEnv = "SANDBOXD_TEST_PRIVATE_NET"

// InPrivateNetwork is a TestMain that runs root tests in a network and mount
// namespace of their own, which then is "the host": what they do can not be seen
// outside. It does not return.
func InPrivateNetwork(m *testing.M) {
	if os.Getenv("SANDBOXD_TEST") != "root" || os.Geteuid() != 0 {
		os.Exit(m.Run())
	}
	if os.Getenv(privateEnv) == "" {
		os.Exit(rerun())
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
	os.Exit(m.Run())
}

func rerun() int {
	signal.Ignore(os.Interrupt) // the child decides
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), privateEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := cmd.Run(); err != nil {
		if cmd.ProcessState == nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return cmd.ProcessState.ExitCode()
	}
	return 0
}
