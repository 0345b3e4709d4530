package runsc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// state is what a sentry writes: a head, metadata and the rest.
func state(metadata uint64, rest io.Reader) io.Reader {
	head := binary.BigEndian.AppendUint64([]byte("gVisorSF"), metadata)
	return io.MultiReader(bytes.NewReader(head), rest)
}

// zeros is n zero bytes.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// TestHold: still is called after the metadata and before the end, once, and the file gets all.
func TestHold(t *testing.T) {
	var file bytes.Buffer
	called := 0
	text := strings.Repeat("m", 10) + strings.Repeat("s", 100)
	err := hold(state(10, strings.NewReader(text)), &file, func() error {
		if called++; file.Len() < 16+10+1 || file.Len() == 16+len(text) {
			t.Errorf("still is called after %d bytes", file.Len())
		}
		return nil
	})
	if err != nil || called != 1 || !strings.HasSuffix(file.String(), text) || file.Len() != 16+len(text) {
		t.Errorf("%v, %d calls, %d bytes", err, called, file.Len())
	}
}

// TestHoldHostile: a sentry that its guest has taken over cannot write without end, nor have
// still called when it has written no state.
func TestHoldHostile(t *testing.T) {
	failed := errors.New("no copy")
	for name, c := range map[string]struct {
		from  io.Reader
		still error
		want  string
		calls int
	}{
		"nothing":             {strings.NewReader(""), nil, "EOF", 0},
		"half a head":         {strings.NewReader("gVis"), nil, "EOF", 0},
		"metadata alone":      {state(4, strings.NewReader("meta")), nil, "EOF", 0},
		"too much metadata":   {state(maxMetadata+1, zeros{}), nil, "metadata", 0},
		"a length that wraps": {state(1<<64-1, zeros{}), nil, "metadata", 0},
		"state without end":   {state(0, zeros{}), nil, "larger than", 1},
		"no copy of the disk": {state(0, zeros{}), failed, failed.Error(), 1},
	} {
		calls := 0
		err := hold(c.from, io.Discard, func() error { calls++; return c.still })
		if err == nil || !strings.Contains(err.Error(), c.want) || calls != c.calls {
			t.Errorf("%s: %v after %d calls", name, err, calls)
		}
	}
}

func TestRemote(t *testing.T) {
	full := remote("save failed: write /x: no space left on device")
	if !errors.Is(full, unix.ENOSPC) || full.Error() != "save failed: write /x: no space left on device" {
		t.Errorf("%v", full)
	}
	if err := remote("no space left on device was said by a guest"); errors.Is(err, unix.ENOSPC) {
		t.Errorf("%v", err)
	}
}

// TestCheckpointNeverClosed: a sentry that its guest has taken over answers that it is done, and
// never closes its end of the pipe. Checkpoint ends with its context, whatever was written before.
func TestCheckpointNeverClosed(t *testing.T) {
	for name, written := range map[string]string{
		"nothing":             "",
		"half a head":         "gVis",
		"metadata alone":      "gVisorSF\x00\x00\x00\x00\x00\x00\x00\x00",
		"a part of its state": "gVisorSF\x00\x00\x00\x00\x00\x00\x00\x00state",
	} {
		t.Run(name, func(t *testing.T) {
			d := &Driver{c: Config{Root: t.TempDir()}}
			sentry, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(d.c.Root, "runsc-a.sock")})
			if err != nil {
				t.Fatal(err)
			}
			defer sentry.Close()
			late := errors.New("it is late")
			ctx, cancel := context.WithCancelCause(t.Context())
			released, served := make(chan struct{}), make(chan error, 1)
			go func() { served <- serveUnclosed(sentry, written, func() { cancel(late) }, released) }()
			done := make(chan error, 1)
			go func() { done <- d.Checkpoint(ctx, "a", t.TempDir(), func() error { return nil }) }()
			select {
			case err := <-done:
				if !errors.Is(err, late) {
					t.Errorf("got %v", err)
				}
			case err := <-served:
				t.Fatal("the sentry ended first:", err)
			case <-time.After(time.Minute): // only a Checkpoint that waits for the sentry takes longer than a moment
				t.Error("Checkpoint waits for a sentry that never closes its end of the pipe")
			}
			close(released)
			if err := <-served; err != nil {
				t.Error(err)
			}
		})
	}
}

// serveUnclosed is a sentry that writes to its pipe, answers, and keeps the pipe open until it is
// released. It calls answered when the other side has read the answer and hung up.
func serveUnclosed(l *net.UnixListener, written string, answered func(), released <-chan struct{}) error {
	conn, err := l.AcceptUnix()
	if err != nil {
		return err
	}
	defer conn.Close()
	request, rights := make([]byte, 4096), make([]byte, unix.CmsgSpace(3*4))
	_, n, _, _, err := conn.ReadMsgUnix(request, rights)
	if err != nil {
		return err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:n])
	if err != nil {
		return err
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return err
	}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "of the checkpoint")
		defer f.Close()
		if i > 0 {
			continue
		}
		if _, err := io.WriteString(f, written); err != nil {
			return err
		}
	}
	if _, err := io.WriteString(conn, `{"success":true}`); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, conn); err != nil {
		return err
	}
	answered()
	<-released
	return nil
}

// TestGone: of a file that a restore lacks, the client reads the path in the sandbox.
func TestGone(t *testing.T) {
	const walk = `restore x on runsc: starting container: failed to load kernel: failed to walk `
	for text, want := range map[string]string{
		walk + `"/a b" of type 0o100000 in mount "main:/data": no such file or directory`:    `"/data/a b"`,
		walk + `"/d/x" of type 0o40000 in mount ":/": no such file or directory`:             `"/d/x"`,
		walk + `"/\"in mount\"" of type 0o100000 in mount ":/v": no such file or directory`:  `"/v/\"in mount\""`,
		walk + `"/\x1b[2J" of type 0o100000 in mount ":/v": no such file or directory; more`: `"/v/\x1b[2J"`,
		walk + `"/a" of type 0o100000 in mount ":/data": permission denied`:                  "",
		walk + `"/a of type 0o100000 in mount ":/data": no such file or directory`:           "",
		`restore x on runsc: the memory image is not whole: stat: no such file or directory`: "",
	} {
		was := errors.New(text)
		err := gone(was)
		if !errors.Is(err, was) {
			t.Errorf("%s: the cause is lost: %v", text, err)
		}
		e, ok := errors.AsType[*errs.Error](err)
		if ok != (want != "") || ok && (e.Code != errs.WrongState || !strings.Contains(e.Text, want+" open, and that file is gone")) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	if err := gone(nil); err != nil {
		t.Error(err)
	}
}

// TestHolding: of a lock that keeps a guest from being checkpointed, the client reads the file.
func TestHolding(t *testing.T) {
	was := errors.New(`checkpointing failed: locks are held of "/a \"b\"" in mount "main:/v", which is shared`)
	e, ok := errors.AsType[*errs.Error](holding(was))
	if !ok || e.Code != errs.WrongState || !strings.Contains(e.Text, `holds a lock of "/v/a \"b\"", on a volume`) || !errors.Is(e, was) {
		t.Errorf("%+v", e)
	}
	for _, other := range []error{nil, errors.New("locks are held of nothing")} {
		if err := holding(other); err != other { //nolint:errorlint // the same one
			t.Errorf("%v became %v", other, err)
		}
	}
}
