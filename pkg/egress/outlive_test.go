package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/flowfile"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// lasting opens an Engine whose flows by name outlive it. All of one test have one directory.
func (w *world) lasting(dir string) *Engine {
	w.t.Helper()
	return w.openWith(func(c *Config) { c.FlowDir = dir })
}

// ask makes one request on a kept connection, and returns the status and the body.
func ask(c net.Conn, r *bufio.Reader, host string) (int, string, error) {
	if _, err := fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", host); err != nil {
		return 0, "", err
	}
	a, err := http.ReadResponse(r, nil)
	if err != nil {
		return 0, "", err
	}
	body, err := io.ReadAll(a.Body)
	return a.StatusCode, string(body), err
}

func isReset(t *testing.T, what string, c net.Conn) {
	t.Helper()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("%s: %v, want a reset", what, err)
	}
}

func (w *world) children(dir string, want int) {
	w.t.Helper()
	var files []string
	for end := time.Now().Add(patient); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if files, _ = filepath.Glob(dir + "/*.flows"); len(files) == want {
			return
		}
	}
	w.t.Fatalf("%d children, want %d", len(files), want)
}

// TestFlowsOutliveTheDaemon: TLS and HTTP flows go on while no daemon runs, when nothing new
// opens, and with each later daemon, which answers what they ask and cuts what its policy
// denies. A child ends with its last flow.
func TestFlowsOutliveTheDaemon(t *testing.T) {
	w := newWorld(t)
	w.sites()
	dir := t.TempDir()
	e := w.lasting(dir)
	id := w.named(e, 0, rules(t, "rules", byName...))
	second := w.named(e, 1, rules(t, "rules", byName...))
	open := func(id string) *tls.Conn {
		t.Helper()
		c, err := w.tls(id, site+":443", "allowed.test")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(2 * patient)) //nolint:errcheck // shows in reads
		return c
	}
	first, ended, others := open(id), open(id), open(second)
	web, err := w.connect(w.guests[id], "tcp", site+":80", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer web.Close()
	web.SetDeadline(time.Now().Add(2 * patient)) //nolint:errcheck // shows in reads
	r := bufio.NewReader(web)
	goesOn := func(what string, c net.Conn) {
		t.Helper()
		if err := said(c); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	asks := func(what, host string, want int) {
		t.Helper()
		if code, body, err := ask(web, r, host); err != nil || code != want {
			t.Errorf("%s: %d %s %v, want %d", what, code, body, err, want)
		}
	}
	goesOn("before", first)
	asks("before", "allowed.test", http.StatusOK)
	for round := range 2 { // a second restart is like the first
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		goesOn("without a daemon", first)
		goesOn("without a daemon", others)
		asks("without a daemon, a new name", fmt.Sprintf("new%d.test", round), http.StatusBadGateway)
		w.silent(id, "tcp", site+":443")
		if round == 0 {
			ended.Close()
		}
		e = w.lasting(dir)
		goesOn("before its sandbox is registered", first)
		asks("before its sandbox is registered", "new.test", http.StatusBadGateway)
		for i, id := range []string{id, second} {
			if err := e.Register(t.Context(), id, addr(i), rules(t, "rules", byName...), nil); err != nil {
				t.Fatal(err)
			}
			e.lookup(addr(i)).leases.Add("allowed.test", []netip.Addr{netip.MustParseAddr(site)}, time.Hour, time.Now())
		}
		if err := Recovered(e); err != nil {
			t.Fatal(err)
		}
		w.proxyEnds(e, func() (left int) { return len(e.proxy.flows) - 3 }) // what was closed without a daemon
		e.proxy.mu.Lock()
		flows, of, outs := len(e.proxy.flows), e.proxy.of[e.lookup(addr(0))], e.proxy.outs[e.lookup(addr(0))]
		e.proxy.mu.Unlock()
		if flows != 3 || of != 2 || outs < 1 {
			t.Errorf("%d flows, %d of the first, which has %d sockets; want 3, 2, 1 or 2", flows, of, outs)
		}
		goesOn("with the next daemon", first)
		asks("with the next daemon", "allowed.test", http.StatusOK)
		asks("with the next daemon, a denied name", "other.test", http.StatusForbidden)
		w.children(dir, 2) // the old one and that for new flows
		c := open(second)
		goesOn("a new flow", c)
		c.Close()
	}
	// The policy that the next daemon finds is another.
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	e = w.lasting(dir)
	if err := e.Register(t.Context(), id, addr(0), rules(t, "rules", "allowed.test:80"), nil); err != nil {
		t.Fatal(err)
	}
	isReset(t, "a flow that the policy denies meanwhile", first)
	asks("a flow that it still allows", "allowed.test", http.StatusOK)
	if err := e.Register(t.Context(), id, addr(0), rules(t, "rules", "203.0.113.1:443"), nil); err != nil {
		t.Fatal(err)
	}
	isReset(t, "a flow that a tightened policy denies", web)
	goesOn("a flow of a sandbox that is not registered yet", others)
	if err := Recovered(e); err != nil { // it was not registered
		t.Fatal(err)
	}
	isReset(t, "a flow of no sandbox", others)
	w.noneProxied(e)
	w.children(dir, 1)
}

// daemonEnv has the directory and the policy of a process that is a daemon until it is killed.
const daemonEnv = "SANDBOXD_TEST_EGRESS_DAEMON"

type doomed struct {
	Dir    string
	Policy record.Network
}

// dieAsDaemon makes this process such a daemon, for the first guest, if it was started as one.
func dieAsDaemon() {
	var d doomed
	text, ok := os.LookupEnv(daemonEnv)
	if !ok {
		return
	}
	err := json.Unmarshal([]byte(text), &d)
	var e *Engine
	if err == nil {
		e, err = Open(context.Background(), Config{every: never, Instance: inst, FlowDir: d.Dir, Upstreams: []Upstream{{
			Addr: netip.MustParseAddrPort("203.0.113.53:53"),
		}}})
	}
	if err == nil {
		err = e.Register(context.Background(), id(0), addr(0), d.Policy, nil)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	e.lookup(addr(0)).leases.Add("allowed.test", []netip.Addr{netip.MustParseAddr(site)}, time.Hour, time.Now())
	fmt.Println("up")
	select {}
}

// TestKilledDaemon: a daemon that is killed while bytes pass loses none of them.
func TestKilledDaemon(t *testing.T) {
	w := newWorld(t)
	w.sites()
	id := w.guest(0)
	all := rules(t, "rules", byName...)
	env, err := json.Marshal(doomed{t.TempDir(), all})
	if err != nil {
		t.Fatal(err)
	}
	var d doomed
	if err := json.Unmarshal(env, &d); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), daemonEnv+"="+string(env))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill() //nolint:errcheck // it has ended
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "up\n" {
		t.Fatal(line, err)
	}
	c, err := w.tls(id, site+":443", "allowed.test")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(2 * patient)) //nolint:errcheck // shows in reads
	const size = 32 << 20
	sent, got, wrote := sha256.New(), sha256.New(), make(chan struct{})
	go func() {
		defer close(wrote)
		b := make([]byte, 64<<10)
		for n := 0; n < size; n += len(b) {
			rand.Read(b)
			sent.Write(b)
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}()
	var e *Engine
	for part := range 8 {
		if _, err := io.CopyN(got, c, size/8); err != nil {
			t.Fatalf("part %d: %v", part, err)
		}
		switch part {
		case 1:
			cmd.Process.Kill() //nolint:errcheck // shows next
			cmd.Wait()         //nolint:errcheck // it was killed
		case 4:
			e = w.lasting(d.Dir)
		case 6:
			if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	<-wrote
	if !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Error("other bytes came than were sent")
	}
	if x := w.onlyProxied(e); x.s != e.lookup(addr(0)) {
		t.Error("the flow is not its sandbox's")
	}
	if err := e.Register(t.Context(), id, addr(0), rules(t, "none"), nil); err != nil {
		t.Fatal(err)
	}
	isReset(t, "a flow that is denied now", c)
}

// TestOldFlowsEnd: what an earlier daemon opened ends with its sandbox, whether the next one
// has registered it or not, and when the file does not know it or its child is of another
// version.
func TestOldFlowsEnd(t *testing.T) {
	w := newWorld(t)
	w.sites()
	dir := t.TempDir()
	all := rules(t, "rules", byName...)
	e := w.lasting(dir)
	id := w.named(e, 0, all)
	left := func() (*tls.Conn, string) {
		t.Helper()
		e.lookup(addr(0)).leases.Add("allowed.test", []netip.Addr{netip.MustParseAddr(site)}, time.Hour, time.Now())
		c, err := w.tls(id, site+":443", "allowed.test")
		if err == nil {
			err = said(c)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in reads
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		files, err := filepath.Glob(dir + "/*.flows")
		if err != nil || len(files) != 1 {
			t.Fatal(files, err)
		}
		return c, files[0]
	}
	register := func() {
		t.Helper()
		if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
			t.Fatal(err)
		}
	}
	for what, end := range map[string]func(){
		"registered":     func() { register(); e.Unregister(t.Context(), id) }, //nolint:errcheck // shows in the flow
		"not registered": func() { e.Unregister(t.Context(), id) },             //nolint:errcheck // likewise
		"another address": func() {
			if err := e.Register(t.Context(), id, addr(5), all, nil); err != nil {
				t.Error(err)
			}
		},
	} {
		c, _ := left()
		e = w.lasting(dir)
		end()
		isReset(t, what, c)
		e.Unregister(t.Context(), id) //nolint:errcheck // of the other address
		register()
	}
	for what, change := range map[string]func(path string){
		"no file":         func(path string) { os.Remove(path) },                        //nolint:errcheck // shows in the flow
		"no entry":        func(path string) { os.Truncate(path, 512) },                 //nolint:errcheck // likewise
		"garbage":         func(path string) { os.WriteFile(path, []byte("x"), 0o600) }, //nolint:errcheck // likewise
		"another version": func(path string) { w.rewrite(path, func(h *flowfile.Head) { h.Version++ }) },
	} {
		c, path := left()
		pid := w.headOf(path).Pid
		change(path)
		e = w.lastingIn(dir, pids{pid})
		register()
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, io.EOF) {
			t.Errorf("%s: %v, want the end", what, err)
		}
		w.children(dir, 1)
	}
	// A child whose last flow ends meanwhile ends, too.
	c, path := left()
	old, err := child.Find(child.Home{Pid: w.headOf(path).Pid, Started: w.headOf(path).Started})
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	c.Close()
	if !old.Ended(patient) {
		t.Error("a child without a flow and a daemon lives")
	}
	e = w.lasting(dir)
	register()
	// A child that died meanwhile leaves nothing.
	_, path = left()
	unix.Kill(w.headOf(path).Pid, unix.SIGKILL) //nolint:errcheck // shows in what is left
	e = w.lasting(dir)
	w.children(dir, 1)
	w.noneProxied(e)
}

