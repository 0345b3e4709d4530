package auth

import (
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
	all   atomic.Pointer[[]record.Key] // the configuration's first

	mu    sync.Mutex // around changes, so that all follows the store
	fixed []record.Key
}

// FixedPrefix begins the names of the configuration's keys, and of no others.
const FixedPrefix = "configuration-"

func newKeyring(fixed []string, store Store) (*keyring, error) {
	k := &keyring{store: store}
	for i, secret := range fixed {
		sum := sha256.Sum256([]byte(secret))
		k.fixed = append(k.fixed, record.Key{Name: fmt.Sprint(FixedPrefix, i+1), Role: record.Admin, Sum: sum[:]})
	}
	return k, k.read(context.Background())
}

// read takes over the keys of the store.
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
	k.all.Store(&all)
	return nil
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
func (k *keyring) find(secret string) (record.Key, bool) {
	if secret == "" {
		return record.Key{}, false
	}
	sum := sha256.Sum256([]byte(secret))
	all, found := *k.all.Load(), -1
	for i := range all {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(sum[:], all[i].Sum), i, found)
	}
	if found < 0 {
		return record.Key{}, false
	}
	return all[found], true
}

func expired(k record.Key) bool { return !k.Expires.IsZero() && !time.Now().Before(k.Expires) }

// NewSecret draws the secret of a new key. The store keeps its SHA-256 alone.
func NewSecret() (secret string, sum []byte) {
	secret = "sbk_" + rand.Text() + rand.Text() // 260 random bits
	s := sha256.Sum256([]byte(secret))
	return secret, s[:]
}
