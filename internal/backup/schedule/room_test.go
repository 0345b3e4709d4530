package schedule

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/backup/target/targettest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// quota is a target that takes so many bytes at a time, as storage with a quota does.
type quota struct {
	target.Target
	most int64
}

func (q *quota) Put(ctx context.Context, name string, r io.ReadSeeker, n int64) error {
	all, err := q.List(ctx)
	if err != nil {
		return err
	}
	sum := n
	for _, o := range all {
		sum += o.Bytes
	}
	if sum > q.most {
		return fmt.Errorf("%s %w", q, target.ErrFull)
	}
	return q.Target.Put(ctx, name, r, n)
}

// TestRoom: a full disk gets the next backup, since what it would have let go is removed before; never the last
// good one, and never what others have stored.
func TestRoom(t *testing.T) {
	hosttest.Root(t)
	dir := hosttest.SmallDisk(t, "size=12m")
	must(t, os.Chmod(dir, 0o700))
	to, err := target.Parse(dir, target.Options{})
	must(t, err)
	other := newHost(t, Config{Target: to, Keep: Limits{Count: 1}})
	other.Label = target.Label("b", "other")
	theirs := other.now(t)
	h := newDataHost(t, Config{Target: to, Keep: Limits{Count: 3}})
	fresh := func(n int) {
		must(t, os.Remove(filepath.Join(h.files, "large")))
		h.write("large", n)
		h.write("small", 100) // else the pack of the first backup stays for it
	}
	for range 3 {
		h.now(t)
		fresh(3 << 20)
	}
	b := h.now(t) // the fourth does not fit beside three
	if f := h.Status().Backup.Good.Freed; f == nil || f.Backups != 1 || f.Packs == 0 || f.Bytes < 3<<20 || b.Number != 4 {
		t.Errorf("%+v, %+v", b, f)
	}
	if said := h.told[len(h.told)-1]; !strings.Contains(said, "the target was full, and 1 old backup") {
		t.Errorf("it says %q", said)
	}
	must(t, h.comesBack(target.Latest))

	// What is too large for the target costs the backups that it would have rotated, and not the last good one.
	fresh(11 << 20)
	for range 3 {
		_, err = h.Backup(t.Context())
		if !errors.Is(err, target.ErrFull) || !strings.Contains(err.Error(), "backup.keep") {
			t.Errorf("one that is too large: %v", err)
		}
	}
	if s := h.Status(); !s.Backup.Last.Full || s.Backup.Good.Name != b.Name {
		t.Errorf("%+v", s.Backup)
	}
	must(t, h.opens(b.Name), other.opensState(theirs.Name))
	all, err := h.List(t.Context())
	must(t, err)
	if mine := h.Whose().Select(all); len(mine) != 2 {
		t.Errorf("%d backups are left, want two", len(mine))
	}
	fresh(2 << 20)
	h.now(t)
	if h.Status().Backup.Last.Full {
		t.Errorf("%+v", h.Status().Backup.Last)
	}
	must(t, h.comesBack(target.Latest), other.opensState(theirs.Name))
}

// opensState reads a backup without data.
func (h *host) opensState(name string) error {
	r, err := target.Open(h.t.Context(), h.Target, name)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, r)
	return errors.Join(err, r.Close())
}

// TestRoomOnce: of backups of the state alone a full target loses one at most, and none if the newest one may be bad.
func TestRoomOnce(t *testing.T) {
	h := newHost(t, Config{Keep: Limits{Count: 2}})
	h.now(t)
	h.now(t)
	q := &quota{Target: h.Target, most: 1}
	h.Target = q
	h.remember(func(s *Status) { s.Drill.Last.Error = "it is damaged" })
	if _, err := h.Backup(t.Context()); !errors.Is(err, target.ErrFull) {
		t.Errorf("%v", err)
	}
	h.want("1 2", "the newest may be bad")
	h.remember(func(s *Status) { s.Drill.Last.Error = "" })
	for range 3 {
		if _, err := h.Backup(t.Context()); !errors.Is(err, target.ErrFull) {
			t.Errorf("%v", err)
		}
	}
	h.want("2", "the last good one stays")
	if n := h.Failures(); n != 4 {
		t.Errorf("%d failures", n)
	}
	q.most = 1 << 40
	h.now(t)
	h.want("2 3", "with room")
}

