package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/instance"
)

const inst = instance.Instance('n')

// newManager returns a Manager on a host that is ready, and sees that nothing
// of it is left in the end.
func newManager(t testing.TB) *Manager {
	t.Helper()
	hosttest.Root(t)
	hosttest.Leaks(t, inst)
	m := New(inst, inst.RunDir())
	t.Cleanup(func() {
		ids, err := m.ListNamespaces(context.Background())
		if err != nil {
			t.Error(err)
		}
		links, err := m.ListLinks(context.Background())
		if err != nil {
			t.Error(err)
		}
		for _, id := range append(ids, links...) {
			remove(t, m, id)
		}
		for range 2 {
			if err := m.Purge(context.Background()); err != nil {
				t.Error(err)
			}
		}
		os.Remove(inst.RunDir())
	})
	for range 2 {
		if err := errors.Join(m.Setup(t.Context()), m.OpenUplinks(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func remove(t testing.TB, m *Manager, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second) // who waits so long waits in vain
	defer cancel()
	for range 2 {
		if err := errors.Join(m.Detach(ctx, id), m.DeleteNamespaces(ctx, id), m.Gone(ctx, id)); err != nil {
			t.Error(err)
		}
	}
}

// id is the i-th ID of a test.
func id(i int) string {
	return "nnetns" + strings.ToLower(fmt.Sprintf("%c%c%c%c%c%c", 'a'+i/26/26%26, 'a'+i/26%26, 'a'+i%26, 'a', 'b', 'c'))
}

func addr(i int) netip.Addr {
	a := inst.Pool().Addr().As4()
	a[2], a[3] = byte((i+2)>>8), byte(i+2)
	return netip.AddrFrom4(a)
}

// in runs a command inside the namespaces of id and returns its output.
func in(t testing.TB, m *Manager, id string, args ...string) string {
	t.Helper()
	join := []string{"--net=" + m.NetPath(id)}
	if _, err := os.Stat(m.UserPath(id)); err == nil {
		join = append(join, "--user="+m.UserPath(id), "--preserve-credentials")
	}
	return run(t, "nsenter", append(join, args...)...)
}

func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// fields makes a listing comparable: one space between words, no empty lines.
func fields(s string) string {
	var lines []string
	for line := range strings.Lines(s) {
		if f := strings.Fields(line); len(f) > 0 {
			lines = append(lines, strings.Join(f, " "))
		}
	}
	return strings.Join(lines, "\n")
}

func same(t testing.TB, what, got, want string) {
	t.Helper()
	if fields(got) != fields(want) {
		t.Errorf("%s:\n%s\nwant:\n%s", what, fields(got), fields(want))
	}
}

func TestAttachGolden(t *testing.T) {
	m := newManager(t)
	for _, own := range []bool{false, true} {
		t.Run(fmt.Sprintf("ownUsers=%v", own), func(t *testing.T) {
			id := id(1)
			if err := m.CreateNamespaces(t.Context(), id, own, inst.UIDBase(7)); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if err := m.Attach(t.Context(), id, addr(1)); err != nil {
					t.Fatal(err)
				}
				checkAttached(t, m, id)
			}
			// What runsc does to the namespace when it starts.
			for _, c := range []string{"address flush dev eth0", "neighbour flush nud permanent dev eth0", "link set eth0 down"} {
				run(t, "nsenter", append([]string{"--net=" + m.NetPath(id), "ip"}, strings.Fields(c)...)...)
			}
			if err := m.Attach(t.Context(), id, addr(1)); err != nil {
				t.Fatal(err)
			}
			checkAttached(t, m, id)
			remove(t, m, id)
		})
	}
}

func checkAttached(t *testing.T, m *Manager, id string) {
	t.Helper()
	same(t, "guest routes", in(t, m, id, "ip", "-4", "route"), `
		default via 169.254.113.1 dev eth0
		169.254.113.1 dev eth0 scope link`)
	same(t, "guest addresses", in(t, m, id, "sh", "-c", "ip -o address | tr -s ' ' | cut -d' ' -f2-4"), `
		lo inet 127.0.0.1/8
		eth0 inet 10.173.0.3/32`)
	same(t, "guest neighbours", in(t, m, id, "ip", "neighbour"), `
		169.254.113.1 dev eth0 lladdr 02:00:00:00:00:01 PERMANENT`)
	same(t, "host route", run(t, "ip", "route", "show", "dev", Link(id)), `
		10.173.0.3 scope link src 169.254.113.1`)
	same(t, "host neighbours", run(t, "ip", "neighbour", "show", "dev", Link(id)), `
		10.173.0.3 lladdr 02:00:00:00:00:02 PERMANENT`)
	same(t, "host addresses", run(t, "ip", "-o", "address", "show", "dev", Link(id)), "")
	same(t, "unused addresses", run(t, "ip", "route", "show", "type", "unreachable"), `
		unreachable 10.173.0.0/16 metric 1048576`)
	for name, want := range map[string]string{
		"ipv6/conf/LINK/disable_ipv6": "1", "ipv4/conf/LINK/rp_filter": "1", "ipv4/conf/LINK/accept_redirects": "0",
		"ipv4/conf/LINK/send_redirects": "0", "ipv4/conf/LINK/proxy_arp": "0", "ipv4/conf/LINK/arp_ignore": "2",
		"ipv4/conf/LINK/arp_announce": "2", "ipv4/conf/LINK/forwarding": "1", "ipv4/ip_forward": "0", // the narrow switch is enough
	} {
		same(t, name, run(t, "cat", procSys+"net/"+strings.ReplaceAll(name, "LINK", Link(id))), want)
	}
	for name, want := range map[string]string{
		"ipv6/conf/eth0/disable_ipv6": "1", "ipv4/conf/eth0/rp_filter": "1", "ipv4/conf/eth0/accept_redirects": "0",
		"ipv4/conf/eth0/arp_ignore": "2", "ipv4/conf/eth0/arp_announce": "2", "ipv4/ping_group_range": "0 65535",
	} {
		same(t, name, in(t, m, id, "cat", procSys+"net/"+name), want)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(m.Gateway.String(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	in(t, m, id, "timeout", "2", "bash", "-c", "exec 3<>/dev/tcp/"+m.Gateway.String()+"/"+port)
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if from := netip.MustParseAddrPort(c.RemoteAddr().String()).Addr(); from != addr(1) {
		t.Errorf("the host sees the guest as %s, want %s", from, addr(1))
	}
}

// TestRejoin: what an operator does to the host's end of a link is seen and
// undone, without touching the guest's, which on gVisor is the sentry's.
func TestRejoin(t *testing.T) {
	m := newManager(t)
	id, link := id(1), Link(id(1))
	joined := func(want bool) {
		t.Helper()
		if ok, err := m.Joined(t.Context(), id, addr(1)); err != nil || ok != want {
			t.Fatalf("joined: %v, %v; want %v", ok, err, want)
		}
	}
	joined(false)
	if err := m.Rejoin(t.Context(), id, addr(1)); err == nil {
		t.Error("no link, and rejoined")
	}
	if err := m.CreateNamespaces(t.Context(), id, false, 0); err != nil {
		t.Fatal(err)
	}
	if err := m.Attach(t.Context(), id, addr(1)); err != nil {
		t.Fatal(err)
	}
	joined(true)
	// What runsc does to the namespace when it starts.
	for _, c := range []string{"address flush dev eth0", "route flush dev eth0"} {
		in(t, m, id, append([]string{"ip"}, strings.Fields(c)...)...)
	}
	guest := in(t, m, id, "ip", "address") + in(t, m, id, "ip", "route")
	for name, deed := range map[string]func(){
		"link down": func() { run(t, "ip", "link", "set", link, "down") },
		"down and up": func() {
			run(t, "ip", "link", "set", link, "down")
			run(t, "ip", "link", "set", link, "up")
		},
		"route":      func() { run(t, "ip", "route", "del", addr(1).String()) },
		"left down":  func() { err := m.LeaveDown(t.Context(), id); same(t, "error", fmt.Sprint(err), "<nil>") },
		"pool route": func() { run(t, "ip", "route", "flush", "root", inst.Pool().String()) },
	} {
		t.Run(name, func(t *testing.T) {
			deed()
			joined(false)
			for range 2 {
				if err := m.Rejoin(t.Context(), id, addr(1)); err != nil {
					t.Fatal(err)
				}
				joined(true)
			}
			same(t, "host route", run(t, "ip", "route", "show", "dev", link), `10.173.0.3 scope link src 169.254.113.1`)
			same(t, "host neighbours", run(t, "ip", "neighbour", "show", "dev", link), `10.173.0.3 lladdr 02:00:00:00:00:02 PERMANENT`)
		})
	}
	for !strings.Contains(in(t, m, id, "ip", "link", "show", "eth0"), "state UP") {
		time.Sleep(time.Millisecond) // the kernel says so a moment after it is
	}
	same(t, "the guest's side", in(t, m, id, "ip", "address")+in(t, m, id, "ip", "route"), guest)
	// Somebody else has the address.
	run(t, "ip", "route", "replace", addr(1).String(), "dev", "lo", "table", "99")
	run(t, "ip", "rule", "add", "to", addr(1).String(), "lookup", "99")
	t.Cleanup(func() {
		_ = exec.Command("ip", "rule", "del", "to", addr(1).String(), "lookup", "99").Run()
		_ = exec.Command("ip", "route", "flush", "table", "99").Run()
	})
	joined(false)
	if err := m.Rejoin(t.Context(), id, addr(1)); err == nil || !strings.Contains(err.Error(), "ip rule") {
		t.Errorf("with a route elsewhere: %v", err)
	}
}

func TestOwnUsers(t *testing.T) {
	m := newManager(t)
	id, base := id(2), inst.UIDBase(3)
	if err := m.CreateNamespaces(t.Context(), id, true, base); err != nil {
		t.Fatal(err)
	}
	same(t, "uid_map", in(t, m, id, "cat", "/proc/self/uid_map"), fmt.Sprintf("0 %d 65536", base))
	same(t, "gid_map", in(t, m, id, "cat", "/proc/self/gid_map"), fmt.Sprintf("0 %d 65536", base))
	for _, s := range guestUser {
		if _, err := os.Stat(procSys + s.name); s.optional && err != nil {
			continue // a kernel without it
		}
		same(t, s.name, in(t, m, id, "cat", procSys+s.name), s.value)
	}
	user, err := os.Open(m.UserPath(id))
	if err != nil {
		t.Fatal(err)
	}
	defer user.Close()
	var owner uint32
	if owner, err = unix.IoctlGetUint32(int(user.Fd()), unix.NS_GET_OWNER_UID); err != nil {
		t.Fatal(err)
	}
	if owner != base {
		t.Errorf("the user namespace belongs to %d, want %d: its limits would be charged to the host's root", owner, base)
	}
	netFile, err := os.Open(m.NetPath(id))
	if err != nil {
		t.Fatal(err)
	}
	defer netFile.Close()
	fd, err := unix.IoctlRetInt(int(netFile.Fd()), unix.NS_GET_USERNS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	var a, b unix.Stat_t
	if err := errors.Join(unix.Fstat(fd, &a), unix.Fstat(int(user.Fd()), &b)); err != nil {
		t.Fatal(err)
	}
	if a.Ino != b.Ino {
		t.Error("the network namespace does not belong to the user namespace: sysfs cannot be mounted")
	}
}

func TestUserNS(t *testing.T) {
	hosttest.Root(t)
	for _, base := range []uint32{0, inst.UIDBase(5)} {
		f, err := UserNS(base, 65536)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("nsenter", "--user=/proc/self/fd/3", "--preserve-credentials", "cat", "/proc/self/uid_map")
		cmd.ExtraFiles = []*os.File{f}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatal(err, string(out))
		}
		same(t, "uid_map", string(out), fmt.Sprintf("0 %d 65536", base))
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestThreads sees that borrowed threads come back as they were: the same
// network, users, capabilities; no child; a process that still dumps core.
func TestThreads(t *testing.T) {
	m := newManager(t)
	state := func() []string {
		var lines []string
		tasks, err := filepath.Glob("/proc/self/task/*")
		if err != nil {
			t.Fatal(err)
		}
		for _, task := range tasks {
			status, err := os.ReadFile(task + "/status")
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			net, _ := os.Readlink(task + "/ns/net")
			line := net
			for l := range strings.Lines(string(status)) {
				if f := strings.Fields(l); slices.Contains([]string{"Uid:", "Gid:", "CapEff:", "SigBlk:"}, f[0]) {
					line += " " + strings.Join(f, " ")
				}
			}
			lines = append(lines, line)
			if c, _ := os.ReadFile(task + "/children"); len(c) > 0 {
				lines = append(lines, "children "+string(c))
			}
		}
		d, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
		lines = append(lines, fmt.Sprintf("dumpable %d %v", d, err))
		slices.Sort(lines)
		return slices.Compact(lines)
	}
	before := state()
	for range 5 { // a thread that the runtime has just made blocks all signals until it runs
		time.Sleep(10 * time.Millisecond)
		if s := state(); len(s) < len(before) {
			before = s
		}
	}
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			if err := m.CreateNamespaces(t.Context(), id(i), i%2 == 0, inst.UIDBase(i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	after := state()
	for end := time.Now().Add(10 * time.Second); !slices.Equal(before, after) && time.Now().Before(end); after = state() {
		time.Sleep(10 * time.Millisecond) // likewise; one that did not come back stays so
	}
	if !slices.Equal(before, after) {
		t.Errorf("threads differ:\n%s\nbefore:\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
}

// TestTogether: those who come and go at the same time do not wait for one another.
func TestTogether(t *testing.T) {
	m := newManager(t)
	// Forty take a tenth of a second, and one after the other 1.6 s (two cores). A
	// busy host makes both slower, and perhaps the former while it is measured.
	const n = 40
	var together, alone time.Duration
	for range 5 {
		together = removing(t, m, n, n)
		alone = removing(t, m, n, 1)
		if together <= alone/4 {
			return
		}
	}
	t.Errorf("removing %d together took %v, one after the other %v", n, together, alone)
}

// removing makes n and removes them, so many at a time, and is how long the latter takes.
func removing(t *testing.T, m *Manager, n, atOnce int) time.Duration {
	t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			if err := m.CreateNamespaces(t.Context(), id(i), i%2 == 0, inst.UIDBase(i)); err != nil {
				t.Error(err)
			} else if err := m.Attach(t.Context(), id(i), addr(i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for what, list := range map[string]func(context.Context) ([]string, error){
		"namespaces": m.ListNamespaces, "links": m.ListLinks,
	} {
		if ids, err := list(t.Context()); err != nil || len(ids) != n {
			t.Errorf("%d %s (%v), want %d", len(ids), what, err, n)
		}
	}
	start := time.Now()
	for i := range n {
		wg.Go(func() { remove(t, m, id(i)) })
		if i%atOnce == atOnce-1 {
			wg.Wait()
		}
	}
	took := time.Since(start)
	if ids, err := m.ListLinks(t.Context()); err != nil || len(ids) > 0 {
		t.Errorf("links %v left (%v)", ids, err)
	}
	return took
}

// TestDetachHeld: something else holds the network namespace, so that it does
// not go away when it is unpinned, and the kernel takes no link away by itself.
func TestDetachHeld(t *testing.T) {
	m := newManager(t)
	var took time.Duration
	for range 10 { // a busy host delays some, what is slow by itself is slow each time
		if took = detachHeld(t, m, id(4)); took <= time.Second {
			return
		}
	}
	t.Errorf("the link was gone after %v, want 1s", took)
}

// detachHeld is how long it takes until the link is gone.
func detachHeld(t *testing.T, m *Manager, id string) time.Duration {
	t.Helper()
	if err := m.CreateNamespaces(t.Context(), id, false, 0); err != nil {
		t.Fatal(err)
	}
	if err := m.Attach(t.Context(), id, addr(4)); err != nil {
		t.Fatal(err)
	}
	held, err := os.Open(m.NetPath(id))
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	start := time.Now()
	if err := m.Detach(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("ip", "route", "get", addr(4).String()).CombinedOutput(); err == nil {
		t.Errorf("the host still has a way to a detached sandbox: %s", out)
	}
	if err := m.DeleteNamespaces(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // who waits so long waits in vain
	defer cancel()
	if err := m.Gone(ctx, id); err != nil {
		t.Fatal(err)
	}
	return time.Since(start)
}

// TestAttachAfterDetach: the sandbox comes back before its link is gone.
func TestAttachAfterDetach(t *testing.T) {
	m := newManager(t)
	id := id(1)
	if err := m.CreateNamespaces(t.Context(), id, false, 0); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := m.Attach(t.Context(), id, addr(1)); err != nil {
			t.Fatal(err)
		}
		checkAttached(t, m, id)
		if err := m.Detach(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCreateHalf(t *testing.T) {
	m := newManager(t)
	id := id(6)
	// What a daemon that died in the middle leaves.
	if err := os.MkdirAll(filepath.Dir(m.NetPath(id)), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(m.NetPath(id), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.CreateNamespaces(t.Context(), id, false, 0); !errors.Is(err, os.ErrExist) {
		t.Errorf("create over a remainder: %v, want exists", err)
	}
	if ids, err := m.ListNamespaces(t.Context()); err != nil || !slices.Equal(ids, []string{id}) {
		t.Errorf("list: %v, %v", ids, err)
	}
	remove(t, m, id)
	// A user namespace that cannot be: the mapping passes the end of the id space.
	if err := m.CreateNamespaces(t.Context(), id, true, ^uint32(0)-100); err == nil {
		t.Error("a mapping beyond 32 bits was made")
	}
	remove(t, m, id)
	if err := m.CreateNamespaces(t.Context(), id, true, inst.UIDBase(0)); err != nil {
		t.Error(err)
	}
}

func TestForeignNames(t *testing.T) {
	m := New(inst, t.TempDir())
	for _, id := range []string{"", "..", "a/b", "nabc", "aaaaaaaaaaaa", "n/aaaaaaaaaa", "nAAAAAAAAAAA", "nnnnnnnnnnnnn"} {
		if err := errors.Join(m.CreateNamespaces(t.Context(), id, false, 0)); err == nil {
			t.Errorf("create %q worked", id)
		}
		if err := m.DeleteNamespaces(t.Context(), id); err == nil {
			t.Errorf("delete %q worked", id)
		}
		if err := m.Attach(t.Context(), id, addr(0)); err == nil {
			t.Errorf("attach %q worked", id)
		}
	}
	if err := m.Attach(t.Context(), id(0), netip.MustParseAddr("fd00::1")); err == nil {
		t.Error("attach with an IPv6 address worked")
	}
}

// TestAttachedCarries: what is sent right after Attach arrives.
func TestAttachedCarries(t *testing.T) {
	m := newManager(t)
	for round := range 5 {
		var wg sync.WaitGroup
		for i := range 10 {
			i += 10 * round
			wg.Go(func() {
				if err := errors.Join(
					m.CreateNamespaces(t.Context(), id(i), false, 0),
					m.Attach(t.Context(), id(i), addr(i)),
				); err != nil {
					t.Error(err)
					return
				}
				// Nobody listens, and the guest's kernel says so.
				if _, err := hosttest.Dial("tcp", netip.AddrPortFrom(addr(i), 44772).String(), 30*time.Second); !errors.Is(err,
					unix.ECONNREFUSED) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for i := range 10 { // deletions make the link watch wait for its lock
			if err := errors.Join(m.Detach(t.Context(), id(10*round+i)), m.DeleteNamespaces(t.Context(), id(10*round+i))); err != nil {
				t.Error(err)
			}
		}
	}
}
