package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long a start may go on after the end of its context. Then it is given
// up: its launcher gets no new starts, and is killed once all its starts are given up.
// Starts take tens of milliseconds, on a loaded host seconds.
const patience = 10 * time.Second

// A Client keeps one launcher running and asks it to start sandboxes.
type Client struct {
	command  func() *exec.Cmd
	patience time.Duration

	mu     sync.Mutex
	live   *process   // nil: none runs
	old    []*process // replaced; they finish their starts
	closed bool
}

// New returns a Client that makes its launchers with command. It starts the first one,
// so that a launcher that cannot run is known at once.
func New(command func() *exec.Cmd) (*Client, error) {
	c := &Client{command: command, patience: patience}
	if _, err := c.launcher(); err != nil {
		return nil, err
	}
	return c, nil
}

// A process is one launcher process.
type process struct {
	cmd  *exec.Cmd
	conn *net.UnixConn
	dead chan struct{} // closed when it has ended and err is set
	err  error

	mu      sync.Mutex
	seq     uint64
	waiting map[uint64]chan string
	stuck   map[uint64]bool // those of waiting that were given up
	retired bool            // gets no new starts
}

// errUnsent marks a request that no launcher has read.
var errUnsent = errors.New("the launcher has ended")

// Start asks the launcher to start id from bundle and returns when PID 1 runs, or with
// the runtime's error. stdin becomes PID 1's; Start does not close it. A launcher that
// died is replaced without an error, unless it died during this start: that is an
// error, and parts of id may exist.
func (c *Client) Start(ctx context.Context, id, bundle string, stdin *os.File) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	for range 3 {
		p, err := c.launcher()
		if err != nil {
			return err
		}
		err = p.start(ctx, Request{ID: id, Bundle: bundle}, stdin, c.patience, func(seq uint64) { c.giveUp(p, seq) })
		if !errors.Is(err, errUnsent) {
			return err
		}
		c.retire(p)
	}
	return errors.New("the launcher ends as soon as it is started; its output is in the daemon's log")
}

// Pid is the process id of the running launcher, or 0.
func (c *Client) Pid() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.live == nil {
		return 0
	}
	return c.live.cmd.Process.Pid
}

// Close ends the launcher and waits for it. Sandboxes live on.
func (c *Client) Close() error {
	c.mu.Lock()
	all := c.old
	if c.live != nil {
		all = append(all, c.live)
	}
	c.live, c.old, c.closed = nil, nil, true
	c.mu.Unlock()
	for _, p := range all {
		p.conn.Close()
	}
	late := time.After(c.patience)
	for _, p := range all {
		select {
		case <-p.dead:
			continue
		case <-late:
		}
		for _, p := range all {
			p.cmd.Process.Kill() //nolint:errcheck // it is gone, then
			<-p.dead
		}
		break
	}
	return nil
}

// launcher returns the running launcher, or starts one.
func (c *Client) launcher() (*process, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errors.New("the launcher was closed")
	}
	if c.live == nil {
		p, err := spawn(c.command())
		if err != nil {
			return nil, err
		}
		c.live = p
	}
	return c.live, nil
}

// retire makes another launcher do the starts from now on. This one ends when its
// starts are done.
func (c *Client) retire(p *process) {
	c.mu.Lock()
	if c.live == p {
		c.live = nil
		c.old = append(slices.DeleteFunc(c.old, (*process).isDead), p)
	}
	c.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.retired = true
	p.maybeEnd()
}

// giveUp is called when a start has gone on for patience after the end of its context.
// Other starts of the same launcher go on.
func (c *Client) giveUp(p *process, seq uint64) {
	p.mu.Lock()
	if p.waiting[seq] != nil {
		p.stuck[seq] = true
	}
	p.mu.Unlock()
	c.retire(p)
}

func (p *process) isDead() bool {
	select {
	case <-p.dead:
		return true
	default:
		return false
	}
}

// maybeEnd ends a launcher that gets no new starts and has no start that a caller waits
// for.
// Preconditions: mu is held.
func (p *process) maybeEnd() {
	switch {
	case !p.retired:
	case len(p.waiting) == 0:
		p.conn.Close()
	case len(p.stuck) == len(p.waiting):
		p.cmd.Process.Kill() //nolint:errcheck // it is gone, then
	}
}

