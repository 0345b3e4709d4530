package confine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

func TestMain(m *testing.M) {
	Main(map[string]Verb{
		"look":  look,
		"echo":  func([]string) error { _, err := io.Copy(os.Stdout, os.Stdin); return err },
		"fail":  func(args []string) error { return errs.New(errs.Code(args[0]), "%s", args[1]) },
		"crash": func([]string) error { panic("a bug") },
		"eat":   eat,
		"spin": func([]string) error {
			for i := 0; ; i++ { //nolint:staticcheck // it is meant to burn
			}
		},
		"write":  func(args []string) error { return write(args[0]) },
		"escape": escape,
		"fork":   fork,
	})
	os.Exit(m.Run())
}

// needsRoot is hosttest.Root, whose package links net and with it libc: this
// binary must be a static one.
func needsRoot(t *testing.T) {
	t.Helper()
	if os.Getenv("SANDBOXD_TEST") != "root" {
		t.Skip("needs root and SANDBOXD_TEST=root")
	}
	if os.Geteuid() != 0 {
		t.Fatal("SANDBOXD_TEST=root is set, but this is not root")
	}
}

// look prints all that a child has.
func look([]string) error {
	entries, err := os.ReadDir("/")
	if err != nil {
		return err
	}
	for _, e := range entries {
		fmt.Println("root has", e.Name())
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		return err
	}
	fmt.Printf("caps %x %x %x %x\n", caps[0].Effective, caps[0].Permitted, caps[1].Effective, caps[1].Permitted)
	bounding := 0
	for c := range uintptr(64) {
		if v, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0); err == nil && v == 1 {
			bounding |= 1 << c
		}
	}
	nnp, _ := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	fmt.Printf("bounding %x nnp %d uid %d gid %d pid %d env %d\n", bounding, nnp, os.Getuid(), os.Getgid(), os.Getpid(), len(os.Environ()))
	for fd := range 64 {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
			var st unix.Stat_t
			_ = unix.Fstat(fd, &st)
			fmt.Printf("fd %d %o\n", fd, st.Mode&unix.S_IFMT)
		}
	}
	return nil
}

func eat([]string) error {
	var all [][]byte
	for {
		b := make([]byte, 16<<20)
		for i := range b {
			b[i] = 1
		}
		all = append(all, b)
		if len(all) > 1000 {
			return nil
		}
	}
}

// write makes what an unpacker makes, and tries what it may not.
func write(outside string) error {
	if err := errors.Join(os.WriteFile("/file", []byte("x"), 0o600), os.Mkdir("/dir", 0o755)); err != nil {
		return err
	}
	if fi, err := os.Stat("/dir"); err != nil || fi.Mode().Perm() != 0o755 {
		return fmt.Errorf("a directory is made with mode %v (%w)", fi.Mode(), err)
	}
	if err := errors.Join(os.Chown("/file", 1000, 65535), os.Chmod("/file", 0o4755)); err != nil {
		return err
	}
	if err := unix.Mknod("/whiteout", unix.S_IFCHR, 0); err != nil {
		return fmt.Errorf("whiteout: %w", err)
	}
	// A version 2 file capability: cap_net_raw, effective.
	if err := unix.Setxattr("/file", "security.capability",
		[]byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0); err != nil {
		return fmt.Errorf("file capability: %w", err)
	}
	for what, err := range map[string]error{
		"a device":             unix.Mknod("/null", unix.S_IFCHR, int(unix.Mkdev(1, 3))),
		"a trusted attribute":  unix.Setxattr("/file", "trusted.overlay.opaque", []byte("y"), 0),
		"an owner not mapped":  os.Chown("/file", 65536, 0),
		"a mount":              unix.Mount("none", "/", "tmpfs", 0, ""),
		"another user's files": os.WriteFile(outside, nil, 0o600),
		"a namespace":          unix.Unshare(unix.CLONE_NEWNET),
	} {
		if err == nil {
			return fmt.Errorf("a child may make %s", what)
		}
	}
	return nil
}

// escape tries to get namespaces, and with them capabilities.
func escape([]string) error {
	for _, flag := range []int{unix.CLONE_NEWUSER, unix.CLONE_NEWUSER | unix.CLONE_NEWNET} {
		if err := unix.Unshare(flag); err != unix.EPERM { //nolint:errorlint // as the filter says it
			return fmt.Errorf("unshare %x: %v", flag, err)
		}
		if pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(flag)|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0); errno == 0 && pid == 0 {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0) //nolint:errcheck // does not return
		} else if errno != unix.EPERM {
			return fmt.Errorf("clone %x: %v", flag, errno)
		}
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_CLONE3, 0, 0, 0); errno != unix.ENOSYS {
		return fmt.Errorf("clone3: %v", errno)
	}
	if err := unix.Setns(0, 0); err != unix.EPERM { //nolint:errorlint // see above
		return fmt.Errorf("setns: %v", err)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_IO_URING_SETUP, 1, 0, 0); errno != unix.EPERM {
		return fmt.Errorf("io_uring_setup: %v", errno)
	}
	fmt.Print("caught")
	return nil
}

// fork makes processes until it may not.
func fork([]string) error {
	for n := 1; n < 1000; n++ {
		pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
		if errno == unix.EAGAIN {
			fmt.Print(n)
			return nil
		}
		if errno != 0 {
			return fmt.Errorf("clone: %w", errno)
		}
		for pid == 0 {
			unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0) //nolint:errcheck // it sleeps until it is killed
		}
	}
	return errors.New("there is no limit")
}

