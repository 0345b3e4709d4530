// Package interpreter runs code in contexts. A context is one process, a driver of its
// language, that lives on between calls and keeps what they have defined.
//
//	server ─ Contexts ─ Context ──── channel: socketpair ───── driver ─ user's code
//	                       ├◀─────── standard output: pipe ───────┤
//	                       └◀─────── standard error: pipe ────────┘
//
// The driver runs in the same process as the code it is given, so code can find the
// channel. With it code can disturb only its own context: lines without the context's
// secret are skipped, sizes are bounded, and what a driver sends concerns its own
// context only.
//
// The surprise: output that a context prints while no call runs is thrown away. The
// agent must read it, or a thread that was left behind would hang, and there is no
// client to send it to.
package interpreter

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// Bounds of contexts.
const (
	// MaxContexts is how many contexts a sandbox may have at a time. A python that has
	// run nothing holds 10 MB, and the agent 40 KB for each context.
	MaxContexts = 64
	// starting is how many contexts start at a time. More would only compete for CPU
	// and time out together.
	starting = 4
	// startLimit is the time in which a driver must report that it is ready.
	startLimit = 30 * time.Second
	// remembered is for how many dead contexts the reason is kept.
	remembered = 64
	// Grace is the time between the interrupt of a call, once it has begun, and the kill of its context.
	Grace = 3 * time.Second
	// interruptAgain is the time between two interrupts in languages where one is
	// easily lost.
	interruptAgain = 100 * time.Millisecond
	// unread is how many messages may wait for a driver: the code of a call, and
	// interrupts that it does not read, ten a second for Grace.
	unread = 64
	// MaxCode bounds the code of a call, in bytes.
	MaxCode = 8 << 20
)

// The errors of this package, for [errors.Is].
var (
	ErrNotFound = errors.New("no such context")
	ErrBusy     = errors.New(agent.ContextBusy)
	ErrTooMany  = errors.New("too many contexts")
	ErrLanguage = errors.New("unknown language")
	ErrDied     = errors.New("the context died")
	ErrProgram  = errors.New("the image has no program for it")
)

// A Process is a driver that was started.
type Process interface {
	Done() <-chan struct{} // closed when it has ended
	Status() syscall.WaitStatus
	Interrupt() // its process group, by SIGINT
	Urge()      // the process by SIGURG, and its group by SIGINT if it sleeps
	Quit()      // its process group, by SIGQUIT
	Kill()      // the process and all that it has started
	KillLeft()  // processes that it has started and left behind, after its end
}

// A Place is where a driver runs, and as whom.
type Place struct {
	Dir    string
	Env    map[string]string
	Memory int64 // bytes that the sandbox has; 0: unlimited
	Cred   *syscall.Credential
	Moves  int // Contexts.Moves, asked before the rest was found out
}

// A Host starts processes. The agent is one.
type Host interface {
	// Look returns the program called name in the PATH of env, or the last one that
	// matches name if that is a pattern of paths, or "".
	Look(name string, env map[string]string) string
	// Start starts path with fds as its descriptors 0, 1, 2, …. If path is Self, that
	// is a program that calls Drive first.
	Start(path string, argv []string, p Place, fds []uintptr) (Process, error)
	// Terminal makes a pseudo-terminal without a size (pty(7)) for who runs at p, both
	// ends close-on-exec. The caller closes them.
	Terminal(p Place) (ours *os.File, theirs int, err error)
	// Go runs f beside the caller. The agent reports a panic of f.
	Go(f func())
}

// Contexts are the contexts of one sandbox. The zero value with a Host is ready to use.
type Contexts struct {
	Host  Host
	Grace time.Duration // 0: Grace

	once  sync.Once
	slots chan struct{} // one for each context that starts

	mu       sync.Mutex
	all      []*Context // live ones, oldest first
	reserved int        // contexts that are being started
	moves    int        // how often Move was called
	seed     []byte     // of the last Reseed
	seeds    int        // how often that was
	dead     []death    // oldest first
	standing map[string]*standing
}

// standing is the context of a language for calls that name no context.
type standing struct {
	mu sync.Mutex // held while it is made
	c  atomic.Pointer[Context]
}

type death struct{ id, why string }

func (cs *Contexts) init() {
	cs.once.Do(func() {
		cs.slots = make(chan struct{}, starting)
		cs.standing = map[string]*standing{}
	})
}

// Languages lists the languages of contexts.
func Languages() []string { return slices.Collect(names) }

