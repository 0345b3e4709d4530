// Package fork makes copies of a sandbox, with what it has in memory or with its files alone.
//
//	Begin ─▶ a temporary snapshot ─▶ the copies, each created from it ─▶ the snapshot is deleted
//
// It calls the Manager and its snapshots like any other caller and stores nothing itself: each
// copy is a sandbox, whose record says of which fork it is. If the daemon dies in between, the
// next one deletes the snapshot and ends what was being created, as it always does; the copies
// that run stay.
package fork

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/internal/keylock"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Sandboxes is what a fork needs of the sandboxes of the host, behind its limits.
type Sandboxes interface {
	Create(ctx context.Context, s record.Spec) (record.Record, error)
	Await(ctx context.Context, idOrName string) (record.Record, error)
	List(ctx context.Context) ([]*record.Record, error)
}

// Snapshots is what a fork needs of sandbox.Snapshots.
type Snapshots interface {
	Create(ctx context.Context, sandbox string, q record.SnapshotRequest) (record.Snapshot, error)
	Await(ctx context.Context, id string) (record.Snapshot, error)
	Delete(ctx context.Context, id string) error
}

// Config says what Forks work with.
type Config struct {
	Instance  instance.Instance
	Sandboxes Sandboxes
	Snapshots Snapshots
	// Fits fails unless the host has room for so many more sandboxes on a runtime, each with so
	// many bytes of memory. May be nil.
	Fits func(ctx context.Context, runtime string, bytes int64, count int) error
	// Vault reports whether a sandbox has a credential vault, which its copies get. It fails if they
	// may not have it: with errs.Invalid if their policy denies a host that is bound there. May be
	// nil.
	Vault func(ctx context.Context, source *record.Record, copies *record.Spec) (bool, error)
	// MemoryHeld is the memory in use by a sandbox, in bytes. May be nil.
	MemoryHeld func(id string) (int64, error)
	// AtOnce is how many copies of one fork come up at once; 0 is all. The others have no record yet.
	AtOnce int
	// Await waits until the host has CPU for one more copy. If that takes too long, the host is still busy: the
	// next copy is then begun when no other one of its fork comes up. May be nil.
	Await func(context.Context) (busy bool, err error)
	Log   *slog.Logger
}

// Forks are the forks of this daemon.
type Forks struct {
	c     Config
	ctx   context.Context
	going sync.WaitGroup
	keys  keylock.Set // one for each key of a request that begins a fork

	mu    sync.Mutex
	known map[string]*State // guarded by mu, as what the pointers lead to
	order []string          // IDs in known, the oldest first
	byKey map[string]string // IDs by the key of the request
}

// keptForks is how many forks are remembered whose copies are gone, or never came to be.
const keptForks = 1000

// Max is how many copies one fork makes at most.
const Max = 256

// A Request says what to copy, and into what.
type Request struct {
	Source record.Record
	Memory bool
	// Copies are the specifications of the copies, which lack only what the snapshot gives them.
	Copies []record.Spec
	Once   record.Request
	// Held says that clients hold the fork (Hold): when the last of them has left, no further copy is begun.
	Held bool

	vault bool // the source has a credential vault
}

// State is what is known of a fork.
type State struct {
	ID      string
	Source  string // ID of the sandbox; it may be gone
	Memory  bool
	Count   int // how many copies were asked for
	Phase   Phase
	Message string // why it failed, for people
	Copies  []Copy
	Created time.Time
	Once    record.Request // of the request that began it, if this daemon did

	done chan struct{} // closed when it is no longer Creating; nil: it is of an earlier daemon
	// alone ends the begin of copies, with errAlone; nil unless clients hold the fork.
	alone   context.CancelCauseFunc
	holders int // clients that hold it
	held    int // how often a client began to hold it
}

// grace is how long a fork goes on that its last holder has left, if the request has a key: a client whose
// connection was cut repeats the request, and holds the fork again.
const grace = 20 * time.Second

// errAlone is why copies were not begun that no client waits for any more.
var errAlone = errs.New(errs.Unavailable, "the client that asked for it left, so it and the copies after it were not begun; those before "+
	"it stay until their timeout")

