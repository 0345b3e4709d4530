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
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

func TestMain(m *testing.M) {
	if os.Args[0] == bareName {
		fmt.Fprintln(os.Stderr, bare())
		os.Exit(1)
	}
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
		"crowd":  crowd,
		"wait":   func([]string) error { fmt.Println("ready"); _, err := io.ReadAll(os.Stdin); return err },
		"serve":  serve,
		"reach":  func(args []string) error { return reach(args[0]) },
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

// look prints all that a child sees.
func look([]string) error {
	entries, err := os.ReadDir("/")
	if err != nil {
		return err
	}
	for _, e := range entries {
		fmt.Println("root has", e.Name())
	}
	fmt.Printf("uid %d gid %d pid %d env %d\n", os.Getuid(), os.Getgid(), os.Getpid(), len(os.Environ()))
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
	f, err := os.OpenFile("/file", os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	fd := int(f.Fd())
	if err := errors.Join(unix.Ftruncate(fd, 1<<20), os.Symlink("x", "/dir/symlink"),
		unix.Linkat(unix.AT_FDCWD, "/file", unix.AT_FDCWD, "/dir/link", 0)); err != nil {
		return err
	}
	if err := errors.Join(os.Chown("/file", 1000, 65535), os.Chmod("/file", 0o4755)); err != nil {
		return err
	}
	if err := unix.Mknod("/whiteout", unix.S_IFCHR, 0); err != nil {
		return fmt.Errorf("whiteout: %w", err)
	}
	// A version 2 file capability: cap_net_raw, effective.
	if err := unix.Fsetxattr(fd, "security.capability",
		[]byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0); err != nil {
		return fmt.Errorf("file capability: %w", err)
	}
	for what, err := range map[string]error{
		"a device":             unix.Mknod("/null", unix.S_IFCHR, int(unix.Mkdev(1, 3))),
		"a trusted attribute":  unix.Fsetxattr(fd, "trusted.overlay.opaque", []byte("y"), 0),
		"a pipe":               unix.Mknod("/pipe", unix.S_IFIFO|0o600, 0),
		"a socket":             unix.Mknod("/socket", unix.S_IFSOCK|0o600, 0),
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

// escape tries to get what the filter refuses.
func escape([]string) error {
	for what, c := range map[string]struct {
		errno unix.Errno
		call  [7]uintptr
	}{
		"unshare":      {unix.ENOSYS, [7]uintptr{unix.SYS_UNSHARE, unix.CLONE_NEWUSER}},
		"setns":        {unix.ENOSYS, [7]uintptr{unix.SYS_SETNS}},
		"fork":         {unix.EPERM, [7]uintptr{unix.SYS_CLONE, uintptr(unix.SIGCHLD)}},
		"namespaces":   {unix.EPERM, [7]uintptr{unix.SYS_CLONE, unix.CLONE_NEWUSER | unix.CLONE_THREAD}},
		"own files":    {unix.EPERM, [7]uintptr{unix.SYS_CLONE, unix.CLONE_VM | unix.CLONE_SIGHAND | unix.CLONE_THREAD}},
		"clone3":       {unix.ENOSYS, [7]uintptr{unix.SYS_CLONE3}},
		"io_uring":     {unix.ENOSYS, [7]uintptr{unix.SYS_IO_URING_SETUP, 1}},
		"execve":       {unix.ENOSYS, [7]uintptr{unix.SYS_EXECVE}},
		"execveat":     {unix.ENOSYS, [7]uintptr{unix.SYS_EXECVEAT}},
		"socket":       {unix.ENOSYS, [7]uintptr{unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_STREAM}},
		"memfd":        {unix.ENOSYS, [7]uintptr{unix.SYS_MEMFD_CREATE}},
		"ptrace":       {unix.ENOSYS, [7]uintptr{unix.SYS_PTRACE, unix.PTRACE_TRACEME}},
		"keyctl":       {unix.ENOSYS, [7]uintptr{unix.SYS_KEYCTL}},
		"splice":       {unix.ENOSYS, [7]uintptr{unix.SYS_SPLICE}},
		"seccomp":      {unix.ENOSYS, [7]uintptr{unix.SYS_SECCOMP}},
		"mprotect":     {unix.ENOSYS, [7]uintptr{unix.SYS_MPROTECT}},
		"a mapping":    {unix.EPERM, [7]uintptr{unix.SYS_MMAP, 0, 4096, unix.PROT_READ, unix.MAP_SHARED, 0}},
		"machine code": {unix.EPERM, [7]uintptr{unix.SYS_MMAP, 0, 4096, unix.PROT_READ | unix.PROT_EXEC, anon, ^uintptr(0)}},
		"a new call":   {unix.ENOSYS, [7]uintptr{5000}},
	} {
		a := c.call
		pid, _, errno := unix.RawSyscall6(a[0], a[1], a[2], a[3], a[4], a[5], a[6])
		if errno == 0 && pid == 0 && what == "fork" {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0) //nolint:errcheck // does not return
		}
		if errno != c.errno {
			return fmt.Errorf("%s: %v, want %v", what, errno, c.errno)
		}
	}
	fmt.Print("caught")
	return nil
}

// reach makes a file below a directory, and tries to reach others.
func reach(dir string) error {
	if err := os.WriteFile(dir+"/file", []byte("x"), 0o700); err != nil {
		return err
	}
	for what, err := range map[string]error{
		"read another file":  func() error { _, err := os.ReadFile("/etc/passwd"); return err }(),
		"list another place": func() error { _, err := os.ReadDir("/etc"); return err }(),
		"write elsewhere":    os.WriteFile(dir+"/../other", nil, 0o600),
		"make a pipe":        unix.Mknod(dir+"/pipe", unix.S_IFIFO|0o600, 0),
	} {
		if !errors.Is(err, unix.EACCES) {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	fmt.Print("kept")
	return nil
}

// serve has a socket of its parent's, and answers on it with what it may do.
func serve([]string) error {
	var cpu, files, data unix.Rlimit
	if err := errors.Join(unix.Prlimit(0, unix.RLIMIT_CPU, nil, &cpu), unix.Prlimit(0, unix.RLIMIT_NOFILE, nil, &files),
		unix.Prlimit(0, unix.RLIMIT_DATA, nil, &data)); err != nil {
		return err
	}
	said := fmt.Sprintf("cpu %t files %d data %d", cpu.Cur == unix.RLIM_INFINITY, files.Cur, data.Cur)
	for what, call := range map[string][3]uintptr{
		"socket": {unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM}, "connect": {unix.SYS_CONNECT, FirstFile},
		"bind": {unix.SYS_BIND, FirstFile}, "sendto": {unix.SYS_SENDTO, FirstFile}, "sendmsg": {unix.SYS_SENDMSG, FirstFile},
		"sendmmsg": {unix.SYS_SENDMMSG, FirstFile}, "pair": {unix.SYS_SOCKETPAIR, unix.AF_UNIX, unix.SOCK_STREAM},
		"ioctl": {unix.SYS_IOCTL, FirstFile},
	} {
		if _, _, errno := unix.RawSyscall(call[0], call[1], call[2], 0); errno != unix.ENOSYS {
			return fmt.Errorf("%s: %w", what, errno)
		}
	}
	word := make([]byte, 8)
	for {
		n, _, err := unix.Recvfrom(FirstFile, word, 0)
		if err != nil || n == 0 {
			return err
		}
		if _, err := unix.Write(FirstFile, []byte(said)); err != nil {
			return err
		}
	}
}

// TestChildThatServes: it has a socket, and may serve it forever, but makes no other.
func TestChildThatServes(t *testing.T) {
	needsRoot(t)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	defer ours.Close()
	p, err := Start(t.Context(), Child{Verb: "serve", Files: []*os.File{theirs}, Serves: true, Memory: 256 << 20})
	theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	word := make([]byte, 256)
	for range 2 {
		if _, err := ours.Write([]byte("tell")); err != nil {
			t.Fatal(err)
		}
		n, err := ours.Read(word)
		var most unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &most); err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("cpu true files %d data %d", min(maxServe, most.Max), 256<<20); err != nil || string(word[:n]) != want {
			t.Fatalf("%q, %v; want %q; the child: %v", word[:n], err, want, p.Wait())
		}
	}
	ours.Close()
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
}

// crowd takes threads until it may not, which ends a Go program.
func crowd([]string) error {
	for range 1000 {
		go func() {
			runtime.LockOSThread()
			for {
				_ = unix.Nanosleep(&unix.Timespec{Sec: 3600}, nil)
			}
		}()
	}
	time.Sleep(time.Hour)
	return nil
}

// bareName is argv[0] of a process that begins the second life of a child at once, without
// namespaces, mounts and limits: with the filter and Landlock alone, which need no root.
const bareName = "sandboxd-confined-bare"

// bare takes a directory, a verb and its arguments. It returns only an error.
func bare() error {
	runtime.LockOSThread()
	self, err := unix.Open("/proc/self/exe", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return again(self, os.Args[1], limits{data: maxData}, os.Args[2:])
}

// TestBareChild: filter and Landlock, each by itself, let a child work and nothing else.
func TestBareChild(t *testing.T) {
	needsRoot(t) // otherwise this binary may be one of the race detector's, which is not static
	dir := filepath.Join(t.TempDir(), "root")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
		cmd.Args = append([]string{bareName, dir}, args...)
		cmd.Stdin = strings.NewReader(strings.Repeat("x", 3<<20))
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%v: %v: %s", args, err, out)
		}
		return string(out)
	}
	if out := run("echo"); len(out) != 3<<20 {
		t.Errorf("echo: %d bytes", len(out))
	}
	if out := run("escape"); out != "caught" {
		t.Errorf("escape: %s", out)
	}
	if LandlockVersion() >= LeastLandlock {
		if out := run("reach", dir); out != "kept" {
			t.Errorf("reach: %s", out)
		}
	}
}

// TestChildMakesNoOthers: no processes, no namespaces, and few threads.
func TestChildMakesNoOthers(t *testing.T) {
	needsRoot(t)
	for _, root := range []string{"", t.TempDir()} {
		if out, err := ask(t, Child{Verb: "escape", Root: root}, ""); err != nil || out != "caught" {
			t.Errorf("root %q: %q, %v", root, out, err)
		}
		if _, err := ask(t, Child{Verb: "crowd", Root: root}, ""); !errs.Is(err, errs.Internal) {
			t.Errorf("a thousand threads, root %q: %v", root, err)
		}
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
	want := "uid 65534 gid 65534 pid 1 env 2\nfd 0 10000\nfd 1 10000\nfd 2 10000\nfd 3 100000\n"
	// The runtime's own: epoll and its wake-up.
	if rest, ok := strings.CutPrefix(got, want); !ok || strings.Contains(rest, "40000") || strings.Contains(rest, "100000") {
		t.Errorf("a child has\n%s, want\n%s", got, want)
	}
	for root, caps := range map[string]string{"": "0000000000000000", t.TempDir(): "000000008000001b"} {
		p, err := Start(t.Context(), Child{Verb: "wait", Root: root})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		if _, err := p.Out.Read(make([]byte, 16)); err != nil {
			t.Error(err)
		}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			"CapEff:\t" + caps, "CapPrm:\t" + caps, "CapBnd:\t" + caps, "NoNewPrivs:\t1", "Seccomp:\t2",
		} {
			if !strings.Contains(string(b), "\n"+want) {
				t.Errorf("a child with the root %q lacks %q:\n%s", root, want, b)
			}
		}
		p.In.Close()
		if err := p.Wait(); err != nil {
			t.Error(err)
		}
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
