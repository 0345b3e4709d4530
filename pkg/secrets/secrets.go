// Package secrets keeps the vault and the certificate authority of each sandbox whose hosts may
// be inspected, sealed in the store, and gives egress what it needs of them.
//
//	POST, PATCH, DELETE ──▶ check ──▶ seal ──▶ store (durable) ──▶ Config.Apply ──▶ the answer
//	                                             │                     │
//	row egress, also after a kill ── Inspection ◀┘ ◀───────────────────┘
//	row bundle, at a start        ── Authority: made, or renewed, and durable before it is used
//	row vault, of a copy          ── Copy: the vault of its source, sealed anew, durable
//
// A change is durable before it is applied. If the daemon is killed in between, the next one
// registers its sandboxes with what is durable. If Apply fails, the change stays too, and the
// error says that the vault of before is still in force; Reapply tries again.
//
// Nothing is kept in memory but values of files and commands (values.go): a vault is unsealed and
// checked each time it is asked for, which takes tens of milliseconds for the largest there may
// be (BenchmarkOverlap of pkg/egress/vault). What registered sandboxes need stays with egress.
//
// What surprises: a lost key fails the calls that need it, and only these. A vault can still be
// deleted, and a sandbox without a vault can be registered.
package secrets

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/keylock"
	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// ErrOff is the cause of the error of a change for a sandbox that was made without inspection
// (record.Spec.Inspect): OpenSandbox's status for it is 412.
var ErrOff = errors.New("the sandbox was made without inspection")

// Store keeps sealed secrets. (pkg/store)
type Store interface {
	// PutSecret writes v in the place of was: errs.WrongState if it is another by now.
	PutSecret(ctx context.Context, v, was record.Secret) error
	// Secret fails with errs.Internal if there is one that cannot be read.
	Secret(ctx context.Context, id string, kind record.SecretKind) (record.Secret, bool, error)
	// DeleteSecret fails with errs.NotFound if there is none.
	DeleteSecret(ctx context.Context, id string, kind record.SecretKind) error
	Secrets(ctx context.Context) (all []record.Secret, unreadable []string, err error)
}

// Config is what a Keeper needs. Store, Apply and Try are required.
type Config struct {
	Store Store
	// Key seals. nil: there is none, for the reason KeyErr.
	Key    *sealed.Key
	KeyErr error
	// Host are the rules that stand before those of each sandbox.
	Host policy.Host
	// Apply registers a sandbox with egress again, by what Inspection then returns; if it does
	// not run, Apply does nothing. It is called after each change, when that is durable, one call
	// at a time for a sandbox. A client that hangs up does not end its ctx.
	Apply func(ctx context.Context, id string) error
	// Try registers a sandbox again as Apply does, unless another operation holds it: done is
	// false then. nil: Apply.
	Try func(ctx context.Context, id string) (done bool, err error)
	// Mask: values in answers are replaced, see inject.Options.
	Mask   bool
	Logger *slog.Logger     // nil: discard
	Now    func() time.Time // nil: time.Now
}

// A Keeper keeps the secrets of sandboxes. Its methods may be called concurrently. Changes of
// one sandbox wait for one another.
type Keeper struct {
	c   Config
	log *slog.Logger
	now func() time.Time

	changing keylock.Set // by the name of a secret
	runs     keylock.Set // by sandbox and credential; see values.go
	// How long a command may run, and how long its output may stay open when it has ended.
	limit, grace time.Duration

	mu sync.Mutex
	// pending are the sandboxes for which Apply has failed and not succeeded since, each with the
	// error of it that Reapply returned last; guarded by mu.
	pending map[string]string
}

// New makes a Keeper.
func New(c Config) *Keeper {
	k := &Keeper{c: c, log: c.Logger, now: c.Now, limit: commandTime, grace: commandGrace, pending: map[string]string{}}
	if k.log == nil {
		k.log = slog.New(slog.DiscardHandler)
	}
	if k.now == nil {
		k.now = time.Now
	}
	if c.Try == nil {
		k.c.Try = func(ctx context.Context, id string) (bool, error) { return true, c.Apply(ctx, id) }
	}
	return k
}

// Kept is the failpoint between durable and applied.
const Kept = "secrets:kept"

// apply has egress take what is durable. kept says what that is.
func (k *Keeper) apply(ctx context.Context, id, kept string) error {
	err := failpoint.Pass(Kept)
	if err == nil {
		err = k.c.Apply(ctx, id)
	}
	if err != nil {
		k.setPending(id, "")
		return errs.Wrap(err, errs.CodeOf(err), "%s, but the sandbox still uses what was before: sandboxd could not apply it, and tries "+
			"again; stop the sandbox if that must not wait", kept)
	}
	k.applied(id)
	return nil
}