// pids are what outlives the daemon, in place of a cgroup.
type pids []int

func (pids) Add(int) error               { return nil }
func (p pids) Processes() ([]int, error) { return p, nil }

func (w *world) lastingIn(dir string, o Outliving) *Engine {
	w.t.Helper()
	return w.openWith(func(c *Config) { c.FlowDir, c.Outliving = dir, o })
}

func (w *world) headOf(path string) flowfile.Head {
	w.t.Helper()
	f, h, _, err := flowfile.Open(path)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	return h
}

func (w *world) rewrite(path string, change func(*flowfile.Head)) {
	w.t.Helper()
	f, h, all, err := flowfile.Open(path)
	if err != nil {
		w.t.Fatal(err)
	}
	f.Close()
	change(&h)
	if err := os.Remove(path); err != nil {
		w.t.Fatal(err)
	}
	if f, err = flowfile.Create(path, h); err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	for _, e := range all {
		if _, err := f.Put(e); err != nil {
			w.t.Fatal(err)
		}
	}
}

// TestOldChildLies: a child of an earlier daemon that was taken over speaks for its own flows
// only, and keeps none that it says it has closed.
func TestOldChildLies(t *testing.T) {
	w := newWorld(t)
	w.sites()
	dir := t.TempDir()
	e := w.lasting(dir)
	all := rules(t, "rules", byName...)
	id := w.named(e, 0, all)
	c, err := w.connect(w.guests[id], "tcp", site+":9999", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in reads
	if err := said(c); err != nil {
		t.Fatal(err)
	}
	last := w.onlyProxied(e).number
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	e = w.lasting(dir)
	x := w.onlyProxied(e)
	if x.number != last || e.proxy.last != last {
		t.Errorf("flow %d, the last is %d; want %d", x.number, e.proxy.last, last)
	}
	if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
		t.Fatal(err)
	}
	if err := said(c); err != nil {
		t.Error(err)
	}
	young, err := e.proxy.child.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	lie := child.Message{Kind: heads.KindClosed, Body: heads.Closed{Flow: x.number}.Append(nil)}
	e.proxy.handle(young, lie) // of another child's flow
	if err := said(c); err != nil {
		t.Error(err)
	}
	check := question{Open: heads.Open{Flow: x.number, Kind: heads.Check, Name: "allowed.test"}}
	if allow, why := e.proxy.checked(x, check, policy.Reason{}); !allow {
		t.Error(why)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	e = w.lasting(dir)
	x = w.onlyProxied(e)
	for _, o := range x.to {
		if o.name != "allowed.test" { // which was said to the second daemon
			t.Errorf("its name is %q", o.name)
		}
	}
	e.proxy.handle(x.line, lie) // it has closed nothing
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("%v, want the end", err)
	}
	w.children(dir, 1)
}

