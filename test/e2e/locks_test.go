package e2e_test

import (
	"bufio"
	_ "embed"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

//go:embed testdata/guest/locks.py
var locksProgram string

// TestSharedLocks: what sandboxes share, they can lock. Locks of each kind exclude each other
// across runtimes, the database of two sandboxes loses nothing, and lines that both append are
// all there.
func TestSharedLocks(t *testing.T) {
	h := newHost(t, daemontest.Options{Pool: pool.BtrfsLoop})
	h.deleteVolumes(t) // of an earlier run that was killed
	daemontest.Image(t, h.Daemon, "python")
	for _, pair := range [][2][]string{
		{{"--runtime", "runsc"}, {"--runtime", "runsc"}},
		{{"--runtime", "runsc"}, {"--runtime", "runc"}},
		{{"--runtime", "runsc", "--security", "strict"}, {"--runtime", "runsc"}}, // whose sentry opens no files
	} {
		t.Run(strings.ReplaceAll(fmt.Sprint(pair[0], pair[1]), "--", ""), func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: "runsc"}
			defer h.deleteVolumes(t)
			defer h.deleteAll(t)
			l.ok(append([]string{"create", "-v", "locks:/v", "--name", "a", "python"}, pair[0]...)...)
			l.ok(append([]string{"create", "-v", "locks:/v", "--name", "b", "python"}, pair[1]...)...)
			a, beside, b := l.locker("a"), l.locker("a"), l.locker("b")
			for _, kind := range []string{"flock", "lock", "ofd"} {
				tellExclusion(a, beside, b, kind)
			}
			tellRanges(a, beside, b)
			for _, mode := range []string{"delete", "wal"} { // the rollback journal, and memory that both map
				a.asks(mode, "made('%s')", mode)
				a.send("insert('%s', 50, 'a')", mode)
				b.send("insert('%s', 50, 'b')", mode)
				a.said("50")
				b.said("50")
				for _, by := range []*locker{a, b} {
					by.asks("('ok', (100, 100))", "rows('%s')", mode)
				}
			}
			a.send("append(2000, 'a')")
			b.send("append(2000, 'b')")
			a.said("2000")
			b.said("2000")
			b.asks("(4000, 4000, {7})", "appended()")
			if pair[0][len(pair[0])-1] == "runsc" {
				tellNotSaved(l, a, b)
			}
		})
	}
}

// tellExclusion: a is one process of a sandbox, beside another one, and b is in another sandbox.
func tellExclusion(a, beside, b *locker, kind string) {
	ok, not := "ok", "EAGAIN"
	for _, other := range []*locker{b, beside} {
		a.asks(ok, "%s(LOCK_EX|LOCK_NB)", kind)
		other.asks(not, "%s(LOCK_EX|LOCK_NB)", kind)
		other.asks(not, "%s(LOCK_SH|LOCK_NB)", kind)
		other.asks("interrupted", "interrupted(%s, LOCK_EX)", kind)
		other.send("%s(LOCK_EX)", kind) // it waits
		a.asks(ok, "%s(LOCK_UN)", kind)
		other.said(ok)
		a.asks(not, "%s(LOCK_SH|LOCK_NB)", kind)
		other.asks(ok, "closed()")
		a.asks(ok, "%s(LOCK_SH|LOCK_NB)", kind)
		other.asks(ok, "%s(LOCK_SH|LOCK_NB)", kind)
		other.asks(not, "%s(LOCK_EX|LOCK_NB)", kind)
		a.asks(ok, "%s(LOCK_UN)", kind)
		other.asks(ok, "%s(LOCK_EX|LOCK_NB)", kind)
		other.asks(ok, "%s(LOCK_UN)", kind)
	}
	// A sandbox holds it as long as one of its processes does.
	a.asks(ok, "%s(LOCK_SH|LOCK_NB)", kind)
	beside.asks(ok, "%s(LOCK_SH|LOCK_NB)", kind)
	a.asks(ok, "%s(LOCK_UN)", kind)
	b.asks(not, "%s(LOCK_EX|LOCK_NB)", kind)
	beside.asks(ok, "closed()")
	b.asks(ok, "%s(LOCK_EX|LOCK_NB)", kind)
	b.asks(ok, "closed()")
	// Killed, it holds nothing.
	killed := a.lab.locker("a")
	killed.asks(ok, "%s(LOCK_EX|LOCK_NB)", kind)
	b.asks(not, "%s(LOCK_SH|LOCK_NB)", kind)
	b.send("%s(LOCK_EX)", kind)
	killed.send("os.kill(os.getpid(), signal.SIGKILL)")
	b.said(ok)
	b.asks(ok, "closed()")
}

