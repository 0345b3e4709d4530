package snapshottest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/pkg/snapshot/layer"
)

// guestEnv makes the test binary be a guest: what to do, and the root to do it in.
const guestEnv = "SNAPSHOTTEST_GUEST"

// Main is the TestMain of a package that runs the suite: the suite starts the
// test binary again, as root of a sandbox.
func Main(m *testing.M) {
	confine.MainOfTest(map[string]confine.Verb{layer.UnpackVerb: layer.Unpack})
	verb, root, ok := strings.Cut(os.Getenv(guestEnv), " ")
	if !ok {
		os.Exit(m.Run())
	}
	if err := guest(verb, root); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func guest(verb, root string) error {
	unix.Umask(0)
	if verb == "wait" {
		_, err := io.Copy(io.Discard, os.Stdin)
		return err
	}
	if err := unix.Chroot(root); err != nil {
		return fmt.Errorf("chroot: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	switch verb {
	case "write":
		return write()
	case "rewrite":
		return rewrite()
	case "hollow":
		return errors.Join(os.RemoveAll("/usr/lib"), os.RemoveAll("/usr/bin"), os.WriteFile("/usr/bin", nil, 0o644))
	case "many":
		for i := range 3000 {
			if err := os.WriteFile(fmt.Sprintf("/srv/new-%04d", i), []byte(strconv.Itoa(i)), 0o644); err != nil {
				return err
			}
		}
		return nil
	case "fill":
		if err := dropResource(); err != nil {
			return err
		}
		return fill()
	case "files":
		return files()
	case "leave project":
		return leaveProject()
	case "device":
		return unix.Mknod("/device", unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3)))
	case "manifest":
		return manifest("/", os.Stdout)
	}
	return fmt.Errorf("no such verb %q", verb)
}

// command starts the test binary again; with own users as root of a user
// namespace that starts at base.
func command(verb, root string, own bool, base uint32) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{guestEnv + "=" + verb + " " + root}
	if own {
		m := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(base), Size: 65536}}
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, UidMappings: m, GidMappings: m,
			GidMappingsEnableSetgroups: true, Credential: &syscall.Credential{},
		}
	}
	return cmd
}

// UserNS makes a user namespace that maps 0..65535 to base and what follows.
func UserNS(base uint32) (f *os.File, err error) {
	cmd := command("wait", "/", true, base)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("make user namespace: %w", err)
	}
	f, err = os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	return f, errors.Join(err, in.Close(), cmd.Wait())
}

// as runs a verb in a root file system and returns what it printed.
func as(verb, root string, s slot) (string, error) {
	cmd := command(verb, root, s.own, s.base)
	var out, bad bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &bad
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", verb, err, strings.TrimSpace(bad.String()))
	}
	return out.String(), nil
}

// steps runs steps until one fails, and says which.
type steps struct{ err error }

func (s *steps) do(what string, err error) {
	if s.err == nil && err != nil {
		s.err = fmt.Errorf("%s: %w", what, err)
	}
}

// write does to a tree what guests do and what overlays find hard.
func write() error {
	var s steps
	for _, id := range []int{0, 1, 33, 1000, 65534, 65535} {
		p := fmt.Sprintf("/srv/of-%d", id)
		s.do("create", os.WriteFile(p, []byte(p), 0o640))
		s.do("chown "+p, os.Chown(p, id, 65535-id))
	}
	s.do("setuid", errors.Join(os.WriteFile("/srv/su", []byte("su"), 0o755), os.Chown("/srv/su", 1000, 1000),
		unix.Chmod("/srv/su", 0o6755)))
	s.do("setuid of a lower file of another", errors.Join(unix.Chmod("/usr/bin/of-33", 0o6755)))
	s.do("chown of a lower file", os.Chown("/usr/bin/plain", 1000, 33))
	s.do("chown of a lower link", os.Lchown("/usr/bin/link", 7, 8))
	s.do("append to a lower file", appendTo("/etc/conf", "more\n"))
	s.do("whiteout", os.Remove("/usr/share/goes"))
	s.do("opaque", errors.Join(os.RemoveAll("/usr/lib/dir"), os.Mkdir("/usr/lib/dir", 0o750), os.WriteFile("/usr/lib/dir/new", nil, 0o600)))
	s.do("hard link", os.Link("/srv/of-33", "/srv/of-33-again"))
	s.do("sparse", errors.Join(os.WriteFile("/srv/sparse", []byte("x"), 0o600), os.Truncate("/srv/sparse", 8<<20)))
	s.do("symlink", os.Symlink("../etc/conf", "/srv/link"))
	s.do("fifo", unix.Mkfifo("/srv/fifo", 0o622))
	s.do("setgid directory", errors.Join(os.Mkdir("/srv/sg", 0o755), os.Chown("/srv/sg", 0, 50), unix.Chmod("/srv/sg", 0o2775),
		os.WriteFile("/srv/sg/inherits", nil, 0o644)))
	s.do("user xattr", unix.Setxattr("/srv/su", "user.note", []byte("hello"), 0))
	s.do("acl", unix.Setxattr("/srv/of-1000", "system.posix_acl_access", acl(1000), 0))
	s.do("default acl", unix.Setxattr("/srv/sg", "system.posix_acl_default", acl(33), 0))
	s.do("file capability", unix.Setxattr("/srv/of-0", "security.capability", fileCaps(), 0))
	s.do("file capability of a lower file", unix.Setxattr("/usr/bin/plain2", "security.capability", fileCaps(), 0))
	s.do("deep", os.MkdirAll("/srv"+strings.Repeat("/d", 40), 0o755))
	return s.err
}

