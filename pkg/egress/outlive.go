package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/flowfile"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

// Flows by name outlive the daemon, with the child that has them:
//
//	daemon ── write: flow, socket, name ──▶ file of the child ── read ──▶ next daemon
//	   │                                                                     │
//	   └── socket ──▶ child ◀── pidfd_getfd(2): its sockets, by SO_COOKIE ───┘
//
// What the next daemon knows of them stands in the file, which no child can write, and what
// it holds of them comes from the kernel. So it cuts what the policy of the moment denies as
// if it had opened it. A socket that is not in the file is reset, and a child that may hide
// one is ended with all its flows. New flows go to a child of its own; an old one ends with
// its last flow.

// mostOld is how many children of earlier daemons live on.
const mostOld = 8

// lineLimit is how long an old child may take to answer the next daemon and to stop, and
// adoptLimit how long all of them may.
const (
	lineLimit  = 5 * time.Second
	adoptLimit = 10 * time.Second
)

// endOfFlows is how the name of a file of flows ends.
const endOfFlows = ".flows"

// Outliving is where processes are that outlive the daemon, such as a cgroup.
type Outliving interface {
	Add(pid int) error
	Processes() ([]int, error)
}

// A hand is a child that outlives the daemon. The methods of a nil hand do nothing.
type hand struct {
	name  string
	line  *child.Conn
	file  *flowfile.File
	old   *child.Old // nil: of this daemon
	flows int
	full  bool // the log has it that the file takes no more
}

// put writes down a socket before the child gets it. One that cannot be written down, because
// the file system is full, is unknown to the next daemon, and ends there.
func (h *hand) put(log *slog.Logger, x *proxied, number uint32, o *outward) error {
	if h == nil {
		return nil
	}
	e, err := entryOf(x, number, o)
	if err != nil {
		return err
	}
	slot, err := h.file.Put(e) // 0 after an error
	if err != nil && !h.full {
		h.full = true
		log.Error("a flow by name cannot be written down; it and others end when the next daemon starts", "err", err)
	}
	if o == nil {
		x.slot = slot
	} else {
		o.slot = slot
	}
	return nil
}

func (h *hand) set(x *proxied, number uint32, o *outward) error {
	if h == nil || o.slot == 0 {
		return nil
	}
	e, err := entryOf(x, number, o)
	if err != nil {
		return err
	}
	return h.file.Set(o.slot, e)
}

func (h *hand) clear(slot int) {
	if h != nil {
		h.file.Clear(slot)
	}
}

// end removes what is left of a child that has ended.
func (h *hand) end(dir string) {
	if h == nil {
		return
	}
	h.file.Close() //nolint:errcheck // it goes
	removeHome(dir, h.name)
}

func removeHome(dir, name string) {
	os.Remove(child.SocketPath(dir, name))         //nolint:errcheck // it may be gone
	os.Remove(filepath.Join(dir, name+endOfFlows)) //nolint:errcheck // likewise
}

// entryOf is what the next daemon needs to know of a socket: of the guest's, if o is nil.
func entryOf(x *proxied, number uint32, o *outward) (e flowfile.Entry, err error) {
	e = flowfile.Entry{
		Flow: x.number, Socket: number, Sandbox: x.s.id, Guest: x.s.addr, Dst: netip.AddrPortFrom(x.flow.Dst, x.flow.Port),
	}
	s := x.guest
	if o != nil {
		e.Kind, e.Name, s = uint8(o.kind), o.name, o.Socket
	}
	e.Cookie, err = s.Cookie()
	return e, err
}