// Phase is how far a fork is.
type Phase string

// The phases of a fork.
const (
	Creating Phase = "Creating" // copies are being made
	Ready    Phase = "Ready"    // all copies came up; of a fork of an earlier daemon, those that are left
	Failed   Phase = "Failed"   // not all did; see Message
)

// A Copy is one sandbox of a fork.
type Copy struct {
	ID, Name string
	Now      *record.Record // shared, to be read only; nil: it is gone
}

// New makes Forks that work until ctx ends.
func New(ctx context.Context, c Config) *Forks {
	return &Forks{c: c, ctx: ctx, known: map[string]*State{}, byKey: map[string]string{}}
}

// Close waits for what goes on when the context of New has ended.
func (f *Forks) Close() { f.going.Wait() }

// Begin begins a fork and returns when its snapshot is being taken; the rest happens in the
// background, even if ctx ends. It fails with errs.Exhausted if the host has no room for all
// copies, with record.CodeRequestRace if another request with the same key has begun one, and
// as Config.Vault and Snapshots.Create do.
func (f *Forks) Begin(ctx context.Context, q Request) (s State, err error) {
	if key := q.Once.Key; key != "" {
		unlock, err := f.keys.Lock(ctx, key)
		if err != nil {
			return State{}, err
		}
		defer unlock()
		if other, begun := f.begunBy(key); begun {
			return State{}, errs.Wire(errs.New(errs.Exists, "another request with this key has begun fork %s", other),
				record.CodeRequestRace)
		}
	}
	if f.c.Vault != nil {
		if q.vault, err = f.c.Vault(ctx, &q.Source, &q.Copies[0]); err != nil { // the others differ by their names
			return State{}, err
		}
	}
	if err := f.room(ctx, q); err != nil {
		return State{}, err
	}
	snap, err := f.c.Snapshots.Create(ctx, q.Source.ID, record.SnapshotRequest{Temporary: true, Memory: q.Memory})
	if err != nil {
		return State{}, err
	}
	s = State{
		ID: record.NewForkID(f.c.Instance), Source: q.Source.ID, Memory: q.Memory, Count: len(q.Copies), Phase: Creating,
		Created: time.Now().Round(0).UTC(), Once: q.Once, done: make(chan struct{}),
	}
	begin, alone := context.WithCancelCause(context.WithoutCancel(ctx))
	if q.Held {
		s.alone = alone
	}
	f.remember(&s)
	f.going.Go(func() {
		defer close(s.done)
		defer alone(nil)
		f.work(context.WithoutCancel(ctx), begin, s.ID, snap.ID, q)
	})
	return s, nil
}

// room refuses a fork that the host cannot hold. A copy of the memory shares nothing with it.
func (f *Forks) room(ctx context.Context, q Request) error {
	if f.c.Fits == nil {
		return nil
	}
	var held int64
	if q.Memory && f.c.MemoryHeld != nil {
		var err error
		if held, err = f.c.MemoryHeld(q.Source.ID); err != nil {
			return err
		}
	}
	return f.c.Fits(ctx, q.Source.Spec.Runtime, held, len(q.Copies))
}

func (f *Forks) begunBy(key string) (id string, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	id, ok = f.byKey[key]
	return id, ok
}

func (f *Forks) remember(s *State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	kept := *s
	f.known[s.ID] = &kept
	f.order = append(f.order, s.ID)
	if key := s.Once.Key; key != "" {
		f.byKey[key] = s.ID
	}
	for len(f.order) > keptForks {
		old := f.order[0]
		f.order = f.order[1:]
		delete(f.byKey, f.known[old].Once.Key)
		delete(f.known, old)
	}
}

// update changes what is known of a fork.
func (f *Forks) update(id string, change func(*State)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.known[id]; s != nil {
		change(s)
	}
}