// rewrite changes in another slot what write made in the first.
func rewrite() error {
	var s steps
	s.do("append", appendTo("/srv/of-33", "more"))
	s.do("chown", os.Chown("/srv/of-65535", 5, 6))
	s.do("remove", os.Remove("/srv/of-1"))
	s.do("remove tree", os.RemoveAll("/srv/d"))
	s.do("setgid", unix.Chmod("/srv/of-1000", 0o2755))
	s.do("into opaque", os.WriteFile("/usr/lib/dir/later", []byte("x"), 0o644))
	return s.err
}

func appendTo(path, text string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// dropResource takes CAP_SYS_RESOURCE from this goroutine's thread: ext4 enforces no
// quota against it. The gofer, which writes for guests of gVisor (goferCaps), does not
// have it, and root of a user namespace has it only in that namespace.
func dropResource() error {
	runtime.LockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData // of capabilities 0 to 31, and 32 to 63
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return os.NewSyscallError("capget", err)
	}
	sets[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
	return os.NewSyscallError("capset", unix.Capset(&header, &sets[0]))
}

// fill writes until it may not and prints the bytes that went in, and then
// whether removing works when full.
func fill() error {
	f, err := os.Create("/srv/fill")
	if err != nil {
		return err
	}
	defer f.Close()
	block := make([]byte, 64<<10)
	for i := range block {
		block[i] = byte(i * 7)
	}
	var n int64
	for {
		w, err := f.Write(block)
		n += int64(w)
		if err == nil && n%(8<<20) == 0 {
			err = f.Sync() // what is refused late is refused here
		}
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			break
		}
		if err != nil {
			return err
		}
		if n > 1<<30 {
			return errors.New("no limit below 1 GiB")
		}
	}
	fmt.Println(n)
	return os.Remove(filepath.Join("/srv", "fill"))
}

// files makes empty files until there is no room for another, and says how many.
func files() error {
	for n := 0; ; n++ {
		f, err := os.Create(fmt.Sprintf("/srv/f%d", n))
		if errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.ENOSPC) {
			fmt.Println(n)
			return nil
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
}

// leaveProject takes a file of its own out of its project.
func leaveProject() error {
	f, err := os.Open("/srv/f1")
	if err != nil {
		return err
	}
	defer f.Close()
	var a [28]byte // struct fsxattr
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), 0x801c581f, uintptr(unsafe.Pointer(&a))); e != 0 {
		return e
	}
	binary.LittleEndian.PutUint32(a[12:], 0)
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), 0x401c5820, uintptr(unsafe.Pointer(&a))); e != 0 {
		return e
	}
	return nil
}

// fileCaps is cap_net_bind_service=ep, revision 2 (struct vfs_cap_data).
func fileCaps() []byte {
	b := make([]byte, 20)
	binary.LittleEndian.PutUint32(b, 0x02000001)
	binary.LittleEndian.PutUint32(b[4:], 1<<unix.CAP_NET_BIND_SERVICE)
	return b
}

// acl is u::rwx,u:id:rw-,g::r--,m::rwx,o::--- (struct posix_acl_xattr_header).
func acl(id uint32) []byte {
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{1, 7, ^uint32(0)}, {2, 6, id}, {4, 4, ^uint32(0)}, {16, 7, ^uint32(0)}, {32, 0, ^uint32(0)}} {
		b = binary.LittleEndian.AppendUint16(b, e.tag)
		b = binary.LittleEndian.AppendUint16(b, e.perm)
		b = binary.LittleEndian.AppendUint32(b, e.id)
	}
	return b
}
