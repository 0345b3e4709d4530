package kmem

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestMain lets this binary be a process that holds locks.
func TestMain(m *testing.M) {
	runtime.LockOSThread() // hold may end the first thread
	if how := os.Getenv("HOLD"); how != "" {
		hold(how)
	}
	os.Exit(m.Run())
}

// lock locks every second byte of fd, n of them after the first ones, by a command of fcntl(2).
func lock(fd, cmd, first, n int) {
	for i := range n {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(2 * (first + i)), Len: 1}
		if err := unix.FcntlFlock(uintptr(fd), cmd, &l); err != nil {
			panic(err)
		}
	}
}

func newFile() int {
	fd, err := unix.MemfdCreate("locked", unix.MFD_CLOEXEC)
	if err != nil {
		panic(err)
	}
	return fd
}

// hold makes as many locks as LOCKS says, writes which processes keep them, and waits until the test closes
// its input.
func hold(how string) {
	n, err := strconv.Atoi(os.Getenv("LOCKS"))
	if err != nil {
		panic(err)
	}
	ready := func(pids ...any) {
		fmt.Println(pids...)
		io.Copy(io.Discard, os.Stdin) //nolint:errcheck // it ends, in any way
		os.Exit(0)
	}
	switch how {
	case "files":
		for range 4 {
			lock(newFile(), unix.F_SETLK, 0, n/4)
		}
	case "open-file": // which two processes have
		lock(newFile(), unix.F_OFD_SETLK, 0, n)
		ready(os.Getpid(), fork(0))
	case "open-twice":
		fd := newFile()
		lock(fd, unix.F_SETLK, 0, n)
		if _, err := unix.Dup(fd); err != nil {
			panic(err)
		}
	case "descriptors": // many of each of four open files of one inode
		path := fmt.Sprintf("/proc/self/fd/%d", newFile())
		for i, cmd := range []int{unix.F_SETLK, unix.F_SETLK, unix.F_OFD_SETLK, unix.F_OFD_SETLK} {
			fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				panic(err)
			}
			lock(fd, cmd, i*n, n)
			for range 200 {
				if _, err := unix.Dup(fd); err != nil {
					panic(err)
				}
			}
		}
	case "own-table": // of a thread
		done := make(chan bool)
		go func() {
			runtime.LockOSThread()
			if err := unix.Unshare(unix.CLONE_FILES); err != nil {
				panic(err)
			}
			lock(newFile(), unix.F_SETLK, 0, n)
			close(done)
			select {}
		}()
		<-done
	case "first-thread": // ends
		go func() {
			lock(newFile(), unix.F_SETLK, 0, n)
			ready(os.Getpid())
		}()
		unix.Syscall(unix.SYS_EXIT, 0, 0, 0) //nolint:errcheck // it does not return
	case "gone": // but another process has its open files
		pid := fork(unix.CLONE_FILES)
		lock(newFile(), unix.F_SETLK, 0, n)
		fmt.Println(pid)
		os.Exit(0)
	}
	ready(os.Getpid())
}

// fork makes a process that ends when the test closes its input.
func fork(flags uintptr) int {
	var b [1]byte
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, flags|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		panic(errno)
	}
	for pid == 0 { // this process has no runtime of Go
		unix.RawSyscall(unix.SYS_READ, 0, uintptr(unsafe.Pointer(&b)), 1)
		unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
	return int(pid)
}

// holder starts a process that holds locks, and returns those that keep them.
func holder(t testing.TB, how string, locks int) (pids []int) {
	t.Helper()
	in, end, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "HOLD="+how, "LOCKS="+strconv.Itoa(locks), "GORACE=atexit_sleep_ms=0")
	cmd.Stdin, cmd.Stderr = in, os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	for _, f := range strings.Fields(line) {
		pid, nerr := strconv.Atoi(f)
		err = errors.Join(err, nerr)
		pids = append(pids, pid)
	}
	if how == "gone" {
		err = errors.Join(err, cmd.Wait())
	}
	t.Cleanup(func() {
		end.Close()
		if how != "gone" {
			cmd.Wait() //nolint:errcheck // what counts is that it has ended
		}
	})
	if err != nil || len(pids) == 0 {
		t.Fatalf("%s: it said %q: %v", how, line, err)
	}
	return pids
}

// looked returns which sandboxes, of some processes each, hold more than they may.
func looked(t testing.TB, b bounds, sandboxes map[string][]int) []string {
	t.Helper()
	over := map[string]string{}
	unseen, err := b.look(slices.Sorted(maps.Keys(sandboxes)), func(id string) ([]int, error) { return sandboxes[id], nil }, over)
	if err != nil || unseen != (len(over) == 0 && many(t, b)) {
		t.Errorf("many locks that no sandbox shows: %v, %v; over: %v", unseen, err, over)
	}
	return slices.Sorted(maps.Keys(over))
}

// many reports whether this host has more locks than one sandbox may hold.
func many(t testing.TB, b bounds) bool {
	t.Helper()
	text, err := os.ReadFile("/proc/locks")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(text), "\n") > b.locks
}