// TestDeadFlowsAreGone: a child cannot keep flows that have ended: the next daemon counts none
// of them.
func TestDeadFlowsAreGone(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	guest := netip.MustParseAddr("10.9.0.2")
	p := &proxy{flows: map[uint64]*proxied{}, of: map[*sandbox]int{}, outs: map[*sandbox]int{}, aside: map[*sandbox]bool{}}
	entries, sockets := map[int]flowfile.Entry{}, map[uint64]child.Socket{}
	add := func(flow uint64, number uint32, dead bool) net.Conn {
		t.Helper()
		c, err := net.Dial("tcp4", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		s, err := child.CopyOf(raw)
		if err != nil {
			t.Fatal(err)
		}
		if dead {
			s.Reset()
		}
		cookie, err := s.Cookie()
		if err != nil {
			t.Fatal(err)
		}
		sockets[cookie] = s
		entries[len(entries)+1] = flowfile.Entry{
			Flow: flow, Socket: number, Cookie: cookie, Sandbox: "one", Guest: guest, Dst: netip.MustParseAddrPort("203.0.113.1:443"),
		}
		return c
	}
	add(1, 0, true)
	orphan := add(1, 1, false)
	add(2, 0, false)
	add(2, 1, true)
	add(2, 2, false)
	h := &hand{}
	p.enter(h, entries, sockets)
	x := p.flows[2]
	if x == nil || len(p.flows) != 1 || h.flows != 1 || len(x.to) != 1 || x.to[2] == nil || p.of[x.s] != 1 || p.outs[x.s] != 1 {
		t.Fatalf("flows %v, %d of the child, counts %v, %v", p.flows, h.flows, p.of, p.outs)
	}
	if _, err := orphan.Write([]byte("x")); err == nil {
		t.Error("a socket of a dead flow goes on")
	}
	x.guest.Close()
	x.to[2].Close()
}

// TestFlowsOnAFullFileSystem: where nothing can be written down, flows by name open all the
// same, and end with the daemon; what the log says of it it says once.
func TestFlowsOnAFullFileSystem(t *testing.T) {
	w := newWorld(t)
	w.sites()
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=64k,nr_inodes=16"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	fill, flows := filepath.Join(dir, "fill"), filepath.Join(dir, "egress")
	full := func() {
		t.Helper()
		if err := os.WriteFile(fill, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	var inodes []string
	none := func() {
		t.Helper()
		for i := range 32 {
			inodes = append(inodes, filepath.Join(dir, fmt.Sprint(i)))
			if err := os.WriteFile(inodes[i], nil, 0o600); err != nil {
				return
			}
		}
		t.Fatal("the file system has no limit")
	}
	mkdir := func() {
		t.Helper()
		if err := os.MkdirAll(flows, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	all := rules(t, "rules", byName...)
	id := w.guest(0)
	for _, c := range []struct {
		what          string
		before, after func() // the daemon starts
		outlives      bool
		says          string
	}{
		{"no directory can be made", none, func() {}, false, "ends with this daemon"},
		{"no socket can be made", func() { mkdir(); none() }, func() {}, false, "ends with this daemon"},
		{"no head can be written", func() { mkdir(); full() }, func() {}, false, "ends with this daemon"},
		{"no entry can be written", func() {}, full, true, "cannot be written down"},
	} {
		c.before()
		var logged bytes.Buffer
		e := w.openWith(func(cfg *Config) {
			cfg.FlowDir, cfg.Logger = flows, slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelError}))
		})
		if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
			t.Fatal(err)
		}
		e.lookup(addr(0)).leases.Add("allowed.test", []netip.Addr{netip.MustParseAddr(site)}, time.Hour, time.Now())
		c.after()
		var conns []*tls.Conn
		for range 12 { // more than a page of entries
			conn, err := w.tls(id, site+":443", "allowed.test")
			if err == nil {
				err = said(conn)
			}
			if err != nil {
				t.Fatalf("%s: %v", c.what, err)
			}
			defer conn.Close()
			conns = append(conns, conn)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(logged.String(), c.says); n != 1 {
			t.Errorf("%s: the log says %d times %q, want once:\n%s", c.what, n, c.says, logged.String())
		}
		last := conns[len(conns)-1]
		if err := said(last); (err == nil) != c.outlives {
			t.Errorf("%s: without the daemon: %v", c.what, err)
		}
		for _, path := range append(inodes, fill) {
			os.Remove(path) //nolint:errcheck // it may not be there
		}
		inodes = nil
		e = w.lasting(flows)
		if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
			t.Fatal(err)
		}
		if err := said(last); err == nil {
			t.Errorf("%s: a flow that is not written down goes on with the next daemon", c.what)
		}
		if c.outlives {
			if err := said(conns[0]); err != nil {
				t.Errorf("%s: one that is: %v", c.what, err)
			}
		}
		for _, conn := range conns {
			conn.Close()
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestLostLeaseOfProxiedFlow: a flow that goes on for want of its lease, whose name the guest
// never said, keeps the leases incomplete for the next daemon, too.
func TestLostLeaseOfProxiedFlow(t *testing.T) {
	w := newWorld(t)
	w.sites()
	dir, kept := t.TempDir(), t.TempDir()
	open := func() *Engine { return w.openWith(func(c *Config) { c.FlowDir, c.Leases = dir, kept }) }
	e := open()
	all := rules(t, "rules", byName...)
	id := w.named(e, 0, all)
	c, err := w.connect(w.guests[id], "tcp", site+":9999", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in reads
	if err := said(c); err != nil {
		t.Fatal(err)
	}
	for round := range 2 {
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		if round == 0 {
			if err := errors.Join(os.RemoveAll(kept), os.Mkdir(kept, 0o700)); err != nil {
				t.Fatal(err)
			}
		}
		e = open()
		if err := e.Register(t.Context(), id, addr(0), all, nil); err != nil {
			t.Fatal(err)
		}
		if err := said(c); err != nil {
			t.Errorf("daemon %d: %v", round, err)
		}
		if e.lookup(addr(0)).leases.Whole() {
			t.Errorf("daemon %d: the leases count as complete", round)
		}
	}
}