// TestRoomS3: storage that says it is full, or that a quota is used up, gets the backup once it has room.
func TestRoomS3(t *testing.T) {
	s := targettest.S3(t)
	h := newHost(t, Config{Target: s.Target, Keep: Limits{Count: 2}})
	h.now(t)
	h.now(t)
	full := targettest.Full
	s.Answer.Store(&full)
	if _, err := h.Backup(t.Context()); !errors.Is(err, target.ErrFull) || !h.Status().Backup.Last.Full {
		t.Errorf("%v, %+v", err, h.Status().Backup.Last)
	}
	s.Answer.Store(nil)
	h.want("2", "one has gone")
	h.now(t)
	h.want("2 3", "with room")
}

// TestRoomPlan: Room never lets the newest whole one go, and no more than the next backup would.
func TestRoomPlan(t *testing.T) {
	b := func(number int, whole bool, age time.Duration) target.Backup {
		return target.Backup{Name: fmt.Sprint(number), Number: number, Whole: whole, Taken: start.Add(-age)}
	}
	for what, c := range map[string]struct {
		all  []target.Backup
		keep Limits
		want string
	}{
		"none":                    {nil, Limits{Count: 1}, ""},
		"the only one":            {[]target.Backup{b(1, true, day)}, Limits{Count: 1}, ""},
		"too old, the only one":   {[]target.Backup{b(1, true, day)}, Limits{Age: time.Hour}, ""},
		"two of two":              {[]target.Backup{b(1, true, day), b(2, true, 0)}, Limits{Count: 2}, "1"},
		"two of three":            {[]target.Backup{b(1, true, day), b(2, true, 0)}, Limits{Count: 3}, ""},
		"half ones":               {[]target.Backup{b(1, true, day), b(2, false, 0)}, Limits{Count: 3}, "2"},
		"half ones alone":         {[]target.Backup{b(1, false, day), b(2, false, 0)}, Limits{Count: 3}, "1 2"},
		"old ones before a half":  {[]target.Backup{b(1, true, 3*day), b(2, true, 2*day), b(3, false, 0)}, Limits{Age: day}, "1 3"},
		"one more than are kept":  {[]target.Backup{b(1, true, 3), b(2, true, 2), b(3, true, 1)}, Limits{Count: 2}, "1 2"},
		"no limit but of an age ": {[]target.Backup{b(1, true, 3), b(2, true, 2)}, Limits{Age: day}, ""},
	} {
		var got []string
		for _, b := range Room(c.all, c.keep, start) {
			got = append(got, b.Name)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %q goes, want %q", what, got, c.want)
		}
	}
}

