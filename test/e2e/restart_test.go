package e2e_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
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

// numbers is a command that writes n numbered lines, in 20 portions over about
// four seconds.
func numbers(n int) []string {
	return []string{"bash", "-c", fmt.Sprintf(`for i in $(seq 0 19); do seq $((i*%d+1)) $(((i+1)*%d)); sleep 0.2; done`, n/20, n/20)}
}

// numbered is what numbers writes.
func numbered(n int) string {
	var b strings.Builder
	for i := 1; i <= n; i++ {
		fmt.Fprintln(&b, i)
	}
	return b.String()
}

// TestRestartLosesNoOutput kills the daemon under commands that write: they go
// on, and every byte of theirs can be read afterwards. A client that comes back gets
// each byte once, and so does a command whose client comes back.
func TestRestartLosesNoOutput(t *testing.T) {
	const lines = 200_000
	want := numbered(lines)
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			sb := h.create(t, spec(runtime))
			ctx := t.Context()
			back, err := h.api.Start(ctx, sb.ID, client.Command{Argv: numbers(lines), Background: true})
			if err != nil {
				t.Fatal(err)
			}
			back.Close()
			fore, err := h.api.Start(ctx, sb.ID, client.Command{Argv: numbers(lines)})
			if err != nil {
				t.Fatal(err)
			}
			seen := gathered{some: make(chan struct{})}
			cut := make(chan error, 1)
			go func() {
				_, err := fore.Wait(&seen, &seen)
				cut <- err
			}()
			stays := stayOn(t, h, sb.ID, lines)
			<-seen.some // in the middle of it
			<-stays.some
			h.Kill()
			if err := <-cut; err == nil {
				t.Fatal("the command in the foreground ended before the daemon was killed")
			}
			time.Sleep(500 * time.Millisecond) // they write while nobody is there
			if err := h.TryStart(); err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(want, seen.String()) || seen.Len() == 0 {
				t.Errorf("the stream up to the death of the daemon has %d bytes and is not the beginning of the output", seen.Len())
			}
			for name, id := range map[string]string{"background": back.ID, "foreground": fore.ID} {
				eventually(t, 20*time.Second, func() error {
					st, err := h.api.Commands(sb.ID).Status(ctx, id)
					if err == nil && st.Running {
						err = fmt.Errorf("command %s still runs", id)
					}
					return err
				})
				st, err := h.api.Commands(sb.ID).Status(ctx, id)
				if err != nil || st.ExitCode == nil || *st.ExitCode != 0 {
					t.Errorf("%s: %+v, %v", name, st, err)
				}
				var got bytes.Buffer
				if _, err := h.api.Commands(sb.ID).Logs(ctx, id, 0, &got); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				if got.String() != want {
					t.Errorf("%s: %d bytes of output, want %d; the first line that differs is %q", name, got.Len(), len(want),
						difference(got.String(), want))
				}
			}
			stays.check(t, want)
			h.deleteAll(t)
		})
	}
}

// staying is a client that comes back to a daemon that was killed: it watches a command that
// writes, and feeds one that repeats what it reads.
type staying struct {
	gathered
	exit, catExit chan client.Exit
	input         *io.PipeWriter
	cat           bytes.Buffer
}

func stayOn(t *testing.T, h host, id string, lines int) *staying {
	t.Helper()
	s := &staying{gathered: gathered{some: make(chan struct{})}, exit: make(chan client.Exit, 1), catExit: make(chan client.Exit, 1)}
	watch := func(cmd client.Command, out io.Writer, exit chan client.Exit) *client.Process {
		p, err := h.api.Start(t.Context(), id, cmd)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			e, err := p.WaitOn(t.Context(), client.Notices{}, func(n int64) { t.Errorf("%d bytes are lost", n) }, out, out)
			if err != nil {
				t.Errorf("the client did not come back: %v", err)
			}
			exit <- e
		}()
		return p
	}
	watch(client.Command{Argv: append(numbers(lines)[:2], numbers(lines)[2]+"; exit 7")}, s, s.exit)
	cat := watch(client.Command{Argv: []string{"cat"}, Stdin: true}, &s.cat, s.catExit)
	r, w := io.Pipe()
	s.input = w
	go cat.SendStdin(t.Context(), r) //nolint:errcheck // what is missing is seen
	io.WriteString(w, "before ")     //nolint:errcheck // as above
	return s
}

