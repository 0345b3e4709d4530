package schedule

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/backup/target/targettest"
	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/store"
)

var start = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)

const day = 24 * time.Hour

// here is where the backups of the tests are from.
var here = backup.Place{Instance: "a", AddressPool: "10.160.0.0/16"}

// A host is a Keeper of a real store, with a clock that a test steps.
type host struct {
	*Keeper
	t     *testing.T
	db    *store.DB
	clock time.Time
	told  []string
	taken int
	files string // a directory with data; empty: there is none
}

func newHost(t *testing.T, c Config) *host {
	t.Helper()
	h := &host{t: t, clock: start}
	if c.Target == nil {
		dir, err := target.Parse(t.TempDir(), target.Options{})
		if err != nil {
			t.Fatal(err)
		}
		c.Target = dir
	}
	if c.Dir == "" {
		c.Dir = t.TempDir()
	}
	c.Label, c.Log = target.Label(here.Instance, "box"), slog.New(slog.DiscardHandler)
	var err error
	if h.db, err = store.Open(filepath.Join(c.Dir, "sandboxd.db"), store.Options{Reserve: -1}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.db.Close(); err != nil {
			t.Error(err)
		}
	})
	c.State = h.db
	c.Now = func() time.Time { return h.clock }
	c.Tell = func(kind, message string) { h.told = append(h.told, kind+": "+message) }
	c.Take = h.take
	c.Trial.Here = here
	if c.Trial.Identities == nil {
		c.Trial.Identities = func() (backup.Identities, error) { return nil, nil }
	}
	if c.Trial.Key == nil {
		c.Trial.Key = func() (*sealed.Key, error) { return nil, fs.ErrNotExist }
	}
	if c.Data != nil {
		c.Data.Target, c.Data.Log = c.Target, c.Log
		c.Data.Journal = filepath.Join(c.Dir, "journal")
		h.files = t.TempDir()
	}
	h.Keeper = New(c)
	return h
}

// take is a backup of the store, as the daemon makes it.
func (h *host) take(ctx context.Context, s *chunks.Session) (_ *os.File, d *backup.Data, err error) {
	h.taken++
	state, err := os.CreateTemp(h.t.TempDir(), "")
	if err != nil {
		return nil, nil, err
	}
	defer state.Close()
	if _, err := h.db.Backup(state); err != nil {
		return nil, nil, err
	}
	if _, err := state.Seek(0, io.SeekStart); err != nil {
		return nil, nil, err
	}
	facts, err := store.Examine(state.Name())
	if err != nil {
		return nil, nil, err
	}
	if s != nil {
		if d, err = h.takeData(ctx, s); err != nil {
			return nil, nil, err
		}
	}
	out, err := os.OpenFile(h.Dir, unix.O_TMPFILE|os.O_RDWR, 0o600)
	if err == nil {
		m := backup.Manifest{Taken: h.clock, Instance: h.Trial.Here.Instance, AddressPool: here.AddressPool, State: facts, Data: d}
		err = backup.Write(out, m, state)
	}
	if err == nil {
		_, err = out.Seek(0, io.SeekStart)
	}
	return out, d, err
}

// step lets time pass, with a look at the clock every so often.
func (h *host) step(d, every time.Duration) {
	h.t.Helper()
	for end := h.clock.Add(d); h.clock.Before(end); {
		h.clock = h.clock.Add(every)
		h.Tick(h.t.Context())
	}
}