// begin makes the file of a child that has begun.
func (p *proxy) begin(line *child.Conn, at child.Home) error {
	file, err := flowfile.Create(filepath.Join(p.e.cfg.FlowDir, at.Name+endOfFlows),
		flowfile.Head{Version: heads.Version, Pid: at.Pid, Started: at.Started})
	if err != nil {
		return fmt.Errorf("make the file of flows by name: %w", err)
	}
	if o := p.e.cfg.Outliving; o != nil {
		if err := o.Add(at.Pid); err != nil {
			p.log.Error("flows by name may end with this daemon", "err", err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hands[line] = &hand{name: at.Name, line: line, file: file}
	return nil
}

// entrust writes down that a child gets a flow.
func (p *proxy) entrust(x *proxied, line *child.Conn) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.flows[x.number] != x || p.closes {
		return errGone
	}
	h := p.hands[line]
	if err := h.put(p.log, x, 0, nil); err != nil {
		return fmt.Errorf("write down the flow: %w", err)
	}
	if x.line = line; h != nil {
		h.flows++
	}
	return nil
}

// forgo takes an ended flow out of the file of its child. A child of an earlier daemon ends
// with its last flow.
//
// Preconditions: p.mu is held.
func (p *proxy) forgo(x *proxied) {
	h := p.hands[x.line]
	if h == nil {
		return
	}
	h.clear(x.slot)
	if h.flows--; h.flows == 0 && h.old != nil {
		h.line.Close() //nolint:errcheck // it has no error that matters: see serveOld
	}
}

// leave lets go of all flows of children that outlive the daemon: they go on.
func (p *proxy) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closes = true
	for number, x := range p.flows {
		if p.hands[x.line] == nil {
			continue // ends with its child, or was not handed to one
		}
		delete(p.flows, number)
		x.stop()
		for _, o := range x.to {
			o.Close() //nolint:errcheck // nothing is written
		}
		x.guest.Close() //nolint:errcheck // likewise
	}
	for _, h := range p.hands {
		if h.old != nil {
			h.line.Close() //nolint:errcheck // likewise
		}
	}
}

// leaves reports whether a child lives on when the Engine closes, and lets go of it then.
func (p *proxy) leaves(line *child.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.hands[line]
	if h == nil || h.flows == 0 || !p.closes {
		return false
	}
	delete(p.hands, line)
	h.file.Close() //nolint:errcheck // each write is complete
	return true
}

// adopt takes over the children of earlier daemons, the youngest mostOld of them.
func (p *proxy) adopt(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, adoptLimit)
	defer cancel()
	dir := p.e.cfg.FlowDir
	err := os.MkdirAll(dir, 0o700)
	var names []fs.DirEntry
	if err == nil {
		names, err = os.ReadDir(dir)
	}
	if err != nil { // then all end below, and no child of this daemon outlives it: see begin
		p.log.Error("flows by name of an earlier daemon cannot be read; they end", "err", err)
	}
	var all []*earlier
	for _, n := range names {
		name, ok := strings.CutSuffix(n.Name(), endOfFlows)
		if !ok {
			continue
		}
		o := &earlier{name: name}
		if o.file, o.head, o.entries, err = flowfile.Open(filepath.Join(dir, n.Name())); err != nil {
			p.log.Warn("a file of flows by name cannot be read; they end", "err", err) // with the strays
			removeHome(dir, name)
			continue
		}
		all = append(all, o)
	}
	slices.SortFunc(all, func(a, b *earlier) int { return cmp.Compare(b.head.Started, a.head.Started) })
	kept := map[int]bool{}
	for i, o := range all {
		err := errors.New("too many of them have flows")
		if len(kept) < mostOld {
			err = p.adoptOne(ctx, o, len(all)-i)
		}
		if err == nil {
			kept[o.head.Pid] = true
			continue
		}
		if !errors.Is(err, child.ErrGone) && !errors.Is(err, errNoFlows) {
			p.log.Warn("a child of an earlier daemon and its flows by name end", "pid", o.head.Pid, "flows", len(o.entries), "err", err)
		}
		o.end(dir)
	}
	for _, n := range names { // of children that died before they had a file
		if name, ok := strings.CutSuffix(n.Name(), ".sock"); ok {
			if _, err := os.Lstat(filepath.Join(dir, name+endOfFlows)); errors.Is(err, fs.ErrNotExist) {
				removeHome(dir, name)
			}
		}
	}
	return p.endStrays(kept)
}

// endStrays ends children of earlier daemons that no file knows.
func (p *proxy) endStrays(kept map[int]bool) error {
	if p.e.cfg.Outliving == nil {
		return nil
	}
	if err := child.EndOthers(p.e.cfg.Outliving.Processes, kept); err != nil {
		return fmt.Errorf("end the children of earlier daemons that no file knows: %w", err)
	}
	return nil
}

// earlier is a child of an earlier daemon, as its file has it.
type earlier struct {
	name    string
	head    flowfile.Head
	file    *flowfile.File
	entries map[int]flowfile.Entry
}

func (o *earlier) home() child.Home {
	return child.Home{Name: o.name, Pid: o.head.Pid, Started: o.head.Started}
}

// end ends it, and removes its file.
func (o *earlier) end(dir string) {
	if old, err := child.Find(o.home()); err == nil {
		old.Kill()
		old.Close() //nolint:errcheck // nothing is written
	}
	o.file.Close() //nolint:errcheck // it goes
	removeHome(dir, o.name)
}

var errNoFlows = errors.New("it has no flow")

