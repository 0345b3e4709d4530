package secrets

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// maxRead is how many bytes are read of a value, with the end of its last line.
const maxRead = vault.MaxValue + len("\r\n")

// trimLine removes the end of the last line, one.
func trimLine(b []byte) []byte {
	return bytes.TrimSuffix(bytes.TrimSuffix(b, []byte("\n")), []byte("\r"))
}

// file reads the value in a file. It must be a regular one that nobody but root can change or put
// another in the place of; others may read it. A link of root's is followed, as services that renew
// a file use them. A pipe or a device is not waited for.
func file(path string) ([]byte, error) {
	f, err := openOwn(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	b, err := io.ReadAll(io.LimitReader(f, int64(maxRead)+1))
	if err == nil && len(b) > maxRead {
		err = fmt.Errorf("it has more than %d bytes, the most a value may have", vault.MaxValue)
	}
	if err != nil {
		clear(b)
		return nil, fmt.Errorf("read file %s: %w", path, err)
	}
	return b, nil
}

// maxLinks is how many links a path may lead over (MAXSYMLINKS of Linux).
const maxLinks = 40

// openOwn opens a regular file to read, if root alone decides what it is: each directory and
// link on the way, and the file, belongs to root or to the user of this process, and others can
// write to none of them. In a directory with the sticky bit, such as /tmp, others cannot replace
// what is root's. The path is absolute.
func openOwn(path string) (*os.File, error) {
	bad := func(p string, st *unix.Stat_t) error {
		return fmt.Errorf("open %s: others than root can change %s, as it belongs to user %d and has mode %04o: chown root %[2]s and "+
			"chmod go-w %[2]s", path, p, st.Uid, st.Mode&0o7777)
	}
	at, rest, links := "/", strings.Split(path, "/"), 0
	for len(rest) > 0 {
		name := rest[0]
		rest = rest[1:]
		if name == ".." {
			at = filepath.Dir(at)
			continue
		}
		at = filepath.Join(at, name) // "" and "." are at again
		var st unix.Stat_t
		if err := unix.Lstat(at, &st); err != nil {
			return nil, fmt.Errorf("open %s: %w", path, &fs.PathError{Op: "lstat", Path: at, Err: err})
		}
		kind := st.Mode & unix.S_IFMT
		sticky := kind == unix.S_IFDIR && st.Mode&unix.S_ISVTX != 0
		if st.Uid != 0 && int(st.Uid) != os.Geteuid() || kind != unix.S_IFLNK && st.Mode&0o022 != 0 && !sticky {
			return nil, bad(at, &st)
		}
		if kind != unix.S_IFLNK {
			continue
		}
		to, err := os.Readlink(at)
		if links++; err == nil && links > maxLinks {
			err = unix.ELOOP
		}
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", path, err)
		}
		at = filepath.Dir(at)
		if filepath.IsAbs(to) {
			at = "/"
		}
		rest = slices.Concat(strings.Split(to, "/"), rest)
	}
	f, err := os.OpenFile(at, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close()
		return nil, errors.Join(fmt.Errorf("open %s: it is no regular file", path), err)
	}
	return f, nil
}

const (
	// commandTime is how long a command may run.
	commandTime = 10 * time.Second
	// commandGrace is how long its output may stay open when it has ended.
	commandGrace = 2 * time.Second
)

// commandEnv is the whole environment of a command. One that wants more is written with
// /usr/bin/env.
var commandEnv = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}

// A writer is a function that is an io.Writer.
type writer func(p []byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// command runs a command and returns what it prints. It runs as root, with what the daemon may do
// and nothing more, because an administrator wrote it; the guest has no part in its arguments. Its
// program must be one that nobody but root can change (openOwn). There is no shell. It has no
// standard input, a clean environment, and a process group of its own, which is killed when the
// command ends, or after limit. What has left that group, as daemons do, goes on; it must not
// hold the standard output. If this process dies, the kernel kills the command.
//
// No error has an argument, or what the command prints: programs write their value, or the
// request that has it, to the standard error too (sh -x, curl -v). An error says how much there was.
func command(argv []string, limit, grace time.Duration) (value []byte, err error) {
	program, err := openOwn(argv[0])
	if err != nil {
		return nil, err
	}
	program.Close() //nolint:errcheck // only looked at
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.Dir = commandEnv, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = grace
	full, said := false, int64(0) // said: bytes of the standard error
	cmd.Stdout = writer(func(p []byte) (int, error) {
		if len(value)+len(p) > maxRead {
			full = true
			cancel() // kills it
			return 0, errors.New("too much")
		}
		value = append(value, p...)
		return len(p), nil
	})
	cmd.Stderr = writer(func(p []byte) (int, error) {
		said += int64(len(p))
		return len(p), nil
	})
	runtime.LockOSThread() // the kernel takes the death of this thread for the parent's
	defer runtime.UnlockOSThread()
	if err = cmd.Start(); err == nil {
		awaitEnd(cmd.Process.Pid)
		unix.Kill(-cmd.Process.Pid, unix.SIGKILL) //nolint:errcheck // nobody else may be in the group
		err = cmd.Wait()
	}
	switch {
	case full:
		err = fmt.Errorf("it prints more than %d bytes, the most a value may have", vault.MaxValue)
	case ctx.Err() != nil:
		err = fmt.Errorf("it did not end within %s and was killed", limit)
	case errors.Is(err, exec.ErrWaitDelay):
		err = errors.New("a process that it left behind holds its standard output or error: redirect them")
	}
	if err != nil {
		clear(value)
		return nil, fmt.Errorf("run %s: %w; %d bytes of its standard error are not shown, as the value may be in them", argv[0], err, said)
	}
	return value, nil
}

// awaitEnd waits until a child has ended, and leaves it a zombie: until then its number can be
// that of no other process or group.
func awaitEnd(pid int) {
	for unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
}