// settle forgets a start and returns the channel for its answer, or nil.
func (p *process) settle(seq uint64) chan string {
	p.mu.Lock()
	defer p.mu.Unlock()
	answer := p.waiting[seq]
	delete(p.waiting, seq)
	delete(p.stuck, seq)
	p.maybeEnd()
	return answer
}

func spawn(cmd *exec.Cmd) (*process, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("start launcher: socketpair: %w", err)
	}
	near, far := os.NewFile(uintptr(pair[0]), "launcher"), os.NewFile(uintptr(pair[1]), "launcher's")
	defer near.Close()
	defer far.Close()
	conn, err := net.FileConn(near)
	if err != nil {
		return nil, fmt.Errorf("start launcher: %w", err)
	}
	cmd.ExtraFiles = []*os.File{far} // descriptor 3
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true // ^C at a daemon in a terminal must end the launcher by its socket, in order
	if err := cmd.Start(); err != nil {
		conn.Close()
		return nil, fmt.Errorf("start launcher: %w", err)
	}
	p := &process{
		cmd: cmd, conn: conn.(*net.UnixConn), dead: make(chan struct{}), waiting: map[uint64]chan string{},
		stuck: map[uint64]bool{},
	}
	go p.listen()
	return p, nil
}

// listen hands out replies until the launcher ends.
func (p *process) listen() {
	b := make([]byte, maxPacket)
	for {
		n, err := p.conn.Read(b)
		if n == 0 || err != nil {
			break
		}
		var r Reply
		if json.Unmarshal(b[:n], &r) != nil {
			break // not a reply of a launcher
		}
		if answer := p.settle(r.Seq); answer != nil {
			answer <- r.Err
		}
	}
	p.conn.Close() // it ends it if it still runs
	p.err = p.cmd.Wait()
	close(p.dead)
}

// start sends req and waits for the answer. It calls giveUp once its context has been
// over for longer than patience.
func (p *process) start(ctx context.Context, req Request, stdin *os.File, patience time.Duration, giveUp func(seq uint64)) error {
	answer := make(chan string, 1)
	p.mu.Lock()
	if p.retired {
		p.mu.Unlock()
		return errUnsent
	}
	p.seq++
	req.Seq = p.seq
	p.waiting[req.Seq] = answer
	p.mu.Unlock()
	defer p.settle(req.Seq)
	b, err := json.Marshal(req)
	if err != nil {
		return err
	}
	if len(b) > maxPacket {
		return fmt.Errorf("the request has %d bytes; at most %d are allowed", len(b), maxPacket)
	}
	// The descriptor is borrowed: Fd() would make the caller's file blocking.
	raw, err := stdin.SyscallConn()
	if err != nil {
		return fmt.Errorf("pass the stdin of %s: %w", req.ID, err)
	}
	var sendErr error
	if err := raw.Control(func(fd uintptr) {
		_, _, sendErr = p.conn.WriteMsgUnix(b, unix.UnixRights(int(fd)), nil)
	}); err != nil {
		return fmt.Errorf("pass the stdin of %s: %w", req.ID, err)
	}
	if sendErr != nil {
		return fmt.Errorf("%w: %w", errUnsent, sendErr)
	}
	return p.await(ctx, answer, patience, func() { giveUp(req.Seq) })
}

// await returns only when the start is settled: the launcher must not work on the
// sandbox while the caller goes on.
func (p *process) await(ctx context.Context, answer chan string, patience time.Duration, giveUp func()) error {
	select {
	case words := <-answer:
		return asError(words)
	case <-p.dead:
		return p.lost(answer)
	case <-ctx.Done():
	}
	select {
	case <-answer: // running or not, the caller tears it down
		return context.Cause(ctx)
	case <-p.dead:
		return context.Cause(ctx)
	case <-time.After(patience):
		giveUp()
	}
	select {
	case <-answer:
	case <-p.dead:
	}
	return context.Cause(ctx)
}

// lost is the error of a start whose launcher ended. The answer may have come just
// before.
func (p *process) lost(answer chan string) error {
	select {
	case words := <-answer:
		return asError(words)
	default:
		return fmt.Errorf("the launcher ended during the start: %v", p.cmd.ProcessState)
	}
}

func asError(words string) error {
	if words == "" {
		return nil
	}
	return errors.New(words)
}
