package downtime_test

import (
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/test/bench/downtime"
)

// limit is how long clients may be without an API when a daemon is replaced. A host that is busy may
// take three times as long as for the same sandboxes when nobody follows anything.
const limit = time.Second

// TestRestart restarts a daemon under sandboxes whose output is followed: clients are without an
// API for a moment, and nothing is lost. With a socket that is held, none is refused.
func TestRestart(t *testing.T) {
	d := daemontest.Prepare(t, daemontest.Options{PoolSize: "8Gi", Config: []string{"[limits]", "max_sandboxes = 300"}})
	d.Start()
	daemontest.Image(t, d, "base")
	d.Stop()
	for name, held := range map[string]bool{"socket held": true, "own socket": false} {
		t.Run(name, func(t *testing.T) {
			var s *downtime.Socket
			if held {
				var err error
				if s, err = downtime.Hold(d.Socket); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { s.Close(); os.Remove(d.Socket) })
			}
			restarts(t, d, s)
		})
	}
}

func restarts(t *testing.T, d *daemontest.Daemon, s *downtime.Socket) {
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	serve := func() (*os.Process, <-chan struct{}) {
		p, ended, err := downtime.Serve(s, log, daemontest.Bin("sandboxd"), "serve", "--config", d.Config)
		if err != nil {
			b, _ := os.ReadFile(log.Name())
			t.Fatalf("%v; it said:\n%s", err, b)
		}
		return p, ended
	}
	stop := func(p *os.Process, ended <-chan struct{}) {
		if err := p.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		<-ended
	}
	p, ended := serve()
	defer func() { stop(p, ended) }()
	cl, err := client.New("unix://"+d.Socket, "")
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	var ids []string
	defer func() {
		for _, id := range ids {
			if err := cl.Delete(t.Context(), id); err != nil {
				t.Error(err)
			}
		}
	}()
	for range sandboxes {
		for _, runtime := range []string{"runc", "runsc"} {
			sb, err := cl.Create(t.Context(), wire.CreateRequest{
				Image:      &wire.Image{URI: "base"},
				Extensions: map[string]string{wire.ExtRuntime: runtime, wire.ExtIdle: "true", wire.ExtOneShot: "true"},
			}, true)
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, sb.ID)
		}
	}
	replace := func() time.Duration {
		t.Helper()
		w, err := downtime.Ask(t.Context(), d.Socket)
		if err != nil {
			t.Fatal(err)
		}
		started := time.Now()
		stop(p, ended)
		stopped := time.Now()
		p, ended = serve()
		served := time.Now()
		gap, from, failed := w.Longest()
		t.Logf("%s without an API, from %s after SIGTERM; it ended after %s and served after %s; %d requests failed", gap,
			from.Sub(started), stopped.Sub(started), served.Sub(stopped), failed)
		if s != nil && failed > 0 {
			t.Errorf("%d requests were refused although the socket is held", failed)
		}
		return gap
	}
	most := max(limit, 3*replace())
	crowd, err := downtime.Write(t.Context(), cl, ids, len(ids)/2)
	if err != nil {
		t.Fatal(err)
	}
	var gaps []time.Duration
	for range 5 {
		gaps = append(gaps, replace())
	}
	slices.Sort(gaps)
	if median := gaps[len(gaps)/2]; median > most {
		t.Errorf("%s without an API, want %s at most: %v", median, most, gaps)
	}
	if lost, err := crowd.End(t.Context()); err != nil || lost != (downtime.Loss{}) {
		t.Errorf("lost %+v, %v", lost, err)
	}
	if t.Failed() {
		b, _ := os.ReadFile(log.Name())
		t.Logf("the daemon said:\n%s", b)
	}
}
