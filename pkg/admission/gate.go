// Package admission decides whether a sandbox may be created, and when it is brought
// up.
//
//	create ─▶ Gate: draining? too many? too little memory, disk? ─yes─▶ 503, Retry-After
//	            │ no, and the intent becomes durable
//	            ▼
//	          Queue: so many at once, the others are Pending, clients in turn
//	            │ its turn
//	            ▼
//	          the Manager brings it up
//
// What surprises: the limits of all sandboxes may add up to several times the host's
// memory. The gate checks the memory available now, not the sum of limits: most
// sandboxes use a small part of theirs. It also counts the memory for sandboxes that
// are still coming up, which is not in that number yet.
package admission

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// The bounds, by the names under which refusals are counted.
const (
	Draining     = "draining"
	MaxSandboxes = "max_sandboxes"
	Memory       = "memory"
	Disk         = "disk"
)

// BoundNames lists the bounds.
func BoundNames() []string { return []string{Draining, MaxSandboxes, Memory, Disk} }

// Space is a file system or directory whose free space the gate checks.
type Space struct {
	Name      string // for people: "the storage pool"
	FreeBytes int64
	Remedy    string // how to free space there
}

// Host is what the gate reads of the host.
type Host struct {
	// Sandboxes lists all sandboxes, ended ones too.
	Sandboxes func(context.Context) ([]*record.Record, error)
	// Deadline is when a sandbox is erased by itself; zero is never.
	Deadline func(record.Record) time.Time
	// MemoryBytes is the memory available without swapping (proc(5), MemAvailable).
	MemoryBytes func() (int64, error)
	Spaces      func() ([]Space, error)
	// Pressed says why nothing new is made, though the reserve is free: a disk was fuller, and is not
	// free enough yet, or it has no room for files. Empty: there is room. May be nil.
	Pressed func() string
	// StartBytes is the memory that a sandbox of a runtime needs to come up.
	StartBytes func(runtime string) int64
	// ImageBytes is the size of the memory image that a sandbox which is coming up begins with; 0 if
	// it begins anew. May be nil.
	ImageBytes func(r *record.Record) int64
	// MakeRoom releases what no sandbox needs (prepared slots), and reports whether there
	// was anything. The gate calls it before it refuses for want of memory or disk. May be
	// nil.
	MakeRoom func(context.Context) bool
	// Relieve frees memory that a sandbox holds which nobody uses at the moment, by putting it on
	// disk, and reports whether there was one. The gate calls it, one call at a time, before it
	// refuses for want of memory. May be nil.
	Relieve func(context.Context) bool
}

// Limits are the limits and reserves that the host's owner sets.
type Limits struct {
	MaxSandboxes  int
	MemoryReserve int64 // bytes of Host.MemoryBytes
	DiskReserve   int64 // bytes of each of Host.Spaces
}

// Gate refuses sandboxes that the host has no room for.
type Gate struct {
	Limits  Limits
	Host    Host
	Queue   *Queue
	Drain   *Drain
	Refused func(bound string) // called for each refusal; may be nil

	relief   sync.Once
	reliever chan struct{} // has one while a caller frees memory
	mu       sync.Mutex
	entering int              // admitted, but not in the list yet or only just there; guarded by mu
	promised int64            // bytes of memory for admitted sandboxes
	wakes    map[string]*wake // by sandbox; guarded by mu
}

// A wake is the admission of a sandbox whose memory is on disk, for all who wait for it.
type wake struct {
	entered chan struct{} // closed when leave or err is known
	leave   func()
	err     error
	callers int // guarded by Gate.mu
}

// Wake is Enter for sandbox id, which is in the list and whose memory of so many bytes is on disk. Of
// several callers at the same time the first enters for all: the sandbox wakes once.
func (g *Gate) Wake(ctx context.Context, id, runtime string, bytes int64) (leave func(), err error) {
	g.mu.Lock()
	w := g.wakes[id]
	first := w == nil
	if first {
		if g.wakes == nil {
			g.wakes = map[string]*wake{}
		}
		w = &wake{entered: make(chan struct{})}
		g.wakes[id] = w
	}
	w.callers++
	g.mu.Unlock()
	if first {
		w.leave, w.err = g.Enter(context.WithoutCancel(ctx), runtime, bytes, 0)
		close(w.entered)
	}
	leave = sync.OnceFunc(func() { g.unwake(id, w) })
	select {
	case <-w.entered:
		err = w.err
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		leave()
		return nil, err
	}
	return leave, nil
}

