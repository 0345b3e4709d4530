package e2e_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// intruder is inside without end: it sends to where it may not, a hundred times
// a second and each time as a new flow.
const intruder = `while :; do
for to in ` + outsideOther + `/7 ` + outsideHost + `/9 ` + outsideAddr + `/7; do echo x 2>/dev/null >/dev/udp/$to; done
sleep 0.005; done 2>/dev/null`

// worker is inside without end: it says "tick" while its one connection works,
// and "broken" and ends when it stands longer than any repair may take.
const worker = `exec 3<>/dev/tcp/` + outsideAddr + `/443
while echo x >&3 && read -t 60 -u 3; do echo tick; sleep 0.05; done; echo broken`

// A guarded is a sandbox that works, tries to get out, and is watched.
type guarded struct {
	wire.Sandbox
	runtime, working string
}

// A field is a daemon in a network of its own, with an outside, in which an
// operator may do what he likes.
type field struct {
	host
	*testing.T
	escaped atomic.Int64 // packets that arrived where none may
}

func newField(t *testing.T) *field {
	f := &field{T: t}
	d := daemontest.Prepare(t, daemontest.Options{})
	newOutside(t)
	f.host = connect(t, d)
	f.listen(outsideHost+":9", "")
	f.listen(outsideOther+":7", outsideNetns)
	f.Start()
	daemontest.Image(t, f.Daemon, "base")
	return f
}

// listen counts the packets that arrive at an address, in a named netns.
func (f *field) listen(addr, netns string) {
	f.Helper()
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends in its namespace
		var err error
		if netns != "" {
			var ns *os.File
			if ns, err = os.Open("/run/netns/" + netns); err == nil {
				err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
				ns.Close()
			}
		}
		var c net.PacketConn
		if err == nil {
			c, err = net.ListenPacket("udp4", addr)
		}
		made <- err
		if err != nil {
			return
		}
		f.Cleanup(func() { c.Close() })
		for b := make([]byte, 2048); ; {
			if _, _, err := c.ReadFrom(b); err != nil {
				return
			}
			f.escaped.Add(1)
		}
	}()
	if err := <-made; err != nil {
		f.Fatal(err)
	}
}

// guard makes a sandbox that may reach TCP 443 of the outside.
func (f *field) guard(runtime string) *guarded {
	f.Helper()
	r := spec(runtime)
	r.Extensions[wire.ExtAllow] = "203.0.113.240/28:443" // the outside and its neighbour
	g := &guarded{Sandbox: f.create(f.T, r), runtime: runtime}
	for _, script := range []string{intruder, worker} {
		p, err := f.api.Start(f.Context(), g.ID, client.Command{Argv: []string{"bash", "-c", script}, Background: true})
		if err != nil {
			f.Fatal(err)
		}
		p.Close()
		g.working = p.ID // the last
	}
	return g
}

// ticks is how often the worker of g said so.
func (f *field) ticks(g *guarded) int {
	f.Helper()
	var b strings.Builder
	if _, err := f.api.Commands(g.ID).Logs(f.Context(), g.working, 0, &b); err != nil {
		f.Errorf("%s on %s: %v", g.ID, g.runtime, err)
	}
	if strings.Contains(b.String(), "broken") {
		f.Fatalf("the connection of %s on %s broke", g.ID, g.runtime)
	}
	return strings.Count(b.String(), "tick")
}

// control fails the test unless what gets out is seen: a sandbox that may get
// out does.
func (f *field) control() {
	f.Helper()
	r := spec("runc")
	r.Extensions[wire.ExtAllow] = "203.0.113.240/28"
	sb := f.create(f.T, r)
	p, err := f.api.Start(f.Context(), sb.ID, client.Command{Argv: []string{"bash", "-c", intruder}, Background: true})
	if err != nil {
		f.Fatal(err)
	}
	p.Close()
	eventually(f.T, 5*time.Second, func() error {
		if f.escaped.Load() == 0 {
			return errors.New("what gets out is not seen")
		}
		return nil
	})
	if err := f.api.Delete(f.Context(), sb.ID); err != nil {
		f.Fatal(err)
	}
	eventually(f.T, 5*time.Second, func() error { // what was on its way arrives
		time.Sleep(100 * time.Millisecond)
		if n := f.escaped.Swap(0); n > 0 {
			return fmt.Errorf("%d packets came after the sandbox was deleted", n)
		}
		return nil
	})
}

