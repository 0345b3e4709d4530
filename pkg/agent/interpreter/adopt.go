package interpreter

import (
	"crypto/sha256"
	"reflect"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"
)

// Move is for a sandbox that becomes another one, whose contexts are at p. Those of languages that
// are wanted, which calls without a context get and which have run nothing, stay: they are told
// their new environment, if they can be. All others are removed, and so is one that is being
// started.
func (cs *Contexts) Move(p Place, wanted []string) {
	cs.init()
	p.Moves = 0
	cs.mu.Lock()
	cs.moves++
	var leave []*Context
	for _, c := range cs.all {
		s := cs.standing[c.Language]
		stays := s != nil && slices.Contains(wanted, c.Language) && s.c.Load() == c && c.move(p)
		if stays {
			c.place = p
		} else {
			leave = append(leave, c)
		}
	}
	cs.mu.Unlock()
	var gone sync.WaitGroup
	for _, c := range leave {
		gone.Add(1)
		cs.Host.Go(func() {
			defer gone.Done()
			cs.Remove(c.ID) //nolint:errcheck // gone is what is wanted
		})
	}
	gone.Wait()
}

// Moves counts the calls of Move. What is found out about a sandbox after one is that of the new
// one.
func (cs *Contexts) Moves() int {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.moves
}

// move has a context that has run nothing be as one that was started at p, and reports whether
// it is. The caller holds Contexts.mu.
func (c *Context) move(p Place) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead || c.count > 0 {
		return false
	}
	if reflect.DeepEqual(c.place, p) {
		return true
	}
	if c.l.move == nil || c.place.Dir != p.Dir || !reflect.DeepEqual(c.place.Cred, p.Cred) || c.l.fixed && c.place.Memory != p.Memory ||
		!c.l.takes(c.place.Env, p.Env) || c.l.find(c.host, p.Env) != c.path {
		return false
	}
	select {
	case c.writes <- c.l.move(c.place, p):
		return true
	default:
		return false
	}
}

// readAtStart are beginnings of the names of variables that programs, or the libraries that
// they all have, read when they start and not later.
var readAtStart = []string{"GCONV_", "GLIBC_", "HOME", "LANG", "LC_", "LD_", "LOC", "MALLOC_", "NLS", "OPENSSL_", "RES_", "SSL_", "TZ"}

// takes reports whether a process that was started with one environment can be told another.
func (l *language) takes(from, to map[string]string) bool {
	differs := func(a, b map[string]string) bool {
		for k, v := range a {
			if w, ok := b[k]; ok && w == v {
				continue
			}
			if !utf8.ValidString(k) || !utf8.ValidString(v) {
				return true // JSON has no such text
			}
			for _, p := range append(readAtStart, l.reads) {
				if strings.HasPrefix(k, p) {
					return true
				}
			}
		}
		return false
	}
	return !differs(from, to) && !differs(to, from)
}

// Reseed is for a copy of a sandbox: the contexts draw other random numbers than those of the
// sandbox that it is a copy of. One that runs code does so from its next call on. seed is for this
// copy alone.
func (cs *Contexts) Reseed(seed []byte) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.seed = seed
	cs.seeds++
	for _, c := range cs.all {
		c.reseed(seed)
	}
}

// reseed tells an idle context its seed, and notes it for the next call of another one: a
// driver that runs code may take the message for an answer, and one that was interrupted may
// lose it.
func (c *Context) reseed(seed []byte) {
	if c.l.reseed == nil {
		return
	}
	own := sha256.New()
	own.Write(seed)
	own.Write([]byte(c.ID + randomHex(32))) // no two contexts have the same
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seed = own.Sum(nil)
	if c.dead || c.run != nil || c.late {
		return
	}
	select {
	case c.writes <- c.l.reseed(c.secret, c.seed):
		c.seed = nil
	default: // it does not read
	}
}
