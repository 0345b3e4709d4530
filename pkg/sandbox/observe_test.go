package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

type askerKey struct{}

// lines is a log that notes messages, attributes and who asked.
type lines struct {
	slog.Handler
	mu  sync.Mutex
	all []string
}

func (l *lines) Enabled(context.Context, slog.Level) bool { return true }

func (l *lines) Handle(ctx context.Context, r slog.Record) error {
	var b strings.Builder
	b.WriteString(r.Level.String() + " " + r.Message)
	r.Attrs(func(a slog.Attr) bool {
		if a.Key != "dur" && !strings.HasPrefix(a.Key, "step_") {
			b.WriteString(" " + a.String())
		}
		return true
	})
	if asker, ok := ctx.Value(askerKey{}).(string); ok {
		b.WriteString(" asker=" + asker)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, b.String())
	return nil
}

// TestObserved holds that every operation is told once, in the log with who
// asked for it, and to who listens; and that events are heard in order before
// who caused them goes on.
func TestObserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		log := &lines{Handler: slog.DiscardHandler}
		var mu sync.Mutex
		var ops []Operation
		var heard []string
		m, _ := h.boot(t, func(c *Config) {
			c.Log = slog.New(log)
			c.OnOperation = func(o Operation) { mu.Lock(); ops = append(ops, o); mu.Unlock() }
			c.OnEvent = func(e events.Event) { mu.Lock(); heard = append(heard, e.Type); mu.Unlock() }
		})
		ctx, hangUp := context.WithCancel(context.WithValue(t.Context(), askerKey{}, "me"))
		r, err := m.Create(ctx, spec())
		if err != nil {
			t.Fatal(err)
		}
		hangUp() // the line of the creation names me all the same
		if _, err := m.Await(t.Context(), r.ID); err != nil {
			t.Fatal(err)
		}
		if err := m.Pause(t.Context(), r.ID); err != nil {
			t.Fatal(err)
		}
		if err := m.Delete(t.Context(), r.ID); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		stop(t, m)
		for i, want := range []struct {
			op    string
			steps bool
		}{{"create", true}, {"pause", false}, {"delete", true}} {
			if i >= len(ops) || ops[i].Name != want.op || ops[i].Outcome != "ok" || ops[i].ID != r.ID || ops[i].Runtime != "runc" ||
				(len(ops[i].Steps) > 0) != want.steps {
				t.Fatalf("operations: %+v", ops)
			}
		}
		if got := strings.Join(heard, " "); got != "creating running pausing paused deleting deleted" {
			t.Errorf("events: %s", got)
		}
		if want := "INFO operation op=create sandbox=" + r.ID + " runtime=runc image=: outcome=ok asker=me"; len(log.all) != 3 ||
			log.all[0] != want {
			t.Errorf("the log: %q, want %q first", log.all, want)
		}
	})
}

// TestProgramInLog: the line of a creation names the program, and none of its arguments.
func TestProgramInLog(t *testing.T) {
	for _, tt := range []struct {
		op         string
		entrypoint []string
		literal    bool
		want       string
	}{
		{opCreate, []string{"nginx", "-g", "secret"}, false, " entrypoint=nginx outcome"},
		{opStart, []string{"tail -f /secret"}, false, " entrypoint=tail outcome"},
		{opCreate, []string{"my program"}, true, " entrypoint=my program outcome"},
		{opCreate, []string{" "}, false, " entrypoint=  outcome"},
		{opCreate, nil, false, " image=: outcome"},
		{opDelete, []string{"nginx"}, false, " image=: outcome"},
	} {
		log := &lines{Handler: slog.DiscardHandler}
		l := life{cfg: Config{Log: slog.New(log)}}
		s := spec()
		s.Entrypoint, s.Literal = tt.entrypoint, tt.literal
		l.log(t.Context(), tt.op, &record.Record{ID: "daaaaaaaaaaa", Spec: s}, time.Now(), nil, nil)
		if len(log.all) != 1 || !strings.Contains(log.all[0], tt.want) {
			t.Errorf("%s %q: %q, want %q", tt.op, tt.entrypoint, log.all, tt.want)
		}
	}
}

// TestOutcomes holds in which words operations end that do not end well.
func TestOutcomes(t *testing.T) {
	for err, want := range map[error]string{
		nil: "ok", errDeleted: "aborted", errClosing: "aborted", table.ErrTooLong: "unavailable", errDied: "internal",
		wrongState(&record.Record{}, record.Running): "wrong_state",
	} {
		if got := outcomeOf(err); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}

// TestOperationSteps holds which way the steps of an operation lead, and which failed.
func TestOperationSteps(t *testing.T) {
	broken := fmt.Errorf("create: %w", &table.StepError{Name: "disk", Err: errors.New("no space")})
	for _, tt := range []struct {
		op     string
		err    error
		up     bool
		failed string
	}{
		{opCreate, nil, true, ""},
		{opStart, broken, true, "disk"},
		{opDelete, broken, false, "disk"},
		{opStop, errors.New("other"), false, ""},
		{opCreate, errors.Join(broken, errDeleted), true, ""}, // it was given up, it did not fail
	} {
		var got Operation
		l := life{cfg: Config{Log: slog.New(slog.DiscardHandler), OnOperation: func(o Operation) { got = o }}}
		l.log(t.Context(), tt.op, &record.Record{ID: "daaaaaaaaaaa"}, time.Now(), nil, tt.err)
		if got.Up != tt.up || got.Failed != tt.failed {
			t.Errorf("%s, %v: up %v, failed %q; want %v, %q", tt.op, tt.err, got.Up, got.Failed, tt.up, tt.failed)
		}
	}
}

// BenchmarkOperation is what telling of a creation costs, without a log.
func BenchmarkOperation(b *testing.B) {
	l := life{cfg: Config{Log: slog.New(slog.DiscardHandler), OnOperation: func(Operation) {}}}
	r := &record.Record{ID: "daaaaaaaaaaa", Spec: spec()}
	steps := make([]table.Step, 10)
	b.ReportAllocs()
	for b.Loop() {
		l.log(b.Context(), opCreate, r, time.Time{}, steps, nil)
	}
}
