package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// An Operation is a finished change of one sandbox, successful or not. It is one line
// of the log.
type Operation struct {
	Name    string // one of OperationNames
	ID      string
	Runtime string        // empty: the sandbox has no readable record
	Took    time.Duration // without the wait for its turn
	Steps   []table.Step  // those that bring the sandbox up, or take it away
	Up      bool          // the steps bring it up
	Outcome string        // "ok", "aborted", or the code of pkg/errs
	Failed  string        // the step that failed; empty: none, or the operation has no steps
	Text    string        // why it failed, as far as a client may know
	Ended   record.Reason // why the sandbox ended by this operation; empty: it did not
}

// The outcomes that are not codes of pkg/errs.
const (
	outcomeOK      = "ok"
	outcomeAborted = "aborted" // no client wants it any more, or the daemon stops
)

// The operations.
const (
	opCreate        = "create"
	opStart         = "start" // start one that had ended
	opStop          = "stop"
	opPause         = "pause"
	opResume        = "resume"
	opRecycle       = "recycle"   // end one that is unhealthy, to start it anew
	opOverdrawn     = "overdrawn" // end one that holds too much of the kernel's memory
	opHibernate     = "hibernate"
	opRelieve       = "relieve" // hibernate one that is asleep, because the host needs its memory
	opIdlePause     = "idle_pause"
	opIdleStop      = "idle_stop"
	opIdleHibernate = "idle_hibernate"
	opIdleKill      = "idle_kill"
	opWake          = "wake" // resume one that is asleep
	opEnd           = "end"  // its processes ended by themselves
	opDelete        = "delete"
	opExpire        = "expire"
	opRecoverEnd    = "recover_end"   // the recovery found it dead
	opErase         = "recover_erase" // the recovery finished a deletion
	opRelease       = "recover_stray" // the recovery found things without a record
	opPrepare       = "prepare"       // make a prepared slot, or a member of a pool
	opDiscard       = "discard"       // release one that no sandbox took
)

// OperationNames lists all operations.
func OperationNames() []string {
	return []string{
		opCreate, opStart, opStop, opRecycle, opOverdrawn, opPause, opResume, opEnd, opDelete, opExpire, opRecoverEnd, opErase, opRelease,
		opPrepare, opDiscard, opIdlePause, opIdleStop, opIdleHibernate, opIdleKill, opWake, opHibernate, opRelieve,
	}
}

// FailpointNames lists every failpoint of this package, for tests that kill
// the daemon at each of them.
func FailpointNames() []string {
	names := []string{
		"store:insert", "store:trade", "store:prepare", "store:take", "store:member", "store:claim", "warm", "ready",
		"store:delete", "kill", "freeze", "thaw", "gone", "limit", "vault:drop",
		"snapshot:prepare", "snapshot:freeze", "snapshot:take", "snapshot:thaw", "snapshot:finish", "snapshot:delete", "snapshot:stray",
		"snapshot:checkpoint", "snapshot:memory", "snapshot:limit",
		"hibernate:pause", "hibernate:checkpoint", "hibernate:volumes", "hibernate:flush", "hibernate:memory", "hibernate:keep",
		"hibernate:drop", "hibernate:resume",
		"store:snapshot:creating", "store:snapshot:ready", "store:snapshot:failed", "store:snapshot:deleting", "store:snapshot:forget",
		"volume:delete", "store:volume:add", "store:volume:deleting", "store:volume:forget",
		"store:policy:put", "store:policy:delete",
	}
	for s := range next {
		if s != record.Prepared { // it is only inserted
			names = append(names, "store:put:"+string(s))
		}
	}
	for _, row := range resources(Deps{}, Config{}) {
		names = append(names, "up:"+row.Name)
		if row.Down != nil {
			names = append(names, "down:"+row.Name)
		}
		if row.Fit != nil {
			names = append(names, "prepare:"+row.Name, "fit:"+row.Name)
		}
		if row.Claim != nil && row.Wanted == nil { // no member has the other rows
			names = append(names, "member:"+row.Name, "claim:"+row.Name)
		}
	}
	for _, n := range names[:len(names):len(names)] {
		names = append(names, "after:"+n)
	}
	slices.Sort(names)
	return names
}

func outcomeOf(err error) string {
	switch {
	case err == nil:
		return outcomeOK
	case errors.Is(err, errDeleted), errors.Is(err, errClosing):
		return outcomeAborted
	}
	return string(errs.CodeOf(err))
}

// programOf is the program of an entrypoint, for the log. Its arguments may be secret.
func programOf(s *record.Spec) string {
	if len(s.Entrypoint) == 0 {
		return ""
	}
	program := s.Entrypoint[0]
	if words := strings.Fields(program); len(s.Entrypoint) == 1 && !s.Literal && len(words) > 0 {
		program = words[0] // the agent may split it
	}
	return strings.ToValidUTF8(program[:min(len(program), maxProgram)], "")
}

