package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Policies keeps named network policies, which any number of sandboxes use.
//
//	Put ─▶ a new version, durable ─▶ each follower: its record ─▶ the egress
//
// A sandbox that was given NAME follows the policy: an edit moves it. One that was given
// NAME@VERSION keeps that version. A sandbox whose policy somebody changes by hand
// (Manager.Update) no longer uses the named one. Each record has a copy of the rules, so
// what a sandbox may reach never depends on another record.
//
// What surprises: a version is durable before the first sandbox moves, and no transaction
// moves them all. If the daemon dies in between, recovery moves the others before it
// registers them. An operation that holds a sandbox delays its move, not the answer.
type Policies struct{ m *Manager }

// PoliciesOf is the part of a Manager that keeps named policies.
func PoliciesOf(m *Manager) *Policies { return &Policies{m: m} }

// moveLimit is how long the answer to an edit waits for operations that hold sandboxes.
const moveLimit = 5 * time.Second

// movers bounds how many sandboxes move at once. Each waits for a sync of the store most
// of the time, and those that wait share it.
const movers = 32

// Put makes v the newest version of a policy, which may be new, and moves the sandboxes
// that follow it. When it returns, v holds for those in Moved, and is durable for all. It
// fails with errs.WrongState if the policy is in the configuration.
func (p *Policies) Put(ctx context.Context, name string, v record.PolicyVersion) (e record.PolicyEdit, err error) {
	m := p.m
	if !m.tracker.begin() {
		return e, errClosing
	}
	defer m.tracker.end()
	ctx = context.WithoutCancel(ctx) // a client that hangs up has still asked for it
	if err := p.editable(ctx, name); err != nil {
		return e, err
	}
	v.Made = now()
	now, was, err := p.put(ctx, name, false, v)
	if err != nil {
		return e, err
	}
	e.Added = len(was.Versions) == 0
	e.Changed = e.Added || was.Newest().Number != now.Newest().Number
	err = p.move(ctx, now, &e)
	if err == nil {
		e.PolicyInfo, err = p.info(ctx, now)
	}
	if err != nil {
		return e, fmt.Errorf("move the sandboxes that follow policy %s to version %d: %w", name, now.Newest().Number, err)
	}
	m.life.cfg.Log.InfoContext(ctx, "policy put", "policy", name, "version", now.Newest().Number, "new", e.Changed,
		"moved", len(e.Moved), "pending", len(e.Pending), "failed", len(e.Failed))
	return e, nil
}

func (p *Policies) put(ctx context.Context, name string, fixed bool, v record.PolicyVersion) (now, was record.Policy, err error) {
	err = bounded(ctx, storeLimit, "store:policy:put", func(ctx context.Context) (err error) {
		now, was, err = p.m.life.Store.PutPolicy(ctx, name, fixed, v)
		return err
	})
	return now, was, err
}

// editable refuses a policy of the configuration.
func (p *Policies) editable(ctx context.Context, name string) error {
	now, ok, err := p.m.life.Store.Policy(ctx, name)
	if err == nil && ok && now.Fixed {
		return errs.Wire(errs.New(errs.WrongState, "policy %s is in the configuration of sandboxd; change it there ([policies.%s]) and "+
			"restart sandboxd, or use another name", name, name), "POLICY::FIXED")
	}
	return err
}

// A move is what became of one follower.
type move struct {
	user  record.PolicyUser
	moved bool
	err   error
}

