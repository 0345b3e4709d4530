package terminate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/egress/child"
)

// asChild in the environment makes this program the child, without its walls.
const asChild = "TERMINATE_CHILD"

func TestMain(m *testing.M) {
	verb := Serve((&clerk{}).maker)
	confine.MainOfTest(map[string]confine.Verb{Verb: verb})
	if os.Getenv(asChild) != "" {
		if err := verb(nil); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestProcess: a process of its own serves requests, in memory that does not grow with them,
// and ends when the daemon is gone.
func TestProcess(t *testing.T) { testProcess(t, bare) }

// TestConfined is TestProcess behind the walls that a test binary can have (confine.MainOfTest).
func TestConfined(t *testing.T) {
	hosttest.Root(t)
	testProcess(t, confined)
}

// bare starts a child that is a plain process.
func bare(t *testing.T, line *os.File) (pid int, wait func() error) {
	t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), asChild+"=1")
	var said bytes.Buffer
	c.ExtraFiles, c.Stderr = []*os.File{line}, &said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	return c.Process.Pid, func() error {
		err := c.Wait()
		if said.Len() > 0 { // the daemon logs it
			err = errors.Join(err, errors.New(said.String()))
		}
		return err
	}
}

// confined starts one as the daemon does.
func confined(t *testing.T, line *os.File) (pid int, wait func() error) {
	t.Helper()
	c := confine.Child{Verb: Verb, Files: []*os.File{line}, Serves: true, Memory: Memory}
	p, err := confine.Start(context.WithoutCancel(t.Context()), c)
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	return p.Pid(), p.Wait
}

func testProcess(t *testing.T, start func(*testing.T, *os.File) (int, func() error)) {
	ours, theirs, err := child.Pair()
	if err != nil {
		t.Fatal(err)
	}
	pid, wait := start(t, theirs)
	theirs.Close()
	line := must(child.NewConn(ours, MaxBody, false))
	d := deskOf(t, line, newSite(t, http.HandlerFunc(talkative), true, nil).dial)
	runs := make(chan bool, 1)
	go line.Run(func(m child.Message) { //nolint:errcheck // the end of the child says
		if m.Kind > child.MaxKind { // it runs
			runs <- true
			return
		}
		d.handle(m)
	})
	<-runs
	d.configure(line)
	const size = 128 << 20
	for _, h2 := range []bool{false, true} {
		c := d.client(h2)
		get(t, c, request(t, "GET", "https://"+host+"/1", nil))
		idle := peak(t, pid)
		up := request(t, "POST", "https://"+host+"/1", io.LimitReader(zeros{}, size))
		up.ContentLength = size
		if resp, _ := get(t, c, up); resp.Header.Get("X-Got") != strconv.Itoa(size) {
			t.Errorf("the server got %s bytes", resp.Header.Get("X-Got"))
		}
		resp, err := c.Do(request(t, "GET", fmt.Sprintf("https://%s/%d", host, size), nil))
		if err != nil {
			t.Fatal(err)
		}
		if n, err := io.Copy(io.Discard, resp.Body); err != nil || n != size {
			t.Errorf("%d bytes, %v", n, err)
		}
		resp.Body.Close()
		grown := peak(t, pid) - idle
		if t.Logf("idle %d KiB, grown by %d KiB", idle, grown); grown > 32<<10 {
			t.Error("that is more than 32 MiB")
		}
		c.CloseIdleConnections()
	}
	c := d.client(false)
	get(t, c, request(t, "GET", "https://"+host+"/unasked", nil))
	c.CloseIdleConnections()
	d.closed() // the child has read all
	line.Close()
	if err := wait(); err != nil {
		t.Error(err)
	}
}

// talkative is sized, and sends more than it was asked for /unasked: net/http would print that.
func talkative(rw http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/unasked" {
		sized(rw, r)
		return
	}
	c, _, err := http.NewResponseController(rw).Hijack()
	if err != nil {
		return // the guest says
	}
	defer c.Close()
	io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nX: "+secret) //nolint:errcheck // likewise
}

// peak is the most memory that a process has had, in KiB (proc_pid_status(5), VmHWM).
func peak(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "VmHWM:")
	n, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		t.Fatal(err)
	}
	return n
}