func names(yield func(string) bool) {
	for _, l := range languages {
		if !yield(l.name) {
			return
		}
	}
}

func find(name string) (*language, error) {
	for _, l := range languages {
		if l.name == name {
			return l, nil
		}
	}
	return nil, fmt.Errorf("%w %.64q: this sandbox supports %s", ErrLanguage, name, strings.Join(Languages(), ", "))
}

// Make starts a context. It returns once its driver answers.
func (cs *Contexts) Make(language string, p Place) (*Context, error) {
	cs.init()
	l, err := find(language)
	if err != nil {
		return nil, err
	}
	cs.mu.Lock()
	if len(cs.all)+cs.reserved >= MaxContexts {
		cs.mu.Unlock()
		return nil, fmt.Errorf("%w: this sandbox has %d, which is the limit: delete some with DELETE /code/contexts/{id}",
			ErrTooMany, MaxContexts)
	}
	if cs.moves != p.Moves {
		cs.mu.Unlock()
		return nil, moved(language)
	}
	cs.reserved++
	seeds := cs.seeds
	cs.mu.Unlock()
	cs.slots <- struct{}{}
	c, err := start(cs.Host, l, p)
	<-cs.slots

	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.reserved--
	if err != nil {
		return nil, err
	}
	if cs.moves != p.Moves {
		c.deleted = true
		c.kill("the sandbox became another one")
		return nil, moved(language)
	}
	if cs.seeds != seeds {
		c.reseed(cs.seed)
	}
	c.grace = cs.Grace
	if c.grace == 0 {
		c.grace = Grace
	}
	cs.all = append(cs.all, c)
	cs.Host.Go(func() {
		<-c.Done()
		cs.noteDeath(c)
	})
	return c, nil
}

func moved(language string) error {
	return fmt.Errorf("start a %s context: the sandbox became another one meanwhile", language)
}

// noteDeath keeps why c died, unless it was deleted.
func (cs *Contexts) noteDeath(c *Context) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.all = slices.DeleteFunc(cs.all, func(o *Context) bool { return o == c })
	if c.deleted {
		return
	}
	cs.dead = append(cs.dead, death{c.ID, c.why()})
	if len(cs.dead) > remembered {
		cs.dead = slices.Delete(cs.dead, 0, 1)
	}
}

// Standing returns the context for calls that name only a language. The first such call
// makes it, and so does the first after it died.
func (cs *Contexts) Standing(language string, p Place) (*Context, error) {
	cs.init()
	if _, err := find(language); err != nil {
		return nil, err
	}
	cs.mu.Lock()
	s := cs.standing[language]
	if s == nil {
		s = &standing{}
		cs.standing[language] = s
	}
	cs.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.c.Load(); c != nil && c.Alive() {
		return c, nil
	}
	c, err := cs.Make(language, p)
	if err != nil {
		return nil, err
	}
	s.c.Store(c)
	return c, nil
}

// Get returns a live context. If the context died, the error says why.
func (cs *Contexts) Get(id string) (*Context, error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, c := range cs.all {
		if c.ID == id {
			if !c.Alive() {
				return nil, gone(id, c.why())
			}
			return c, nil
		}
	}
	for _, d := range cs.dead {
		if d.id == id {
			return nil, gone(id, d.why)
		}
	}
	return nil, fmt.Errorf("%w has the id %.64q", ErrNotFound, id)
}

func gone(id, why string) error {
	return fmt.Errorf("%w: %w %s: %s; create another with POST /code/context", ErrNotFound, ErrDied, id, why)
}

// List returns the live contexts of a language, or all if language is empty, oldest
// first.
func (cs *Contexts) List(language string) []*Context {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	list := []*Context{}
	for _, c := range cs.all {
		if (language == "" || c.Language == language) && c.Alive() {
			list = append(list, c)
		}
	}
	return list
}

// Remove ends a context: its driver and all that it has started are killed. A
// call that runs in it ends with an error.
func (cs *Contexts) Remove(id string) error {
	c, err := cs.Get(id)
	if err != nil {
		return err
	}
	cs.mu.Lock()
	c.deleted = true
	cs.mu.Unlock()
	c.kill("it was deleted")
	<-c.Done()
	cs.mu.Lock() // now, because noteDeath may run later
	defer cs.mu.Unlock()
	cs.all = slices.DeleteFunc(cs.all, func(o *Context) bool { return o == c })
	return nil
}