// move moves all that follow a policy and have another version of it. Those that another
// operation holds for longer than moveLimit move in the background.
func (p *Policies) move(ctx context.Context, to record.Policy, e *record.PolicyEdit) error {
	all, err := p.m.life.Store.List(ctx)
	if err != nil {
		return err
	}
	waiting := map[string]record.PolicyUser{}
	for _, r := range all {
		if use := r.Spec.Policy; use.Uses(to.Name) && use.Follows() && use.Version != to.Newest().Number && r.State != record.Deleting {
			waiting[r.ID] = userOf(r)
		}
	}
	done, turns := make(chan move, len(waiting)), make(chan struct{}, movers)
	for _, user := range waiting {
		go func() { done <- p.moveOne(user, turns) }()
	}
	late := time.NewTimer(moveLimit)
	defer late.Stop()
	e.Reasons = map[string]error{}
	for len(waiting) > 0 {
		select {
		case one := <-done:
			delete(waiting, one.user.ID)
			switch {
			case one.err != nil:
				e.Failed, e.Reasons[one.user.ID] = append(e.Failed, one.user), one.err
			case one.moved:
				e.Moved = append(e.Moved, one.user)
			}
		case <-late.C:
			e.Pending = slices.Collect(maps.Values(waiting))
			waiting = nil
		}
	}
	for _, list := range [][]record.PolicyUser{e.Moved, e.Pending, e.Failed} {
		slices.SortFunc(list, byID)
	}
	return nil
}

// moveOne moves one follower, under its lock.
func (p *Policies) moveOne(user record.PolicyUser, turns chan struct{}) (one move) {
	m := p.m
	one.user = user
	if !m.tracker.begin() {
		one.err = errClosing
		return one
	}
	defer m.tracker.end()
	unlock, err := m.locks.Lock(m.ctx, user.ID)
	if err != nil {
		one.err = busy("move", user.ID, err)
		return one
	}
	defer unlock()
	turns <- struct{}{}
	defer func() { <-turns }()
	r, err := m.find(m.ctx, user.ID)
	if errs.Is(err, errs.NotFound) {
		return one // it was deleted meanwhile
	}
	if err == nil {
		one.moved, err = m.life.follow(m.ctx, &r, live(r.State))
	}
	if _, refused := errors.AsType[notAdmitted](err); err != nil && !refused { // follow has logged what it refused
		m.life.cfg.Log.Error("a sandbox could not be moved to another version of its policy; the sweep tries again", "sandbox", r.ID,
			"policy", user.Use.Name, "err", err)
	}
	if one.err = err; r.ID != "" {
		one.user = userOf(&r)
	}
	return one
}

// follow gives r the newest version of the policy that it follows, if it has another one.
// With enforce, the egress gets it too: it must have r already.
func (l *life) follow(ctx context.Context, r *record.Record, enforce bool) (moved bool, err error) {
	use := r.Spec.Policy
	if !use.Follows() || r.State == record.Deleting {
		return false, nil
	}
	p, ok, err := l.Store.Policy(ctx, use.Name)
	if err != nil || !ok || p.Newest().Number == use.Version { // without the policy it keeps what it has
		return false, err
	}
	start, v, next := time.Now(), p.Newest(), *r
	if err := l.admits(r, v.Network); err != nil {
		_, refused := errors.AsType[notAdmitted](err)
		if refused && l.refusals.add(r.ID, record.PolicyUse{Name: use.Name, Version: v.Number}) {
			l.cfg.Log.WarnContext(ctx, "a sandbox may not have the newest version of its policy; it keeps the one that it has",
				"sandbox", r.ID, "policy", use.Name, "has", use.Version, "newest", v.Number, "err", err)
		}
		return false, err
	}
	next.Spec.Policy.Version, next.Spec.Network, next.Spec.NetworkPolicy = v.Number, v.Network, v.NetworkPolicy
	if enforce {
		err = l.update(ctx, r, next.Spec.Terms(), false, true)
	} else if err = l.put(ctx, next); err == nil {
		*r = next
		l.bus.Publish(events.Updated, r)
	}
	l.log(ctx, "update", r, start, nil, err)
	return err == nil, err
}

// notAdmitted is the refusal of a policy that a sandbox may not have, also when it is asked again,
// as long as neither its vault nor the policy changes.
type notAdmitted struct{ error }

func (e notAdmitted) Unwrap() error { return e.error }

// refusals holds which version of its policy each sandbox was refused last, so that the sweep says
// so once. It has at most one entry for each sandbox of the store: Manager.erase forgets them.
type refusals struct {
	mu sync.Mutex
	of map[string]record.PolicyUse // by sandbox; guarded by mu
}

