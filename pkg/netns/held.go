package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A Held is the memory of the kernel that sockets of one sandbox hold in messages that nobody has
// read or sent on, truesize as the kernel counts it.
type Held struct {
	Bytes int64
	Most  string // the protocol that holds most of it
}

// The tables of /proc/net whose sockets no cgroup is charged with, or not for all they hold. TCP
// and Unix sockets are not among them: a cgroup is charged with what they queue.
//
// A message of netlink and of ICMP is charged to nobody, on v1 and v2. Of UDP that holds for errors
// and time stamps (IP_RECVERR, SO_TIMESTAMPING), which keep a copy of each message that was sent,
// and whose size stands with that of the received ones.
var unpaid = []struct {
	protocol string // of /proc/net/protocols
	table    string // of /proc/net
	name     string
}{
	{"NETLINK", "netlink", "netlink"},
	{"PING", "icmp", "ICMP"},
	{"PINGv6", "icmp6", "ICMPv6"},
	{"RAW", "raw", "raw IP"},
	{"RAWv6", "raw6", "raw IPv6"},
	{"UDP", "udp", "UDP"},
	{"UDPv6", "udp6", "UDP"},
}

// bareSocket is what a socket of netlink costs beside its messages; its cgroup is charged with half of
// it (measured with 2,000 of them on Linux 6.18).
const bareSocket = 2 << 10

// HeldBy returns what the sockets of each of ids hold. It leaves out those that cannot hold more than
// least: of these it reads only how many sockets there are (20 µs). An id without namespaces
// holds nothing.
//
// It moves the calling thread through the namespaces, because the kernel has no list of them all.
func HeldBy(m *Manager, ids []string, least int64) (map[string]Held, error) {
	full, err := fullSocket()
	if err != nil {
		return nil, fmt.Errorf("find out how much one socket holds: %w", err)
	}
	runtime.LockOSThread()
	here, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return nil, err
	}
	defer here.Close()
	all := map[string]Held{}
	var failed []error
	for _, id := range ids {
		h, err := heldBy(m, id, least, full)
		if err != nil {
			failed = append(failed, fmt.Errorf("read what the sockets of %s hold: %w", id, err))
		} else if h.Bytes > least {
			all[id] = h
		}
	}
	if back := unix.Setns(int(here.Fd()), unix.CLONE_NEWNET); back != nil {
		// The thread stays locked, and ends with this goroutine: see newNet.
		return all, errors.Join(append(failed, fmt.Errorf("return to the host's network: %w", back))...)
	}
	runtime.UnlockOSThread()
	return all, errors.Join(failed...)
}

// fullSocket is the most that the messages of one socket may hold: the kernel doubles what SO_RCVBUF
// asks for, and the last message may go beyond it.
func fullSocket() (int64, error) {
	var most int64
	for name, times := range map[string]int64{"rmem_max": 2, "wmem_max": 2, "rmem_default": 1, "wmem_default": 1} {
		b, err := os.ReadFile(procSys + "net/core/" + name)
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		if err != nil {
			return 0, err
		}
		most = max(most, n*times)
	}
	return 2 * (most + 128<<10), nil // both queues
}

// heldBy moves the calling thread, which is locked, into the namespace of id and looks there.
func heldBy(m *Manager, id string, least, full int64) (h Held, err error) {
	if err := m.check(id); err != nil {
		return h, err
	}
	fd, err := unix.Open(m.NetPath(id), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return h, nil
	}
	if err != nil {
		return h, err
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return h, fmt.Errorf("enter its network namespace: %w", err)
	}
	counts, err := socketCounts(least, full)
	if err != nil || counts == nil {
		return h, err
	}
	most := int64(0)
	for _, u := range unpaid {
		n := counts[u.protocol]
		if n == 0 {
			continue
		}
		text, err := os.ReadFile(threadNet + u.table)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return h, err
		}
		bytes := queued(string(text))
		if u.protocol == "NETLINK" {
			bytes += n * bareSocket
		}
		h.Bytes += bytes
		if bytes > most {
			most, h.Most = bytes, u.name
		}
	}
	return h, nil
}

const threadNet = "/proc/thread-self/net/"

// socketCounts counts the sockets of this namespace by protocol. It is nil if all of them
// together cannot hold more than least.
func socketCounts(least, full int64) (map[string]int64, error) {
	text, err := os.ReadFile(threadNet + "sockstat")
	if err != nil {
		return nil, err
	}
	_, rest, ok := strings.Cut(string(text), "sockets: used ")
	used, _, _ := strings.Cut(rest, "\n")
	n, err := strconv.ParseInt(used, 10, 64)
	if !ok || err != nil {
		return nil, fmt.Errorf("%ssockstat does not say how many sockets are used: %.100q", threadNet, text)
	}
	if n*full <= least {
		return nil, nil //nolint:nilnil // documented
	}
	if text, err = os.ReadFile(threadNet + "protocols"); err != nil {
		return nil, err
	}
	counts, unpaidOnes := map[string]int64{}, int64(0)
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 2 {
			counts[f[0]], _ = strconv.ParseInt(f[2], 10, 64) // the heading has no number
		}
	}
	for _, u := range unpaid {
		unpaidOnes += counts[u.protocol]
	}
	if unpaidOnes*full <= least {
		return nil, nil //nolint:nilnil // documented
	}
	return counts, nil
}

// queued adds up both queues of all sockets of a table of /proc/net. That of netlink has Rmem and
// Wmem, in decimal; the others have tx_queue:rx_queue, in hexadecimal.
func queued(table string) (sum int64) {
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) < 6 {
			continue
		}
		out, in, inet := strings.Cut(f[4], ":")
		base := 16
		if !inet {
			out, in, base = f[4], f[5], 10
		}
		for _, n := range []string{out, in} {
			bytes, _ := strconv.ParseInt(n, base, 64) // the heading has no numbers
			sum += bytes
		}
	}
	return sum
}