func (k *Keeper) setPending(id, told string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pending[id] = told
}

func (k *Keeper) applied(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.pending, id)
}

func (k *Keeper) isPending(id string) (told string, pending bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	told, pending = k.pending[id]
	return told, pending
}

// Reapply tries again what Config.Apply has failed to do, by Config.Try. It is for the sweep, so it
// waits for no other change and no other operation: what it leaves out now, it tries the next
// time. Of a sandbox it returns an error once, until that changes.
func (k *Keeper) Reapply(ctx context.Context) error {
	k.mu.Lock()
	ids := slices.Sorted(maps.Keys(k.pending))
	k.mu.Unlock()
	var all []error
	for _, id := range ids {
		if err := k.reapply(ctx, id); err != nil {
			all = append(all, fmt.Errorf("apply the credential vault of sandbox %s again: %w", id, err))
		}
	}
	return errors.Join(all...)
}

func (k *Keeper) reapply(ctx context.Context, id string) error {
	unlock, ok := k.changing.TryLock(record.Secret{Sandbox: id, Kind: record.Vault}.Name())
	if !ok {
		return nil // a change, which applies what it makes durable
	}
	defer unlock()
	told, pending := k.isPending(id)
	if !pending {
		return nil
	}
	done, err := k.c.Try(ctx, id)
	switch {
	case err == nil && !done:
		return nil
	case err == nil || errs.Is(err, errs.NotFound): // the sandbox is gone
		k.applied(id)
		return nil
	case err.Error() == told:
		return nil
	}
	k.setPending(id, err.Error())
	return err
}

// unseal opens a secret. Its errors are errs.Unavailable if it may open later, with another key
// or another sandboxd, and errs.Internal if it never will.
func (k *Keeper) unseal(s record.Secret) ([]byte, error) {
	if k.c.Key == nil {
		return nil, k.noKey()
	}
	text, err := k.c.Key.Unseal(s.Name(), s.Sealed)
	switch {
	case err == nil:
		return text, nil
	case errors.Is(err, sealed.ErrOtherKey):
		return nil, errs.Wrap(err, errs.Unavailable, "the %s of sandbox %s cannot be opened: the key that sealed it is missing; %s", s.Kind,
			s.Sandbox, k.c.Key.Bring())
	case errors.Is(err, sealed.ErrNewer):
		return nil, errs.Wrap(err, errs.Unavailable, "the %s of sandbox %s cannot be opened: a newer sandboxd sealed it; start that one",
			s.Kind, s.Sandbox)
	case s.Kind == record.Authority:
		return nil, errs.Wrap(err, errs.Internal, "the %s of sandbox %s is damaged; restart the sandbox, which gives it a new one", s.Kind,
			s.Sandbox)
	}
	return nil, errs.Wrap(err, errs.Internal, "the %s of sandbox %s is damaged; delete it, and set it again", s.Kind, s.Sandbox)
}

// noKey is the error of what needs a key. A key file that is there and is refused, such as one that others can read,
// needs another remedy than a key that is missing.
func (k *Keeper) noKey() error {
	if !errors.Is(k.c.KeyErr, fs.ErrNotExist) {
		return errs.Wrap(k.c.KeyErr, errs.Unavailable, "sandboxd refuses the key file of this host, so it has no key for the secrets of "+
			"sandboxes: \"sandboxd doctor\" on the host says what is wrong with the file; correct that, and start sandboxd again")
	}
	return errs.Wrap(k.c.KeyErr, errs.Unavailable, "sandboxd has no key for the secrets of sandboxes: %s", k.c.Key.Bring())
}

// lock waits for other changes of a secret.
func (k *Keeper) lock(ctx context.Context, id string, kind record.SecretKind) (unlock func(), err error) {
	unlock, err = k.changing.Lock(ctx, record.Secret{Sandbox: id, Kind: kind}.Name())
	if err != nil {
		return nil, fmt.Errorf("wait for another change of the %s of sandbox %s: %w", kind, id, err)
	}
	return unlock, nil
}

// Keys names the keys that there are (sealed.Key.IDs). It is empty, and not nil, without any.
func (k *Keeper) Keys() []string {
	if k.c.Key == nil {
		return []string{}
	}
	return k.c.Key.IDs()
}
