package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
)

// A sysctl is a file below /proc/sys and the value written to it.
type sysctl struct {
	name, value string
	optional    bool // a kernel without the file is no error
}

// guestNet is written inside a new network namespace, before there is a link; a new
// link starts with the values of "default".
//
// IPv6 is blocked (docs/design/network.md, "Why is IPv6 blocked?"). A kernel
// without IPv6 has no file for it.
// Unprivileged ping needs no capability once every group may use it.
var guestNet = []sysctl{
	{"net/ipv6/conf/all/disable_ipv6", "1", true},
	{"net/ipv6/conf/default/disable_ipv6", "1", true},
	{"net/ipv4/ping_group_range", "0 65535", false},
	{"net/ipv4/conf/all/accept_redirects", "0", false},
	{"net/ipv4/conf/default/accept_redirects", "0", false},
	{"net/ipv4/conf/default/send_redirects", "0", false},
	{"net/ipv4/conf/default/rp_filter", "1", false},
	{"net/ipv4/conf/default/arp_ignore", "2", false},
	{"net/ipv4/conf/default/arp_announce", "2", false},
}

// guestTimes keeps the kernel from adding a whole message to the time at which it was sent: until that is read,
// it holds memory that no cgroup is charged with. Older kernels have the setting for the whole host, so there is no
// such file in a new namespace; sandboxd doctor looks at the host's.
var guestTimes = []sysctl{{"net/core/tstamp_allow_data", "0", true}}

// guestUser limits how much one sandbox may use of the objects that the kernel counts
// by user (docs/design/hardening.md, "Which traps do ordinary container defaults
// miss?"). User and network namespaces: none, the sandbox has those it needs. Time
// namespaces and fanotify: none, no runtime makes them and seccomp refuses them. Other
// namespaces: a runtime makes one of each when it starts, and the kernel frees those of
// the previous start late. So with a limit of 1 every second start would fail.
var guestUser = []sysctl{
	{"user/max_inotify_instances", "64", false},
	{"user/max_inotify_watches", "65536", false},
	{"user/max_user_namespaces", "0", false},
	{"user/max_net_namespaces", "0", false},
	{"user/max_mnt_namespaces", "8", false},
	{"user/max_pid_namespaces", "8", false},
	{"user/max_ipc_namespaces", "8", false},
	{"user/max_uts_namespaces", "8", false},
	{"user/max_cgroup_namespaces", "8", false},
	{"user/max_time_namespaces", "0", true},
	{"user/max_fanotify_groups", "0", true},
	{"user/max_fanotify_marks", "0", true},
}

// hostLink is written for the host end of a link, before it is up.
var hostLink = []sysctl{
	{"net/ipv6/conf/%s/disable_ipv6", "1", true},
	{"net/ipv6/conf/%s/accept_ra", "0", true},
	{"net/ipv4/conf/%s/rp_filter", "1", false},
	{"net/ipv4/conf/%s/accept_redirects", "0", false},
	{"net/ipv4/conf/%s/accept_source_route", "0", false},
	{"net/ipv4/conf/%s/send_redirects", "0", false},
	{"net/ipv4/conf/%s/proxy_arp", "0", false},
	{"net/ipv4/conf/%s/route_localnet", "0", false},
	{"net/ipv4/conf/%s/arp_ignore", "2", false},
	{"net/ipv4/conf/%s/arp_announce", "2", false},
	{"net/ipv4/conf/%s/forwarding", "1", false},
}

const procSys = "/proc/sys/"

// newProc mounts proc for the sysctls of one new namespace. Nobody else sees the mount,
// and it goes with the last descriptor of it.
//
// One mount of proc keeps the files of all namespaces that were opened through it under
// the same few names, and compares them one by one (proc_sys_compare in the kernel's
// fs/proc/proc_sysctl.c). Through /proc, the namespaces and the link of the 1001st sandbox
// took 28 ms instead of 6, and every other program was as slow in /proc/sys. A mount
// takes 0.1 ms.
func newProc() (*os.File, error) {
	fs, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen proc: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fmt.Errorf("make an instance of proc: %w", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("mount proc: %w", err)
	}
	return os.NewFile(uintptr(fd), "proc"), nil
}

// guestSteps is what a guest on runc gets, as steps for a child of withChild.
func guestSteps() []step {
	list := slices.Clone(guestNet)
	if !weak.Off(weak.KernelMemory) {
		list = append(list, guestTimes...)
	}
	if !weak.Off(weak.UserLimits) {
		list = append(list, guestUser...)
	}
	steps := make([]step, 0, len(list))
	for _, s := range list {
		steps = append(steps, newStep(s.name, s.value, s.optional))
	}
	return steps
}

// writeGuestSysctls writes guestNet. Preconditions: the thread is locked, and is in the
// guest's namespace.
func writeGuestSysctls() error {
	proc, err := newProc()
	if err != nil {
		return err
	}
	defer proc.Close()
	return writeSysctls(fmt.Sprintf("/proc/self/fd/%d/sys/", proc.Fd()), guestNet, "")
}

// writeSysctls writes list below root, with link for every %s.
func writeSysctls(root string, list []sysctl, link string) error {
	for _, s := range list {
		name := s.name
		if link != "" {
			name = fmt.Sprintf(name, link)
		}
		err := writeFile(root+name, []byte(s.value))
		if s.optional && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("set %s = %s: %w", name, s.value, err)
		}
	}
	return nil
}

// writeFile writes a file of /proc, which must exist, in one write. It makes as
// few system calls as possible: an Attach writes eleven such files.
func writeFile(path string, data []byte) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, data); err != nil {
		return &fs.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}