// adoptOne takes over one child, the first of some that share the time which is left. After
// an error it is to be ended.
func (p *proxy) adoptOne(ctx context.Context, o *earlier, some int) error {
	if o.head.Version != heads.Version {
		return fmt.Errorf("it is of another version, %d, not %d", o.head.Version, heads.Version)
	}
	old, err := child.Find(o.home())
	if err != nil {
		return err
	}
	limit := lineLimit
	if end, ok := ctx.Deadline(); ok { // one that does not answer leaves the others their part
		limit = min(limit, time.Until(end)/time.Duration(min(some, mostOld)))
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	line, err := old.Line(ctx, p.e.cfg.FlowDir, o.name, heads.MaxBody)
	if err != nil {
		return errors.Join(err, old.Close())
	}
	sockets, err := old.Sockets(ctx)
	if err != nil {
		return errors.Join(err, line.Close(), old.Close())
	}
	h := &hand{name: o.name, line: line, file: o.file, old: old}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hands[line] = h
	p.enter(h, o.entries, sockets)
	if h.flows == 0 {
		delete(p.hands, line)
		return errors.Join(errNoFlows, line.Close(), old.Close())
	}
	p.done.Go(func() { p.serveOld(h) })
	return nil
}

// enter enters the flows of a child that the file and the kernel agree about. What else it
// has is reset.
//
// Preconditions: p.mu is held.
func (p *proxy) enter(h *hand, entries map[int]flowfile.Entry, sockets map[uint64]child.Socket) {
	found, next := map[uint64]*proxied{}, flowfile.NextSocket(entries)
	take := func(slot int, e flowfile.Entry) (child.Socket, bool) {
		s, ok := sockets[e.Cookie]
		delete(sockets, e.Cookie)
		if ok && s.Dead() { // the child may never say that it has closed it
			s.Close() //nolint:errcheck // nothing is written
			ok = false
		}
		if !ok {
			h.clear(slot) // it was closed meanwhile
		}
		return s, ok
	}
	for slot, e := range entries {
		p.last = max(p.last, e.Flow)
		if e.Socket != 0 {
			continue
		}
		s, ok := take(slot, e)
		if !ok {
			continue
		}
		x := &proxied{
			s: p.asideOf(e), number: e.Flow, line: h.line, guest: s, slot: slot, to: map[uint32]*outward{},
			flow: policy.Flow{Src: e.Guest, Dst: e.Dst.Addr(), Proto: unix.IPPROTO_TCP, Port: e.Dst.Port()},
			next: next,
		}
		x.ctx, x.stop = context.WithCancel(context.Background())
		found[x.number], p.flows[x.number] = x, x
		p.of[x.s]++
		p.heads++
		h.flows++
	}
	for slot, e := range entries {
		x := found[e.Flow]
		if e.Socket == 0 {
			continue
		}
		if x == nil { // its socket is left over
			h.clear(slot)
			continue
		}
		if s, ok := take(slot, e); ok {
			x.to[e.Socket] = &outward{Socket: s, tuple: tupleOfTCP{sentFrom(s), e.Dst}, kind: heads.Kind(e.Kind), name: e.Name, slot: slot}
			p.outs[x.s]++
		}
	}
	for _, s := range sockets { // of no flow
		s.Reset()
		s.Close() //nolint:errcheck // nothing is written
	}
}

// asideOf stands for a sandbox that is not registered yet.
//
// Preconditions: p.mu is held.
func (p *proxy) asideOf(e flowfile.Entry) *sandbox {
	for s := range p.aside {
		if s.id == e.Sandbox && s.addr == e.Guest {
			return s
		}
	}
	s := &sandbox{id: e.Sandbox, addr: e.Guest}
	p.aside[s] = true
	return s
}

// serveOld serves a child of an earlier daemon, until it has no flow left, or this daemon
// ends.
func (p *proxy) serveOld(h *hand) {
	err := h.line.Run(func(m child.Message) { p.handle(h.line, m) })
	if err == nil && p.leaves(h.line) {
		h.old.Close() //nolint:errcheck // nothing is written
		return
	}
	p.mu.Lock()
	if flows := h.flows; flows > 0 {
		p.log.Error("a child of an earlier daemon died; its flows by name end", "flows", flows, "err", err)
	}
	p.mu.Unlock()
	h.old.Kill()
	p.drop(h.line)
	h.old.Close() //nolint:errcheck // likewise
}

// claim gives a sandbox that is registered its flows from the time of an earlier daemon. It
// reports whether it has any.
func (p *proxy) claim(s *sandbox) (any bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for was := range p.aside {
		switch {
		case was.id != s.id:
		case was.addr != s.addr:
			p.endAside(was)
		default:
			any = true
			delete(p.aside, was)
			for _, x := range p.flows {
				if x.s == was {
					x.s = s
				}
			}
			for _, counts := range []map[*sandbox]int{p.of, p.outs} {
				if counts[was] > 0 {
					counts[s] += counts[was]
					delete(counts, was)
				}
			}
		}
	}
	return any
}

// closeAside ends the flows of a sandbox that was never registered with this Engine.
func (p *proxy) closeAside(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for s := range p.aside {
		if s.id == id {
			p.endAside(s)
		}
	}
}

// closeUnclaimed ends the flows of all of those.
func (p *proxy) closeUnclaimed() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for s := range p.aside {
		p.endAside(s)
	}
}

// endAside ends the flows of one.
//
// Preconditions: p.mu is held.
func (p *proxy) endAside(s *sandbox) {
	delete(p.aside, s)
	for _, x := range p.flows {
		if x.s == s {
			p.end(x, true)
		}
	}
}