// work makes the copies of a fork, and then deletes its snapshot. When begin ends, it begins no further copy.
func (f *Forks) work(asker, begin context.Context, id, snap string, q Request) {
	start := time.Now()
	ctx, cancel := context.WithCancelCause(asker)
	defer cancel(nil)
	defer context.AfterFunc(f.ctx, func() { cancel(context.Cause(f.ctx)) })()
	begin, stop := context.WithCancelCause(begin)
	defer stop(nil)
	defer context.AfterFunc(ctx, func() { stop(context.Cause(ctx)) })()
	err := f.copy(ctx, begin, id, snap, q)
	var left error                 // if it fails, the copies are nevertheless what was asked for
	if context.Cause(ctx) == nil { // else the next daemon does
		left = f.c.Snapshots.Delete(ctx, snap)
	}
	f.update(id, func(s *State) {
		s.Phase = Ready
		if err != nil {
			s.Phase, s.Message = Failed, text(err)
		}
	})
	f.c.Log.InfoContext(asker, "fork", "fork", id, "sandbox", q.Source.ID, "count", len(q.Copies), "memory", q.Memory,
		"dur", time.Since(start), "err", errors.Join(err, left))
}

// text is why a fork failed, as far as a client may know.
func text(err error) string {
	if e, ok := errors.AsType[*errs.Error](err); ok {
		return e.Text
	}
	return "the daemon's log says why"
}

// copy makes the copies of a fork, a few at once. After an error it goes on with the others. When begin ends, it
// begins no further one; those that have a record come up.
func (f *Forks) copy(ctx, begin context.Context, id, snap string, q Request) error {
	s, err := f.c.Snapshots.Await(ctx, snap)
	if err != nil {
		return err
	}
	if s.State != record.SnapshotReady {
		return errs.New(errs.Internal, "sandbox %s could not be copied: %s", q.Source.ID, s.Message)
	}
	var wg sync.WaitGroup
	failed := make([]error, len(q.Copies)) // nil: it came up
	once := q.Once
	turns := make(chan struct{}, cmp.Or(f.c.AtOnce, len(q.Copies)))
	for i, spec := range q.Copies {
		if err := f.turn(begin, turns); err != nil {
			for ; i < len(failed); i++ {
				failed[i] = err
			}
			break
		}
		spec.Snapshot, spec.Memory, spec.Image = snap, q.Memory, s.Image
		spec.Fork = record.Fork{ID: id, Source: q.Source.ID, Count: len(q.Copies), Index: i + 1, Vault: q.vault}
		spec.Request = once // whoever repeats it finds the fork by its first copy
		r, err := f.c.Sandboxes.Create(ctx, spec)
		if err != nil {
			failed[i] = err
			<-turns
			continue
		}
		once = record.Request{}
		f.update(id, func(s *State) { s.Copies = append(s.Copies, Copy{ID: r.ID, Name: r.Spec.Name}) })
		wg.Go(func() {
			defer func() { <-turns }()
			now, err := f.c.Sandboxes.Await(ctx, r.ID)
			if err == nil && now.State == record.Ended && now.NeverRan() {
				err = errs.New(errs.Internal, "%s", now.Message)
			}
			failed[i] = err
		})
	}
	wg.Wait()
	return incomplete(failed)
}

// turn waits until the next copy may be begun, and takes one of turns for it.
func (f *Forks) turn(ctx context.Context, turns chan struct{}) error {
	select {
	case turns <- struct{}{}:
	case <-ctx.Done():
	}
	if err := context.Cause(ctx); err != nil || f.c.Await == nil {
		return err
	}
	busy, err := f.c.Await(ctx)
	if err == nil && busy {
		err = last(ctx, turns)
	}
	return err
}

