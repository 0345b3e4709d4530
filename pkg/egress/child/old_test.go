package child

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	keep     = iota + 20 // the file
	dropAll              // closes the files that it keeps, and leaves if it is alone
	hide                 // makes another descriptor of its line
	complain             // writes to standard error
	juggle               // moves its file from one descriptor to the next, without end
	cling                // waits in a call for bytes of its file
	letGo                // closes its file, but for that call
)

// stays is a child that outlives the daemon as long as it keeps a file.
func stays([]string) error {
	var files []*os.File
	var gone func()
	held := -1
	return ServeOn(1<<10, func(c *Conn) func(Message) {
		gone = nil
		return func(m Message) {
			switch m.Kind {
			case keep:
				files = append(files, m.File)
			case dropAll:
				for _, f := range files {
					f.Close()
				}
				files = nil
			case hide:
				c.raw.Control(func(fd uintptr) { unix.FcntlInt(fd, unix.F_DUPFD, 0) }) //nolint:errcheck // the daemon looks
			case juggle:
				go func(fd int) {
					for {
						next, _ := unix.FcntlInt(uintptr(fd), unix.F_DUPFD, (fd+1)%200)
						unix.Close(fd)
						fd = next
					}
				}(copyOf(files[0]))
				files[0].Close()
			case cling:
				held = copyOf(files[0])
				unix.SetNonblock(held, false) //nolint:errcheck // shows in the call
				go func(fd int) {
					for {
						unix.Recvfrom(fd, make([]byte, 1<<20), unix.MSG_WAITALL) //nolint:errcheck // the daemon looks
					}
				}(held)
			case letGo:
				files[0].Close()
				unix.Close(held)
			case complain:
				os.Stderr.WriteString("to nobody\n")
			}
			c.Answer(m, []byte("done"), nil) //nolint:errcheck // the daemon waits for it
		}
	}, func(leave func()) {
		gone = leave
		os.Stderr.WriteString("alone\n") // nobody may read it
		if len(files) == 0 {
			gone()
		}
	})
}

func copyOf(f *os.File) (fd int) {
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Control(func(s uintptr) { fd, _ = unix.FcntlInt(s, unix.F_DUPFD, 0) })
	}
	if err != nil {
		panic(err)
	}
	return fd
}