// unwake is leave of one caller of Wake.
func (g *Gate) unwake(id string, w *wake) {
	g.mu.Lock()
	w.callers--
	last := w.callers == 0
	if last {
		delete(g.wakes, id)
	}
	g.mu.Unlock()
	if last && w.leave != nil {
		w.leave()
	}
}

// Enter admits one sandbox that is to be brought up on runtime. It refuses with
// errs.Exhausted, or with errs.Unavailable while the host drains; the error says when
// to try again. more is 1 for a new sandbox, and 0 for a restart of one that is in the
// list already. bytes is the memory that it begins with, if it does not begin anew. Call leave
// when the list shows that the sandbox is coming up, or when it will not come up.
func (g *Gate) Enter(ctx context.Context, runtime string, bytes int64, more int) (leave func(), err error) {
	needs := max(bytes, g.Host.StartBytes(runtime))
	leave, err = g.enter(ctx, needs, more)
	r, refused := errors.AsType[*refusal](err)
	if refused && (r.bound == Memory || r.bound == Disk) && g.Host.MakeRoom != nil && g.Host.MakeRoom(ctx) {
		leave, err = g.enter(ctx, needs, more)
		r, refused = errors.AsType[*refusal](err)
	}
	if refused && r.bound == Memory && g.Host.Relieve != nil {
		leave, err = g.relieve(ctx, needs, more)
		r, refused = errors.AsType[*refusal](err)
	}
	if !refused {
		return leave, err
	}
	if g.Refused != nil {
		g.Refused(r.bound)
	}
	return nil, r.err
}