// A sandbox that holds one lock more than it may is found, however it holds them, and one that does not is left alone.
func TestLocks(t *testing.T) {
	b := bounds{locks: 200, time: time.Minute}
	quiet := holder(t, "files", b.locks)
	for _, how := range []string{"files", "open-file", "open-twice", "own-table", "first-thread", "gone"} {
		t.Run(how, func(t *testing.T) {
			for locks, want := range map[int]string{b.locks: "[]", b.locks + 4: "[this]"} {
				pids := holder(t, how, locks)
				if got := fmt.Sprint(looked(t, b, map[string][]int{"quiet": quiet, "this": pids, "ended": {1 << 30}})); got != want {
					t.Errorf("with %d locks: %s are over, want %s", locks, got, want)
				}
			}
		})
	}
}

// However many descriptors an open file has, its locks are read once. Other open files of its inode have their own.
func TestDescriptors(t *testing.T) {
	pid := holder(t, "descriptors", 100)[0]
	s := survey{bounds: bounds{locks: 1000}, until: time.Now().Add(time.Minute)}
	if err := s.process(pid); err != nil || s.late || s.posix != 200 || len(s.open) != 200 {
		t.Errorf("%d locks of the process and %d of open files, want 200 each; late: %v; %v", s.posix, len(s.open), s.late, err)
	}
	if len(s.files) != 4 {
		t.Errorf("the locks of %d descriptors were read, want 4", len(s.files))
	}
}

// A descriptor that was closed after it was read hides no other one.
func TestClosedDescriptor(t *testing.T) {
	var s survey
	fds := []int{newFile(), newFile(), newFile()}
	for _, fd := range fds {
		at, _ := s.find(os.Getpid(), fd)
		s.files = slices.Insert(s.files, at, fd)
	}
	gone := s.files[1] // where a search begins
	unix.Close(gone)
	for _, fd := range fds {
		if _, found := s.find(os.Getpid(), fd); found != (fd != gone) {
			t.Errorf("descriptor %d is found: %v; %d was closed", fd, found, gone)
		}
		if fd != gone {
			defer unix.Close(fd)
		}
	}
	if slices.Contains(s.files, gone) || len(s.files) != 2 {
		t.Errorf("left: %v, without %d", s.files, gone)
	}
}

// Locks that cannot be looked at in time are those of the process that made them; and if that is gone, those of
// each sandbox that takes too long.
func TestSlowLocks(t *testing.T) {
	b := bounds{locks: 200}
	slow := holder(t, "files", 4)
	for how, want := range map[string]string{"files": "[this]", "gone": "[slow this]"} {
		t.Run(how, func(t *testing.T) {
			if got := fmt.Sprint(looked(t, b, map[string][]int{"slow": slow, "this": holder(t, how, 300)})); got != want {
				t.Errorf("over: %s, want %s", got, want)
			}
		})
	}
}

// The list ends where it is to end, and lines that nobody knows count nothing.
func TestList(t *testing.T) {
	path := filepath.Join(t.TempDir(), "locks")
	text := "1: POSIX  ADVISORY  WRITE 708 08:01:13 0 EOF\n" +
		"1: -> POSIX  ADVISORY  WRITE 709 08:01:13 0 EOF\n" +
		"2: OFDLCK ADVISORY  READ -1 fe:00:100 100 100\n" +
		"3: POSIX  *NOINODE* READ 708 <none>:0 0 1\n" +
		"4: POSIX  ADVISORY  READ -7 00:30:9 0 1\n" +
		"5: FLOCK  ADVISORY  WRITE 710 08:01:14 0 EOF\n" +
		"6: LEASE  ACTIVE    READ 710 08:01:15 0 EOF\n" +
		"POSIX\n\n7: POSIX\n8: POSIX ADVISORY\n9: POSIX  ADVISORY  WRITE many 08:01:13 0 EOF\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for lines, want := range map[int]string{100: "{12 map[708:2]}", 3: "{3 map[708:1]}"} {
		if l, err := read(path, lines); err != nil || fmt.Sprint(l) != want {
			t.Errorf("%d lines: %v, %v; want %s", lines, l, err, want)
		}
	}
	if _, err := read(path+"x", 1); !os.IsNotExist(err) {
		t.Errorf("without a list: %v", err)
	}
}

// BenchmarkLocks is a look while nobody holds locks, while many are held by others, and while a sandbox holds
// too many.
func BenchmarkLocks(b *testing.B) {
	run := func(name string, sandboxes map[string][]int) {
		ids := slices.Sorted(maps.Keys(sandboxes))
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				_, err := lockBounds.look(ids, func(id string) ([]int, error) { return sandboxes[id], nil }, map[string]string{})
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	quiet := holder(b, "files", 4)
	run("idle", map[string][]int{"quiet": quiet})
	for range 5 {
		holder(b, "files", 8000)
	}
	run("others", map[string][]int{"quiet": quiet})
	run("over", map[string][]int{"quiet": quiet, "this": holder(b, "files", 20_000)})
}
