// Command guest is PID 1 of the sandboxes that runtimetest starts. It reads questions
// from stdin, one line of JSON each, and writes its answers there too: stdin is a
// socket, stdout is /dev/null as for every sandbox.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/seccomp"
)

func main() {
	switch {
	case len(os.Args) == 3 && os.Args[1] == "calls":
		i, _ := strconv.Atoi(os.Args[2])
		makeCalls(i)
	case len(os.Args) > 1: // its own child: see setuid
		fmt.Print(os.Geteuid())
		return
	}
	if err := seccomp.InstallAsked(); err != nil { // as the agent does
		os.Stdin.WriteString(strconv.Quote(err.Error()) + "\n") //nolint:errcheck // the answer to the first question
		os.Exit(1)
	}
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			select {} // init lives on until the cgroup kills it
		}
		var answer any
		switch q := strings.TrimSpace(line); q {
		case "ping":
			answer = "pong"
		case "report":
			answer = report()
		case "exit":
			os.Exit(3)
		case "calls":
			answer = calls()
		case "places":
			answer = places()
		case "setuid":
			answer = setuid()
		case "stores":
			answer = stores()
		case "count":
			answer = count()
		default:
			answer = "unknown question " + q
		}
		b, err := json.Marshal(answer)
		if err != nil {
			b = []byte(strconv.Quote(err.Error()))
		}
		os.Stdin.Write(append(b, '\n')) //nolint:errcheck // the reader is gone
	}
}

// setuid returns the effective user of a setuid program of root's that user 1000 runs.
func setuid() string {
	const path = "/tmp/setuid"
	b, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(path, b, 0o700)
	}
	if err == nil {
		err = os.Chmod(path, 0o755|os.ModeSetuid)
	}
	if err != nil {
		return err.Error()
	}
	cmd := exec.Command(path, "whoami")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}
	out, err := cmd.Output()
	if err != nil {
		return err.Error()
	}
	return string(out)
}

// places returns the size of each file system, and what the guest can do there.
func places() map[string]map[string]string {
	all := map[string]map[string]string{}
	for _, dir := range []string{"/", "/tmp", "/run", "/work", "/dev/shm", "/.sandboxd"} {
		p := map[string]string{}
		all[dir] = p
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err != nil {
			p["statfs"] = err.Error()
			continue
		}
		p["bytes"] = strconv.FormatUint(fs.Blocks*uint64(fs.Bsize), 10)
		var st unix.Stat_t
		_ = unix.Stat(dir, &st)
		p["mode"] = strconv.FormatUint(uint64(st.Mode&0o7777), 8)
		prog := filepath.Join(dir, "program")
		if p["write"] = errText(os.WriteFile(prog, []byte("#!/opt/opensandbox/sandbox-agent\n"), 0o700)); p["write"] != "ok" {
			continue
		}
		p["exec"] = errText(unix.Access(prog, unix.X_OK))
		p["fill"] = fill(filepath.Join(dir, "fill"))
	}
	return all
}

// stores returns what stands in each store of certificates that a test of the suite looks at,
// and whether the guest can change it.
func stores() map[string]map[string]string {
	all := map[string]map[string]string{}
	for _, name := range []string{
		"/opt/opensandbox/mitmproxy-ca-cert.pem", "/opt/opensandbox/ca-bundle.pem", "/usr/share/tls/bundle.pem",
		"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/cert.pem",
	} {
		s := map[string]string{}
		all[name] = s
		b, err := os.ReadFile(name)
		if s["text"] = string(b); err != nil {
			s["text"] = err.Error()
			continue
		}
		f, err := os.OpenFile(name, os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteString("mine")
			f.Close()
		}
		s["write"], s["chmod"] = errText(err), errText(os.Chmod(name, 0o600))
		if fi, err := os.Lstat(name); err != nil || !fi.Mode().IsRegular() {
			continue // a link may be removed
		}
		if err = os.WriteFile(name+".new", b, 0o600); err == nil {
			err = os.Rename(name+".new", name)
			os.Remove(name + ".new") //nolint:errcheck // it has been renamed
		}
		s["rename"], s["remove"] = errText(err), errText(os.Remove(name))
	}
	return all
}

// fill writes up to 32 MiB and returns how many bytes fitted.
func fill(path string) string {
	f, err := os.Create(path)
	if err != nil {
		return err.Error()
	}
	defer os.Remove(path)
	defer f.Close()
	n, b := 0, make([]byte, 1<<20)
	for ; n < 32; n++ {
		if _, err := f.Write(b); err != nil {
			break
		}
	}
	return strconv.Itoa(n)
}

func errText(err error) string {
	if err == nil {
		return "ok"
	}
	return err.Error()
}

