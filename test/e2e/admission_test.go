package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// place finds for how many others a sandbox waits.
var place = regexp.MustCompile(`^waiting for (\d+) creations? before it$`)

// places are those of all sandboxes that wait.
func (h host) places(t *testing.T) map[string]int {
	t.Helper()
	all, err := h.api.List(t.Context(), client.Filter{States: []string{wire.Pending}})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]int{}
	for _, sb := range all {
		if m := place.FindStringSubmatch(sb.Status.Message); m != nil {
			out[sb.ID], _ = strconv.Atoi(m[1])
		}
	}
	return out
}

// post asks for n sandboxes and waits for none of them. It asks for all at once, or
// on a disk that is slow to sync one would be made before the next is asked for.
func post(t *testing.T, c *client.Client, n int, runtime, who string) (ids []string) {
	t.Helper()
	ids = make([]string, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			r := spec(runtime)
			r.Extensions[wire.ExtName] = fmt.Sprintf("%s-%d", who, i)
			sb, err := c.Create(t.Context(), r, false)
			if err != nil {
				t.Error(err)
			} else if sb.Status.State != wire.Pending {
				t.Errorf("%s is %+v", sb.ID, sb.Status)
			}
			ids[i] = sb.ID
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return ids
}

// arrivals notes the names of sandboxes in the order in which they run.
type arrivals struct {
	mu    sync.Mutex
	names []string
}

func (a *arrivals) follow(ctx context.Context, c *client.Client) {
	for e, err := range c.Events(ctx, time.Time{}, client.Notices{}) {
		if err == nil && e.Type == "running" {
			a.mu.Lock()
			a.names = append(a.names, e.Name)
			a.mu.Unlock()
		}
	}
}

func (a *arrivals) list() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]string(nil), a.names...)
}

// TestQueue asks for far more at once than are brought up at once: each is told
// its place, which falls, two clients take turns, and all come to run.
func TestQueue(t *testing.T) {
	h := newHost(t, daemontest.Options{Config: []string{"[limits]", "max_creating = 2"}})
	before := h.empty(t)
	tcp, err := client.New("tcp://"+h.TCP, daemontest.Key)
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			var seen arrivals
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			go seen.follow(ctx, h.api)
			h.create(t, spec(runtime)) // the stream of events has begun when this is seen
			settles(t, func() error {
				if len(seen.list()) == 0 {
					h.deleteAll(t)
					h.create(t, spec(runtime))
					return errors.New("no events come")
				}
				return nil
			})
			var already int
			var ids []string
			var at map[string]int
			for range 5 { // this process may be late to ask
				h.deleteAll(t)
				already = len(seen.list())
				ids = append(post(t, h.api, 20, runtime, "many"), post(t, tcp, 10, runtime, "few")...)
				if at = h.places(t); len(at) >= 10 {
					break
				}
			}
			if len(at) < 10 {
				t.Fatalf("only %d wait: %v", len(at), at)
			}
			taken := map[int]bool{}
			for id, n := range at {
				if n < 1 || n > len(at) || taken[n] {
					t.Errorf("%s waits for %d, of %d that wait", id, n, len(at))
				}
				taken[n] = true
			}
			line := slices.SortedFunc(maps.Keys(at), func(a, b string) int { return at[a] - at[b] })
			few := func(id string) bool { return slices.Contains(ids[20:], id) }
			n := len(slices.DeleteFunc(slices.Clone(line), func(id string) bool { return !few(id) }))
			for i := 1; i < 2*min(n, len(line)-n); i++ { // as long as both have some
				if few(line[i]) == few(line[i-1]) {
					t.Errorf("places %d and %d are one client's", i, i+1)
				}
			}
			for limit := time.Now().Add(hosttest.Patient(time.Minute)); len(at) > 0; {
				now := h.places(t)
				for id, n := range now {
					if n > at[id] {
						t.Errorf("%s waited for %d and then for %d", id, at[id], n)
					}
				}
				for id, n := range at { // whose turn came were the first
					if _, waits := now[id]; !waits && n > len(at)-len(now) {
						t.Errorf("%s waited for %d, and %d turns came", id, n, len(at)-len(now))
					}
				}
				at = now
				if time.Now().After(limit) {
					t.Fatalf("the queue stands: %v", at)
				}
			}
			for _, id := range ids {
				h.awaitState(t, id, wire.Running, 30*time.Second)
			}
			settles(t, func() error {
				if n := len(seen.list()) - already; n < len(ids) {
					return fmt.Errorf("%d of %d events", n, len(ids))
				}
				return nil
			})
			t.Log(strings.Join(seen.list()[already:], " "))
			h.answers(t, ids[29])
			h.deleteAll(t)
			h.holdsOnly(t, before)
		})
	}
}