// numbers are those of the backups on the target; ? follows one that is not whole.
func (h *host) numbers() string {
	h.t.Helper()
	all, err := h.List(h.t.Context())
	if err != nil {
		h.t.Fatal(err)
	}
	var words []string
	for _, b := range all {
		word := fmt.Sprint(b.Number)
		if !b.Whole {
			word += "?"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

func (h *host) want(numbers, what string) {
	h.t.Helper()
	if got := h.numbers(); got != numbers {
		h.t.Errorf("%s: the target has the backups %q, want %q", what, got, numbers)
	}
}

// TestTimer holds that backups come once an interval, also over a restart, and that old ones go.
func TestTimer(t *testing.T) {
	h := newHost(t, Config{Every: day, Keep: Limits{Count: 3}})
	h.step(time.Minute, time.Minute)
	h.want("1", "the first look")
	h.step(day-10*time.Minute, 10*time.Minute)
	h.want("1", "before a day")
	h.step(20*time.Minute, 10*time.Minute)
	h.want("1 2", "after a day")
	h.Keeper = New(h.Config)
	h.step(time.Hour, time.Minute)
	h.want("1 2", "after a restart")
	h.step(4*day, time.Hour)
	h.want("4 5 6", "after four more days")
	if s := h.Status().Backup; s.Good != s.Last || s.Good.Name == "" || s.Good.Bytes == 0 || !s.Since.IsZero() || s.Late(day, h.clock) {
		t.Errorf("the status is %+v", s)
	}
	if len(h.told) != 6 || !strings.HasPrefix(h.told[5], Done+": sandboxd-"+h.Whose().Owner()+"-000006-") {
		t.Errorf("it told %q", h.told)
	}
	if _, err := h.Backup(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.want("5 6 7", "one on request")
	h.step(23*time.Hour, time.Hour)
	h.want("5 6 7", "the timer counts from that one")

	h = newHost(t, Config{Keep: Limits{Count: 1}})
	h.step(30*day, day)
	h.want("", "without a timer")
}

// TestAge holds that age removes old backups, and never the last one.
func TestAge(t *testing.T) {
	h := newHost(t, Config{Every: day, Keep: Limits{Age: 3 * day}})
	h.step(6*day, time.Hour)
	h.want("3 4 5 6", "six days")
	h.clock = h.clock.Add(90 * day) // it was switched off
	h.Tick(t.Context())
	h.want("7", "after three months")
}

// TestGone is a target that is gone for a week: the backups stay, the daemon says so and tries
// again, and goes on when it is back.
func TestGone(t *testing.T) {
	h := newHost(t, Config{Every: day, Keep: Limits{Count: 2}})
	h.step(3*day, time.Hour)
	h.want("2 3", "before")
	dir := h.Target.String()
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	h.told, h.taken = nil, 0
	h.step(7*day, 3*time.Hour)
	s := h.Status().Backup
	if !s.Late(day, h.clock) || h.clock.Sub(s.Since) < 6*day || !strings.Contains(s.Last.Error, "mount it") || s.Good.Name == "" {
		t.Errorf("after a week the status is %+v", s)
	}
	// It fails for 6 days and some hours, and each look is a try.
	if n := int(h.Failures()); n < 6*8 || n > 7*8 || len(h.told) != n || !strings.HasPrefix(h.told[0], Failed) {
		t.Errorf("it failed %d times, and told %d", n, len(h.told))
	}
	if h.taken > 0 {
		t.Errorf("%d copies of the state were made for a target that is gone", h.taken)
	}
	h.Keeper = New(h.Config)
	if got := h.Status().Backup; got.Since != s.Since {
		t.Errorf("after a restart it fails since %v, and not %v", got.Since, s.Since)
	}
	if err := os.Rename(dir+".away", dir); err != nil {
		t.Fatal(err)
	}
	h.want("2 3", "when it is back")
	h.step(time.Hour, time.Minute)
	h.want("3 4", "an hour later")
	if s := h.Status().Backup; !s.Since.IsZero() || s.Late(day, h.clock) {
		t.Errorf("then the status is %+v", s)
	}
}

// bad is a target with a fault.
type bad struct {
	target.Target
	put func(name string, r io.ReadSeeker, bytes int64) error // instead of Put
}

func (b bad) Put(ctx context.Context, name string, r io.ReadSeeker, bytes int64) error {
	if b.put == nil {
		return b.Target.Put(ctx, name, r, bytes)
	}
	return b.put(name, r, bytes)
}

// TestBad holds that a target that lies, loses or is full costs no backup, and that the timer goes
// on afterwards.
func TestBad(t *testing.T) {
	h := newHost(t, Config{Every: day, Keep: Limits{Count: 1}})
	h.step(day, time.Hour)
	h.want("1", "before")
	to := h.Target
	write := func(name string, b []byte) error { return os.WriteFile(filepath.Join(to.String(), name), b, 0o600) }
	for what, c := range map[string]struct {
		put  func(name string, r io.ReadSeeker, bytes int64) error
		want string
	}{
		"it cuts off": {func(name string, r io.ReadSeeker, bytes int64) error {
			b, err := io.ReadAll(r)
			return errors.Join(err, write(name, b[:bytes-1]))
		}, "stored something else"},
		"it changes a bit": {func(name string, r io.ReadSeeker, bytes int64) error {
			b, err := io.ReadAll(r)
			b[bytes/2] ^= 1
			return errors.Join(err, write(name, b))
		}, "stored something else"},
		"it stores nothing": {func(string, io.ReadSeeker, int64) error { return nil }, "stored something else"},
		"it loses the mark": {func(name string, r io.ReadSeeker, bytes int64) error {
			if strings.HasSuffix(name, target.Suffix) {
				return nil
			}
			return to.Put(t.Context(), name, r, bytes)
		}, "stored something else"},
		"it is full": {func(string, io.ReadSeeker, int64) error { return unix.ENOSPC }, unix.ENOSPC.Error()},
	} {
		h.Target = bad{to, c.put}
		h.step(day, day)
		h.want("1", what)
		if s := h.Status().Backup; !strings.Contains(s.Last.Error, c.want) || s.Since.IsZero() {
			t.Errorf("%s: %+v", what, s)
		}
	}
	h.Target = to
	h.step(time.Hour, time.Hour)
	h.want("2", "when it is well again")
}

// TestKilled holds that what a daemon left that was killed in a run counts for nothing, and goes.
func TestKilled(t *testing.T) {
	h := newHost(t, Config{Every: day, Keep: Limits{Count: 2}})
	h.step(day, time.Hour)
	half := target.Name(h.Whose().Owner(), 2, h.clock, false)
	theirs := target.Name("a-other", 1, h.clock, false)
	for _, name := range []string{half, theirs, "notes.txt"} {
		if err := os.WriteFile(filepath.Join(h.Target.String(), name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h.remember(func(s *Status) { s.Tried = []string{half} })                 // as the daemon does before it stores it
	h.note(func(s *Status) *History { return &s.Drill }, Run{Time: h.clock}) // a drill that comes before the next backup
	h.want("1 2? 1?", "after the kill")
	if b, err := target.Find(t.Context(), h.Target, h.Whose(), target.Latest); err != nil || b.Number != 1 {
		t.Errorf("the latest is %+v, %v", b, err)
	}
	if _, err := target.Open(t.Context(), h.Target, half); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("half a backup opens: %v", err)
	}
	h.step(day, time.Hour)
	h.want("1 3 1?", "the next run")
	if _, err := os.Stat(filepath.Join(h.Target.String(), "notes.txt")); err != nil {
		t.Error(err)
	}
}

// TestClock holds that a clock that jumps neither stops the timer nor makes the keeper remove
// what is new.
func TestClock(t *testing.T) {
	h := newHost(t, Config{Every: day, Keep: Limits{Count: 2}})
	h.step(2*day, time.Hour)
	h.want("1 2", "before")
	h.clock = h.clock.AddDate(10, 0, 0)
	h.Tick(t.Context())
	h.want("2 3", "ten years ahead")
	h.clock = h.clock.AddDate(-10, 0, 0)
	h.Tick(t.Context())
	h.want("3 4", "and back")
	h.step(time.Hour, time.Minute)
	h.want("3 4", "an hour later")
	h.step(2*day, time.Hour)
	h.want("5 6", "days later")
	if b, err := target.Find(t.Context(), h.Target, h.Whose(), target.Latest); err != nil || b.Number != 6 {
		t.Errorf("the latest is %+v, %v", b, err)
	}
}

// TestShutdown holds that the end of the daemon is no failure.
func TestShutdown(t *testing.T) {
	h := newHost(t, Config{Every: day})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	h.clock = h.clock.Add(day)
	h.Tick(ctx)
	if s := h.Status(); s.Backup != (History{}) || h.Failures() > 0 || len(h.told) > 0 {
		t.Errorf("the status is %+v, %q", s, h.told)
	}
	h.want("", "nothing was stored")
}

// newIdentity makes a file with a private key, and returns its public key.
func newIdentity(t *testing.T) (file, public string) {
	t.Helper()
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte("# made by a test\n"+id.String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file, id.Recipient().String()
}

// TestEncrypted holds that a backup for recipients opens with the key of one of them alone.
func TestEncrypted(t *testing.T) {
	dir := t.TempDir()
	var files, public []string
	for range 3 {
		file, key := newIdentity(t)
		files, public = append(files, file), append(public, key)
	}
	to, err := backup.ParseRecipients(public[:2])
	if err != nil {
		t.Fatal(err)
	}
	h := newHost(t, Config{Every: day, Recipients: to})
	b, err := h.Backup(t.Context())
	if err != nil || !b.Encrypted || !strings.HasSuffix(b.Name, ".tar.gz.age") {
		t.Fatalf("%+v, %v", b, err)
	}
	unpack := func(ids backup.Identities) (backup.Manifest, error) {
		r, err := target.Open(t.Context(), h.Target, b.Name)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		return backup.Unpack(r, ids, filepath.Join(t.TempDir(), "db"), here)
	}
	for i, file := range files {
		ids, err := backup.ReadIdentities(file)
		if err != nil {
			t.Fatal(err)
		}
		switch m, err := unpack(ids); {
		case i < 2 && (err != nil || !m.Taken.Equal(start)):
			t.Errorf("recipient %d does not open it: %v", i, err)
		case i == 2 && !errors.Is(err, backup.ErrEncrypted):
			t.Errorf("another one opens it: %v", err)
		}
	}
	if _, err := unpack(nil); !errors.Is(err, backup.ErrEncrypted) {
		t.Errorf("nobody opens it: %v", err)
	}
	// A changed byte anywhere is found, also in the last chunk.
	path := filepath.Join(h.Target.String(), b.Name)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := backup.ReadIdentities(files[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []int{0, 30, len(text) / 2, len(text) - 1} {
		changed := slices.Clone(text)
		changed[at] ^= 1
		if err := os.WriteFile(path, changed, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := unpack(ids); err == nil {
			t.Errorf("byte %d of %d is changed, and it opens", at, len(text))
		}
	}
	for _, key := range []string{"", "age1", "ssh-ed25519 AAAA", public[0] + "\n" + public[1], "#"} {
		if _, err := backup.ParseRecipients([]string{key}); err == nil {
			t.Errorf("%q is a recipient", key)
		}
	}
	bad := filepath.Join(dir, "bad")
	if err := os.WriteFile(bad, []byte("AGE-SECRET-KEY-1HUNTER2"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := backup.ReadIdentities(bad); err == nil || strings.Contains(err.Error(), "HUNTER2") {
		t.Errorf("a bad identity: %v", err)
	}
	if err := os.Chmod(files[0], 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := backup.ReadIdentities(files[0]); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("an identity that all may read: %v", err)
	}
}

// TestS3 is the timer with S3-compatible storage that is gone, full and lies in turn.
func TestS3(t *testing.T) {
	s := targettest.S3(t)
	h := newHost(t, Config{Target: s.Target, Every: day, Keep: Limits{Count: 2}})
	h.step(3*day, day)
	h.want("2 3", "three days")
	for _, c := range []struct {
		fault func(*http.Response)
		left  string
	}{{targettest.Flip, "2 3"}, {targettest.Full, "3"}} { // a full one lets go what the next would
		s.Answer.Store(&c.fault)
		h.step(day, day)
		s.Answer.Store(nil)
		h.want(c.left, "with a fault")
	}
	s.Gone.Store(true)
	h.step(day, day)
	s.Gone.Store(false)
	if n := h.Failures(); n != 3 || strings.Contains(fmt.Sprint(h.told), targettest.Secret) {
		t.Errorf("%d failures, %q", n, h.told)
	}
	h.step(time.Hour, time.Hour)
	h.want("3 4", "when it is well again")
	r, err := target.Open(t.Context(), s.Target, h.Status().Backup.Good.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if m, err := backup.Unpack(r, nil, filepath.Join(t.TempDir(), "db"), here); err != nil || m.State.Schema != store.Schema {
		t.Errorf("the last one: %+v, %v", m, err)
	}
}

// TestAppendOnly: storage that lets nothing be removed gets every backup, and it is said; so does one that
// lets it again.
func TestAppendOnly(t *testing.T) {
	s := targettest.S3(t)
	h := newHost(t, Config{Target: s.Target, Every: day, Keep: Limits{Count: 2}})
	h.step(2*day, day)
	if got := h.Status().Refused; got != "" {
		t.Errorf("before anything is old: %s", got)
	}
	s.AppendOnly.Store(true)
	h.step(2*day, day)
	h.want("1 2 3 4", "nothing may be removed")
	st := h.Status()
	if st.Backup.Last.Error != "" || !strings.Contains(st.Refused, "remove ") || !strings.Contains(st.Refused, "Access Denied") {
		t.Errorf("the status is %+v", st)
	}
	s.AppendOnly.Store(false)
	h.step(day, day)
	h.want("4 5", "then it may")
	if got := h.Status().Refused; got != "" {
		t.Errorf("then: %s", got)
	}
}

// TestPlan holds, for any backups, that the newest stays, that nothing goes within the limits, and
// that a second plan is empty.
func TestPlan(t *testing.T) {
	rnd := rand.New(rand.NewPCG(19, 4))
	for range 20_000 {
		var all []target.Backup
		n := 1 + rnd.IntN(8)
		for i := range n {
			all = append(all, target.Backup{
				Number: i + 1, Whole: i == n-1 || rnd.IntN(4) > 0, Taken: start.Add(time.Duration(rnd.IntN(200)-100) * time.Hour),
			})
		}
		keep := Limits{Count: rnd.IntN(4), Age: time.Duration(rnd.IntN(2)*rnd.IntN(90)) * time.Hour}
		gone := Plan(slices.Clone(all), keep, start)
		left := slices.DeleteFunc(slices.Clone(all), func(b target.Backup) bool { return slices.Contains(gone, b) })
		bad := len(left) == 0 || left[len(left)-1].Number != n || len(left)+len(gone) != n
		for i, b := range left[:max(0, len(left)-1)] {
			bad = bad || !b.Whole || keep.Age > 0 && start.Sub(b.Taken) > keep.Age || keep.Count > 0 && len(left)-i > keep.Count
		}
		for _, b := range gone {
			newer := 0
			for _, o := range all {
				if o.Whole && o.Number > b.Number {
					newer++
				}
			}
			bad = bad || b.Whole && (keep.Count == 0 || newer < keep.Count) && (keep.Age == 0 || start.Sub(b.Taken) <= keep.Age)
		}
		if bad || len(Plan(left, keep, start)) > 0 {
			t.Fatalf("of %+v with %+v go %+v", all, keep, gone)
		}
	}
}

// TestStatus holds that a file nobody can read costs the timer nothing.
func TestStatus(t *testing.T) {
	h := newHost(t, Config{Every: day})
	if err := os.WriteFile(filepath.Join(h.Dir, statusFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadStatus(h.Dir); err == nil {
		t.Error("a broken file is read")
	}
	h.Keeper = New(h.Config)
	h.step(time.Minute, time.Minute)
	h.want("1", "with a broken file")
	if s, err := ReadStatus(h.Dir); err != nil || !reflect.DeepEqual(s, h.Status()) {
		t.Errorf("%+v, %v", s, err)
	}
	for every, want := range map[time.Duration]time.Duration{
		time.Minute: time.Minute, time.Hour: 150 * time.Second, day: time.Hour, 30 * day: time.Hour,
	} {
		if got := retry(every); got != want {
			t.Errorf("every %v is tried again after %v, want %v", every, got, want)
		}
	}
}