func report() map[string]string {
	r := map[string]string{"cpus": strconv.Itoa(runtime.NumCPU())}
	for _, f := range []string{
		"/proc/self/status", "/proc/self/limits", "/proc/self/uid_map", "/proc/self/mountinfo", "/proc/meminfo", "/proc/self/oom_score_adj",
		"/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/proc/sys/kernel/random/boot_id",
	} {
		b, err := os.ReadFile(f)
		if err != nil {
			r[f] = err.Error()
			continue
		}
		r[f] = string(b)
	}
	r["hostname"], _ = os.Hostname()
	r["env"] = strings.Join(os.Environ(), "\n")
	r["cwd"], _ = os.Getwd()
	r["pid"] = strconv.Itoa(os.Getpid())
	fds, _ := filepath.Glob("/proc/self/fd/*")
	for _, fd := range fds {
		to, _ := os.Readlink(fd)
		r["fds"] += filepath.Base(fd) + " " + to + "\n"
	}
	for _, n := range []string{"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm"} {
		if _, err := os.Stat("/dev/" + n); err != nil {
			r["dev"] += err.Error() + "\n"
		}
	}
	for _, p := range []string{
		"/proc/kcore", "/proc/keys", "/proc/interrupts", "/proc/timer_list", "/proc/config.gz", "/proc/diskstats", "/proc/pressure",
		"/proc/pressure/cpu", "/sys/firmware", "/sys/class/dmi", "/sys/block", "/sys/class/block", "/sys/fs/btrfs", "/sys/kernel/notes",
		"/sys/kernel/vmcoreinfo",
	} {
		if readable(p) {
			r["unmasked"] += p + " "
		}
	}
	for _, p := range []string{
		"/sys/kernel/mm/transparent_hugepage/enabled", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger",
		"/opt/opensandbox/sandbox-agent", "/proc/pressure/cpu", "/proc/sys/kernel/random/boot_id",
	} {
		if fd, err := unix.Open(p, unix.O_WRONLY|unix.O_CLOEXEC, 0); err == nil {
			unix.Close(fd)
			r["writable"] += p + " "
		}
	}
	if err := os.WriteFile("/tmp/new", []byte("x"), 0o600); err != nil {
		r["rootfs"] = err.Error()
	}
	entries, _ := os.ReadDir("/sys")
	for _, e := range entries {
		r["/sys"] += e.Name() + " "
	}
	for name, p := range probes {
		if errno := p(); errno != 0 {
			r["sys."+name] = unix.ErrnoName(errno)
		} else {
			r["sys."+name] = "ok"
		}
	}
	return r
}

// readable reports whether p is a file with something in it or a directory with an entry.
func readable(p string) bool {
	if entries, err := os.ReadDir(p); err == nil {
		return len(entries) > 0
	}
	f, err := os.Open(p)
	if err != nil {
		return false
	}
	defer f.Close()
	n, _ := f.Read(make([]byte, 1))
	return n > 0
}

func call(nr uintptr, args ...uintptr) unix.Errno {
	var a [6]uintptr
	copy(a[:], args)
	_, _, errno := unix.RawSyscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
	return errno
}

// probes try calls that a sandbox must not make. Their arguments do no harm if a call
// succeeds.
var probes = map[string]func() unix.Errno{
	"unshare":  func() unix.Errno { return call(unix.SYS_UNSHARE, unix.CLONE_NEWUSER) },
	"setns":    func() unix.Errno { return call(unix.SYS_SETNS, ^uintptr(0), 0) },
	"clone3":   func() unix.Errno { return call(unix.SYS_CLONE3, 0, 0) },
	"clonens":  func() unix.Errno { return call(unix.SYS_CLONE, unix.CLONE_NEWUSER|unix.CLONE_THREAD) }, // EINVAL if it got through
	"mount":    func() unix.Errno { return call(unix.SYS_MOUNT, 0, 0, 0, 0, 0) },
	"fsopen":   func() unix.Errno { return call(unix.SYS_FSOPEN, 0, 0) },
	"bpf":      func() unix.Errno { return call(unix.SYS_BPF, 0, 0, 0) },
	"io_uring": func() unix.Errno { return call(unix.SYS_IO_URING_SETUP, 0, 0) },
	"keyctl":   func() unix.Errno { return call(unix.SYS_KEYCTL, 0, 0, 0) },
	"perf":     func() unix.Errno { return call(unix.SYS_PERF_EVENT_OPEN, 0, 0, 0, 0) },
	"ptrace":   func() unix.Errno { return call(unix.SYS_PTRACE, unix.PTRACE_ATTACH, 1<<22) }, // there is no such process
	"reboot":   func() unix.Errno { return call(unix.SYS_REBOOT, 1, 2, 3, 0) },
	"vsock":    func() unix.Errno { return call(unix.SYS_SOCKET, unix.AF_VSOCK, unix.SOCK_STREAM, 0) },
	"alg":      func() unix.Errno { return call(unix.SYS_SOCKET, unix.AF_ALG, unix.SOCK_SEQPACKET, 0) },
	"packet":   func() unix.Errno { return call(unix.SYS_SOCKET, unix.AF_PACKET, unix.SOCK_RAW, 0) },
	"netfilter": func() unix.Errno {
		return call(unix.SYS_SOCKET, unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER)
	},
	"route":   func() unix.Errno { return call(unix.SYS_SOCKET, unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE) },
	"inet":    func() unix.Errno { return call(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, 0) },
	"mptcp":   func() unix.Errno { return call(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP) },
	"udplite": func() unix.Errno { return call(unix.SYS_SOCKET, unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE) },
	"sctp":    func() unix.Errno { return call(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_SEQPACKET, unix.IPPROTO_SCTP) },
	"tiocsti": func() unix.Errno { return call(unix.SYS_IOCTL, ^uintptr(0), 1<<32|unix.TIOCSTI, 0) },
	"core": func() unix.Errno {
		err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 0, Max: 1})
		errno, _ := err.(unix.Errno)
		return errno
	},
	"chroot": func() unix.Errno { return errnoOf(unix.Chroot("/")) },
	"mknod":  func() unix.Errno { return errnoOf(unix.Mknod("/tmp/dev", unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5)))) },
}

func errnoOf(err error) unix.Errno {
	errno, _ := err.(unix.Errno)
	return errno
}
