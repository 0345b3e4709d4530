package command

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// Programs print these when a limit stopped them: strerror(3) of libc, and the words of
// shells and language runtimes that do not use it. The text of EAGAIN may also come
// from a socket or a lock. So it counts only after the name of a call that starts a
// process or a thread, on the same line or one of the three before, as in a traceback.
var (
	saysDiskFull = says(`(?i)no space left on device|disk quota exceeded`)
	saysNoFork   = says(`(?i)can(no|')t fork|can't start new thread|unable to create native thread|failed to create new OS thread|` +
		`(fork|clone|spawn|thread_create|std::system_error)[^\n]*(\n[^\n]*){0,3}(resource temporarily unavailable|EAGAIN)`)
	saysAgain = says(`(?i)resource temporarily unavailable`)
)

// says compiles a pattern when it is first needed: not while the agent starts.
func says(pattern string) func(words []byte) bool {
	compiled := sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
	return func(words []byte) bool { return compiled().Match(words) }
}

// lastWords is how many bytes at the end of a command's output Explain reads.
const lastWords = 4 << 10

// Explain says why a command ended and, if a limit of the sandbox is behind it, which
// one. A limit counts only if the command's last output names it: the command may have
// met other limits and coped with them. Explain also checks a full disk by a write.
// Only the host knows whether the kernel killed the command for its memory.
func (g *Registry) Explain(c *Command, e *Ending) {
	switch {
	case e.TimedOut:
		e.Reason = agent.ReasonTimeout
		return
	case e.Signal != 0:
		e.Reason = agent.ReasonKilled
		return
	}
	e.Reason = agent.ReasonExited
	if e.Code == 0 {
		return
	}
	words, limits := c.Output.Tail(lastWords), g.Limits()
	switch {
	case saysDiskFull(words) && g.diskFull():
		e.Reason = agent.ReasonDiskFull
		e.Hint = limits.DiskFull()
	case limits.Pids > 0 && (saysNoFork(words) || saysAgain(words) && g.manyTasks()):
		e.Reason = agent.ReasonPidsLimit
		e.Hint = fmt.Sprintf("the sandbox may have %d processes and threads, its pids limit", limits.Pids)
	}
}

// The values of Command.blamed.
const (
	blamedYes = 1
	blamedNo  = 2
)

// OOMKills is the number of OOM kills that the daemon sent with a request; -1: it sent
// none.
func OOMKills(r *http.Request) int64 {
	n, err := strconv.ParseInt(r.Header.Get(agent.OOMKillsHeader), 10, 64)
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// Blame settles, once, whether c was killed for its memory: by a SIGKILL that no client
// asked for, in a sandbox in which the kernel has killed since c began. The first call
// after the end of c settles it, so that later kills do not count for c.
func (c *Command) Blame(now int64) {
	if c.Running() || now < 0 || c.OOMKills < 0 || c.end.Reason != agent.ReasonKilled || c.end.Signal != unix.SIGKILL {
		return
	}
	verdict := int32(blamedNo)
	if now > c.OOMKills && !c.byHand.Load() {
		verdict = blamedYes
	}
	c.blamed.CompareAndSwap(0, verdict)
}

// manyTasks reports whether the guest has three fourths of the tasks that it may have.
// The command that was refused a task has ended meanwhile, and some of its children
// with it.
func (g *Registry) manyTasks() bool { return proc.Tasks()*4 >= g.Limits().Pids*3 }

// probe is how many bytes diskFull writes, more than a full disk still has room for: a
// program failed to write a buffer of a usual size there.
const probe = 1 << 20

// diskFull tries to write.
func (g *Registry) diskFull() (is bool) {
	proc.FileTurns.Do(func() { is = g.tryToWrite() })
	return is
}

func (g *Registry) tryToWrite() bool {
	path := filepath.Join(g.StateDir, "probe")
	defer os.Remove(path) //nolint:errcheck // it may not have been made
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return full(err)
	}
	defer f.Close()
	if _, err = f.Write(make([]byte, probe)); err == nil {
		err = f.Sync()
	}
	return full(err)
}

func full(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }
