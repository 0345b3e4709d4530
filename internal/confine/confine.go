// Package confine runs the parts of a program that read hostile bytes in children
// without privileges: the same binary, started again.
//
//	program ── Start(Child{Verb: "unpack", Root: dir}) ──▶ the same binary
//	             its own user, mount, pid, network, ipc, uts, cgroup namespaces
//	             root: a clone of Root, nosuid nodev noexec, or nothing at all
//	             user nobody, at most FileCaps, and those over ids 0..65535 only
//	             no_new_privs, resource limits, an empty environment,
//	             only the system calls that its verbs need, Landlock where the kernel has it
//	           ◀── standard output: the answer; standard error: one Failure
//
// A hijacked child can write only the files it was made to write, below Root: there is
// no other file, no network, no other process.
//
// What surprises: the binary is executed twice. Go has threads before main, and
// credentials belong to a thread. The first life sets them up on one thread and
// executes the binary again, which then has only that thread's credentials.
package confine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// FileCaps are the capabilities needed to make files of any owner and mode, and no
// more. They hold only for files of ids 0..65535, which the child's user namespace maps
// to themselves.
var FileCaps = []uintptr{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_SETFCAP}

// Child says what to run and what it may do. Sizes are bytes.
type Child struct {
	Verb  string     // as Main knows it
	Args  []string   // for the verb
	Root  string     // directory that becomes "/", written with FileCaps; empty: an empty one, and no capabilities
	Files []*os.File // descriptors FirstFile and up of the child
	// Time bounds its CPU time; zero is an hour.
	Time time.Duration
	// Serves makes it a child that serves for as long as this process lives: without an
	// end of its CPU time, with many descriptors, and with the calls that sockets need. It
	// still makes none: it has those that it is given. Memory, if not zero, bounds its data.
	Serves bool
	Memory int64
	// Outlives makes a child that serves one that outlives this process, and ctx. It gets
	// no signal when it writes to somebody who is gone, its standard error included.
	Outlives bool
}

// FirstFile is the descriptor of Files[0] in the child.
const FirstFile = 3

// Limits of every child. A Go program reserves more than a gigabyte of addresses at its
// start, so memory is bounded by the limit on data.
const (
	maxData  = 768 << 20
	maxSpace = 8 << 30
	maxFiles = 1024
	maxServe = 1 << 18  // descriptors of a child that serves, unless this process may have fewer
	maxTasks = 64       // processes and threads, counted in the child's user namespace; Go has about ten
	maxFile  = 64 << 30 // for the file of a layer; limits on the whole bound all files together
)

// name is argv[0] of a child. It distinguishes the child from the program, also for an
// operator who lists processes.
const name = "sandboxd-confined"

// ids is how many ids a child may give to files: the guest's.
const ids = 65536

// nobody is the user of a child.
const nobody = 65534

// Process is a started child. The caller reads Out to its end, closes In when all is
// written, and calls Wait.
type Process struct {
	In  *os.File // its standard input
	Out *os.File // its standard output

	cmd    *exec.Cmd
	words  *tail
	limits limits
	done   chan error
}

// pipeSize is the largest that the kernel allows without privileges: fewer wake-ups
// than with the default of 64 KiB.
const pipeSize = 1 << 20

// Start starts a child, which ends with ctx, and with this process, unless it Outlives them.
func Start(ctx context.Context, c Child) (*Process, error) {
	root, err := cloneRoot(c.Root)
	if err != nil {
		return nil, fmt.Errorf("confine %s: %w", c.Verb, err)
	}
	defer root.Close()
	inR, inW, err := pipe()
	if err != nil {
		return nil, fmt.Errorf("confine %s: %w", c.Verb, err)
	}
	defer inR.Close()
	outR, outW, err := pipe()
	if err != nil {
		inW.Close()
		return nil, fmt.Errorf("confine %s: %w", c.Verb, err)
	}
	defer outW.Close()
	caps := []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_SETPCAP}
	if c.Root != "" {
		caps = append(caps, FileCaps...)
	}
	l := limits{files: len(c.Files), cpu: cmp.Or(c.Time, time.Hour), data: cmp.Or(c.Memory, maxData), serves: c.Serves}
	same := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: ids}}
	p := &Process{In: inW, Out: outR, words: &tail{}, limits: l, done: make(chan error, 1)}
	if c.Outlives {
		ctx = context.WithoutCancel(ctx)
	}
	p.cmd = exec.CommandContext(ctx, "/proc/self/exe")
	p.cmd.Args = append([]string{name, l.String(), c.Verb}, c.Args...)
	p.cmd.Env = append([]string{}, weak.Environ()...) // an empty one is not that of the daemon
	p.cmd.Dir = "/"
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = inR, outW, p.words
	p.cmd.ExtraFiles = append(append([]*os.File(nil), c.Files...), root)
	p.cmd.WaitDelay = time.Second
	p.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET |
			unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
		UidMappings: same, GidMappings: same, GidMappingsEnableSetgroups: true,
		Credential:  &syscall.Credential{Uid: nobody, Gid: nobody},
		AmbientCaps: caps,
		Pdeathsig:   unix.SIGKILL,
	}
	if c.Outlives {
		p.cmd.SysProcAttr.Pdeathsig = 0
		p.cmd.SysProcAttr.Setsid = true // Ctrl-C at a daemon in a terminal must not reach it
	}
	started := make(chan error, 1)
	go p.run(started)
	if err := <-started; err != nil {
		inW.Close()
		outR.Close()
		return nil, fmt.Errorf("confine %s (see user.max_user_namespaces and, on Ubuntu, kernel.apparmor_restrict_unprivileged_userns): %w",
			c.Verb, err)
	}
	return p, nil
}

