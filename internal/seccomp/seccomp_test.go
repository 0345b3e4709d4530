package seccomp

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// numbers returns the calls of golang.org/x/sys/unix for goarch, by the kernel's names.
func numbers(t *testing.T, goarch string) map[string]int {
	t.Helper()
	dir, err := exec.Command("go", "list", "-f", "{{.Dir}}", "golang.org/x/sys/unix").Output()
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(strings.TrimSpace(string(dir)), "zsysnum_linux_"+goarch+".go"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all := map[string]int{}
	row := regexp.MustCompile(`^\s+SYS_(\w+)\s+= (\d+)$`)
	for s := bufio.NewScanner(f); s.Scan(); {
		if m := row.FindStringSubmatch(s.Text()); m != nil {
			n, err := strconv.Atoi(m[2])
			if err != nil {
				t.Fatal(err)
			}
			all[strings.ToLower(m[1])] = n
		}
	}
	if n, ok := all["fstatat"]; ok { // on arm64; linux/asm-generic calls it newfstatat
		all["newfstatat"] = n
		delete(all, "fstatat")
	}
	delete(all, "arch_specific_syscall") // the start of numbers that arm64 does not use
	return all
}

func TestTable(t *testing.T) {
	for _, goarch := range []string{"amd64", "arm64"} {
		want := numbers(t, goarch)
		if len(want) < 300 {
			t.Fatalf("%s: x/sys has %d calls: this test looks in the wrong place", goarch, len(want))
		}
		by := map[int]string{}
		for _, c := range Table {
			n := c.Number(goarch)
			if n < 0 {
				if w, ok := want[c.Name]; ok {
					t.Errorf("%s has %s, number %d; the table says it does not", goarch, c.Name, w)
				}
				continue
			}
			if w, ok := want[c.Name]; !ok || w != n {
				t.Errorf("%s: %s has number %d, the table says %d", goarch, c.Name, w, n)
			}
			if other, ok := by[n]; ok {
				t.Errorf("%s: %s and %s have number %d", goarch, c.Name, other, n)
			}
			by[n] = c.Name
		}
		for name, n := range want {
			if by[n] != name {
				t.Errorf("%s: %s, number %d, is not in the table: is it allowed, and why?", goarch, name, n)
			}
		}
	}
	seen := map[string]bool{}
	for _, c := range Table {
		if seen[c.Name] || c.Why == "" {
			t.Errorf("%s stands in the table twice, or without a reason", c.Name)
		}
		seen[c.Name] = true
	}
}

// Strict refuses all that Default refuses, whatever the arguments are.
func TestStrictIsStricter(t *testing.T) {
	for _, c := range Table {
		for _, args := range [][6]uint64{
			{}, {1, 1, 1}, {4, 4, 4}, {2, 2, 136}, {8}, {16, 3, 15}, {0, tiocsti}, {^uint64(0), ^uint64(0), ^uint64(0)},
		} {
			if normal := c.Verdict.Errno(Default, args); normal != 0 && c.Verdict.Errno(Strict, args) != normal {
				t.Errorf("%s%#x: default refuses it with %v, strict does not", c.Name, args, normal)
			}
		}
		if c.Verdict.At(Compat) != nil {
			t.Errorf("%s: compat refuses it", c.Name)
		}
	}
}

func TestParseLevel(t *testing.T) {
	for name, want := range map[string]Level{"": Default, "compat": Compat, "default": Default, "strict": Strict} {
		if got, err := ParseLevel(name); got != want || err != nil {
			t.Errorf("%q: %q, %v", name, got, err)
		}
	}
	if _, err := ParseLevel("Strict"); err == nil || !strings.Contains(err.Error(), "strict, default and compat") {
		t.Errorf("%v", err)
	}
	if err := Install("none"); err == nil {
		t.Error("a level that does not exist was installed")
	}
}

// TestMain lets this binary be the process that installs a filter: it never gets rid of it.
func TestMain(m *testing.M) {
	switch os.Getenv("BE") {
	case "":
		os.Exit(m.Run())
	case "installed":
		beInstalled()
	case "measured":
		beMeasured()
	}
}

// be runs this binary as who, and returns what it says, by key.
func be(t testing.TB, who string, env ...string) map[string]string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), "BE="+who), env...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	said := map[string]string{}
	for line := range strings.Lines(string(out)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), " ")
		said[k] = v
	}
	return said
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// noNewPrivs is for the thread that installs the filter, which sets it for the others.
func noNewPrivs() {
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		fail(err)
	}
}

func filters(path string) int {
	b, err := os.ReadFile(path)
	if err != nil {
		fail(err)
	}
	for line := range strings.Lines(string(b)) {
		if n, ok := strings.CutPrefix(line, "Seccomp_filters:"); ok {
			i, err := strconv.Atoi(strings.TrimSpace(n))
			if err != nil {
				fail(err)
			}
			return i
		}
	}
	return 0
}