// works fails the test unless all go on working, and may open new connections
// within five seconds, and what is against IPv6 is there.
func (f *field) works(all ...*guarded) {
	f.Helper()
	f.without6(5 * time.Second)
	for _, g := range all {
		eventually(f.T, 5*time.Second, func() error { return f.opens(g) })
		before := f.ticks(g)
		eventually(f.T, 20*time.Second, func() error { // TCP sends again less and less often
			if f.ticks(g) == before {
				return fmt.Errorf("the worker of %s on %s hangs", g.ID, g.runtime)
			}
			return nil
		})
	}
}

// opens fails unless a connection opens by its first SYN: TCP sends the next after
// a second (RFC 6298, section 2), as the clock of the guest has it.
func (f *field) opens(g *guarded) error {
	out, err := f.exec(f.Context(), g.ID, "timeout", "20", "bash", "-c",
		"from=${EPOCHREALTIME/./}; </dev/tcp/"+outsideAddr+"/443 && echo $((${EPOCHREALTIME/./} - from))")
	if err != nil {
		return err
	}
	micros, err := strconv.Atoi(strings.TrimSpace(out))
	if err == nil && micros >= 1e6 {
		err = fmt.Errorf("a connection of %s on %s opened after %d µs", g.ID, g.runtime, micros)
	}
	return err
}

// without6 fails the test unless the host comes to drop IPv6 of sandboxes.
func (f *field) without6(limit time.Duration) {
	f.Helper()
	links := f.Instance.LinkMatch()
	eventually(f.T, limit, func() error {
		out, err := exec.Command("ip6tables-save").Output()
		if err != nil {
			return err
		}
		for _, rule := range []string{"-A PREROUTING -i " + links + " -j DROP\n", "-A OUTPUT -o " + links + " -j DROP\n"} {
			if !strings.Contains(string(out), rule) {
				return fmt.Errorf("ip6tables lacks %q", rule)
			}
		}
		return nil
	})
}

// closed fails the test if anything got out.
func (f *field) closed(when string) {
	f.Helper()
	if n := f.escaped.Swap(0); n > 0 {
		f.Errorf("%s: %d packets got to where they may not", when, n)
	}
}

// run plays the operator.
func (f *field) run(lines ...string) {
	f.Helper()
	for _, line := range lines {
		if out, err := exec.Command("sh", "-c", line).CombinedOutput(); err != nil {
			f.Fatalf("%s: %v: %s", line, err, out)
		}
	}
}

// What an operator types who wants a clean firewall.
var flushed = []string{
	"iptables -F", "iptables -t nat -F", "iptables -t mangle -F", "iptables -t raw -F", "ip6tables -F",
	"ip6tables -t raw -F",
}

// A set that a chain names cannot be destroyed, and the guard makes those anew
// some 10 ms after they went: whoever means it tries again.
var destroyed = append(flushed[:len(flushed):len(flushed)],
	`for i in $(seq 50); do printf '*filter\nCOMMIT\n*nat\nCOMMIT\n*mangle\nCOMMIT\n*raw\nCOMMIT\n' | iptables-restore && ipset destroy && exit; done; exit 1`)