// add reports whether the refusal is news.
func (s *refusals) add(id string, use record.PolicyUse) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of[id] == use {
		return false
	}
	if s.of == nil {
		s.of = map[string]record.PolicyUse{}
	}
	s.of[id] = use
	return true
}

func (s *refusals) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.of, id)
}

// admits fails with notAdmitted if r may not have a policy, and with another error if that cannot
// be told now: the key of the secrets may be missing.
func (l *life) admits(r *record.Record, n record.Network) error {
	err := r.Admits(n)
	if err == nil && l.cfg.CheckPolicy != nil {
		err = l.cfg.CheckPolicy(r, n)
	}
	if why, ok := errors.AsType[*errs.Error](err); ok && (why.Code == errs.Invalid || why.Wire == record.CodeNotInspected) {
		return notAdmitted{err}
	}
	return err
}

// Use gives a sandbox that runs or is paused a policy by name, or a version of one, in the
// place of what it has. It holds at once, as after Manager.Update.
func (p *Policies) Use(ctx context.Context, idOrName string, use record.PolicyUse) (record.Record, error) {
	start := time.Now()
	return p.m.with(ctx, "update", idOrName, func(r *record.Record) error {
		if r.State != record.Running && r.State != record.Paused {
			return wrongState(r, record.Running)
		}
		i, err := p.Get(ctx, use.Name)
		if err != nil {
			return err
		}
		v, ok := i.Version(use.Version)
		if !ok {
			return noVersion(i.Policy, use.Version)
		}
		if err := p.m.life.admits(r, v.Network); err != nil {
			return err
		}
		t, was := r.Spec.Terms(), *r
		t.Network, t.NetworkPolicy, t.Policy = v.Network, v.NetworkPolicy, use
		t.Policy.Version = v.Number
		ctx := context.WithoutCancel(ctx)
		err = p.m.life.update(ctx, r, t, false, true)
		p.m.life.log(ctx, "update", r, start, nil, err)
		if err != nil {
			return err
		}
		// An edit that was durable by now may not have seen that the sandbox follows.
		if _, err := p.m.life.follow(ctx, r, true); err != nil {
			return err
		}
		if _, err := p.Get(ctx, use.Name); err != nil { // nor a deletion that it uses the policy
			return errors.Join(err, p.m.life.update(ctx, r, was.Spec.Terms(), false, true))
		}
		return nil
	})
}

func noVersion(p record.Policy, number int) error {
	return errs.Wire(errs.New(errs.NotFound, "policy %s has no version %d; the versions %d to %d are kept", p.Name, number,
		p.Versions[0].Number, p.Newest().Number), "POLICY::NOT_FOUND")
}

// catchUp is follow for recovery: the edit may have been cut short. A sandbox that the egress
// does not have yet is registered afterwards (adopt). One that may not have the newest version
// keeps the one it has, and that is no error: follow has logged it.
func (m recovery) catchUp(ctx context.Context, r *record.Record) error {
	_, err := m.life.follow(ctx, r, live(r.State) && m.tracker.get(r.ID) != nil && !m.tracker.unregistered(r.ID))
	if _, ok := errors.AsType[notAdmitted](err); ok {
		return nil
	}
	if err != nil {
		return fmt.Errorf("move it to the newest version of policy %s: %w", r.Spec.Policy.Name, err)
	}
	return nil
}

