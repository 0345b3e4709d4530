package retention

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

var now = time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)

// snaps makes snapshots of a text such as "a1:5 b2!": of sandbox a, one minute old, with 5
// bytes; of b, two minutes old, failed. ~ is one being taken, - one being deleted, and * a
// temporary one. IDs are the letter and the minutes.
func snaps(t *testing.T, text string) (all []record.Snapshot) {
	t.Helper()
	for word := range strings.FieldsSeq(text) {
		s := record.Snapshot{Source: word[:1], State: record.SnapshotReady}
		if i := strings.IndexAny(word, "!~-*"); i > 0 {
			switch word[i] {
			case '!':
				s.State = record.SnapshotFailed
			case '~':
				s.State = record.SnapshotCreating
			case '-':
				s.State = record.SnapshotDeleting
			case '*':
				s.Temporary = true
			}
			word = word[:i] + word[i+1:]
		}
		id, bytes, ok := strings.Cut(word, ":")
		var age int
		if _, err := fmt.Sscan(id[1:], &age); err != nil {
			t.Fatal(err)
		}
		if ok {
			if _, err := fmt.Sscan(bytes, &s.Bytes); err != nil {
				t.Fatal(err)
			}
		}
		s.ID, s.Created = id, now.Add(-time.Duration(age)*time.Minute)
		s.Changed = s.Created
		all = append(all, s)
	}
	return all
}

func told(gone []Removal) string {
	var words []string
	for _, r := range gone {
		words = append(words, r.Snapshot.ID+" "+r.Limit)
	}
	return strings.Join(words, ", ")
}

func TestPlan(t *testing.T) {
	for name, c := range map[string]struct {
		all    string
		limits Limits
		want   string
	}{
		"nothing":          {"", Limits{Max: 1, Bytes: 1, Age: 1}, ""},
		"no limit":         {"a1:5 a2:5 a9!", Limits{}, ""},
		"as many as fit":   {"a1 a2 b3", Limits{Max: 3, MaxPerSandbox: 2}, ""},
		"too many":         {"a1 a2 b3 b4", Limits{Max: 2}, "b4 max, b3 max"},
		"too many of one":  {"a1 a2 a3 b4", Limits{MaxPerSandbox: 1}, "a3 max_per_sandbox, a2 max_per_sandbox"},
		"first of one":     {"a1 a2 a3 b4 c5", Limits{MaxPerSandbox: 2, Max: 3}, "c5 max, a3 max_per_sandbox"},
		"one is enough":    {"a1 a2 b3", Limits{MaxPerSandbox: 1, Max: 2}, "a2 max_per_sandbox"},
		"failed first":     {"a1 a2 a3! a9", Limits{Max: 3}, "a3 max"},
		"failed of one":    {"a2! a3 b4", Limits{MaxPerSandbox: 1}, "a2 max_per_sandbox"},
		"all failed":       {"a2! a3! a4!", Limits{Max: 1}, "a4 max, a3 max"},
		"just failed":      {"a0! a3 a4", Limits{Max: 2}, ""},
		"too much":         {"a1:5 a2:5 b3:5", Limits{Bytes: 10}, "b3 max_bytes"},
		"too much of one":  {"a1:5 a2:5 b3:50", Limits{BytesPerSandbox: 9}, "a2 max_bytes_per_sandbox"},
		"the newest stays": {"a1:50 a2:5 b3:5", Limits{Bytes: 10}, "b3 max_bytes, a2 max_bytes"},
		"also of one":      {"a1:50 a2:5 b3:50", Limits{BytesPerSandbox: 10}, "a2 max_bytes_per_sandbox"},
		"it frees nothing": {"a1:9 a2:5 a3 a4! a5:5", Limits{Bytes: 10}, "a5 max_bytes, a2 max_bytes"},
		"nobody counts":    {"a1 a2 a3", Limits{Bytes: 1, BytesPerSandbox: 1}, ""},
		"both":             {"a1:5 a2:5 a3:5 a4:1", Limits{Max: 3, Bytes: 9}, "a4 max, a3 max_bytes, a2 max_bytes"},
		"old":              {"a59 a60 a61 b99! b1", Limits{Age: time.Hour}, "b99 max_age, a61 max_age"},
		"old, and newest":  {"a61:5", Limits{Age: time.Hour, Max: 1}, "a61 max_age"},
		"old ones are out": {"a1 a2 a61", Limits{Age: time.Hour, Max: 2}, "a61 max_age"},
		"not theirs":       {"a3~:5 a4-:5 a5*:5 a1:5 a2:5", Limits{Max: 2, MaxPerSandbox: 2, Bytes: 10, Age: 2 * time.Minute}, ""},
	} {
		all := snaps(t, c.all)
		if got := told(Plan(all, c.limits, now)); got != c.want {
			t.Errorf("%s: of %q with %+v go %q, want %q", name, c.all, c.limits, got, c.want)
		}
		slices.Reverse(all)
		if got := told(Plan(all, c.limits, now)); got != c.want {
			t.Errorf("%s, in another order: %q, want %q", name, got, c.want)
		}
	}
	// A clock that was set back makes nobody old; of the same age, the ID decides.
	ahead := record.Snapshot{ID: "x", State: record.SnapshotReady, Created: now.Add(time.Hour)}
	twin := ahead
	twin.ID = "w"
	if got := told(Plan([]record.Snapshot{ahead, twin}, Limits{Age: time.Minute, Max: 1}, now)); got != "w max" {
		t.Errorf("of two of tomorrow go %q", got)
	}
}

