package e2e_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// A network of its own beyond the host, with one address in it.
const (
	awayNetns = "sandboxd-away"
	awayLink  = "away0"
	awayAddr  = "198.51.100.1"
)

// serveAway echoes on TCP 80 and 443 of awayAddr until the end of the test, and counts
// the bytes.
func serveAway(t *testing.T) *atomic.Int64 {
	t.Helper()
	drop := func() { // also what a killed run left
		_ = exec.Command("ip", "link", "del", awayLink).Run()
		_ = exec.Command("ip", "netns", "del", awayNetns).Run()
	}
	drop()
	t.Cleanup(drop)
	carried := new(atomic.Int64)
	for _, line := range []string{
		"netns add " + awayNetns,
		"link add " + awayLink + " type veth peer name away netns " + awayNetns,
		"addr add 198.51.100.254/24 dev " + awayLink,
		"link set " + awayLink + " up",
		"-n " + awayNetns + " addr add " + awayAddr + "/24 dev away",
		"-n " + awayNetns + " link set away up",
		"-n " + awayNetns + " route add default via 198.51.100.254",
	} {
		if out, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", line, err, out)
		}
	}
	ns, err := os.Open("/run/netns/" + awayNetns)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with its namespace
		err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		for _, port := range []string{"80", "443"} {
			if err != nil {
				break
			}
			var l net.Listener
			if l, err = net.Listen("tcp4", "0.0.0.0:"+port); err == nil {
				t.Cleanup(func() { l.Close() })
				go echo(l, carried)
			}
		}
		made <- err
	}()
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	return carried
}

type tally struct{ n *atomic.Int64 }

func (t tally) Write(b []byte) (int, error) { t.n.Add(int64(len(b))); return len(b), nil }

func echo(l net.Listener, carried *atomic.Int64) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			io.Copy(io.MultiWriter(c, tally{carried}), c) //nolint:errcheck // the guest sees what is missing
		}()
	}
}

// Both write lines of a time in ms and a word, to their ends; the second two times,
// of the beginning and the end of an attempt.
const (
	// One connection, on which a line goes to and fro.
	talk = `exec 3<>/dev/tcp/` + awayAddr + `/443
while echo x >&3 && read -t 60 -u 3; do echo $(date +%s%3N) tick; sleep 0.05; done; echo $(date +%s%3N) broken`
	// Ever new connections; each may take a second.
	knock = `while :; do
for port in 443 80; do
at=$(date +%s%3N); timeout 1 bash -c '</dev/tcp/` + awayAddr + `/'$port 2>/dev/null && was=open || was=shut
echo $at $(date +%s%3N) $was $port
done; sleep 0.05; done`
)

// wantCounted holds that the traffic of a sandbox, whose daemon was killed, is all that its
// one link has carried.
func wantCounted(t *testing.T, h host, id string) {
	t.Helper()
	carried := func() (n int64) {
		b, err := os.ReadFile("/sys/class/net/sb-" + id + "/statistics/rx_bytes")
		if err == nil {
			_, err = fmt.Sscan(string(b), &n)
		}
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	least := carried()
	s, err := h.api.Policy(id).Traffic(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if most := carried(); s.TxBytes < least || s.TxBytes > most || s.Allowed == 0 || s.Denied == 0 {
		t.Errorf("the log has %+v; its link carried %d to %d bytes", s, least, most)
	}
}

// TestNetworkWhileAway kills the daemon under a sandbox that may reach one
// port: the connection it has goes on, no new one opens until there is a
// daemon again, and what was denied is denied at all times.
func TestNetworkWhileAway(t *testing.T) {
	h := connect(t, daemontest.Prepare(t, daemontest.Options{}))
	carried := serveAway(t) // under the lock that Prepare took: there is one on a host
	h.Start()
	daemontest.Image(t, h.Daemon, "base")
	for _, name := range runtimes {
		t.Run(name, func(t *testing.T) {
			r := spec(name)
			r.Extensions[wire.ExtAllow] = "198.51.100.0/24:443"
			sb := h.create(t, r)
			start := func(script string) string {
				p, err := h.api.Start(t.Context(), sb.ID, client.Command{Argv: []string{"bash", "-c", script}, Background: true})
				if err != nil {
					t.Fatal(err)
				}
				p.Close()
				return p.ID
			}
			talking, knocking := start(talk), start(knock)
			said := func(id, word string, from, to time.Time) (all []int64) {
				var b bytes.Buffer
				if _, err := h.api.Commands(sb.ID).Logs(t.Context(), id, 0, &b); err != nil {
					t.Fatal(err)
				}
				for line := range strings.Lines(b.String()) {
					var at, end int64
					if n, _ := fmt.Sscan(line, &at, &end); n == 1 {
						end = at
					}
					if strings.Contains(line, word) && at >= from.UnixMilli() && end < to.UnixMilli() {
						all = append(all, at)
					}
				}
				return all
			}
			ever := time.Now().Add(time.Hour)
			works := func(since time.Time) {
				eventually(t, 30*time.Second, func() error {
					lines := len(said(talking, "tick", since, ever))
					opened, denied := len(said(knocking, "open 443", since, ever)), len(said(knocking, "shut 80", since, ever))
					if lines < 10 || opened == 0 || denied == 0 {
						return fmt.Errorf("with a daemon the connection carried %d lines, %d opened, %d were denied", lines, opened, denied)
					}
					return nil
				})
			}
			works(time.Time{})
			h.Kill()
			killed, from := time.Now(), carried.Load()
			time.Sleep(3 * time.Second) // new connections are tried
			eventually(t, 30*time.Second, func() error {
				if n := (carried.Load() - from) / 2; n < 12 { // lines; what knocks sends nothing
					return fmt.Errorf("while no daemon was there %d lines came", n)
				}
				return nil
			})
			back := time.Now()
			if err := h.TryStart(); err != nil {
				t.Fatal(err)
			}
			served := time.Now()
			works(served)
			wantCounted(t, h, sb.ID)

			if n := len(said(talking, "tick", killed.Add(50*time.Millisecond), back)); n < 10 {
				t.Errorf("while no daemon was there the connection carried %d lines", n)
			}
			if n := len(said(talking, "broken", time.Time{}, ever)); n > 0 {
				t.Error("the connection broke")
			}
			// What began and ended while no daemon was there, by the clock of the guest.
			if n := len(said(knocking, "open 443", killed.Add(50*time.Millisecond), back.Add(-50*time.Millisecond))); n > 0 {
				t.Errorf("%d connections opened while no daemon was there", n)
			}
			if n := len(said(knocking, "open 80", time.Time{}, ever)); n > 0 {
				t.Errorf("%d connections opened that were never allowed", n)
			}
			if t.Failed() {
				for _, id := range []string{talking, knocking} {
					var b bytes.Buffer
					_, _ = h.api.Commands(sb.ID).Logs(t.Context(), id, 0, &b)
					t.Logf("killed at %d, back at %d, served at %d; it said\n%s", killed.UnixMilli(), back.UnixMilli(), served.UnixMilli(),
						b.String())
				}
			}
			h.deleteAll(t)
		})
	}
}