// TestOperator has an operator flush and destroy what all sandboxes share, and
// delete what belongs to one, while others work and all try to get out.
func TestOperator(t *testing.T) {
	images := func() { t.Run("images", func(t *testing.T) { newHost(t, daemontest.Options{}) }) }
	if !hosttest.Private(t, images) {
		return
	}
	f := newField(t)
	before := f.empty(t)
	var all []*guarded
	for _, runtime := range runtimes {
		all = append(all, f.guard(runtime))
	}
	f.control()
	f.works(all...)
	f.closed("before any deed")
	f.closedFirst()
	if out, err := exec.Command("sh", "-c", "ipset destroy").CombinedOutput(); err == nil {
		t.Errorf("sets in use were destroyed: %s", out)
	}

	const (
		chains = `msg="chains installed"`
		rules6 = `msg="rules against IPv6 installed"`
		set    = `msg="sandboxes had no network: another program removed them from an ipset; they were added again"`
	)
	for _, deed := range []struct {
		name  string
		lines []string
		limit time.Duration // until the daemon says
		says  []string
	}{
		// The guard hears of it. It comes each 10 s besides: not sooner after it came.
		{"iptables -F", flushed[:1], 2 * time.Second, []string{chains}},
		{"every table", flushed, 3 * time.Second, []string{chains, rules6}},
		{"ip6tables -t raw -F", flushed[5:], 2 * time.Second, []string{rules6}}, // and nothing else, which nobody inside feels
		{"ip6tables -F", flushed[4:5], 2 * time.Second, []string{rules6}},
		{"ipset flush", []string{"ipset flush"}, 15 * time.Second, []string{set}}, // of which the kernel tells nobody
		{"ipset destroy", destroyed, 15 * time.Second, []string{chains, set}},
	} {
		soon(t, deed.limit, deed.name, func() (mended time.Duration) {
			before := time.Now()
			f.run(deed.lines...)
			done := time.Now()
			for _, words := range deed.says {
				f.logged(t, before, words)
			}
			f.works(all...)
			f.closed(deed.name)
			for _, words := range deed.says {
				all := f.said(before, words) // also in the middle of the deed
				mended = max(mended, all[len(all)-1].at.Sub(done))
			}
			return mended
		})
	}
	f.whileAway(all)
	f.stopped(all)
	f.linksDown(all)
	f.linksDeleted(all)
	f.deleteAll(t)
	f.holdsOnly(t, before)
	f.closed("at the end")
}

// whileAway flushes everything while no daemon is there.
func (f *field) whileAway(all []*guarded) {
	f.Helper()
	f.Kill()
	f.run(destroyed...)
	time.Sleep(2 * time.Second) // the intruders try
	f.closed("flushed while no daemon was there")
	if err := f.TryStart(); err != nil {
		f.Fatal(err)
	}
	f.works(all...)
	f.closed("after the start")
}

// closedFirst fails the test unless a link was closed to others before the daemon
// had it forward.
func (f *field) closedFirst() {
	f.Helper()
	log := f.host.Log()
	forwards := strings.Index(log, `msg="forwarding switched on" link=`)
	if forwards < 0 {
		f.Fatal("the daemon switched forwarding on for no link")
	}
	link, _, _ := strings.Cut(log[forwards+len(`msg="forwarding switched on" link=`):], " ")
	var last string // of the lock, before
	for line := range strings.Lines(log[:forwards]) {
		if strings.Contains(line, `msg="lock installed"`) {
			last = line
		}
	}
	if _, uplinks, _ := strings.Cut(last, "uplinks="); !strings.Contains(uplinks, link) {
		f.Errorf("%s forwards, and before that the lock said: %s", link, last)
	}
}

// stopped flushes everything while the daemon is stopped: clients wait,
// sandboxes go on, nothing opens.
func (f *field) stopped(all []*guarded) {
	f.Helper()
	pid := f.Pid()
	stop(f.T, pid)
	listed := make(chan error, 1)
	go func() {
		_, err := f.api.List(f.Context(), client.Filter{})
		listed <- err
	}()
	f.run(flushed...)
	time.Sleep(2 * time.Second) // the intruders try
	f.closed("flushed while the daemon was stopped")
	select {
	case err := <-listed:
		f.Errorf("a stopped daemon answers: %v", err)
		listed <- err
	default:
	}
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		f.Fatal(err)
	}
	if err := <-listed; err != nil {
		f.Errorf("a client that waited: %v", err)
	}
	f.works(all...)
	f.closed("after the daemon went on")
}

// linksDown sets the links of all down while no daemon is there, or deletes their
// routes: the next one gives them back, on gVisor too, and says so.
func (f *field) linksDown(all []*guarded) {
	f.Helper()
	for _, deed := range []string{"ip link set sb-ID down", "ip link set sb-ID down; ip link set sb-ID up", "ip route flush dev sb-ID"} {
		f.Kill()
		for _, g := range all {
			f.run(strings.ReplaceAll(deed, "ID", g.ID))
		}
		if err := f.TryStart(); err != nil {
			f.Fatal(err)
		}
		f.works(all...)
		for _, g := range all {
			if !strings.Contains(f.host.Log(), "sandbox="+g.ID+" lost=network") {
				f.Errorf("%s: the daemon does not say that it gave the link of %s on %s back", deed, g.ID, g.runtime)
			}
		}
		f.closed(deed)
	}
}

