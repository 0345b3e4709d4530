package interpreter

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// A Context is a running driver.
type Context struct {
	ID       string
	Language string
	Dir      string // where it was started

	host    Host
	l       *language
	path    string // of its program
	place   Place  // guarded by Contexts.mu
	proc    Process
	conn    *os.File // our end of the channel
	out     []*pump  // standard output and error, and the terminal if it has one
	secret  string
	grace   time.Duration
	writes  chan []byte   // to the driver, in this order
	ready   chan struct{} // closed when the driver answers
	settled chan int      // numbers that the driver has answered when it had settled
	done    chan struct{} // closed when the process has ended
	deleted bool          // guarded by Contexts.mu

	mu    sync.Mutex
	run   *Run
	count int
	late  bool // the driver was sent a SIGINT, and has not settled
	// settles counts how often it was asked to settle. Only the call that is starting
	// uses it.
	settles int
	seed    []byte // it is to have before its next call; nil: none
	how     string // why the agent killed it
	dead    bool
	died    string // how it ended
}

// Done is closed when c has died.
func (c *Context) Done() <-chan struct{} { return c.done }

// Alive reports whether c has not died.
func (c *Context) Alive() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

func (c *Context) why() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.died
}

func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b) //nolint:errcheck // never fails since Go 1.24
	return hex.EncodeToString(b)
}

func appendJSON(dst []byte, v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		return dst // strings always encode
	}
	return append(dst, b...)
}

// find looks for the program of l; "": there is none.
func (l *language) find(h Host, env map[string]string) string {
	for _, name := range l.programs(env) {
		if path := h.Look(name, env); path != "" {
			return path
		}
	}
	return ""
}

// start starts a driver and waits until it answers.
func start(h Host, l *language, p Place) (*Context, error) {
	path := l.find(h, p.Env)
	if path == "" {
		return nil, fmt.Errorf("start a %s context: %w: none of %s is in its PATH (%s)",
			l.name, ErrProgram, strings.Join(l.programs(p.Env), ", "), p.Env["PATH"])
	}
	p.Moves = 0
	c := &Context{
		ID: randomHex(16), Language: l.name, Dir: p.Dir,
		host: h, l: l, path: path, place: p, secret: randomHex(16),
		writes: make(chan []byte, unread),
		ready:  make(chan struct{}), settled: make(chan int, 1), done: make(chan struct{}),
	}
	p.Env = maps.Clone(p.Env)
	maps.Copy(p.Env, l.env)
	if err := c.spawn(path, p); err != nil {
		return nil, fmt.Errorf("start a %s context: %w", l.name, err)
	}
	var last tail
	for _, p := range c.out {
		p.to = last.output
		h.Go(p.run)
	}
	h.Go(func() { readFrames(c.conn, c.secret, c.frame) })
	h.Go(c.write)
	c.writes <- l.hello(c.secret, p)
	h.Go(c.watch)
	limit := time.NewTimer(startLimit)
	defer limit.Stop()
	why := "did not answer within " + startLimit.String()
	select {
	case <-c.ready:
		for _, p := range c.out {
			p.listen(nil)
		}
		return c, nil
	case <-c.done:
		why = c.why()
	case <-limit.C:
		c.kill(why)
	}
	return nil, fmt.Errorf("start a %s context: its driver %s: %s", l.name, path, strings.TrimSpace(why+" "+last.text()))
}

// spawn makes the channel and the pipes, and starts the process.
func (c *Context) spawn(path string, p Place) (err error) {
	var theirs, ours []int
	defer func() {
		for _, fd := range theirs {
			syscall.Close(fd)
		}
		if err != nil {
			for _, fd := range ours {
				syscall.Close(fd)
			}
		}
	}()
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make its channel: %w", err)
	}
	ours, theirs = append(ours, pair[0]), append(theirs, pair[1])
	in, err := c.l.input()
	if err != nil {
		return err
	}
	theirs = append(theirs, in)
	for range 2 {
		var p [2]int
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
			return fmt.Errorf("make its pipes: %w", err)
		}
		ours, theirs = append(ours, p[0]), append(theirs, p[1])
	}
	for _, fd := range ours { // these ends only: so that reads can wait in the poller
		if err := syscall.SetNonblock(fd, true); err != nil {
			return fmt.Errorf("make its channel: %w", err)
		}
	}
	fds := []uintptr{uintptr(in), uintptr(theirs[2]), uintptr(theirs[3]), uintptr(pair[1])}
	if c.l.stdin {
		fds[0] = fds[3]
	}
	argv := append([]string{path}, c.l.argv(path, p)...)
	var tty *os.File
	if c.l.terminal {
		var theirTTY int
		if tty, theirTTY, err = c.host.Terminal(p); err != nil {
			return err
		}
		theirs = append(theirs, theirTTY)
		fds = append(fds, fds[2])
		fds[2] = uintptr(theirTTY)
	}
	if c.l.self {
		path = Self
	}
	if c.proc, err = c.host.Start(path, argv, p, fds); err != nil {
		tty.Close() //nolint:errcheck // there may be none
		return fmt.Errorf("execute %s: %w", path, err)
	}
	c.conn = os.NewFile(uintptr(ours[0]), "channel")
	for i, fd := range ours[1:] {
		c.out = append(c.out, &pump{f: os.NewFile(uintptr(fd), "pipe"), stream: byte(i + 1)})
	}
	if tty != nil {
		c.out = append(c.out, &pump{f: tty, stream: 2})
	}
	return nil
}