// tellRanges: parts of a file, with what the processes of one sandbox hold of them together.
func tellRanges(a, beside, b *locker) {
	a.asks("ok", "lock(LOCK_EX|LOCK_NB, 10, 10)")
	beside.asks("ok", "lock(LOCK_SH|LOCK_NB, 30, 30)")
	b.asks("('write', 10, 10)", "asked(0, 100)")
	b.asks("('read', 30, 30)", "asked(20, 100)")
	b.asks("free", "asked(60)")
	b.asks("ok", "lock(LOCK_EX|LOCK_NB, 0, 10)")
	a.asks("('write', 0, 10)", "asked(0, 10)")
	b.asks("EAGAIN", "lock(LOCK_EX|LOCK_NB, 0, 11)")
	b.asks("ok", "lock(LOCK_SH|LOCK_NB, 40, 100)")
	beside.asks("EAGAIN", "lock(LOCK_EX|LOCK_NB, 30, 30)") // what it had stays
	b.asks("EAGAIN", "lock(LOCK_EX|LOCK_NB, 35, 1)")
	a.asks("ok", "lock(LOCK_SH|LOCK_NB, 35, 5)")
	beside.asks("ok", "lock(LOCK_UN, 0)")
	b.asks("EAGAIN", "lock(LOCK_EX|LOCK_NB, 35, 1)")
	b.asks("ok", "lock(LOCK_EX|LOCK_NB, 30, 5)")
	a.asks("ok", "lock(LOCK_UN, 12, 4)") // in the middle
	b.asks("ok", "lock(LOCK_EX|LOCK_NB, 12, 4)")
	b.asks("EAGAIN", "lock(LOCK_EX|LOCK_NB, 16, 1)")
	for _, l := range []*locker{a, beside, b} {
		l.asks("ok", "closed()")
	}
	b.asks("free", "asked()")
	b.asks("ok", "closed()")
	// A lock of a file that has no name any more.
	a.asks("ok", "lock(LOCK_EX|LOCK_NB, name='tmp')")
	b.asks("EAGAIN", "flock(LOCK_EX|LOCK_NB, 'tmp') and lock(LOCK_EX|LOCK_NB, name='tmp')")
	a.asks("None", "os.unlink('tmp')")
	b.asks("EAGAIN", "lock(LOCK_EX|LOCK_NB, name='tmp')")
	a.asks("ok", "closed('tmp')")
	b.asks("ok", "lock(LOCK_EX|LOCK_NB, name='tmp')")
	b.asks("ok", "closed('tmp')")
	// The host's memory for them has a bound.
	a.asks("(4096, 'ENOLCK', 'ENOLCK', 'ok')", "many()")
	b.asks("('write', 50, 50)", "asked(0, 100)")
	a.asks("ok", "closed()")
	b.asks("free", "asked()")
	b.asks("ok", "closed()")
}

// tellNotSaved: a sandbox that holds such a lock is not put to sleep, nor copied with its memory.
func tellNotSaved(l *lab, a, b *locker) {
	a.asks("ok", "flock(LOCK_EX|LOCK_NB)")
	for _, args := range [][]string{{"hibernate", "a"}, {"fork", "a", "--memory"}} {
		l.wants(l.ctl(args...), 125, "holds a lock", "/f", "volume")
	}
	b.asks("EAGAIN", "flock(LOCK_EX|LOCK_NB)")
	a.asks("ok", "flock(LOCK_UN)")
	l.ok("hibernate", "a")
	b.asks("ok", "flock(LOCK_EX|LOCK_NB)")
	l.ok("resume", "a")
	again := l.locker("a")
	again.asks("EAGAIN", "flock(LOCK_EX|LOCK_NB)")
	b.asks("ok", "flock(LOCK_UN)")
	again.asks("ok", "flock(LOCK_EX|LOCK_NB)")
	again.asks("ok", "closed()")
}

// locker is locks.py in a sandbox.
type locker struct {
	*lab
	in  io.Writer
	out *bufio.Scanner
}

func (l *lab) locker(sandbox string) *locker {
	l.Helper()
	cmd := l.command(l.Context(), "exec", "-i", sandbox, "--", "python3", "-c", locksProgram, "/v")
	in, err := cmd.StdinPipe()
	if err != nil {
		l.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		l.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() {
		in.Close() //nolint:errcheck // it ends
		cmd.Wait() //nolint:errcheck // one is killed in its sandbox
	})
	k := &locker{l, in, bufio.NewScanner(out)}
	k.said("here")
	return k
}

func (k *locker) send(expression string, args ...any) {
	k.Helper()
	if _, err := fmt.Fprintf(k.in, expression+"\n", args...); err != nil {
		k.Fatal(err)
	}
}

func (k *locker) said(want string) {
	k.Helper()
	if !k.out.Scan() || k.out.Text() != want {
		k.Fatalf("it answered %q, want %q (%v)", k.out.Text(), want, k.out.Err())
	}
}

func (k *locker) asks(want, expression string, args ...any) {
	k.Helper()
	k.send(expression, args...)
	if k.said(want); k.Failed() {
		k.Fatalf("to "+expression, args...)
	}
}