// TestChildMakesNoOthers: no namespaces, and few processes.
func TestChildMakesNoOthers(t *testing.T) {
	needsRoot(t)
	for _, root := range []string{"", t.TempDir()} {
		if out, err := ask(t, Child{Verb: "escape", Root: root}, ""); err != nil || out != "caught" {
			t.Errorf("namespaces, root %q: %q, %v", root, out, err)
		}
		var limits sync.WaitGroup
		for range 3 { // each has its own
			limits.Go(func() {
				out, err := ask(t, Child{Verb: "fork", Root: root}, "")
				if n, aerr := strconv.Atoi(out); err != nil || aerr != nil || n < 16 || n > maxTasks {
					t.Errorf("processes, root %q: %q, %v", root, out, err)
				}
			})
		}
		limits.Wait()
	}
}

// ask runs a verb to its end.
func ask(t *testing.T, c Child, in string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	p, err := Start(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	go func() { _, _ = io.Copy(p.In, strings.NewReader(in)); p.In.Close() }()
	out, err := io.ReadAll(p.Out)
	if err != nil {
		t.Error(err)
	}
	return string(out), p.Wait()
}

func TestChildHasNothing(t *testing.T) {
	needsRoot(t)
	t.Setenv("SECRET", "x")
	spare, err := os.Open("/etc")
	if err != nil {
		t.Fatal(err)
	}
	defer spare.Close()
	extra, err := os.Open("/etc/hostname")
	if err != nil {
		t.Fatal(err)
	}
	defer extra.Close()
	got, err := ask(t, Child{Verb: "look", Files: []*os.File{extra}}, "")
	if err != nil {
		t.Fatal(err)
	}
	want := "caps 0 0 0 0\nbounding 0 nnp 1 uid 65534 gid 65534 pid 1 env 2\nfd 0 10000\nfd 1 10000\nfd 2 10000\nfd 3 100000\n"
	// The runtime's own: epoll and its wake-up.
	if rest, ok := strings.CutPrefix(got, want); !ok || strings.Contains(rest, "40000") || strings.Contains(rest, "100000") {
		t.Errorf("a child has\n%s, want\n%s", got, want)
	}
	dir := t.TempDir()
	got, err = ask(t, Child{Verb: "look", Root: dir}, "")
	if want := "caps 8000001b 8000001b 0 0\nbounding 8000001b nnp 1 "; err != nil || !strings.HasPrefix(got, want) {
		t.Errorf("a child with a root has\n%s (%v), want\n%s", got, err, want)
	}
}

func TestChildWritesItsRootOnly(t *testing.T) {
	needsRoot(t)
	dir := filepath.Join(t.TempDir(), "root")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	outside := filepath.Join(filepath.Dir(dir), "outside")
	defer unix.Umask(unix.Umask(0o077)) // as the unit has it
	if _, err := ask(t, Child{Verb: "write", Root: dir, Args: []string{outside}}, ""); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(dir, "file"), &st); err != nil || st.Uid != 1000 || st.Gid != 65535 {
		t.Errorf("file: %d:%d, %v", st.Uid, st.Gid, err)
	}
	if err := unix.Lstat(filepath.Join(dir, "whiteout"), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
		t.Errorf("whiteout: %o, %d, %v", st.Mode, st.Rdev, err)
	}
	out, err := exec.Command("getcap", filepath.Join(dir, "file")).CombinedOutput()
	if err == nil && !bytes.Contains(out, []byte("cap_net_raw")) {
		t.Errorf("file capability: %s", out)
	}
}

func TestChildFails(t *testing.T) {
	needsRoot(t)
	if _, err := ask(t, Child{Verb: "fail", Args: []string{"invalid", "bad \x1b thing"}}, ""); !errs.Is(err, errs.Invalid) ||
		!strings.Contains(err.Error(), "bad") {
		t.Errorf("invalid: %v", err)
	}
	if _, err := ask(t, Child{Verb: "fail", Args: []string{"denied", "not a child's word"}}, ""); !errs.Is(err, errs.Internal) {
		t.Errorf("denied: %v", err)
	}
	if _, err := ask(t, Child{Verb: "crash"}, ""); !errs.Is(err, errs.Internal) {
		t.Errorf("crash: %v", err)
	}
	if _, err := ask(t, Child{Verb: "eat"}, ""); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "memory") {
		t.Errorf("a glutton: %v", err)
	}
	if _, err := ask(t, Child{Verb: "spin", Time: time.Second}, ""); !errs.Is(err, errs.Invalid) ||
		!strings.Contains(err.Error(), "to read") {
		t.Errorf("a burner: %v", err)
	}
	if out, err := ask(t, Child{Verb: "echo"}, strings.Repeat("x", 3<<20)); err != nil || len(out) != 3<<20 {
		t.Errorf("echo: %d bytes, %v", len(out), err)
	}
}

func TestChildEndsWithItsContext(t *testing.T) {
	needsRoot(t)
	ctx, cancel := context.WithCancel(t.Context())
	p, err := Start(ctx, Child{Verb: "echo"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	cancel()
	if err := p.Wait(); err == nil {
		t.Error("it ended well")
	}
}

// TestUnderSharedMounts: systemd makes every mount of a host shared.
func TestUnderSharedMounts(t *testing.T) {
	needsRoot(t)
	out, err := exec.Command("unshare", "--mount", "--propagation", "shared", os.Args[0], "-test.run", "^TestChildWritesItsRootOnly$",
		"-test.v").CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("PASS: TestChildWritesItsRootOnly")) {
		t.Fatalf("%v: %s", err, out)
	}
}
