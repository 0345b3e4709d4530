// Command sandboxd-runc starts runc containers for sandboxd. It is the only binary that
// links libcontainer, and so the only one with cgo.
//
// It is a launcher (pkg/oci/launch): the daemon keeps one running and asks it
// over a socket to start sandboxes, many at once. Nothing else about a
// container needs libcontainer: pkg/cgroups kills it, pkg/oci/runc forgets and
// lists it.
//
// What surprises: "runc init", the first process of every container, is this binary,
// executed again from a sealed copy in memory with the argument "init". Every start
// pays for the init functions of packages here.
package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	_ "github.com/opencontainers/cgroups/devices" // lets libcontainer set device rules
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/exeseal"
	_ "github.com/opencontainers/runc/libcontainer/nsenter" // enters the namespaces before Go starts
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/release"
	"github.com/sandboxd/sandboxd/pkg/oci/launch"
)

func init() {
	if len(os.Args) > 1 && os.Args[1] == "init" {
		libcontainer.Init() // does not return
	}
	// Only main may use the first thread. libcontainer enters a container's mount
	// namespace on a thread that ends with its goroutine. The first thread never ends:
	// it would stay inside and hold the disk of a sandbox that is gone.
	runtime.LockOSThread()
}

func main() {
	var err error
	switch {
	case len(os.Args) == 2 && os.Args[1] == "--version":
		fmt.Println("sandboxd-runc", release.Version())
	case len(os.Args) == 3 && os.Args[1] == "launch":
		err = run(os.Args[2])
	default:
		err = errors.New("usage: sandboxd-runc launch ROOT (sandboxd starts it, with a socket as descriptor 3)")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandboxd-runc:", err)
		os.Exit(1)
	}
}

// run launches sandboxes, with their state below root, until the daemon has
// closed the socket.
func run(root string) error {
	if err := seal(); err != nil {
		return err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	debug.SetGCPercent(400) // the heap is a few MiB of short-lived objects
	l := launcher{root: root, null: null}
	return launch.Serve(l.start)
}

// seal executes this binary again from a sealed copy in memory, once, so that
// libcontainer need not make one for every start. A guest that finds it through
// /proc/<pid>/exe cannot write to it (CVE-2019-5736).
func seal() error {
	if exeseal.IsSelfExeCloned() {
		return nil
	}
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer self.Close()
	fi, err := self.Stat()
	if err != nil {
		return err
	}
	sealed, err := exeseal.CloneBinary(self, fi.Size(), "sandboxd-runc", os.TempDir())
	if err != nil {
		return fmt.Errorf("make a sealed copy of this binary: %w", err)
	}
	err = unix.Exec(fmt.Sprintf("/proc/self/fd/%d", sealed.Fd()), os.Args, os.Environ())
	return fmt.Errorf("execute the sealed binary: %w", err)
}
