package command

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// Programs print these when a limit stopped them: strerror(3) of libc, and the
// words of shells and language runtimes that do not use it. EAGAIN has the words
// that a socket or a lock would have too, so it says it only behind what starts a
// process or a thread, in its own line or the three before, as in a traceback.
var (
	saysDiskFull = regexp.MustCompile(`(?i)no space left on device|disk quota exceeded`)
	saysNoFork   = regexp.MustCompile(`(?i)can(no|')t fork|can't start new thread|unable to create native thread|` +
		`(fork|clone|spawn|thread_create|std::system_error)[^\n]*(\n[^\n]*){0,3}(resource temporarily unavailable|EAGAIN)`)
	saysAgain = regexp.MustCompile(`(?i)resource temporarily unavailable`)
)

// lastWords is how much of the end of its output says why a command failed.
const lastWords = 4 << 10

// Explain says why a command ended and, if a limit of the sandbox is behind it, which
// one. A limit is suspected only if the command's last output speaks of it: a limit
// that it met and coped with is no reason. A full disk is checked by a write too. Only
// the host knows whether the kernel killed it for its memory.
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
	case saysDiskFull.Match(words) && g.diskFull():
		e.Reason = agent.ReasonDiskFull
		e.Hint = "the disk limit of the sandbox is reached"
		if n := limits.DiskBytes; n > 0 {
			e.Hint = fmt.Sprintf("the disk limit of the sandbox, %s, is reached", amount(n))
		}
	case limits.Pids > 0 && (saysNoFork.Match(words) || saysAgain.Match(words) && g.manyTasks()):
		e.Reason = agent.ReasonPidsLimit
		e.Hint = fmt.Sprintf("the sandbox may have %d processes and threads, its pids limit", limits.Pids)
	}
}

// The values of Command.blamed.
const (
	blamedYes = 1
	blamedNo  = 2
)

// OOMKills is how many OOM kills the daemon says there were; -1: it says nothing.
func OOMKills(r *http.Request) int64 {
	n, err := strconv.ParseInt(r.Header.Get(agent.OOMKillsHeader), 10, 64)
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// Blame settles, once, whether c was killed for its memory: by a SIGKILL that no
// client asked for, in a sandbox in which the kernel has killed since c began. The
// first who asks after its end settles it, so that later kills are not its own.
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

// manyTasks reports whether the guest has three fourths of what it may have: who
// was refused one has ended, and some of its children with it.
func (g *Registry) manyTasks() bool { return proc.Tasks()*4 >= g.Limits().Pids*3 }

// probe is what does not fit onto a disk that is full: a program that failed
// to write as much, a usual buffer, left less.
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

// amount writes bytes as a limit is given: 64Mi.
func amount(n int64) string {
	for i, unit := range []string{"Ti", "Gi", "Mi", "Ki"} {
		if u := int64(1) << (40 - 10*i); n >= u && n%u == 0 {
			return fmt.Sprintf("%d%s", n/u, unit)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}