func (s *staying) check(t *testing.T, want string) {
	t.Helper()
	io.WriteString(s.input, "after") //nolint:errcheck // what is missing is seen
	s.input.Close()
	if e := <-s.catExit; e.Code != 0 || s.cat.String() != "before after" {
		t.Errorf("a command that was fed over the restart: %+v, %q", e, s.cat.String())
	}
	if e := <-s.exit; e.Code != 7 || s.String() != want {
		t.Errorf("a command that was watched over the restart: %+v, %d bytes of %d; the first line that differs is %q", e, s.Len(),
			len(want), difference(s.String(), want))
	}
}

// gathered keeps what is written, and closes some when it is worth a kill.
type gathered struct {
	bytes.Buffer
	some chan struct{}
}

func (g *gathered) Write(b []byte) (int, error) {
	before := g.Len()
	n, err := g.Buffer.Write(b)
	if enough := 100_000; before < enough && g.Len() >= enough {
		close(g.some)
	}
	return n, err
}

// difference is the first line of got that is not in its place in want.
func difference(got, want string) string {
	w := strings.Split(want, "\n")
	for i, line := range strings.Split(got, "\n") {
		if i >= len(w) || line != w[i] {
			return fmt.Sprintf("%d: %s", i+1, line)
		}
	}
	return ""
}

// TestTimeoutAcrossRestart has a timeout met to the second although the daemon
// was killed and away for one, and at once by a daemon that was away for longer.
// The daemon says when it begins to erase; how long that takes is not its timers'.
func TestTimeoutAcrossRestart(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	live := func(timeout time.Duration) (all []wire.Sandbox) {
		for _, runtime := range runtimes {
			r := spec(runtime)
			r.Extensions[wire.ExtTimeout] = hosttest.Patient(timeout).String()
			all = append(all, h.create(t, r))
		}
		return all
	}
	soon(t, time.Second, "expire", func() (late time.Duration) {
		all := live(time.Hour)
		for i := range all { // how long it took to make them does not count
			if _, err := h.api.Renew(t.Context(), all[i].ID, time.Now().Add(hosttest.Patient(10*time.Second))); err != nil {
				t.Fatal(err)
			}
			at := h.expires(t, all[i].ID)
			all[i].ExpiresAt = &at
		}
		h.Kill()
		time.Sleep(time.Second)
		h.Start()
		for _, sb := range all {
			h.answers(t, sb.ID)
		}
		var wg sync.WaitGroup
		for _, sb := range all {
			wg.Go(func() { h.livesUntil(t, sb) })
		}
		wg.Wait()
		for _, sb := range all {
			late = max(late, h.expired(t, sb.ID).Sub(*sb.ExpiresAt))
		}
		return late
	})
	away := live(time.Hour)
	end := time.Now().Add(5 * time.Second)
	for _, sb := range away {
		if _, err := h.api.Renew(t.Context(), sb.ID, end); err != nil {
			t.Fatal(err)
		}
	}
	h.Kill()
	time.Sleep(time.Until(end.Add(500 * time.Millisecond)))
	h.Start()
	for _, sb := range away { // by the recovery, which comes before the API
		if err := h.unknown(t, sb.ID); err != nil {
			t.Error(err)
		}
	}
}

// livesUntil asks for a sandbox until it is gone: it runs until its time.
func (h host) livesUntil(t *testing.T, sb wire.Sandbox) {
	for gone := false; !gone; time.Sleep(10 * time.Millisecond) { // looked at from outside
		got, err := h.api.Get(t.Context(), sb.ID)
		now := time.Now()
		gone = errs.Is(err, errs.NotFound)
		if alive := err == nil && got.Status.State == wire.Running; now.Before(*sb.ExpiresAt) && !alive {
			t.Errorf("%v before its time sandbox %s is %+v, %v", sb.ExpiresAt.Sub(now), sb.ID, got.Status, err)
		} else if now.After(sb.ExpiresAt.Add(2 * time.Minute)) { // twice as late as a sweep could be
			t.Errorf("sandbox %s is still known: %+v, %v", sb.ID, got.Status, err)
			return
		}
	}
}

// expired is when the daemon began to erase a sandbox that expired.
func (h host) expired(t *testing.T, id string) time.Time {
	t.Helper()
	line := h.logged(t, time.Time{}, "op=expire sandbox="+id)
	var dur time.Duration
	if m := regexp.MustCompile(` dur=(\S+) `).FindStringSubmatch(line.text); m != nil {
		dur, _ = time.ParseDuration(m[1])
	}
	if dur == 0 {
		t.Fatalf("the daemon does not say how long it took: %s", line.text)
	}
	return line.at.Add(-dur)
}