// linksDeleted deletes the link of one sandbox on each runtime, beside all: on
// runc it comes back, on gVisor it cannot and the sandbox ends.
func (f *field) linksDeleted(all []*guarded) {
	f.Helper()
	again := f.guard("runc")
	soon(f.T, 2*time.Second, "ip link del on runc, until it is back", func() time.Duration {
		start := time.Now()
		f.run("ip link del sb-" + again.ID)
		back := f.logged(f.T, start, "sandbox="+again.ID+" lost=network")
		if _, err := os.Stat("/sys/class/net/sb-" + again.ID); err != nil {
			f.Error(err)
		}
		f.answers(f.T, again.ID)
		f.works(all...)
		return back.at.Sub(start)
	})
	soon(f.T, 2*time.Second, "ip link del on runsc, until it ended", func() time.Duration {
		ends := f.guard("runsc")
		start := time.Now()
		f.run("ip link del sb-" + ends.ID)
		sb := f.awaitState(f.T, ends.ID, wire.Failed, 2*time.Minute)
		if sb.Status.Reason != "runtime_crash" || !strings.Contains(sb.Status.Message, "removed its network") {
			f.Errorf("it ended as %+v", sb.Status)
		}
		return sb.Status.LastTransitionAt.Sub(start)
	})
	if log := f.host.Log(); !strings.Contains(log, "lost=network") {
		f.Error("the daemon does not say that somebody took links away")
	}
	f.works(all...)
	f.closed("links deleted")
}

// TestOperatorFiles has an operator unmount and remove what one sandbox has on
// disk. What runs goes on without or ends, and says so; its neighbours are as
// before, and delete leaves nothing.
func TestOperatorFiles(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	before := h.empty(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			other := h.create(t, spec(runtime))
			if _, err := h.exec(t.Context(), other.ID, "sh", "-c", "echo mine >/root/file"); err != nil {
				t.Fatal(err)
			}
			run, pool := h.Instance.RunDir(), filepath.Join(h.StateDir, "pool")
			for _, deed := range []struct {
				name, line string
				lost       string // what the log says is lost
				ends       bool
			}{
				{"umount", "umount -l " + run + "/ID/rootfs; umount -l " + run + "/ns/ID/*", "rootfs", false},
				{"rm of the run directory", "rm -rf --one-file-system " + run + "/ID", "", false},
				{"rm through the mount", "rm -rf " + run + "/ID", "", false},
				{"rm of the state of the runtime", "rm -rf " + run + "/" + runtime + "/*ID*", "runtime", false},
				{"rm of the disk", "rm -rf " + pool + "/ID", "disk", true},
			} {
				t.Run(deed.name, func(t *testing.T) {
					sb := h.create(t, spec(runtime))
					// It need not succeed: what is mounted or busy cannot be removed.
					out, _ := exec.Command("sh", "-c", strings.ReplaceAll(deed.line, "ID", sb.ID)).CombinedOutput()
					t.Logf("%s", out)
					h.Kill() // the next daemon's recovery is the sweep of the minute
					if err := h.TryStart(); err != nil {
						t.Fatal(err)
					}
					now, err := h.api.Get(t.Context(), sb.ID)
					if err != nil {
						t.Fatal(err)
					}
					if ended := now.Status.State == wire.Failed; ended != deed.ends {
						t.Errorf("it is %+v", now.Status)
					}
					if deed.lost != "" && !strings.Contains(h.Log(), "sandbox="+sb.ID+" lost="+deed.lost) {
						t.Errorf("the daemon does not say that it lost its %s", deed.lost)
					}
					if got, err := h.exec(t.Context(), other.ID, "cat", "/root/file"); err != nil || got != "mine\n" {
						t.Errorf("the neighbour: %q, %v", got, err)
					}
					if err := h.api.Delete(t.Context(), sb.ID); err != nil {
						t.Errorf("delete: %v", err)
					}
					h.answers(t, h.create(t, spec(runtime)).ID) // its image is as it was
					h.deleteAll(t, other.ID)
				})
			}
			h.deleteAll(t)
			h.holdsOnly(t, before)
		})
	}
}
