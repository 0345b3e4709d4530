package client

import (
	"bufio"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/systemd"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// listens is set in a process that takes the socket which systemd passes, and serves nothing.
const listens = "CLIENT_TEST_LISTENS"

// TestDeserted: while systemd holds the socket, and no daemon lives that has taken it, a client says so after a few
// looks. It waits for a daemon that lives, and for one that comes in time.
func TestDeserted(t *testing.T) {
	if os.Getenv(listens) != "" {
		if err := systemd.Claim(); err != nil {
			t.Fatal(err)
		}
		os.Stdout.WriteString("listening\n") //nolint:errcheck // the other side notices
		os.Stdin.Read(make([]byte, 1))       //nolint:errcheck // until it is closed
		os.Exit(0)
	}
	path := filepath.Join(t.TempDir(), "s.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}) // this test is systemd
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	socket, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	daemon := func() (end func()) {
		t.Helper()
		cmd := exec.Command("sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" -test.run='^TestDeserted$'`, os.Args[0])
		cmd.Env, cmd.ExtraFiles = append(os.Environ(), listens+"=1"), []*os.File{socket}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(out).ReadString('\n'); line != "listening\n" {
			t.Fatalf("the daemon says %q, %v", line, err)
		}
		return func() { in.Close(); cmd.Wait() } //nolint:errcheck // it ends
	}
	client := func(look, answer time.Duration) *Client {
		t.Helper()
		c, err := New("unix://"+path, "")
		if err != nil {
			t.Fatal(err)
		}
		c.look, c.answer = look, answer
		return c
	}

	end := daemon()
	pid, lives := listener(path)
	if pid == 0 || pid == os.Getpid() || !lives {
		t.Fatalf("the process that listens: %d, lives: %v", pid, lives)
	}
	_, err = client(time.Millisecond, 200*time.Millisecond).Get(t.Context(), "lab")
	if err == nil || !strings.Contains(err.Error(), "did not answer within 200ms") {
		t.Errorf("a daemon that lives, and does not answer: %v", err)
	}
	end()
	if _, lives := listener(path); lives {
		t.Fatal("the daemon that has ended lives")
	}
	_, err = client(10*time.Millisecond, time.Hour).Get(t.Context(), "lab")
	if !errs.Is(err, errs.Unavailable) || !strings.Contains(err.Error(), "journalctl -u sandboxd") {
		t.Errorf("no daemon: %v", err)
	}
	if err := client(10*time.Millisecond, time.Hour).Stop(t.Context(), "lab", 0); err == nil {
		t.Error("no daemon, and a request that changes something: no error")
	}

	// The next daemon, which is this process, answers what waits.
	answered := make(chan error, 1)
	go func() { answered <- client(time.Second, time.Hour).Stop(t.Context(), "lab", 0) }()
	if err := unix.Listen(int(socket.Fd()), unix.SOMAXCONN); err != nil {
		t.Fatal(err)
	}
	if err := unix.SetNonblock(int(socket.Fd()), true); err != nil { // Fd made the listener block
		t.Fatal(err)
	}
	s := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })}
	defer s.Close()
	go s.Serve(l) //nolint:errcheck // it ends with the test
	if err := <-answered; err != nil {
		t.Errorf("a daemon came: %v", err)
	}
}
