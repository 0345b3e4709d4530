package auth

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Store keeps API keys. (pkg/store)
type Store interface {
	Keys(ctx context.Context) ([]record.Key, error)
	AddKey(ctx context.Context, k record.Key) error   // errs.Exists: there is one of the name
	RemoveKey(ctx context.Context, name string) error // errs.NotFound: there is none
}

// keyring holds the API keys. Those of the configuration are admins' and stay as long
// as the daemon runs. Those of the store are added and removed meanwhile. A look-up
// takes no lock.
type keyring struct {
	store Store
	all   atomic.Pointer[ring]

	mu    sync.Mutex // around changes, so that all follows the store
	fixed []record.Key
	timer *time.Timer // fires when a key may have expired; nil: none does
}

// A ring is the keys at one moment.
type ring struct {
	keys []*held      // the configuration's first
	open life         // of requests without a key, where none is asked for
	gone []record.Key // removed ones, the newest last
}

// maxGone is how many removed keys are known by their name.
const maxGone = 64

// held is a key, and how long its requests last.
type held struct {
	record.Key
	life
}

// Equal compares what of a key counts for a request.
func (h *held) Equal(k record.Key) bool {
	return h.Name == k.Name && h.Role == k.Role && bytes.Equal(h.Sum, k.Sum) && h.Expires.Equal(k.Expires)
}

// FixedPrefix begins the names of the configuration's keys, and of no others.
const FixedPrefix = "configuration-"

func newKeyring(fixed []string, store Store) (*keyring, error) {
	k := &keyring{store: store}
	k.all.Store(&ring{open: newLife()})
	for i, secret := range fixed {
		sum := sha256.Sum256([]byte(secret))
		k.fixed = append(k.fixed, record.Key{Name: fmt.Sprint(FixedPrefix, i+1), Role: record.Admin, Sum: sum[:]})
	}
	return k, k.read(context.Background())
}

// read takes over the keys of the store. Requests of a key that is no longer there, or not as
// it was, end.
// Preconditions: mu is held, or nobody else knows k.
func (k *keyring) read(ctx context.Context) error {
	all := slices.Clone(k.fixed)
	if k.store != nil {
		kept, err := k.store.Keys(ctx)
		if err != nil {
			return err
		}
		all = append(all, kept...)
	}
	old := k.all.Load()
	now := &ring{open: old.open, gone: slices.Clone(old.gone)}
	for _, key := range all {
		i := slices.IndexFunc(old.keys, func(h *held) bool { return h.Equal(key) })
		if i >= 0 {
			now.keys = append(now.keys, old.keys[i])
		} else {
			now.keys = append(now.keys, &held{key, newLife()})
		}
	}
	if len(old.keys) > 0 && len(all) == 0 {
		now.open = newLife()
	}
	var lost []*held
	for _, h := range old.keys {
		if !slices.Contains(now.keys, h) {
			lost = append(lost, h)
			now.gone = append(now.gone, h.Key)
		}
	}
	now.gone = now.gone[max(0, len(now.gone)-maxGone):]
	k.all.Store(now) // before the ends: a request that comes from here on finds no old key
	for _, h := range lost {
		h.end(errRemoved(h.Key))
	}
	if len(all) > 0 {
		now.open.end(errKeyNeeded())
	}
	k.expire()
	return nil
}

// recheck is how often keys that expire are looked at. The clock of the host may be set.
const recheck = time.Minute

// expire ends requests of keys that have expired, and comes back when the next one does.
// Preconditions: mu is held, or nobody else knows k.
func (k *keyring) expire() {
	if k.timer != nil {
		k.timer.Stop()
		k.timer = nil
	}
	next := time.Duration(0)
	for _, h := range k.all.Load().keys {
		switch {
		case h.Expires.IsZero():
		case expired(h.Key):
			h.end(errExpired(h.Key))
		default:
			if d := max(time.Until(h.Expires), time.Millisecond); next == 0 || d < next {
				next = d
			}
		}
	}
	if next > 0 {
		k.timer = time.AfterFunc(min(next, recheck), func() {
			k.mu.Lock()
			defer k.mu.Unlock()
			if k.timer != nil {
				k.expire()
			}
		})
	}
}

// close ends no request; no key is looked at from then on.
func (k *keyring) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.timer != nil {
		k.timer.Stop()
		k.timer = nil
	}
}

// change changes the store and takes over its keys.
func (k *keyring) change(ctx context.Context, f func(context.Context) error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	ctx = context.WithoutCancel(ctx) // half a change would leave a new key that is invalid, or a removed one that is valid
	if err := f(ctx); err != nil {
		return err
	}
	return k.read(ctx)
}

// find returns the key of a secret; it may have expired. The time it takes depends on
// no secret.
func (k *keyring) find(secret string) (*held, bool) {
	if secret == "" {
		return nil, false
	}
	sum := sha256.Sum256([]byte(secret))
	all, found := k.all.Load().keys, -1
	for i := range all {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(sum[:], all[i].Sum), i, found)
	}
	if found < 0 {
		return nil, false
	}
	return all[found], true
}

// removed returns the key that a secret was.
func (k *keyring) removed(secret string) (record.Key, bool) {
	sum := sha256.Sum256([]byte(secret))
	for _, gone := range k.all.Load().gone {
		if subtle.ConstantTimeCompare(sum[:], gone.Sum) == 1 {
			return gone, true
		}
	}
	return record.Key{}, false
}

func expired(k record.Key) bool { return !k.Expires.IsZero() && !time.Now().Before(k.Expires) }

// NewSecret draws the secret of a new key. The store keeps its SHA-256 alone.
func NewSecret() (secret string, sum []byte) {
	secret = "sbk_" + rand.Text() + rand.Text() // 260 random bits
	s := sha256.Sum256([]byte(secret))
	return secret, s[:]
}
