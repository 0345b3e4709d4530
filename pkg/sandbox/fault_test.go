package sandbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// story visits every transition there is. It goes on after an error, as
// clients do; a dead daemon fails whatever comes after its death.
func story(ctx context.Context, m *Manager, h *host) (failed int) {
	note := func(err error) {
		if err != nil {
			failed++
		}
	}
	create := func(s record.Spec) string {
		s.Runtime = "runc"
		r, err := m.Create(ctx, s)
		note(err)
		synctest.Wait() // every history makes the same calls
		if err == nil {
			_, err = m.Await(ctx, r.ID)
			note(err)
		}
		return r.ID
	}
	a := create(record.Spec{Name: "lab", Timeout: time.Hour, CPUMillis: 100})
	note(m.Pause(ctx, a))
	note(m.Resume(ctx, a))
	_, err := m.Renew(ctx, a, now().Add(2*time.Hour))
	note(err)
	b := create(record.Spec{CPUMillis: 2500})
	h.exit(b, Obituary{ExitCode: 3, LastOutput: "bye"}) // it ends by itself
	synctest.Wait()
	note(m.Delete(ctx, a))
	synctest.Wait() // what Delete leaves to the background
	c := create(record.Spec{Name: "lab"})
	note(m.Pause(ctx, c))
	note(m.Recover(ctx))
	d := create(record.Spec{Timeout: time.Minute})
	time.Sleep(time.Minute + time.Second)
	note(m.Expire(ctx, d))
	return failed
}

// numbered turns a list of calls into their names in a fault: "call #2".
func numbered(calls []string) (out []string) {
	seen := map[string]int{}
	for _, c := range calls {
		seen[c]++
		out = append(out, fmt.Sprintf("%s #%d", c, seen[c]))
	}
	return out
}

// history is one run of the story with one fault, and a second death at one
// call of the recovery, unless that is empty. It returns the calls of the
// recovery and whether the second death came to pass.
func history(t *testing.T, f fault, second string) (recovery []string, hit bool) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		h := newHost()
		h.fault = f
		m, d := h.boot(t)
		failed := story(ctx, m, h)
		synctest.Wait()
		if !h.fault.hit {
			t.Fatalf("%v %s: the story never got there", f.mode, f.call)
		}
		if f.mode >= crashBefore && failed == 0 && !d.dead {
			t.Fatalf("%v %s: nobody died", f.mode, f.call)
		}
		where := fmt.Sprintf("%v %s, then death after %q", f.mode, f.call, second)
		if f.mode < crashBefore {
			// The daemon lives on. Its own sweep heals it.
			h.calls, h.fault = nil, fault{call: second, mode: crashAfter}
			m.Recover(ctx) //nolint:errcheck // it may die here
		}
		stop(t, m)
		if f.mode >= crashBefore {
			h.calls, h.fault = nil, fault{call: second, mode: crashAfter}
			m, _ = h.boot(t)
			m.Recover(ctx) //nolint:errcheck // it may die here
			stop(t, m)
		}
		recovery, hit = numbered(h.calls), h.fault.hit

		h.fault = fault{}
		m, d = h.boot(t)
		if err := m.Recover(ctx); err != nil {
			t.Fatalf("%s: the last recovery: %v", where, err)
		}
		synctest.Wait()
		if w := h.wrong(d); len(w) > 0 {
			t.Fatalf("%s:\n%s\nhost:\n%s", where, strings.Join(w, "\n"), h)
		}
		before := h.String()
		if err := m.Recover(ctx); err != nil || h.String() != before {
			t.Fatalf("%s: recovery is not idempotent: %v\n%s\n->\n%s", where, err, before, h)
		}
		stop(t, m)
	})
	return recovery, hit
}

// TestEveryFault injects one fault at every call of the story, in every mode,
// then a death at every call of the recovery, and checks that a last,
// undisturbed recovery leaves host and store in agreement.
func TestEveryFault(t *testing.T) {
	var calls []string
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		m, d := h.boot(t)
		if n := story(t.Context(), m, h); n > 0 {
			t.Fatalf("%d failures without a fault", n)
		}
		stop(t, m)
		if w := h.wrong(d); len(w) > 0 {
			t.Fatalf("without a fault:\n%s", strings.Join(w, "\n"))
		}
		calls = numbered(h.calls)
	})
	slices.Sort(calls) // rows come up at the same time: their order is chance
	stride := 1
	if testing.Short() || raceEnabled {
		stride = 7
	}
	for _, md := range []mode{errBefore, errAfter, crashBefore, crashAfter} {
		t.Run(md.String(), func(t *testing.T) {
			t.Parallel()
			n, ran := int(md), 0
			turn := func() bool {
				if n++; n%stride != 0 {
					return false
				}
				ran++
				return true
			}
			for _, call := range calls {
				f := fault{call: call, mode: md}
				if !turn() {
					continue
				}
				recovery, _ := history(t, f, "")
				for _, second := range recovery {
					if turn() {
						history(t, f, second)
					}
				}
			}
			t.Logf("%d calls, %d histories", len(calls), ran)
		})
	}
}
