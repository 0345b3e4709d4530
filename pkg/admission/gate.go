// Package admission says whether a sandbox may be created, and when it is
// brought up.
//
//	create ─▶ Gate: draining? too many? too little memory, disk? ─yes─▶ 503, Retry-After
//	            │ no, and the intent becomes durable
//	            ▼
//	          Queue: so many at once, the others are Pending, clients in turn
//	            │ its turn
//	            ▼
//	          the Manager brings it up
//
// What surprises: memory may be promised several times over. The gate looks at
// what the host has now, not at the sum of limits: most sandboxes use a small
// part of theirs. What it does count is what those take that are on their way
// and not yet seen in that number.
package admission

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// The bounds, as they are called where refusals are counted.
const (
	Draining     = "draining"
	MaxSandboxes = "max_sandboxes"
	Memory       = "memory"
	Disk         = "disk"
)

// BoundNames lists the bounds.
func BoundNames() []string { return []string{Draining, MaxSandboxes, Memory, Disk} }

// Space is a place for files.
type Space struct {
	Name      string // for people: "the storage pool"
	FreeBytes int64
	Remedy    string // what makes room there
}

// Host is what the gate looks at.
type Host struct {
	// Sandboxes lists all, ended ones too.
	Sandboxes func(context.Context) ([]*record.Record, error)
	// Deadline is when a sandbox goes by itself; zero is never.
	Deadline func(record.Record) time.Time
	// MemoryBytes is what can be had without swapping. (proc(5), MemAvailable)
	MemoryBytes func() (int64, error)
	Spaces      func() ([]Space, error)
	// StartBytes is the memory that a sandbox of a runtime takes to come up.
	StartBytes func(runtime string) int64
}

// Limits are what the host's owner wants kept.
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
	Refused func(bound string) // hears of each refusal; may be nil

	mu       sync.Mutex
	entering int   // let in, and not in the list yet or just there; guarded by mu
	promised int64 // bytes of memory they take
}

// Enter admits one sandbox that is to be brought up on runtime. It refuses with
// errs.Exhausted, or with errs.Unavailable while the host drains, and says how soon to
// ask again. more is 1 for a new sandbox and 0 for one that starts again, which is in
// the list already. leave is to be called when the list shows that it is coming up, or
// when it will not.
func (g *Gate) Enter(ctx context.Context, runtime string, more int) (leave func(), err error) {
	if since := g.Drain.Since(); !since.IsZero() {
		return nil, g.refuse(Draining, errs.Retry(errs.Wire(errs.New(errs.Unavailable,
			"nothing is created or started here: the host is draining since %s; what runs goes on, and `sandboxctl system drain --off` "+
				"ends it", since.Format(time.RFC3339)),
			"SANDBOX::DRAINING"), maxRetry))
	}
	needs := g.Host.StartBytes(runtime)
	g.mu.Lock()
	defer g.mu.Unlock()
	all, err := g.Host.Sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	if more > 0 && len(all)+g.entering+more > g.Limits.MaxSandboxes {
		return nil, g.full(all, MaxSandboxes, 0, "this host has its %d sandboxes (limits.max_sandboxes); delete some, ended ones with "+
			"`sandboxctl rm` too", g.Limits.MaxSandboxes)
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

// memory refuses what would go at the reserve. Preconditions: g.mu is held.
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
			promised += g.Host.StartBytes(all[i].Spec.Runtime)
			n++
		}
	}
	if free-promised-needs >= g.Limits.MemoryReserve {
		return nil
	}
	return g.full(all, Memory, g.Queue.clears(),
		"the host has %s of memory left, of which %d creations under way take %s and this one %s, and it keeps %s back "+
			"(limits.memory_reserve); delete sandboxes or wait for some to end",
		record.Mebibytes(free), n, record.Mebibytes(promised), record.Mebibytes(needs), record.Mebibytes(g.Limits.MemoryReserve))
}

func (g *Gate) disk(all []*record.Record) error {
	if g.Limits.DiskReserve == 0 {
		return nil
	}
	spaces, err := g.Host.Spaces()
	if err != nil {
		return err
	}
	for _, s := range spaces {
		if s.FreeBytes < g.Limits.DiskReserve {
			return g.full(all, Disk, 0, "%s has %s free, and it keeps %s back (storage.reserve); %s",
				s.Name, record.Mebibytes(s.FreeBytes), record.Mebibytes(g.Limits.DiskReserve), s.Remedy)
		}
	}
	return nil
}

// How soon to ask again.
const (
	minRetry     = time.Second
	maxRetry     = time.Minute
	unknownRetry = 10 * time.Second // nothing is known to go; what clients delete is not known
)

// full refuses for want of room. Room comes with the first sandbox to go by
// itself or, where creations under way are what takes it, after soon.
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
	return g.refuse(bound, errs.Retry(errs.New(errs.Exhausted, "%s", text), min(max(retry, minRetry), maxRetry)))
}

func (g *Gate) refuse(bound string, err error) error {
	if g.Refused != nil {
		g.Refused(bound)
	}
	return err
}