// connected makes both ends of a connection of TCP. Package net would link libc: see needsRoot.
func connected(t *testing.T) (a, b *os.File) {
	t.Helper()
	stream := func() int {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	end := func(fd int) *os.File {
		if err := unix.SetNonblock(fd, true); err != nil { // for deadlines
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "end of a connection")
		t.Cleanup(func() { f.Close() })
		return f
	}
	l := stream()
	defer unix.Close(l)
	err := errors.Join(unix.Bind(l, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(l, 1))
	at, gerr := unix.Getsockname(l)
	if err := errors.Join(err, gerr); err != nil {
		t.Fatal(err)
	}
	client := stream()
	if err := unix.Connect(client, at); err != nil {
		t.Fatal(err)
	}
	server, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	return end(server), end(client)
}

// left starts a child that outlives its Supervisor, with a socket, and closes that. It returns
// where the child is, and the other end of its socket.
func left(t *testing.T, dir string, stays bool, do ...uint8) (Home, Socket, *os.File) {
	t.Helper()
	var home Home
	s, err := Start(t.Context(), Config{Verb: "stays", Memory: 256 << 20, Max: 256, Outlive: &Outlive{
		Dir: dir, Begin: func(_ *Conn, h Home) error { home = h; return nil }, Leave: func(*Conn) bool { return stays },
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c, peer := connected(t)
	defer c.Close()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	ours, err := CopyOf(raw)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close() })
	line, err := s.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := line.Call(t.Context(), keep, nil, c); err != nil {
		t.Fatal(err)
	}
	for _, kind := range do {
		if _, err := line.Call(t.Context(), kind, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	return home, ours, peer
}

// found finds a child that was left, and takes its line.
func found(t *testing.T, dir string, h Home) (*Old, *Conn) {
	t.Helper()
	o, err := Find(h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.Kill(); o.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c, err := o.Line(ctx, dir, h.Name, 256)
	if err != nil {
		t.Fatal(err)
	}
	go c.Run(func(Message) {}) //nolint:errcheck // the calls say
	return o, c
}

// ends waits for the end of a child.
func ends(t *testing.T, o *Old) {
	t.Helper()
	if !o.Ended(30 * time.Second) {
		t.Fatal("the child lives")
	}
}

// TestOutlives: a child lives on with what it was given, each later daemon takes its line and
// gets descriptors of its sockets, and it ends when it has nothing left.
func TestOutlives(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir() + "/" + strings.Repeat("x", 120) // longer than an address may be
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	h, ours, peer := left(t, dir, true)
	want, err := ours.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	ours.Close()
	var last *Conn
	var o *Old
	for range 2 {
		if last != nil {
			last.Close() // this daemon ends, too
		}
		o, last = found(t, dir, h)
		if _, err := last.Call(t.Context(), complain, nil, nil); err != nil { // nobody reads what it says there

			t.Fatal(err)
		}
		all, err := o.Sockets(t.Context())
		if err != nil || len(all) != 1 || slices.Collect(maps.Keys(all))[0] != want {
			t.Fatalf("%v, %v: want the socket %d", all, err, want)
		}
		defer all[want].Close()
		ours = all[want]
	}
	peer.SetDeadline(time.Now().Add(30 * time.Second)) //nolint:errcheck // shows in the read
	ours.Reset()                                       // whatever the child does
	if _, err := peer.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
	if _, err := last.Call(t.Context(), dropAll, nil, nil); err != nil {
		t.Fatal(err)
	}
	last.Close()
	ends(t, o)
	if _, err := Find(h); !errors.Is(err, ErrGone) {
		t.Errorf("a child that has ended: %v", err)
	}
}

// TestNotLeft: a child that is not to be left ends with its Supervisor, and its socket goes.
func TestNotLeft(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir()
	h, ours, peer := left(t, dir, false)
	ours.Close()
	if _, err := Find(h); !errors.Is(err, ErrGone) {
		t.Errorf("it lives: %v", err)
	}
	peer.SetDeadline(time.Now().Add(30 * time.Second)) //nolint:errcheck // shows in the read
	if _, err := peer.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("its connection: %v", err)
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 0 {
		t.Errorf("it leaves %v, %v", names, err)
	}
}

// TestHides: a child that has kept the line of the last daemon, in which sockets may wait, is
// found out. So is another process that has its id.
func TestHides(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir()
	h, _, _ := left(t, dir, true, hide)
	for _, other := range []Home{{Pid: h.Pid, Started: h.Started + 1}, {Pid: 1 << 22, Started: 1}} {
		if _, err := Find(other); !errors.Is(err, ErrGone) {
			t.Errorf("%v was found: %v", other, err)
		}
	}
	o, _ := found(t, dir, h)
	if all, err := o.Sockets(t.Context()); !errors.Is(err, errHides) {
		t.Errorf("%v, %v", all, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := o.Line(ctx, dir, h.Name, 256); err == nil { // it has a line
		t.Error("a second line was taken")
	}
	o.Kill()
	ends(t, o)
}

// TestJuggles: a child that moves a socket from one descriptor to another while they are read
// hides it from nobody.
func TestJuggles(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir()
	h, ours, _ := left(t, dir, true, juggle)
	want, err := ours.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	o, c := found(t, dir, h)
	for range 100 {
		all, err := o.Sockets(t.Context())
		if err != nil || len(all) != 1 || all[want] == 0 {
			t.Fatalf("%v, %v: want the socket %d", all, err, want)
		}
		all[want].Close()
	}
	if _, err := c.Call(t.Context(), complain, nil, nil); err != nil { // it goes on
		t.Error(err)
	}
}

// TestClings: a child that holds a socket without a descriptor, by a call that waits, loses it.
func TestClings(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir()
	h, ours, peer := left(t, dir, true, cling)
	ours.Close()
	waits := func() bool {
		calls, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", h.Pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range calls {
			b, _ := os.ReadFile(path)
			if strings.HasPrefix(string(b), fmt.Sprintf("%d ", unix.SYS_RECVFROM)) {
				return true
			}
		}
		return false
	}
	for end := time.Now().Add(30 * time.Second); !waits(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not wait")
		}
	}
	o, c := found(t, dir, h)
	if _, err := c.Call(t.Context(), letGo, nil, nil); err != nil {
		t.Fatal(err)
	}
	peer.SetDeadline(time.Now().Add(100 * time.Millisecond)) //nolint:errcheck // shows in the read
	if _, err := peer.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) || !waits() {
		t.Fatalf("it does not hold the socket: %v", err)
	}
	all, err := o.Sockets(t.Context())
	if err != nil || len(all) != 0 {
		t.Fatalf("%v, %v", all, err)
	}
	peer.SetDeadline(time.Now().Add(30 * time.Second)) //nolint:errcheck // shows in the read
	if _, err := peer.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("%v, want the end", err)
	}
	// A daemon that died while the child was stopped does it no harm.
	if err := o.stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.Close()
	found(t, dir, h)
}

// TestEndOthers: what is in the list no more when it was opened is somebody else's.
func TestEndOthers(t *testing.T) {
	var all []int
	var cmds []*exec.Cmd
	for range 3 {
		c := exec.Command("sleep", "60")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Process.Kill(); c.Wait() }) //nolint:errcheck // it may have ended
		cmds, all = append(cmds, c), append(all, c.Process.Pid)
	}
	list := func() ([]int, error) {
		was := all
		all = all[:2]
		return was, nil
	}
	if err := EndOthers(list, map[int]bool{all[0]: true}); err != nil {
		t.Fatal(err)
	}
	if err := cmds[1].Wait(); err == nil || cmds[1].ProcessState.Sys().(syscall.WaitStatus).Signal() != unix.SIGKILL {
		t.Error(err)
	}
	for _, i := range []int{0, 2} {
		if err := unix.Kill(cmds[i].Process.Pid, 0); err != nil {
			t.Errorf("process %d: %v", i, err)
		}
	}
}

// TestHomeless: a child that cannot outlive the daemon runs all the same, and one that does not
// start leaves no socket.
func TestHomeless(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir()
	var logged bytes.Buffer
	cfg := Config{
		Verb: "stays", Memory: 256 << 20, Max: 256, Logger: slog.New(slog.NewTextHandler(&logged, nil)),
		Outlive: &Outlive{Dir: dir, Begin: func(*Conn, Home) error { return errors.New("no room") }},
	}
	s, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	c, err := s.Conn(t.Context())
	if err == nil {
		_, err = c.Call(t.Context(), complain, nil, nil)
	}
	if err != nil || strings.Count(logged.String(), "no room") != 1 {
		t.Errorf("%v; the log: %s", err, logged.String())
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	cfg.Verb, cfg.Max = "none", 16
	if _, err := Start(t.Context(), cfg); err == nil {
		t.Error("a child without a verb has started")
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 0 {
		t.Errorf("%v, %v are left", names, err)
	}
}