// What is planned obeys the limits, whatever there is: nothing more than needed goes, nothing
// newer than what stays, and a second plan is empty.
func TestPlanHolds(t *testing.T) {
	rnd := rand.New(rand.NewPCG(18, 6))
	states := []record.SnapshotState{
		record.SnapshotReady, record.SnapshotReady, record.SnapshotReady, record.SnapshotFailed,
		record.SnapshotCreating, record.SnapshotDeleting,
	}
	for range 20_000 {
		var all []record.Snapshot
		for i := range rnd.IntN(12) {
			s := record.Snapshot{
				ID: fmt.Sprint("s", i), Source: fmt.Sprint(rnd.IntN(3)), State: states[rnd.IntN(len(states))],
				Created: now.Add(-time.Duration(rnd.IntN(300)) * time.Minute), Temporary: rnd.IntN(8) == 0,
			}
			s.Changed = s.Created
			if s.State == record.SnapshotReady {
				s.Bytes = rnd.Int64N(10)
			}
			all = append(all, s)
		}
		l := Limits{
			Max: rnd.IntN(6), MaxPerSandbox: rnd.IntN(4), Bytes: rnd.Int64N(30), BytesPerSandbox: rnd.Int64N(15),
			Age: time.Duration(rnd.IntN(2)*rnd.IntN(300)) * time.Minute,
		}
		gone := Plan(all, l, now)
		left := slices.Clone(all)
		for _, r := range gone {
			n := len(left)
			left = slices.DeleteFunc(left, func(s record.Snapshot) bool { return s.ID == r.Snapshot.ID })
			if len(left) != n-1 || !slices.Contains(LimitNames(), r.Limit) {
				t.Fatalf("%s goes twice, or by %q", r.Snapshot.ID, r.Limit)
			}
		}
		if why := disobeyed(left, gone, l); why != "" {
			t.Fatalf("%s: of %+v\nwith %+v go %s", why, all, l, told(gone))
		}
		if again := Plan(left, l, now); len(again) > 0 {
			t.Fatalf("of %+v\nwith %+v go first %s, and then %s", all, l, told(gone), told(again))
		}
	}
}