// run starts the child and waits for it, on one thread: the kernel takes the death of
// that thread for the parent's.
func (p *Process) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	err = p.cmd.Wait()
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // it ended well; a forked process had a copy of its pipe for a moment
	}
	p.done <- err
}

// Wait returns when the child has ended. If the child reported a Failure, the error is
// an errs.Error with a code that a child may use. Any other death is internal.
func (p *Process) Wait() error {
	err := <-p.done
	p.done <- err
	if err == nil {
		return nil
	}
	var f Failure
	said := p.words.last()
	if json.Unmarshal(said, &f) == nil && f.Text != "" {
		text := strings.ToValidUTF8(f.Text, "\uFFFD")
		switch f.Code {
		case errs.Invalid, errs.Unsupported, errs.Exhausted, errs.NotFound:
			return errs.Wrap(err, f.Code, "%s", text)
		}
		return fmt.Errorf("%w: %.1000q", err, text)
	}
	if p.limits.serves {
		return fmt.Errorf("%w: %.1000q", err, said)
	}
	if strings.Contains(string(p.words.b), "out of memory") || strings.Contains(string(p.words.b), "cannot allocate memory") {
		return errs.Wrap(err, errs.Invalid, "the archive takes more than %d MiB of memory to read: it is damaged or malicious",
			p.limits.data>>20)
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.SystemTime()+exit.UserTime() > p.limits.cpu-time.Second/2 {
		return errs.Wrap(err, errs.Invalid, "the archive takes more than %s of CPU time to read: it is damaged or malicious", p.limits.cpu)
	}
	return fmt.Errorf("%w: %.1000q", err, said)
}

// Pid is the child's id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Kill ends the child; Wait returns soon after.
func (p *Process) Kill() { _ = p.cmd.Process.Kill() }

// Close gives up both pipes; either may be closed already.
func (p *Process) Close() {
	p.In.Close()
	p.Out.Close()
}

// Failure is the last line of a child that failed.
type Failure struct {
	Code errs.Code `json:"code"`
	Text string    `json:"text"`
}

// pipe makes a large pipe.
func pipe() (r, w *os.File, err error) {
	r, w, err = os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	// Not with Fd: it would make the pipe blocking, and Close would wait for a blocked
	// write.
	c, err := w.SyscallConn()
	if err == nil {
		err = c.Control(func(fd uintptr) {
			_, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeSize) // a small pipe works too
		})
	}
	return r, w, err
}

// cloneRoot returns a mount of dir, or an empty one, that is attached nowhere.
func cloneRoot(dir string) (*os.File, error) {
	const flags = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC
	if dir == "" {
		fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
		if err != nil {
			return nil, fmt.Errorf("fsopen tmpfs: %w", err)
		}
		defer unix.Close(fs)
		if err := unix.FsconfigCreate(fs); err != nil {
			return nil, fmt.Errorf("make an empty root: %w", err)
		}
		fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, flags|unix.MOUNT_ATTR_RDONLY)
		if err != nil {
			return nil, fmt.Errorf("mount an empty root: %w", err)
		}
		return os.NewFile(uintptr(fd), "empty root"), nil
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return nil, &os.PathError{Op: "open_tree", Path: dir, Err: err}
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: flags}); err != nil {
		unix.Close(fd)
		return nil, &os.PathError{Op: "mount_setattr", Path: dir, Err: err}
	}
	return os.NewFile(uintptr(fd), dir), nil
}

// tail keeps the end of a child's standard error.
type tail struct{ b []byte }

const maxTail = 16 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if n := len(t.b) - maxTail; n > 0 {
		t.b = append(t.b[:0], t.b[n:]...)
	}
	return len(p), nil
}

// last is the last line.
func (t *tail) last() []byte {
	b := bytes.TrimSpace(t.b)
	return b[bytes.LastIndexByte(b, '\n')+1:]
}

var _ io.Writer = (*tail)(nil)