// relieve is enter after a refusal, while memory can be freed.
func (g *Gate) relieve(ctx context.Context, needs int64, more int) (leave func(), err error) {
	g.relief.Do(func() { g.reliever = make(chan struct{}, 1) })
	select {
	case g.reliever <- struct{}{}:
		defer func() { <-g.reliever }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	leave, err = g.enter(ctx, needs, more) // another caller may have freed enough
	for {
		r, refused := errors.AsType[*refusal](err)
		if !refused || r.bound != Memory || ctx.Err() != nil || !g.Host.Relieve(ctx) {
			return leave, err
		}
		leave, err = g.enter(ctx, needs, more)
	}
}

// Room fails as Enter does if the gate would refuse a new sandbox on runtime. It is
// counted as no refusal.
func (g *Gate) Room(ctx context.Context, runtime string) error {
	leave, err := g.enter(ctx, g.Host.StartBytes(runtime), 1)
	if err == nil {
		leave()
	}
	return err
}

// Fits fails with errs.Exhausted unless the host has room for so many more sandboxes on runtime,
// which will soon use so many bytes of memory each; the error says how many would fit. It fails
// as Enter does if not even one may enter. It promises them nothing: each enters on its own.
func (g *Gate) Fits(ctx context.Context, runtime string, bytes int64, count int) error {
	leave, err := g.Enter(ctx, runtime, 0, 1)
	if err != nil {
		return err
	}
	leave()
	all, err := g.Host.Sandboxes(ctx)
	if err != nil {
		return err
	}
	if fit := g.Limits.MaxSandboxes - len(all); count > fit {
		return errs.New(errs.Exhausted, "no room for %d more sandboxes: %d would fit; this host has %d of at most %d "+
			"(limits.max_sandboxes); delete some (`sandboxctl rm`)", count, max(fit, 0), len(all), g.Limits.MaxSandboxes)
	}
	if g.Limits.MemoryReserve == 0 {
		return nil
	}
	free, err := g.Host.MemoryBytes()
	if err != nil {
		return err
	}
	each := max(bytes, g.Host.StartBytes(runtime))
	if fit := (free - g.Limits.MemoryReserve) / each; int64(count) > fit {
		return errs.New(errs.Exhausted, "no room for %d more sandboxes with %s of memory each: %d would fit; the host has %s of free "+
			"memory, and %s must stay free (limits.memory_reserve)", count, record.Mebibytes(each), max(fit, 0), record.Mebibytes(free),
			record.Mebibytes(g.Limits.MemoryReserve))
	}
	return nil
}

// A refusal is why enter admits nobody.
type refusal struct {
	bound string
	err   error
}

func (r *refusal) Error() string { return r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

// enter is Enter, without a second try.
func (g *Gate) enter(ctx context.Context, needs int64, more int) (leave func(), err error) {
	if since := g.Drain.Since(); !since.IsZero() && !onTrial(ctx) {
		return nil, &refusal{Draining, errs.Retry(errs.Wire(errs.New(errs.Unavailable,
			"this host creates and starts no sandboxes: it has been draining since %s; running sandboxes are not affected; `sandboxctl "+
				"system drain --off` ends the drain", since.Format(time.RFC3339)),
			"SANDBOX::DRAINING"), maxRetry)}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	all, err := g.Host.Sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	if more > 0 && len(all)+g.entering+more > g.Limits.MaxSandboxes {
		return nil, g.full(all, MaxSandboxes, 0, "this host has its maximum of %s (limits.max_sandboxes); delete some "+
			"(`sandboxctl rm`); ended sandboxes count too", errs.Count(g.Limits.MaxSandboxes, "sandbox", "sandboxes"))
	}
	if err := g.memory(all, needs); err != nil {
		return nil, err
	}
	if err := g.disk(all); err != nil {
		return nil, err
	}
	g.entering += more
	g.promised += needs
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.entering -= more
		g.promised -= needs
	}, nil
}

// memory refuses a sandbox that would use the reserve. Preconditions: g.mu is held.
func (g *Gate) memory(all []*record.Record, needs int64) error {
	if g.Limits.MemoryReserve == 0 {
		return nil
	}
	free, err := g.Host.MemoryBytes()
	if err != nil {
		return err
	}
	promised, n := g.promised, g.entering
	for i := range all {
		if all[i].State.Beginning() {
			promised += g.begins(all[i])
			n++
		}
	}
	if free-promised-needs >= g.Limits.MemoryReserve {
		return nil
	}
	return g.full(all, Memory, g.Queue.clears(),
		"the host has %s of free memory; %s %s of it and this one needs %s; %s must stay free "+
			"(limits.memory_reserve); delete sandboxes, or wait for some to end",
		record.Mebibytes(free), errs.Count(n, "creation in progress needs", "creations in progress need"),
		record.Mebibytes(promised), record.Mebibytes(needs), record.Mebibytes(g.Limits.MemoryReserve))
}

// begins is the memory that a sandbox in the list needs to come up.
func (g *Gate) begins(r *record.Record) int64 {
	bytes := g.Host.StartBytes(r.Spec.Runtime)
	if g.Host.ImageBytes != nil {
		bytes = max(bytes, g.Host.ImageBytes(r))
	}
	return bytes
}

func (g *Gate) disk(all []*record.Record) error {
	if g.Limits.DiskReserve > 0 {
		spaces, err := g.Host.Spaces()
		if err != nil {
			return err
		}
		for _, s := range spaces {
			if s.FreeBytes < g.Limits.DiskReserve {
				return g.full(all, Disk, 0, "%s has %s free, and %s must stay free (storage.reserve); %s", s.Name,
					record.Mebibytes(s.FreeBytes), record.Mebibytes(g.Limits.DiskReserve), s.Remedy)
			}
		}
	}
	if g.Host.Pressed != nil {
		if why := g.Host.Pressed(); why != "" {
			return g.full(all, Disk, 0, "%s", why)
		}
	}
	return nil
}

// When a refused client should try again.
const (
	minRetry     = time.Second
	maxRetry     = time.Minute
	unknownRetry = 10 * time.Second // no deadline is known; nobody knows what clients will delete
)

// full refuses because there is no room. Room comes when the first sandbox reaches its
// deadline or, if creations under way take the room, after soon.
func (g *Gate) full(all []*record.Record, bound string, soon time.Duration, format string, args ...any) error {
	retry := unknownRetry
	first := true
	sooner := func(d time.Duration) {
		if first || d < retry {
			first, retry = false, d
		}
	}
	for _, r := range all {
		if t := g.Host.Deadline(*r); !t.IsZero() {
			sooner(time.Until(t))
		}
	}
	if soon > 0 {
		sooner(soon)
	}
	text := "no room for another sandbox: " + fmt.Sprintf(format, args...)
	return &refusal{bound, errs.Retry(errs.New(errs.Exhausted, "%s", text), min(max(retry, minRetry), maxRetry))}
}