// maxProgram is how many bytes of the name of a program are logged.
const maxProgram = 120

// log calls OnOperation and writes the one wide line of a finished operation. The log
// handler adds what the context knows of the request.
func (l *life) log(ctx context.Context, op string, r *record.Record, start time.Time, steps []table.Step, err error) {
	o := Operation{Name: op, ID: r.ID, Runtime: r.Spec.Runtime, Took: time.Since(start), Steps: steps, Outcome: outcomeOf(err)}
	o.Up = op == opCreate || op == opStart || op == opPrepare
	if s, ok := errors.AsType[*table.StepError](err); ok && o.Outcome != outcomeAborted {
		o.Failed = s.Name
	}
	attrs := make([]slog.Attr, 0, 9+len(steps))
	attrs = append(attrs, slog.String("op", op), slog.String("sandbox", r.ID))
	switch {
	case r.State == record.Prepared:
		attrs = append(attrs, slog.String("runtime", r.Spec.Runtime))
	case r.Spec.Runtime != "":
		attrs = append(attrs, slog.String("runtime", r.Spec.Runtime), slog.String("image", r.Spec.Image.Ref()))
	}
	if op == opCreate && r.Prepared {
		attrs = append(attrs, slog.Bool("prepared", true))
	}
	if r.Pool.Name != "" {
		attrs = append(attrs, slog.String("pool", r.Pool.Name))
	}
	if r.Pool.Miss != "" {
		attrs = append(attrs, slog.String("miss", r.Pool.Miss))
	}
	if program := programOf(&r.Spec); o.Up && program != "" {
		attrs = append(attrs, slog.String("entrypoint", program))
	}
	attrs = append(attrs, slog.Duration("dur", o.Took))
	for _, s := range steps {
		name := "step_" + s.Name
		if s.Name == stepQueue { // before dur, not part of it
			name = "queued"
		}
		attrs = append(attrs, slog.Duration(name, s.Took))
	}
	if r.Reason != "" {
		attrs = append(attrs, slog.String("reason", string(r.Reason)))
	}
	attrs = append(attrs, slog.String("outcome", o.Outcome))
	level := slog.LevelInfo
	if err != nil {
		o.Text = clientText(err)
		attrs = append(attrs, slog.String("err", strings.ReplaceAll(err.Error(), "\n", "; ")))
		if o.Outcome != outcomeAborted {
			level = slog.LevelError
		}
	}
	switch op {
	case opCreate, opStart, opStop, opIdleStop, opRecycle, opOverdrawn, opEnd, opRecoverEnd:
		o.Ended = r.Reason
	}
	if l.cfg.OnOperation != nil {
		l.cfg.OnOperation(o)
	}
	l.cfg.Log.LogAttrs(ctx, level, "operation", attrs...) // last: an operation in the log has been counted
}

// count counts a result. The caller holds s.mu.
func (s *Stock) count(pool, result string, took time.Duration) {
	if s.counts[pool] == nil {
		s.counts[pool] = map[string]record.PoolWork{}
	}
	w := s.counts[pool][result]
	s.counts[pool][result] = record.PoolWork{N: w.N + 1, Took: w.Took + took}
}

// waited notes how long a creation of a pool took until its sandbox r ran. was is its record before
// that.
func waited(s *Stock, was, r *record.Record) {
	if was.State != record.Creating || was.Pool.Name == "" {
		return
	}
	result := record.PoolMiss
	switch {
	case r.Pool.Revision != "":
		result = record.PoolHit
	case was.Claims():
		result = record.PoolLost
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if w, ok := s.counts[was.Pool.Name][result]; ok {
		w.Took += max(now().Sub(r.Created), 0)
		s.counts[was.Pool.Name][result] = w
	}
}

// counted is count for a caller that does not hold s.mu.
func (s *Stock) counted(pool, result string, took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count(pool, result, took)
}

// Pools returns all pools and their state, by name.
func (s *Stock) Pools(ctx context.Context) ([]record.PoolInfo, error) {
	pools, err := s.m.life.Store.Pools(ctx)
	if err != nil {
		return nil, fmt.Errorf("list pools: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	records, err := s.m.life.Store.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list pools: %w", err)
	}
	var all []record.PoolInfo
	for _, p := range pools {
		all = append(all, record.PoolInfo{
			Pool: p, Revision: s.today[p.Name], Available: len(s.members.ready[p.Name]), Allocated: s.allocated(records, p.Name),
			Trouble: s.trouble[p.Name].text, Work: maps.Clone(s.counts[p.Name]),
		})
	}
	return all, nil
}