// input makes the standard input of a driver.
func (l *language) input() (int, error) {
	if l.source == "" {
		fd, err := syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return -1, fmt.Errorf("open the null device: %w", err)
		}
		return fd, nil
	}
	fd, err := unix.MemfdCreate("driver", unix.MFD_CLOEXEC) // any user may open it again
	if err != nil {
		return -1, fmt.Errorf("create a file for its driver: %w", err)
	}
	if _, err := unix.Write(fd, []byte(l.source)); err != nil { // memory takes all of it; the offset is then at the end
		unix.Close(fd)
		return -1, fmt.Errorf("write the file of its driver: %w", err)
	}
	return fd, nil
}

// A tail keeps the last of what a driver prints while it starts.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) output(_ byte, b []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	if over := len(t.b) - 2<<10; over > 0 {
		t.b = slices.Delete(t.b, 0, over)
	}
}

func (t *tail) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}

// frame handles a frame of the driver.
func (c *Context) frame(f frame) {
	switch f.Type {
	case "ready":
		c.mu.Lock()
		defer c.mu.Unlock()
		select {
		case <-c.ready:
		default:
			close(c.ready)
		}
	case "settled":
		select {
		case c.settled <- f.Status:
		default: // nobody waits for it
		}
	case "begin":
		if r := c.current(); r != nil {
			c.begin(r)
		}
	case "result":
		if l := c.listener(); l != nil && len(f.Results) > 0 {
			c.drain() // output that was printed before is delivered before
			l.Result(f.Results)
		}
		if f.Ack != 0 { // output that is printed later is delivered later
			c.conn.Write(fmt.Appendf(nil, "%d\n", f.Ack)) //nolint:errcheck // then it has died
		}
	case "done":
		err := f.Error
		if err == nil && f.Status != 0 {
			code := strconv.Itoa(f.Status)
			err = &Error{Name: "CommandExecError", Value: code, Traceback: []string{"exit status " + code}}
		}
		if c.listener() != nil { // else it is of a call that has ended
			c.finish(err)
		}
	}
}

// write sends the queued messages to the driver. A driver may read them late, or never.
func (c *Context) write() {
	for {
		select {
		case b := <-c.writes:
			c.conn.Write(b) //nolint:errcheck // then it has died
		case <-c.done:
			return
		}
	}
}

func (c *Context) drain() {
	for _, p := range c.out {
		p.drain()
	}
}

// kill ends the driver and all it has started.
func (c *Context) kill(why string) {
	c.mu.Lock()
	if c.how == "" && !c.dead {
		c.how = why
	}
	c.mu.Unlock()
	c.proc.Kill()
}

// watch waits for the end of the driver.
func (c *Context) watch() {
	<-c.proc.Done()
	select {
	case <-c.ready:
	default:
		c.drain() // start reports its last output
	}
	c.proc.KillLeft() // nothing could name these processes later
	c.mu.Lock()
	c.dead = true
	c.died = ended(c.proc.Status())
	if c.how != "" {
		c.died = "killed: " + c.how
	}
	close(c.done)
	var over chan struct{}
	if c.run != nil && c.run.l != nil { // else Start will see that c is dead
		over = c.run.done
	}
	c.mu.Unlock()
	c.finish(c.lastWords())
	if over != nil {
		<-over // the reader of frames may be ending it
	}
	c.conn.Close()
	for _, p := range c.out {
		p.f.Close() // processes that the driver left behind may hold the other end
	}
}

// ended says how a process ended that nobody told to end.
func ended(ws syscall.WaitStatus) string {
	switch {
	case ws.Signaled() && ws.Signal() == unix.SIGKILL:
		return "its process was killed by SIGKILL, most likely because the sandbox is out of memory"
	case ws.Signaled():
		return "its process was killed by " + unix.SignalName(ws.Signal())
	}
	return fmt.Sprintf("its process exited with status %d", ws.ExitStatus())
}

// lastWords is the error of a call whose context died.
func (c *Context) lastWords() *Error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ws := c.proc.Status()
	first := fmt.Sprintf("exit status %d", ws.ExitStatus())
	if ws.Signaled() {
		first = "signal: " + ws.Signal().String()
	}
	e := &Error{
		Name:      agent.ContextDied,
		Value:     fmt.Sprintf("context %s died, and its state is lost: %s", c.ID, c.died),
		Traceback: []string{first},
	}
	if c.how != "" {
		e.Traceback = append(e.Traceback, c.how)
	}
	return e
}