// TestForeignDamage: a damaged list of another owner keeps packs alone that it may need, is named, and is no
// refusal of the target; what others need is read once.
func TestForeignDamage(t *testing.T) {
	old := newDataHost(t, Config{Keep: Limits{Count: 9}})
	old.now(t)
	h := newDataHost(t, Config{Target: old.Target, Keep: Limits{Count: 1}})
	must(t, h.Look(t.Context()))
	_, err := h.Adopt(t.Context(), nil)
	must(t, err)
	theirs := newDataHost(t, Config{Target: old.Target, Keep: Limits{Count: 9}})
	theirs.Label = target.Label("b", "other")
	bad := theirs.now(t)
	theirs.now(t)
	counted := &reads{Target: h.Target}
	h.Target, h.Data.Target = counted, counted
	fresh := func() {
		must(t, os.Remove(filepath.Join(h.files, "large")))
		h.write("large", 2<<20)
	}
	h.now(t) // rotates the adopted one
	lists := func() (n int) {
		for _, name := range counted.names {
			if strings.Contains(name, "-other-") && strings.HasSuffix(name, target.ListSuffix) {
				n++
			}
		}
		counted.names = nil
		return n
	}
	if n := lists(); n != 2 {
		t.Errorf("%d lists of others are read at first", n)
	}
	fresh()
	h.now(t)
	_, err = h.Check(t.Context()) // of its own alone
	must(t, err)
	h.Keeper = New(h.Config)
	fresh()
	h.now(t)
	if n := lists(); n != 0 {
		t.Errorf("%d lists of others are read again", n)
	}
	if got := h.Status().Kept; got != "" {
		t.Errorf("before: %s", got)
	}

	// The host adopts what has packs of its own again, so that there is something to spare.
	must(t, old.db.Close())
	again := reopen(t, old)
	adopted := again.now(t)
	_, err = h.Adopt(t.Context(), []string{adopted.Name})
	must(t, err)
	flip(t, filepath.Join(h.Target.String(), bad.Name+target.ListSuffix), 0.5)
	flip(t, filepath.Join(h.Target.String(), bad.Name), 0.5) // or the backup itself says what it needs
	must(t, os.Remove(filepath.Join(h.Dir, knownFile)))      // it was not known before
	before := packsIn(t, h)
	fresh()
	h.now(t)
	s := h.Status()
	if s.Refused != "" || !strings.Contains(s.Kept, bad.Name) || strings.Contains(s.Kept, "backups check") {
		t.Errorf("refused %q, kept %q", s.Refused, s.Kept)
	}
	own, common := 0, 0
	for _, f := range before {
		_, err := os.Stat(f)
		p, _ := target.ParsePack(filepath.Base(f))
		switch {
		case p.ID() == h.Whose().ID && err != nil:
			own++
		case slices.Contains(h.Whose().Packs, p.Owner) && err != nil:
			common++
		}
	}
	if own == 0 || common > 0 {
		t.Errorf("%d own packs are gone, and %d that the damaged one may need", own, common)
	}
	must(t, theirs.Drop(bad.Name))
	fresh()
	h.now(t)
	if got := h.Status().Kept; got != "" {
		t.Errorf("after it is gone: %s", got)
	}
	for _, f := range packsIn(t, h) {
		if p, _ := target.ParsePack(filepath.Base(f)); slices.Contains(h.Whose().Packs, p.Owner) {
			t.Errorf("nothing needs %s", f)
		}
	}
	must(t, h.comesBack(target.Latest))
}

// Drop removes a backup as its host does.
func (h *host) Drop(name string) error { return target.Drop(h.t.Context(), h.Target, name) }

// reads notes what is read.
type reads struct {
	target.Target
	names []string
}

func (r *reads) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	r.names = append(r.names, name)
	return r.Target.Get(ctx, name)
}

// TestOwnDamage: what a backup needs is known from itself if its list is damaged; if that is damaged, too, no pack
// goes, until the backup is removed.
func TestOwnDamage(t *testing.T) {
	h := newDataHost(t, Config{Keep: Limits{Count: 9}})
	fresh := func() {
		must(t, os.Remove(filepath.Join(h.files, "large")))
		h.write("large", 2<<20)
	}
	first := h.now(t).Name
	fresh()
	second := h.now(t).Name
	fresh()
	h.now(t)
	must(t, os.Remove(filepath.Join(h.Target.String(), first+target.ListSuffix)))
	r, err := h.Remove(t.Context(), []string{second})
	if err != nil || r.Packs == 0 || r.Kept != "" {
		t.Errorf("its list is damaged: %+v, %v", r, err)
	}
	must(t, h.opens(first))
	flip(t, filepath.Join(h.Target.String(), first), 0.5)
	fresh()
	third := h.now(t).Name
	fresh()
	h.now(t)
	r, err = h.Remove(t.Context(), []string{third})
	if err != nil || r.Packs != 0 || !strings.Contains(r.Kept, first) || !strings.Contains(r.Kept, "backups rm") {
		t.Errorf("it is damaged itself: %+v, %v", r, err)
	}
	r, err = h.Remove(t.Context(), []string{first})
	if err != nil || r.Packs < 2 || r.Kept != "" {
		t.Errorf("it is removed: %+v, %v", r, err)
	}
	h.whole()
	must(t, h.comesBack(target.Latest))
}