// last waits until only one of turns is taken: it takes the others, and gives them back.
func last(ctx context.Context, turns chan struct{}) error {
	for range cap(turns) - 1 {
		select {
		case turns <- struct{}{}:
			defer func() { <-turns }()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// incomplete is the error of a fork some of whose copies failed. Its text is about the first one.
func incomplete(failed []error) error {
	n, first := 0, ""
	for i, err := range failed {
		if err == nil {
			continue
		}
		if n++; n == 1 {
			first = fmt.Sprintf("copy %d: %s", i+1, text(err))
		}
	}
	if n == 0 {
		return nil
	}
	return errs.Wrap(errors.Join(failed...), errs.Internal, "%d of %s could not be made; %s", n,
		errs.Count(len(failed), "copy", "copies"), first)
}

// ByKey finds the fork that a request with an idempotency key has begun, if this daemon did.
func (f *Forks) ByKey(ctx context.Context, key string) (State, bool, error) {
	id, ok := f.begunBy(key)
	if !ok {
		return State{}, false, nil
	}
	s, err := f.Get(ctx, id)
	return s, err == nil, err
}

// Get returns a fork. One of an earlier daemon is known by its copies, as long as there are any.
func (f *Forks) Get(ctx context.Context, id string) (State, error) {
	all, err := f.c.Sandboxes.List(ctx)
	if err != nil {
		return State{}, fmt.Errorf("find the copies of fork %s: %w", id, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	known := f.known[id]
	s := State{ID: id, Phase: Ready}
	if known != nil {
		s = *known
		s.Copies = slices.Clone(known.Copies)
	}
	for _, r := range slices.Backward(all) { // the oldest first
		if r.Spec.Fork.ID == id {
			s.add(r)
		}
	}
	if s.Source == "" {
		return s, errs.Wire(errs.New(errs.NotFound, "no fork %.40q; this daemon has begun none with this id, and no sandbox is a "+
			"copy of it", id), "FORK::NOT_FOUND")
	}
	switch {
	case known == nil:
		s.restarted()
	case s.Phase == Creating:
		s.Message = s.progress()
	}
	return s, nil
}

// progress says how far a fork is whose copies are being made.
func (s *State) progress() string {
	up := 0
	for _, c := range s.Copies {
		if c.Now == nil || !c.Now.State.Beginning() {
			up++
		}
	}
	return fmt.Sprintf("%d of %s made, %d under way", up, errs.Count(s.Count, "copy is", "copies are"), len(s.Copies)-up)
}

// restarted says of a fork of an earlier daemon what its copies show of it.
func (s *State) restarted() {
	if n := len(s.Copies); n < s.Count { // the others have been deleted, or were not made: nobody knows
		s.Message = fmt.Sprintf("%d of %d copies are left; sandboxd has been restarted since", n, s.Count)
	}
	for _, c := range s.Copies {
		if c.Now.State == record.Ended && c.Now.NeverRan() {
			s.Phase, s.Message = Failed, fmt.Sprintf("copy %d could not be made; %s", c.Now.Spec.Fork.Index, c.Now.Message)
			return
		}
	}
}

// Await is Get once the fork is no longer Creating. When ctx ends first, it is Get.
func (f *Forks) Await(ctx context.Context, id string) (State, error) {
	f.mu.Lock()
	known := f.known[id]
	f.mu.Unlock()
	if known != nil {
		select {
		case <-known.done:
		case <-ctx.Done():
		}
	}
	return f.Get(context.WithoutCancel(ctx), id)
}

// Hold is Await for a client that the fork is made for. If ctx ends and no other client holds the fork, no
// further copy is begun. A fork whose request has a key goes on for a grace first, in which a repeat may hold it.
func (f *Forks) Hold(ctx context.Context, id string) (State, error) {
	f.update(id, func(s *State) { s.holders++; s.held++ })
	defer f.update(id, func(s *State) {
		if s.holders--; s.holders > 0 || s.alone == nil || ctx.Err() == nil {
			return
		}
		if s.Once.Key == "" {
			s.alone(errAlone)
			return
		}
		left := s.held
		time.AfterFunc(grace, func() { f.leave(id, left) })
	})
	return f.Await(ctx, id)
}

// leave ends the begin of copies if no client has held the fork since its grace began.
func (f *Forks) leave(id string, held int) {
	f.update(id, func(s *State) {
		if s.held == held {
			s.alone(errAlone)
		}
	})
}

// add adds a copy that the host has.
func (s *State) add(r *record.Record) {
	if s.Source == "" { // of a fork of an earlier daemon
		of := r.Spec.Fork
		s.Source, s.Memory, s.Count, s.Created = of.Source, r.Spec.Memory, of.Count, r.Created
	}
	c := Copy{r.ID, r.Spec.Name, r}
	if i := slices.IndexFunc(s.Copies, func(c Copy) bool { return c.ID == r.ID }); i >= 0 {
		s.Copies[i] = c
	} else {
		s.Copies = append(s.Copies, c)
	}
}
