package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain is also the launcher of these tests.
func TestMain(m *testing.M) {
	if os.Getenv("LAUNCH_TEST") == "" {
		os.Exit(m.Run())
	}
	err := Serve(func(id, bundle string, stdin *os.File) error {
		switch id {
		case "die":
			os.Exit(7)
		case "long":
			return errors.New(strings.Repeat("x", 2*maxPacket))
		case "fail":
			return fmt.Errorf("no such bundle: %s", bundle)
		case "wait": // says that it is at work, and waits until the test closes its end
			fmt.Fprint(stdin, "!")
		}
		b, err := io.ReadAll(stdin)
		if err == nil && id == "echo" {
			err = fmt.Errorf("read %s", b)
		}
		return err
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func client(t *testing.T) *Client {
	t.Helper()
	c, err := New(func() *exec.Cmd {
		cmd := exec.Command(os.Args[0])
		cmd.Env = []string{"LAUNCH_TEST=1"}
		cmd.Stderr = os.Stderr
		return cmd
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func null(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestStart(t *testing.T) {
	c, in := client(t), null(t)
	if err := c.Start(t.Context(), "ok", "/b", in); err != nil {
		t.Error(err)
	}
	if err := c.Start(t.Context(), "fail", "/b", in); err == nil || err.Error() != "no such bundle: /b" {
		t.Errorf("error %v, want the launcher's own words", err)
	}
	if err := c.Start(t.Context(), "long", "/b", in); err == nil || len(err.Error()) > maxErr+8 {
		t.Error("an error is longer than a packet")
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	fmt.Fprint(w, "hello")
	w.Close()
	if err := c.Start(t.Context(), "echo", "/b", r); err == nil || err.Error() != "read hello" {
		t.Errorf("error %v: stdin did not arrive", err)
	}
	if _, err := r.Stat(); err != nil {
		t.Errorf("Start closed stdin: %v", err)
	}
}

func TestManyAtOnce(t *testing.T) {
	c, in := client(t), null(t)
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			id, bundle := "fail", fmt.Sprint(i)
			if err := c.Start(t.Context(), id, bundle, in); err == nil || !strings.HasSuffix(err.Error(), " "+bundle) {
				t.Errorf("%s: %v", bundle, err)
			}
		})
	}
	all.Wait()
}

// A launcher that died idle is replaced unseen; one that dies with a start in
// hand fails that start, and every other one in its hands.
func TestDeath(t *testing.T) {
	c, in := client(t), null(t)
	for range 3 {
		p, err := os.FindProcess(c.Pid())
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Kill(); err != nil {
			t.Fatal(err)
		}
		c.mu.Lock()
		dead := c.live.dead
		c.mu.Unlock()
		<-dead
		if err := c.Start(t.Context(), "ok", "/b", in); err != nil {
			t.Errorf("after the death of an idle launcher: %v", err)
		}
	}
	near, far := pair(t)
	other := make(chan error)
	go func() { other <- c.Start(t.Context(), "wait", "/b", far) }()
	inHand(t, near)
	if err := c.Start(t.Context(), "die", "/b", in); err == nil || !strings.Contains(err.Error(), "exit status 7") {
		t.Errorf("death during a start: %v", err)
	}
	if err := <-other; err == nil {
		t.Error("a start in the hands of a dead launcher succeeded")
	}
	if err := c.Start(t.Context(), "ok", "/b", in); err != nil {
		t.Error(err)
	}
}

// A start whose context ends is settled before Start returns.
func TestCancel(t *testing.T) {
	c := client(t)
	near, far := pair(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Start(ctx, "wait", "/b", far) }()
	inHand(t, near)
	cancel()
	select {
	case err := <-done:
		t.Fatalf("returned %v while the launcher was at work", err)
	case <-time.After(20 * time.Millisecond): // nothing happens: there is no event for that
	}
	near.Close()
	far.Close()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want canceled", err)
	}
	if err := c.Start(ctx, "ok", "/b", null(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("start under a context that has ended: %v", err)
	}
}

// A start that hangs costs the others in the same hands nothing: new ones go to
// another launcher, and its own is killed when the last of the old is done.
func TestStuck(t *testing.T) {
	c := client(t)
	c.patience = 20 * time.Millisecond
	first := c.Pid()
	begin := func(ctx context.Context) (near, far *os.File, done chan error) {
		near, far = pair(t)
		done = make(chan error, 1)
		go func() { done <- c.Start(ctx, "wait", "/b", far) }()
		inHand(t, near)
		return near, far, done
	}
	near, far, other := begin(t.Context())
	ctx, cancel := context.WithCancel(t.Context())
	_, _, stuck := begin(ctx)
	cancel()
	for c.Pid() == first {
		runtime.Gosched()
	}
	if err := c.Start(t.Context(), "ok", "/b", null(t)); err != nil || c.Pid() == first {
		t.Errorf("a new start beside one that hangs: %v", err)
	}
	select {
	case err := <-stuck:
		t.Errorf("returned %v while its launcher may be at work", err)
	default:
	}
	near.Close()
	far.Close()
	if err := <-other; err != nil {
		t.Errorf("a start in the same hands: %v", err)
	}
	if err := <-stuck; !errors.Is(err, context.Canceled) {
		t.Errorf("the one that hung: %v, want canceled", err)
	}
}

// pair returns a connected pair; far is for a launcher.
func pair(t *testing.T) (near, far *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	near, far = os.NewFile(uintptr(fds[0]), "near"), os.NewFile(uintptr(fds[1]), "far")
	t.Cleanup(func() { near.Close(); far.Close() })
	return near, far
}

// inHand returns when the launcher works on the start whose stdin is connected to near.
func inHand(t *testing.T, near *os.File) {
	t.Helper()
	if _, err := near.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
}

func TestUselessLauncher(t *testing.T) {
	if _, err := New(func() *exec.Cmd { return exec.Command("/nonexistent/launcher") }); err == nil {
		t.Error("no error for a launcher that is not there")
	}
	c, err := New(func() *exec.Cmd { return exec.Command("false") })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // nothing runs
	if err := c.Start(t.Context(), "ok", "/b", null(t)); err == nil {
		t.Error("a start by a launcher that only ends succeeded")
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := c.Start(t.Context(), "ok", "/b", null(t)); err == nil {
		t.Error("start after Close")
	}
}