// silent is a target that does not send what has a part in its name, as storage does that answers 503.
type silent struct {
	target.Target
	part string // empty: it sends all
}

func (s *silent) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	if s.part != "" && strings.Contains(name, s.part) {
		return nil, fmt.Errorf("get %s from %s: 503 Slow Down", name, s)
	}
	return s.Target.Get(ctx, name)
}

// TestRoomAfterCheck: a check that failed keeps older backups on a full target no longer than what it has found lasts,
// and the error says what keeps them.
func TestRoomAfterCheck(t *testing.T) {
	ctx := t.Context()
	h := newDataHost(t, Config{Keep: Limits{Count: 2}})
	s := &silent{Target: h.Target}
	q := &quota{Target: s, most: 1 << 40}
	h.Target, h.Data.Target = q, q
	fresh := func() {
		must(t, os.Remove(filepath.Join(h.files, "large")))
		h.write("large", 2<<20)
	}
	first := h.now(t)
	fresh()
	second := h.now(t)
	fresh()
	full := func(when string, held bool) {
		t.Helper()
		q.most = 1
		_, err := h.Backup(ctx)
		text := fmt.Sprint(err)
		says := strings.Contains(text, "check --all") && !strings.Contains(text, "lower backup.keep")
		if !errors.Is(err, target.ErrFull) || held != says {
			t.Errorf("%s: %v", when, err)
		}
		q.most = 1 << 40
	}

	// A pack that is not sent is no damage: the check is repeated without a new backup.
	s.part = "-pack-"
	_, err := h.Check(ctx)
	if c := h.Status().Check; err == nil || !c.Last.Unread || c.Last.Error == "" {
		t.Errorf("%v, %+v", err, c)
	}
	full("a pack is not sent", true)
	h.want("1 2", "an older one may be the last good one")
	s.part = ""
	h.clock = h.clock.Add(2 * time.Hour)
	if h.Tick(ctx); h.Status().Check.Last.Error != "" {
		t.Errorf("after two hours: %+v", h.Status().Check)
	}
	s.part = ".tar.gz"
	if _, err := h.Check(ctx); err == nil || !h.Status().Check.Last.Unread {
		t.Errorf("a list is not sent: %v, %+v", err, h.Status().Check)
	}
	s.part = ""

	// A damage stands, until all backups of this state are found good.
	need, err := target.Packs(ctx, h.Target, first.Name)
	must(t, err)
	for _, p := range need {
		flip(t, filepath.Join(h.Target.String(), p), 0.5)
	}
	for range checkParts {
		h.Check(ctx) //nolint:errcheck // what it finds is in the status
		if h.Status().Check.Last.Error != "" {
			break
		}
	}
	if c := h.Status().Check; c.Last.Error == "" || c.Last.Unread {
		t.Errorf("with bad packs: %+v", c)
	}
	h.clock = h.clock.Add(day)
	h.Tick(ctx)
	full("with bad packs", true)
	if _, _, err := h.checks(); err != nil || h.Status().Check.Last.Error == "" {
		t.Errorf("a check of all: %v, %+v", err, h.Status().Check)
	}
	h.Keep.Count = 9
	h.now(t)
	fresh()
	last := h.now(t)
	_, err = h.Remove(ctx, []string{first.Name, second.Name})
	must(t, err)
	if _, _, err := h.checks(last.Name); err != nil || h.Status().Check.Last.Error == "" {
		t.Errorf("a check of one of two: %v, %+v", err, h.Status().Check)
	}
	h.Keep.Count = 2
	full("one is checked", true)
	h.want("3 4", "the damaged ones are removed")
	if _, found, err := h.checks(); err != nil || len(found) > 0 || h.Status().Check.Last.Error != "" {
		t.Errorf("a check of all: %v, %+v, %+v", err, found, h.Status().Check)
	}
	full("all are good", false)
	h.want("4", "what the limits let go is gone")
	h.now(t)
	must(t, h.comesBack(target.Latest))
}