// unknown is nil if a sandbox does not exist.
func (h host) unknown(t testing.TB, id string) error {
	sb, err := h.api.Get(t.Context(), id)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	return fmt.Errorf("sandbox %s is still known: %+v, %w", id, sb.Status, err)
}

// TestEndWhileAway has entrypoints end while no daemon is there: the next one
// knows how, and what they said last.
func TestEndWhileAway(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			well := h.create(t, spec(runtime, "sh", "-c", "sleep 5; echo done"))
			ill := h.create(t, spec(runtime, "sh", "-c", "sleep 5; echo broken >&2; exit 7"))
			shot := h.create(t, spec(runtime, "sh", "-c", "sleep 5; kill -9 $$"))
			h.Kill()
			for _, id := range []string{well.ID, ill.ID, shot.ID} { // their agents sync what they leave behind
				eventually(t, 30*time.Second, func() error { return h.lifeless(id) })
			}
			if err := h.TryStart(); err != nil {
				t.Fatal(err)
			}
			for _, c := range []struct {
				id, state, reason, says string
				code                    int
			}{
				{well.ID, wire.Terminated, "exited", "done\n", 0},
				{ill.ID, wire.Failed, "exited", "broken\n", 7},
				{shot.ID, wire.Failed, "killed", "", 137},
			} {
				i, err := h.api.Inspect(t.Context(), c.id)
				if err != nil {
					t.Fatal(err)
				}
				if s := i.Status; s.State != c.state || s.Reason != c.reason || i.LastOutput != c.says {
					t.Errorf("%+v, last output %q; want %s, %s, %q", s, i.LastOutput, c.state, c.reason, c.says)
				}
				if code := i.Sandboxd.ExitCode; code == nil || *code != c.code {
					t.Errorf("%s: exit code %v, want %d", c.id, code, c.code)
				}
			}
			h.deleteAll(t)
		})
	}
}

// TestPauseSurvivesRestart finds a paused sandbox paused: not a tick passed in it.
func TestPauseSurvivesRestart(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			sb := h.create(t, spec(runtime))
			ctx := t.Context()
			p, err := h.api.Start(ctx, sb.ID, client.Command{
				Argv:       []string{"sh", "-c", "while :; do date +%s%3N; sleep 0.05; done"},
				Background: true,
			})
			if err != nil {
				t.Fatal(err)
			}
			p.Close()
			ever := time.Now().Add(time.Hour)
			ticks := func(from, to time.Time) (all []time.Time) { // by the clock of the guest
				var b bytes.Buffer
				if _, err := h.api.Commands(sb.ID).Logs(ctx, p.ID, 0, &b); err != nil {
					t.Fatal(err)
				}
				for line := range strings.Lines(b.String()) {
					if at, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64); err == nil && at >= from.UnixMilli() &&
						at < to.UnixMilli() {
						all = append(all, time.UnixMilli(at))
					}
				}
				return all
			}
			come := func(since time.Time) error {
				if len(ticks(since, ever)) == 0 {
					return errors.New("it does not tick")
				}
				return nil
			}
			eventually(t, 30*time.Second, func() error { return come(time.Time{}) })
			if err := h.api.Pause(ctx, sb.ID); err != nil {
				t.Fatal(err)
			}
			paused := time.Now()
			h.Kill()
			time.Sleep(time.Second)
			if err := h.TryStart(); err != nil {
				t.Fatal(err)
			}
			if sb, err := h.api.Get(ctx, sb.ID); err != nil || sb.Status.State != wire.Paused {
				t.Fatalf("%+v, %v", sb.Status, err)
			}
			soon(t, 2*time.Second, "tick after the resume", func() time.Duration {
				if paused.IsZero() {
					if err := h.api.Pause(ctx, sb.ID); err != nil {
						t.Fatal(err)
					}
					paused = time.Now()
					time.Sleep(time.Second)
				}
				resumed := time.Now()
				if err := h.api.Resume(ctx, sb.ID); err != nil {
					t.Fatal(err)
				}
				runs := time.Now()
				eventually(t, 30*time.Second, func() error { return come(resumed) })
				// gVisor has a clock of its own, a little off.
				if n := len(ticks(paused.Add(50*time.Millisecond), resumed.Add(-50*time.Millisecond))); n > 0 {
					t.Errorf("%d ticks passed in a sandbox that was paused for %v", n, resumed.Sub(paused))
				}
				paused = time.Time{}
				return ticks(resumed, ever)[0].Sub(runs)
			})
			h.deleteAll(t)
		})
	}
}