func beInstalled() {
	noNewPrivs()
	before := filters("/proc/self/status")
	if err := InstallAsked(); err != nil {
		fail(err)
	}
	if _, ok := os.LookupEnv(Variable); ok {
		fail(fmt.Errorf("%s is still there", Variable))
	}
	shown, err := os.ReadFile("/proc/self/environ")
	if err != nil || strings.Contains(string(shown), Variable) || !strings.Contains(string(shown), "\x00BE=installed\x00") {
		fail(fmt.Errorf("/proc shows the environment %q, %v", shown, err))
	}
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(tasks) < 2 {
		fail(fmt.Errorf("threads: %v, %v", tasks, err))
	}
	for _, task := range tasks {
		fmt.Println("filters", filters(task)-before)
	}
	call := func(name string, nr uintptr, args ...uintptr) {
		var a [3]uintptr
		copy(a[:], args)
		fd, _, errno := unix.RawSyscall(nr, a[0], a[1], a[2])
		if errno == 0 && strings.HasPrefix(name, "socket") {
			unix.Close(int(fd))
		}
		fmt.Println(name, unix.ErrnoName(errno))
	}
	call("getpid", unix.SYS_GETPID)
	call("unknown", 999)
	call("listmount", unix.SYS_LISTMOUNT)
	call("mincore", unix.SYS_MINCORE, 1) // not on a page
	call("unshare", unix.SYS_UNSHARE)    // nothing, which all may do
	call("lock", unix.SYS_FCNTL, ^uintptr(0), unix.F_SETLK)
	call("lock-of-open-file", unix.SYS_FCNTL, ^uintptr(0), unix.F_OFD_SETLK)
	call("lock-of-open-file-waits", unix.SYS_FCNTL, ^uintptr(0), unix.F_OFD_SETLKW)
	call("socket", unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_TCP)
	call("socket-mptcp", unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP)
	call("socket-udplite", unix.SYS_SOCKET, unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE)
	out, err := exec.Command("grep", "Seccomp_filters", "/proc/self/status").Output() // clone, and all that a program needs
	if err != nil {
		fail(err)
	}
	f := strings.Fields(string(out))
	n, err := strconv.Atoi(f[len(f)-1])
	if err != nil {
		fail(err)
	}
	fmt.Println("child", n-before)
}

// All threads of a process and its children get the filter, and the kernel answers as the
// table says.
func TestInstall(t *testing.T) {
	for level, want := range map[Level]map[string]string{
		Compat: {
			"filters": "0", "child": "0", "getpid": "", "unshare": "", "mincore": "EINVAL", "socket": "", "lock-of-open-file": "EBADF",
		},
		Default: {
			"filters": "1", "child": "1", "getpid": "", "unknown": "ENOSYS", "listmount": "ENOSYS", "mincore": "EINVAL", "unshare": "EPERM",
			"lock": "EBADF", "lock-of-open-file": "EBADF", "lock-of-open-file-waits": "EBADF",
			"socket": "", "socket-mptcp": "EPROTONOSUPPORT", "socket-udplite": "EPROTONOSUPPORT",
		},
		Strict: {
			"filters": "1", "child": "1", "getpid": "", "unknown": "ENOSYS", "listmount": "ENOSYS", "mincore": "ENOSYS", "unshare": "EPERM",
			"lock": "EBADF", "lock-of-open-file": "EINVAL", "lock-of-open-file-waits": "EINVAL",
			"socket": "", "socket-mptcp": "EPROTONOSUPPORT", "socket-udplite": "EPROTONOSUPPORT",
		},
	} {
		got := be(t, "installed", Variable+"="+string(level))
		for key, w := range want {
			if g, ok := got[key]; !ok || g != w {
				t.Errorf("%s: %s: %q, want %q", level, key, g, w)
			}
		}
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "BE=installed", Variable+"=lax")
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), `"lax" is none of`) {
		t.Errorf("a level that does not exist: %v, %s", err, out)
	}
}

// cpuTime is how long this thread has computed, in ns: other processes do not count.
func cpuTime() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		fail(err)
	}
	return ts.Nano()
}

// beMeasured says what the filters cost, in ns.
func beMeasured() {
	noNewPrivs()
	calls := []struct {
		name string
		args [4]uintptr
	}{
		{"getpid", [4]uintptr{unix.SYS_GETPID}},
		{"read", [4]uintptr{unix.SYS_READ, ^uintptr(0)}},
		{"ioctl", [4]uintptr{unix.SYS_IOCTL, ^uintptr(0), unix.TCGETS}}, // whose arguments are checked
	}
	measure := func(when string) {
		for _, c := range calls {
			const n = 1000 // short, so that some round is disturbed by nobody
			best := time.Duration(1 << 62)
			for range 100 {
				t0 := time.Now()
				for range n {
					unix.RawSyscall(c.args[0], c.args[1], c.args[2], c.args[3]) //nolint:errcheck // all but getpid fail
				}
				best = min(best, time.Since(t0))
			}
			fmt.Printf("%s-%s %.2f\n", c.name, when, float64(best)/n)
		}
	}
	measure("none")
	all := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW}} // in the place of stage 1
	prog := unix.SockFprog{Len: 1, Filter: &all[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&prog))); errno != 0 {
		fail(errno)
	}
	measure("one")
	t0 := cpuTime()
	if err := Install(Default); err != nil {
		fail(err)
	}
	fmt.Println("install", cpuTime()-t0)
	measure("both")
}

// BenchmarkCost measures installing the second filter, and calls without a filter, with
// one, and with both. Each number is the best of b.N processes.
func BenchmarkCost(b *testing.B) {
	best := map[string]float64{}
	for b.Loop() {
		for k, v := range be(b, "measured") {
			ns, err := strconv.ParseFloat(v, 64)
			if err != nil {
				b.Fatal(err)
			}
			if old, ok := best[k]; !ok || ns < old {
				best[k] = ns
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	for k, ns := range best {
		b.ReportMetric(ns, "ns-"+k)
	}
}