// configure makes the policies of the configuration those of the store. One that left the
// configuration is deleted or, while sandboxes use it, kept as a policy like others.
func (p *Policies) configure(ctx context.Context) error {
	stored, _, err := p.m.life.Store.Policies(ctx)
	if err != nil {
		return fmt.Errorf("list policies: %w", err)
	}
	wanted, log := p.m.life.cfg.Policies, p.m.life.cfg.Log
	var failed []error
	// Removals first: what the others take may not fit before.
	for _, o := range stored {
		if _, ok := wanted[o.Name]; ok || !o.Fixed {
			continue
		}
		err := p.remove(ctx, o.Name)
		if errs.Is(err, errs.WrongState) {
			log.WarnContext(ctx, "a policy left the configuration and is in use; it stays, and can be edited by the API", "policy", o.Name,
				"reason", err)
			_, _, err = p.put(ctx, o.Name, false, o.Newest())
		}
		if err != nil && !errs.Is(err, errs.NotFound) {
			failed = append(failed, fmt.Errorf("policy %s left the configuration: %w", o.Name, err))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		v := record.PolicyVersion{Made: now(), Network: wanted[name]}
		at := slices.IndexFunc(stored, func(o record.Policy) bool { return o.Name == name })
		if at >= 0 && stored[at].Fixed && stored[at].Newest().Same(v) {
			continue
		}
		to, _, err := p.put(ctx, name, true, v)
		if err != nil {
			failed = append(failed, fmt.Errorf("take policy %s from the configuration: %w", name, err))
			continue
		}
		log.InfoContext(ctx, "policy taken from the configuration", "policy", name, "version", to.Newest().Number)
	}
	return errors.Join(failed...)
}

// Delete removes a policy and its versions. While a sandbox uses it, in whatever state, it
// fails with errs.WrongState, and so it does if the policy is in the configuration.
func (p *Policies) Delete(ctx context.Context, name string) error {
	if !p.m.tracker.begin() {
		return errClosing
	}
	defer p.m.tracker.end()
	if err := p.editable(ctx, name); err != nil {
		return err
	}
	if err := p.remove(ctx, name); err != nil {
		return err
	}
	p.m.life.cfg.Log.InfoContext(ctx, "policy deleted", "policy", name)
	return nil
}

func (p *Policies) remove(ctx context.Context, name string) error {
	return bounded(ctx, storeLimit, "store:policy:delete", func(ctx context.Context) error {
		return p.m.life.Store.DeletePolicy(ctx, name)
	})
}

// List returns all policies by name.
func (p *Policies) List(ctx context.Context) ([]record.PolicyInfo, error) {
	all, _, err := p.m.life.Store.Policies(ctx)
	if err != nil {
		return nil, fmt.Errorf("list policies: %w", err)
	}
	boxes, err := p.m.life.Store.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list policies: %w", err)
	}
	out := make([]record.PolicyInfo, 0, len(all))
	for _, o := range all {
		out = append(out, record.PolicyInfo{Policy: o, UsedBy: usersOf(boxes, o.Name)})
	}
	return out, nil
}

// Get returns a policy by its name.
func (p *Policies) Get(ctx context.Context, name string) (i record.PolicyInfo, err error) {
	o, ok, err := p.m.life.Store.Policy(ctx, name)
	if err != nil {
		return i, fmt.Errorf("get policy %s: %w", name, err)
	}
	if ok {
		return p.info(ctx, o)
	}
	if _, bad, err := p.m.life.Store.Policies(ctx); err == nil && slices.Contains(bad, name) {
		return i, errs.New(errs.Internal, "the record of policy %s cannot be read; the sandboxes that use it keep what they have; set "+
			"it again (`sandboxctl policy set %s`)", name, name)
	}
	return i, errs.Wire(errs.New(errs.NotFound, "no policy %q; `sandboxctl policy ls` lists the policies of this host", name),
		"POLICY::NOT_FOUND")
}

func (p *Policies) info(ctx context.Context, o record.Policy) (i record.PolicyInfo, err error) {
	boxes, err := p.m.life.Store.List(ctx)
	return record.PolicyInfo{Policy: o, UsedBy: usersOf(boxes, o.Name)}, err
}

func usersOf(boxes []*record.Record, name string) (users []record.PolicyUser) {
	for _, r := range boxes {
		if r.State != record.Deleting && r.Spec.Policy.Uses(name) {
			users = append(users, userOf(r))
		}
	}
	slices.SortFunc(users, byID)
	return users
}

func userOf(r *record.Record) record.PolicyUser {
	return record.PolicyUser{ID: r.ID, Name: r.Spec.Name, Use: r.Spec.Policy}
}

func byID(a, b record.PolicyUser) int { return strings.Compare(a.ID, b.ID) }