// disobeyed says which rule a plan breaks.
func disobeyed(left []record.Snapshot, gone []Removal, l Limits) string {
	counted := slices.DeleteFunc(slices.Clone(left), func(s record.Snapshot) bool {
		return s.Temporary || s.State != record.SnapshotReady && (s.State != record.SnapshotFailed || now.Sub(s.Changed) < failedKept)
	})
	exceeds := func(list []record.Snapshot, count int, bytes int64) bool {
		sum, holders := int64(0), 0
		for _, s := range list {
			if sum += s.Bytes; s.Bytes > 0 {
				holders++
			}
		}
		return count > 0 && len(list) > count || bytes > 0 && sum > bytes && holders > 1
	}
	of := func(source string) (list []record.Snapshot) {
		return slices.DeleteFunc(slices.Clone(counted), func(s record.Snapshot) bool { return s.Source != source })
	}
	if exceeds(counted, l.Max, l.Bytes) {
		return "too many or too much is left"
	}
	for i := range 3 {
		if exceeds(of(fmt.Sprint(i)), l.MaxPerSandbox, l.BytesPerSandbox) {
			return fmt.Sprintf("too many or too much of %d is left", i)
		}
	}
	for _, r := range gone {
		s := r.Snapshot
		if s.Temporary || s.State == record.SnapshotCreating || s.State == record.SnapshotDeleting {
			return s.ID + " is not to be touched"
		}
		var among []record.Snapshot
		switch r.Limit {
		case maxAge:
			if now.Sub(s.Created) <= l.Age {
				return s.ID + " is not old"
			}
			continue
		case maxPerSandbox, bytesPerSource:
			among = of(s.Source)
		default:
			among = counted
		}
		for _, o := range among { // what stays in its place is not older
			frees := o.Bytes > 0 || r.Limit == maxAll || r.Limit == maxPerSandbox
			if frees && inOrder(o, s) < 0 {
				return s.ID + " goes before " + o.ID
			}
		}
		if r.Limit == maxAll || r.Limit == maxPerSandbox { // as many as may be are left, or were removed for another reason
			if n := map[string]int{maxAll: l.Max, maxPerSandbox: l.MaxPerSandbox}[r.Limit]; len(among) > n {
				return "too many are left after " + s.ID
			}
		}
	}
	return ""
}

// kept plays a Manager's snapshots.
type kept struct {
	all    []record.Snapshot
	fails  map[string]error
	listed int
}

func (k *kept) List(context.Context) ([]record.Snapshot, error) {
	k.listed++
	return slices.Clone(k.all), k.fails["list"]
}

func (k *kept) Delete(_ context.Context, id string) error {
	if err := k.fails[id]; err != nil {
		return err
	}
	k.all = slices.DeleteFunc(k.all, func(s record.Snapshot) bool { return s.ID == id })
	return nil
}

// What is in use stays and nothing goes in its place; what fails is named, and goes later.
func TestApply(t *testing.T) {
	ctx := t.Context()
	k := &kept{all: snaps(t, "a1 a2 a3 a4 a5"), fails: map[string]error{
		"a5": errs.New(errs.WrongState, "in use"), "a4": errors.New("the disk"), "a3": errs.New(errs.NotFound, "another was faster"),
	}}
	var log []string
	apply := func(l Limits) error {
		log = nil
		return Apply(ctx, k, l, now, func(r Removal) { log = append(log, r.Snapshot.ID+" "+r.Limit) })
	}
	if err := apply(Limits{}); err != nil || k.listed > 0 {
		t.Errorf("without limits: %v, listed %d times", err, k.listed)
	}
	err := apply(Limits{Max: 1})
	if err == nil || !strings.Contains(err.Error(), "a4, which exceeds snapshots.max: ") || strings.Contains(err.Error(), "a5") ||
		!slices.Equal(log, []string{"a2 max"}) {
		t.Errorf("%v, removed %q", err, log)
	}
	k.fails = nil
	if err := apply(Limits{Max: 1}); err != nil || !slices.Equal(log, []string{"a5 max", "a4 max", "a3 max"}) || len(k.all) != 1 {
		t.Errorf("again: %v, removed %q", err, log)
	}
	k.fails = map[string]error{"list": errors.New("the store")}
	if err := apply(Limits{Max: 1}); err == nil || !strings.Contains(err.Error(), "the store") {
		t.Errorf("a list that fails: %v", err)
	}
	// Many go in portions, and none once the daemon ends.
	k = &kept{}
	for i := range atOnce + 2 {
		k.all = append(k.all, snaps(t, fmt.Sprint("a", i))...)
	}
	for _, want := range []int{2, 1, 1} {
		if err := apply(Limits{Max: 1}); err != nil || len(k.all) != want {
			t.Errorf("%d are left, want %d, %v", len(k.all), want, err)
		}
	}
	k.all = snaps(t, "a1 a2")
	ended, end := context.WithCancel(ctx)
	end()
	if err := Apply(ended, k, Limits{Max: 1}, now, func(Removal) {}); err != nil || len(k.all) != 2 {
		t.Errorf("a daemon that ends: %v, %d are left", err, len(k.all))
	}
}