// TestDeleteInQueue deletes a sandbox that waits: at once, and it never runs.
func TestDeleteInQueue(t *testing.T) {
	h := newHost(t, daemontest.Options{Config: []string{"[limits]", "max_creating = 1"}})
	before := h.empty(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			// On a busy host none may be left that wait when the deleted are gone.
			soon(t, time.Second, "delete what waits, and who waits for it", func() time.Duration { return h.deleteInQueue(t, runtime) })
			h.holdsOnly(t, before)
		})
	}
}

// deleteInQueue deletes the last two of thirteen, and returns how long that took,
// or an hour where others before them did not wait any more.
func (h host) deleteInQueue(t *testing.T, runtime string) time.Duration {
	t.Helper()
	ids := post(t, h.api, 12, runtime, "w")
	defer h.deleteAll(t)
	at := h.places(t)
	last := slices.MaxFunc(ids, func(a, b string) int { return at[a] - at[b] })
	if at[last] < 2 {
		return time.Hour
	}
	gone := make(chan error, 1)
	go func() { // who waits for it hears so
		r := spec(runtime)
		r.Extensions[wire.ExtName] = "waited-for"
		_, err := h.api.Create(t.Context(), r, true)
		gone <- err
	}()
	settles(t, func() error { _, err := h.api.Get(t.Context(), "waited-for"); return err })
	lasted := took(func() {
		for _, id := range []string{last, "waited-for"} {
			if err := h.api.Delete(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			h.gone(t, id)
		}
	})
	wait := len(h.places(t)) // those that were before them
	if err := <-gone; wait > 0 && !errs.Is(err, errs.NotFound) {
		t.Errorf("who waited for it got %v", err)
	}
	for _, id := range slices.DeleteFunc(ids, func(id string) bool { return id == last }) {
		h.awaitState(t, id, wire.Running, 30*time.Second)
	}
	if wait == 0 {
		return time.Hour
	}
	return lasted
}

// TestKillWithQueue kills the daemon while most wait: each is there afterwards
// and says what became of it, and nothing is left of any.
func TestKillWithQueue(t *testing.T) {
	h := newHost(t, daemontest.Options{Config: []string{"[limits]", "max_creating = 2"}})
	before := h.empty(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			// Where this process stands still between the two, fewer wait.
			var waited []int
			for len(waited) < 5 && (len(waited) == 0 || waited[len(waited)-1] < 10) {
				waited = append(waited, h.killWithQueue(t, runtime))
				h.deleteAll(t)
				h.holdsOnly(t, before)
			}
			if waited[len(waited)-1] < 10 {
				t.Errorf("of 25 waited %v", waited)
			}
		})
	}
}

// killWithQueue asks for 25 sandboxes, kills the daemon, and returns how many waited.
func (h host) killWithQueue(t *testing.T, runtime string) (waited int) {
	t.Helper()
	ids := post(t, h.api, 25, runtime, "k")
	h.Kill()
	if err := h.TryStart(); err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		sb, err := h.api.Get(t.Context(), id)
		switch {
		case err != nil:
			t.Errorf("%s is lost: %v", id, err)
		case sb.Status.State == wire.Running:
			h.answers(t, id)
		case sb.Status.State == wire.Failed && strings.Contains(sb.Status.Message, "sandboxd stopped in the middle"):
			waited++
		default:
			t.Errorf("%s is %+v", id, sb.Status)
		}
	}
	return waited
}

