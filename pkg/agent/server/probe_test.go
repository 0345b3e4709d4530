package server

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/agent"
)

// TestProbe has the daemon's client try things here: it is told why they fail,
// takes no more than it wants, and leaves nothing behind.
func TestProbe(t *testing.T) {
	e := newEnv(t)
	c := agent.New(func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", e.http.Listener.Addr().String())
	}, "tok")
	defer c.Close()
	for command, want := range map[string][2]string{
		"echo fine":                              {"fine\n", ""},
		"echo out; echo err >&2; exit 3":         {"", "exited with code 3"},
		"sleep 100":                              {"", "took longer than 500ms"},
		"yes":                                    {"y\n", "prints more than"},
		"/no/such/program":                       {"", "code 127|no such file"},
		"kill -9 $$":                             {"", "exited with code 137"},
		`printf 'x%.0s' $(seq 3000); echo "end"`: {"xend\n", ""},
		`printf '\377\033[2J'`:                   {"\uFFFD", ""},
	} {
		limit := 20 * time.Second // those that end by themselves may take it, on a busy host
		switch command {
		case "sleep 100":
			limit = 500 * time.Millisecond
		case "yes": // goes on until then, though nobody reads it any more
			limit = 2 * time.Second
		}
		var output string
		var err error
		took, _ := hosttest.Soonest(5*time.Second, func() error {
			output, err = c.Probe(t.Context(), command, limit)
			return nil
		})
		said := want[1] == "" && err == nil
		for text := range strings.SplitSeq(want[1], "|") {
			said = said || err != nil && text != "" && strings.Contains(err.Error(), text)
		}
		if !said || !strings.Contains(output, want[0]) || len(output) > agent.MaxProbeOutput || took > 5*time.Second {
			t.Errorf("%s: %q, %v after %v", command, output, err, took)
		}
	}
	deadline := time.Now().Add(20 * time.Second)
	for left := -1; left != 0; {
		left = e.s.commands.Known()
		if time.Now().After(deadline) {
			t.Fatalf("%d probes are remembered", left)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestListening(t *testing.T) {
	e := newEnv(t)
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		path := fmt.Sprint("/listening/", l.Addr().(*net.TCPAddr).Port)
		e.call(200, "GET", path, nil)
		l.Close()
		e.call(502, "GET", path, nil)
	}
	for _, port := range []string{"", "0", "70000", "x", "80/x"} {
		e.call(400, "GET", "/listening/"+port, nil)
	}
}
