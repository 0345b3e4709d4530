package runsc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A memory image is what Checkpoint writes and Restore reads: the state of a sentry, a list of
// the guest's pages, and these pages. runsc gives them their names
// (gvisor.dev/gvisor/runsc/boot/checkpointfiles).
const (
	stateImage = "checkpoint.img"
	metaImage  = "pages_meta.img"
	pagesImage = "pages.img"
)

// ImageFiles lists the files of a memory image.
func ImageFiles() []string { return []string{stateImage, metaImage, pagesImage} }

// Checkpoint writes the memory image of id, which runs, into dir, which exists and has none.
// Meanwhile the guest stands still; afterwards it goes on, also after an error and if this
// process dies. The image is not compressed, and not yet durable; after an error dir may hold a
// part of one.
//
// Checkpoint calls still once, while the guest stands still and its files hold all that it has
// written to them: a copy of its disk that still makes is of the same instant as the image.
func (d *Driver) Checkpoint(ctx context.Context, id, dir string, still func() error) error {
	var files []*os.File
	defer func() {
		for _, f := range files {
			f.Close() //nolint:errcheck // whoever makes the image durable learns of lost writes
		}
	}()
	for _, name := range ImageFiles() {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return fmt.Errorf("make a memory image of %s: %w", id, err)
		}
		files = append(files, f)
	}
	out, in, err := pipe()
	if err != nil {
		return fmt.Errorf("make a memory image of %s: %w", id, err)
	}
	// A sentry that its guest has taken over may answer and write on, or never close its end.
	defer context.AfterFunc(ctx, func() { out.Close() })() //nolint:errcheck // as below
	held := make(chan error, 1)
	go func() {
		err := hold(out, files[0], still)
		out.Close() //nolint:errcheck // if it is not read to its end, the sentry gives up, and the guest goes on
		held <- err
	}()
	// gvisor.dev/gvisor/pkg/sentry/control, SaveOpts. With Resume the guest goes on afterwards.
	arg := struct {
		Metadata      map[string]string `json:"metadata"`
		HavePagesFile bool              `json:"have_pages_file"`
		Resume        bool
	}{map[string]string{"compression": "none"}, true, true}
	err = d.call(ctx, id, "containerManager.Checkpoint", &arg, in, files[1], files[2])
	in.Close() //nolint:errcheck // the sentry has its own
	if err != nil {
		out.Close() //nolint:errcheck // hold may wait for a sentry that has hung up
	}
	heldErr := <-held
	switch {
	case ctx.Err() != nil:
		err = errors.Join(context.Cause(ctx), err)
	case !errors.Is(heldErr, os.ErrClosed): // else only because call failed
		err = errors.Join(heldErr, err)
	}
	if err != nil && strings.Contains(err.Error(), unix.ENOSPC.Error()) { // the sentry says so in words
		err = errors.Join(err, unix.ENOSPC)
	}
	return holding(err)
}

// pipe returns a pipe that holds as little as the kernel lets it, with an end to be written by
// a sentry, which wants it to block.
func pipe() (out, in *os.File, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("make a pipe: %w", err)
	}
	in = os.NewFile(uintptr(p[1]), "state")
	if _, err = unix.FcntlInt(uintptr(p[0]), unix.F_SETPIPE_SZ, os.Getpagesize()); err == nil {
		err = unix.SetNonblock(p[0], true) // so that Close ends a read
	}
	out = os.NewFile(uintptr(p[0]), "state")
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("set up a pipe: %w", err), in.Close(), out.Close())
	}
	return out, in, nil
}

// What a sentry may write before its state, and as its state, in bytes. A guest may have taken
// it over.
const (
	maxMetadata = 16 << 20
	maxState    = 1 << 30
)

// hold copies the state of a sentry to a file, and calls still in the middle of it. The sentry
// stops its tasks, and writes metadata; then it writes out files, and only after that the rest
// of its state (gvisor.dev/gvisor/pkg/sentry/kernel, SaveTo). It cannot finish, and let its
// tasks go on, before hold has read that, which is more than the pipe holds.
//
// (A call to pause the sentry, and another to resume it, would not do: if this process died in
// between, the next one could not know whether the guest is paused, and a sentry that is told
// to resume a guest that runs panics.)
func hold(out io.Reader, file io.Writer, still func() error) error {
	state := io.TeeReader(out, file)
	var head [16]byte // a magic number, and the length of the metadata (gvisor.dev/gvisor/pkg/state/statefile)
	if _, err := io.ReadFull(state, head[:]); err != nil {
		return fmt.Errorf("read the state of the sentry: %w", err)
	}
	n := binary.BigEndian.Uint64(head[8:])
	if n > maxMetadata {
		return fmt.Errorf("read the state of the sentry: %d bytes of metadata, more than %d", n, maxMetadata)
	}
	if _, err := io.CopyN(io.Discard, state, int64(n)+1); err != nil {
		return fmt.Errorf("read the state of the sentry: %w", err)
	}
	if err := still(); err != nil {
		return err
	}
	size, err := io.Copy(file, io.LimitReader(out, maxState))
	if err == nil && size == maxState {
		err = fmt.Errorf("it is larger than %d bytes", maxState)
	}
	if err != nil {
		return fmt.Errorf("read the state of the sentry: %w", err)
	}
	return nil
}

