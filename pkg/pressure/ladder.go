package pressure

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

const (
	// every is how often the ladder looks: two calls of statfs. Something that fills a disk writes a
	// gigabyte meanwhile.
	every = 5 * time.Second
	// round is how often each effect runs while a disk stays on its rung.
	round = 15 * time.Second
	// retry is when a refused client should try again.
	retry = 10 * time.Second
)

// A Change is a space that has come to another rung.
type Change struct {
	Space    Space
	From, To Rung
	Text     string // for people, in one line
}

// A Ladder holds the rungs of all spaces. Its methods may be called concurrently.
type Ladder struct {
	Reserve int64 // bytes; 0: there is no ladder
	Spaces  func() ([]Space, error)
	// Try fails if a space takes no writes (the function Try). It is asked by each Act with now, and on
	// rung Failed by each.
	Try func(s Space) error
	// Collect removes from a space what would go anyway. It runs on each rung but Calm.
	Collect func(ctx context.Context, s Space, r Rung) error
	// Rest pauses sandboxes that nobody uses. text says why. It runs on Rest.
	Rest func(ctx context.Context, text string)
	Tell func(Change) // called for each change; must not block
	Log  *slog.Logger

	acting sync.Mutex // held while effects run

	mu     sync.Mutex
	rungs  map[string]Rung  // by Space.Name; guarded by mu
	broken map[string]error // of Try, by Space.Name; guarded by mu
	failed string           // the last error of Spaces; guarded by mu

	collected, rested map[string]time.Time // by Space.Name; guarded by acting
}

// Run looks and acts until ctx ends.
func (l *Ladder) Run(ctx context.Context) {
	if l.Reserve <= 0 {
		return
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if err := l.Act(ctx, false); err != nil && ctx.Err() == nil {
			l.Log.Error("not all was removed that would go anyway; it is tried again", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Look reads how full the spaces are, tells of changes, and returns the spaces with their rungs. If
// they cannot be read, it logs that once and the rungs stay.
func (l *Ladder) Look() ([]Space, map[string]Rung) {
	spaces, err := l.Spaces()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.rungs == nil {
		l.rungs = map[string]Rung{}
	}
	if err != nil {
		if text := err.Error(); text != l.failed {
			l.failed = text
			l.Log.Error("cannot find out how full the disks are", "err", err)
		}
		return nil, nil
	}
	l.failed = ""
	out := make(map[string]Rung, len(spaces))
	for i := range spaces {
		s := &spaces[i]
		s.Broken = l.broken[s.Name]
		from := l.rungs[s.Name]
		to := s.Rung(from, l.Reserve)
		l.rungs[s.Name], out[s.Name] = to, to
		if to != from {
			l.tell(Change{*s, from, to, s.Change(from, to, l.Reserve)})
		}
	}
	return spaces, out
}

// tell logs a change and passes it on.
func (l *Ladder) tell(c Change) {
	level := slog.LevelWarn
	switch {
	case c.To == Failed:
		level = slog.LevelError
	case c.To <= Collect && c.To < c.From:
		level = slog.LevelInfo
	}
	l.Log.Log(context.Background(), level, "disk pressure", "space", c.Space.Name, "rung", c.To.String(), "from", c.From.String(),
		"free", c.Space.FreeBytes, "size", c.Space.Bytes, "text", c.Text)
	if l.Tell != nil {
		l.Tell(c)
	}
}

// try finds out which spaces take no writes: of all, or of those that took none.
func (l *Ladder) try(spaces []Space, all bool) {
	for _, s := range spaces {
		if !all && s.Broken == nil {
			continue
		}
		err := l.Try(s)
		l.mu.Lock()
		if l.broken == nil {
			l.broken = map[string]error{}
		}
		l.broken[s.Name] = err
		l.mu.Unlock()
	}
}

// Act looks, and does what the rungs say. An effect runs once in 15 s, or with now at once.
func (l *Ladder) Act(ctx context.Context, now bool) error {
	spaces, rungs := l.Look()
	if l.Try != nil && (now || slices.ContainsFunc(spaces, func(s Space) bool { return s.Broken != nil })) {
		l.try(spaces, now)
		spaces, rungs = l.Look()
	}
	l.acting.Lock()
	defer l.acting.Unlock()
	if l.collected == nil {
		l.collected, l.rested = map[string]time.Time{}, map[string]time.Time{}
	}
	var failed []error
	for _, s := range spaces {
		r := rungs[s.Name]
		if r == Failed {
			continue
		}
		if r >= Collect && due(l.collected, s.Name, now) {
			failed = append(failed, l.Collect(ctx, s, r))
		}
		if r >= Rest && due(l.rested, s.Name, now) {
			l.Rest(ctx, s.Title+" is nearly full")
		}
	}
	return errors.Join(failed...)
}

// due reports whether a round has passed since the last time, or now is set, and notes the time.
func due(last map[string]time.Time, name string, now bool) bool {
	if at, ok := last[name]; ok && !now && time.Since(at) < round {
		return false
	}
	last[name] = time.Now()
	return true
}

// Rungs are the rungs of all spaces, by name, as of the last look.
func (l *Ladder) Rungs() map[string]Rung {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.rungs)
}

// Full says why nothing new is made in one of these spaces; empty: there is room. It looks first, so
// room that was just made counts. No name means all spaces.
func (l *Ladder) Full(names ...string) string {
	spaces, rungs := l.Look()
	for i := range spaces {
		s := &spaces[i]
		if r := rungs[s.Name]; r >= Refuse && (len(names) == 0 || slices.Contains(names, s.Name)) {
			return s.why(r, l.Reserve)
		}
	}
	return ""
}

// Room fails with errs.Exhausted, which is 503 with Retry-After, while Full has a reason. what is
// what there is no room for.
func (l *Ladder) Room(what string, names ...string) error {
	if why := l.Full(names...); why != "" {
		return errs.Retry(errs.New(errs.Exhausted, "no room for %s: %s", what, why), retry)
	}
	return nil
}