// setting restarts the daemon with one line more in a table of its configuration.
func (h host) setting(t *testing.T, table, line string) {
	t.Helper()
	b, err := os.ReadFile(h.Config)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(string(b), "["+table+"]\n", "["+table+"]\n"+line+"\n", 1)
	h.Stop()
	if err := os.WriteFile(h.Config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	h.Start()
	if err := os.WriteFile(h.Config, b, 0o600); err != nil { // for the next one
		t.Fatal(err)
	}
}

// refused fails the test unless a create is, for the reason that words give.
func (h host) refused(t *testing.T, code errs.Code, words ...string) {
	t.Helper()
	_, err := h.api.Create(t.Context(), spec("runc"), true)
	e, ok := errors.AsType[*errs.Error](err)
	if !ok || e.Code != code || e.Retry < time.Second || e.Retry > time.Minute {
		t.Errorf("a create: %+v", err)
		return
	}
	for _, w := range words {
		if !strings.Contains(e.Text, w) {
			t.Errorf("%q does not say %q", e.Text, w)
		}
	}
}

// TestBounds meets each bound of the host, with a sandbox that goes on through
// all of it.
func TestBounds(t *testing.T) {
	h := newHost(t, daemontest.Options{Config: []string{"[limits]", ""}})
	before := h.empty(t)
	r := spec("runc")
	r.Extensions[wire.ExtTimeout] = "10m"
	keep := h.create(t, r)
	for _, b := range []struct {
		table, line string
		words       []string
	}{
		{"limits", "max_sandboxes = 1", []string{"its maximum of 1 sandbox ", "limits.max_sandboxes", "sandboxctl rm"}},
		{"limits", `memory_reserve = "64Ti"`, []string{"MiB of free memory", "limits.memory_reserve"}},
		{"storage", `reserve = "64Ti"`, []string{"the storage pool has", "storage.reserve", "sandboxd pool grow"}},
	} {
		h.setting(t, b.table, b.line)
		h.refused(t, errs.Exhausted, b.words...)
		h.answers(t, keep.ID)
	}
	h.setting(t, "limits", "max_creating = 3")
	h.create(t, spec("runsc"))
	h.deleteAll(t)
	h.holdsOnly(t, before)
}

// TestDrain empties a host across a restart of the daemon.
func TestDrain(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	t.Cleanup(func() { os.Remove(filepath.Join(h.StateDir, "draining")) }) // other tests use the directory, whatever becomes of this one
	before := h.empty(t)
	keep := h.create(t, spec("runsc"))
	tcp, err := client.New("tcp://"+h.TCP, daemontest.Key)
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	if err := tcp.System().Drain(t.Context(), true); !errs.Is(err, errs.Denied) {
		t.Errorf("drained from afar: %v", err)
	}
	drain := func(args ...string) (string, error) {
		var out bytes.Buffer
		cmd := exec.CommandContext(t.Context(), daemontest.Bin("sandboxctl"), append([]string{"system", "drain"}, args...)...)
		cmd.Env = append(os.Environ(), "SANDBOXD_HOST=unix://"+h.Socket)
		cmd.Stdout, cmd.Stderr = &out, &out
		err := cmd.Run()
		return out.String(), err
	}
	if out, err := drain(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for range 2 {
		h.refused(t, errs.Unavailable, "draining since", "system drain --off")
		h.answers(t, keep.ID)
		if i, err := h.api.System().Info(t.Context()); err != nil || i.DrainingSince == nil {
			t.Errorf("info: %+v, %v", i, err)
		}
		resp, err := http.Get("http://" + h.TCP + "/health")
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("health: %v, %v", resp, err)
		}
		resp.Body.Close()
		h.Kill()
		h.Start()
	}
	// However short the time is, they are counted once.
	if out, err := drain("--wait", "--timeout", "1ms"); err == nil || !strings.Contains(out, "1 sandbox still runs") {
		t.Errorf("%v: %s", err, out)
	}
	waits := make(chan string, 1)
	go func() {
		out, err := drain("--wait", "--timeout", "20s")
		waits <- fmt.Sprint(out, err)
	}()
	if err := h.api.Delete(t.Context(), keep.ID); err != nil {
		t.Error(err)
	}
	if said := <-waits; said != "<nil>" {
		t.Errorf("drain --wait: %s", said)
	}
	if out, err := drain("--off"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	h.create(t, spec("runc"))
	h.deleteAll(t)
	h.holdsOnly(t, before)
}