// Pause stops the guest of id until Resume is called as often as Pause was. A checkpoint in between
// changes nothing of that. Nobody can ask a sentry whether it is paused.
func (d *Driver) Pause(ctx context.Context, id string) error {
	return d.call(ctx, id, "containerManager.Pause", struct{}{})
}

// Resume undoes one Pause. What surprises: a sentry that is told so more often panics.
func (d *Driver) Resume(ctx context.Context, id string) error {
	return d.call(ctx, id, "containerManager.Resume", struct{}{})
}

// Restore is Start from the memory image in dir, which needs n: the guest goes on where Checkpoint found
// it, on the build of runsc that kept it.
// The bundle of id may have other paths, another network namespace, cgroup and environment
// than that of the checkpoint, and must be the same otherwise
// (gvisor.dev/gvisor/runsc/specutils, RestoreValidateSpec); its root file system must hold what
// the disk held.
//
// ran is whether the guest may have run, also after an error: then its disk may have changed.
//
// What surprises: a sentry takes the address off the link that it finds in its network
// namespace, so no second one can start there.
func (d *Driver) Restore(
	ctx context.Context, id, dir string, n record.MemoryNeeds, stdin *os.File,
) (ran bool, err error) {
	for _, name := range ImageFiles() {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				err = fmt.Errorf("the memory image is not whole: %w", err)
			}
			return false, fmt.Errorf("restore %s on runsc: %w", id, err)
		}
	}
	binary, err := d.binaryOf(n)
	if err != nil {
		return false, fmt.Errorf("restore %s on runsc: %w", id, err)
	}
	ran, err = d.begin(ctx, binary, "restore", id, stdin, "restore", "--image-path="+dir)
	return ran, gone(err)
}

// locked is what our runsc says when the guest holds a lock of a file that others may change
// (tools/runsc/patches/host-locks.patch): its path in a mount, and that mount as "CONTAINER:PATH".
var locked = regexp.MustCompile(`locks are held of ("(?:[^"\\]|\\.)*") in mount ("(?:[^"\\]|\\.)*")`)

// holding says in the words of a client that a guest with such a lock is not checkpointed.
func holding(err error) error {
	if file := fileIn(locked, err); file != "" {
		return errs.Wrap(err, errs.WrongState, "a program holds a lock of %.200q, on a volume or a directory of the host. Others could "+
			"take it while the sandbox is asleep, and a copy cannot have it, too: try again when it is released", file)
	}
	return err
}

// fileIn is the path of the file that an error of runsc names as says, or "".
func fileIn(says *regexp.Regexp, err error) string {
	if err == nil {
		return ""
	}
	found := says.FindStringSubmatch(err.Error())
	if found == nil {
		return ""
	}
	file, fileErr := strconv.Unquote(found[1])
	mount, mountErr := strconv.Unquote(found[2])
	if fileErr != nil || mountErr != nil {
		return ""
	}
	_, mount, _ = strings.Cut(mount, ":")
	return path.Join(mount, file)
}

// lost is what runsc says when a file that the guest had open is not there
// (gvisor.dev/gvisor/pkg/sentry/fsimpl/gofer, restoreFile): its path in a mount, and that mount as
// "CONTAINER:PATH".
var lost = regexp.MustCompile(`failed to walk ("(?:[^"\\]|\\.)*") of type \S+ in mount ("(?:[^"\\]|\\.)*"): ` + unix.ENOENT.Error())

// gone says in the words of a client that a restore lacks a file. Others write to volumes and host
// directories, so the file may have been removed after the checkpoint.
func gone(err error) error {
	if file := fileIn(lost, err); file != "" {
		return errs.Wrap(err, errs.WrongState, "a program in the memory has %.200q open, and that file is gone: put it back, or "+
			"begin with the files alone (create without --with-memory; stop and start what hibernates)", file)
	}
	return err
}
