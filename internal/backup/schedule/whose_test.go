package schedule

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/store"
)

func (h *host) now(t *testing.T) target.Backup {
	t.Helper()
	h.clock = h.clock.Add(time.Hour)
	b, err := h.Backup(t.Context())
	must(t, err)
	return b
}

// copyOf is another host with a copy of the disk of one whose store is closed.
func copyOf(t *testing.T, was *host, machine string) *host {
	t.Helper()
	dir := t.TempDir()
	must(t, os.CopyFS(dir, os.DirFS(was.Dir)))
	return boot(t, was, dir, machine)
}

// boot starts the daemon of a directory on a machine.
func boot(t *testing.T, was *host, dir, machine string) *host {
	t.Helper()
	must(t, was.db.Close())
	db, err := store.Open(filepath.Join(dir, "sandboxd.db"), store.Options{Reserve: -1})
	must(t, err, Bind(t.Context(), db, machine, slog.New(slog.DiscardHandler)), db.Close())
	c := Config{Keep: was.Keep, Target: was.Target, Dir: dir}
	if was.Data != nil {
		c.Data = &chunks.Store{}
	}
	h := newHost(t, c)
	h.clock = was.clock
	if was.Data != nil {
		h.files = was.files
	}
	return h
}

// TestReimaged: a host that was installed again neither counts nor removes the backups of its old life,
// says so, and does not take its new, empty ones for the newest in a restore, until they are adopted.
func TestReimaged(t *testing.T) {
	old := newDataHost(t, Config{Keep: Limits{Count: 3}})
	for range 3 {
		old.write("small", 100)
		old.now(t)
	}
	packs := packsIn(t, old)
	h := newHost(t, Config{Keep: Limits{Count: 2}, Target: old.Target, Data: &chunks.Store{}})
	pick := func(w target.Whose) (target.Backup, error) { return Pick(t.Context(), h.Target, w, nil, target.Latest) }
	if b, err := pick(h.Whose()); err != nil || b.Number != 3 {
		t.Errorf("before its first backup a restore takes %+v, %v", b, err)
	}
	must(t, h.Look(t.Context()))
	if u := h.Status().Unknown; u.Count != 3 || !strings.Contains(u.Newest, "-000003-") {
		t.Errorf("a look at the target finds %+v", u)
	}
	for range 4 {
		h.now(t)
	}
	numbers := func(w target.Whose) string {
		all, err := h.List(t.Context())
		must(t, err)
		var out []string
		for _, b := range w.Select(all) {
			out = append(out, string('0'+rune(b.Number))+string(w.Of(b)[0]))
		}
		return strings.Join(out, " ")
	}
	if got := numbers(old.Whose()) + " and " + numbers(h.Whose()); got != "1o 2o 3o and 6o 7o" {
		t.Errorf("after four backups the target has %s", got)
	}
	for _, p := range packs {
		if _, err := os.Stat(p); err != nil {
			t.Error(err)
		}
	}
	must(t, old.comesBack(target.Latest))
	for what, w := range map[string]target.Whose{"with its state": h.Whose(), "on a new disk": {Label: h.Label}} {
		_, err := pick(w)
		if !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "-000003-") || !strings.Contains(err.Error(), "-000007-") {
			t.Errorf("%s a restore of the latest: %v", what, err)
		}
	}
	if b, err := pick(old.Whose()); err == nil {
		t.Errorf("the old state takes %+v", b)
	}

	if _, err := h.Adopt(t.Context(), []string{"a-nobody"}); !errs.Is(err, errs.NotFound) {
		t.Errorf("what is not there is adopted: %v", err)
	}
	adopted, err := h.Adopt(t.Context(), []string{old.Whose().Owner()})
	if err != nil || len(adopted) != 3 || h.Status().Unknown.Count != 0 {
		t.Fatalf("%+v, %v, %+v", adopted, err, h.Status().Unknown)
	}
	if again, err := h.Adopt(t.Context(), nil); err != nil || len(again) > 0 {
		t.Errorf("a second time: %+v, %v", again, err)
	}
	h.Keep.Count = 4
	h.Keeper = New(h.Config) // it outlives a restart
	if b, err := pick(h.Whose()); err != nil || b.Number != 7 {
		t.Errorf("then a restore takes %+v, %v", b, err)
	}
	h.now(t)
	if got := numbers(h.Whose()); got != "3a 6o 7o 8o" {
		t.Errorf("after they are adopted the target has %s", got)
	}
	must(t, old.comesBack(target.Latest))
	h.Keep.Count = 1
	h.now(t)
	h.whole() // the packs of the old life are gone, too
}

// TestCopies: of two hosts with copies of one disk none removes what the other has written: at once if
// their machines differ, and as soon as both have written if nothing tells them apart. Nor does one need packs
// that the other may remove.
func TestCopies(t *testing.T) {
	for what, c := range map[string]struct{ machine, name string }{
		"another machine": {"m2", "box"}, "nothing tells them apart": {"m1", "box"}, "only the name does": {"m1", "other"},
	} {
		t.Run(what, func(t *testing.T) {
			first := newDataHost(t, Config{Keep: Limits{Count: 3}})
			a := boot(t, first, first.Dir, "m1")
			for range 3 {
				a.now(t)
			}
			must(t, a.db.Close())
			id := a.Whose().ID
			b := copyOf(t, a, c.machine)
			b.Label, b.files = target.Label(here.Instance, c.name), t.TempDir()
			must(t, os.CopyFS(b.files, os.DirFS(a.files)))
			a = boot(t, a, a.Dir, "m1")
			if a.Whose().ID != id || (b.Whose().ID == id) != (c.machine == "m1") {
				t.Errorf("it was %s; then they are %s and %s", id, a.Whose().ID, b.Whose().ID)
			}
			var wrote []target.Backup
			for range 3 {
				b.clock = b.clock.Add(time.Minute)
				b.write("small", 100)
				must(t, os.Remove(filepath.Join(b.files, "large"))) // so it needs nothing of the common past
				b.write("large", 2<<20)
				wrote = append(wrote, b.now(t), a.now(t))
			}
			if a.Whose().ID == b.Whose().ID {
				t.Error("both have one identity")
			}
			all, err := a.List(t.Context())
			must(t, err)
			for _, one := range wrote {
				if !slices.ContainsFunc(all, func(b target.Backup) bool { return b.Name == one.Name && b.Whole }) {
					t.Errorf("%s is gone", one.Name)
				}
			}
			for _, one := range all {
				must(t, a.opens(one.Name))
			}
		})
	}
}

// opens reads all files of a backup.
func (h *host) opens(name string) error {
	err := h.comesBack(name)
	if err != nil && strings.Contains(err.Error(), "other files come back") {
		return nil
	}
	return err
}

// TestUpgrade: a state of the release before adopts what it has written there, goes on with its packs, and
// leaves alone what another state has written under the same name.
func TestUpgrade(t *testing.T) {
	ctx := t.Context()
	to, err := target.Parse(t.TempDir(), target.Options{})
	must(t, err)
	// earlier starts the daemon on the state that a release wrote.
	earlier := func(pool string) *host {
		dir := t.TempDir()
		b, err := os.ReadFile("../../../pkg/store/testdata/release-2/sandboxd.db")
		must(t, err, os.WriteFile(filepath.Join(dir, "sandboxd.db"), b, 0o600))
		h := newHost(t, Config{Keep: Limits{Count: 3}, Target: to, Dir: dir, Data: &chunks.Store{}})
		must(t, h.db.SetPoolID(ctx, pool))
		h.write("large", 3<<20)
		return h
	}
	// write is a backup as that release stored it.
	write := func(h *host, number int, whole bool) string {
		h.clock = h.clock.Add(time.Hour)
		h.Data.Whose = target.Whose{Label: h.Label, BackupIdentity: store.BackupIdentity{Packs: []string{h.Label}}}
		f, packs, _, err := h.takeAs(ctx)
		must(t, err)
		defer f.Close() //nolint:errcheck // read only
		size, err := f.Seek(0, io.SeekEnd)
		must(t, err)
		_, err = f.Seek(0, io.SeekStart)
		must(t, err)
		name := target.Name(h.Label, number, h.clock, false)
		_, err = target.Save(ctx, to, name, f, size, packs)
		must(t, err)
		if !whole {
			must(t, to.Remove(ctx, name+target.Suffix))
		}
		return name
	}
	need := func(name string) []string {
		packs, err := target.Packs(ctx, to, name)
		must(t, err)
		return packs
	}
	remember := func(h *host, last string) {
		must(t, os.WriteFile(filepath.Join(h.Dir, statusFile), []byte(`{"backup":{"good":{"time":"2026-11-27T12:00:00Z","name":"`+last+
			`"},"last":{"time":"2026-11-27T12:00:00Z","name":"`+last+`"}},"drill":{}}`), 0o600))
		h.Keeper = New(h.Config)
	}
	gone, h := earlier("the pool before"), earlier("this pool")
	write(gone, 1, true)
	write(h, 2, true)
	last := write(h, 3, true)
	write(h, 4, false)
	remember(h, last)
	if !h.Whose().Earlier || h.Status().Backup.Good.Name != last {
		t.Fatalf("%+v, %+v", h.Whose(), h.Status())
	}
	b := h.now(t)
	if w := h.Whose(); w.Earlier || b.Number != 5 || b.ID != w.ID {
		t.Errorf("%+v, then %+v", w, b)
	}
	h.want("1 2 3 5", "the half one is gone, and 1 is not this state's")
	// The release before, if it is started again, removes packs without an ID that no backup without one needs.
	if sent, u := h.Status().Backup.Good.Data.Sent, h.Status().Unknown.Count; sent < 3<<20 || u != 1 {
		t.Errorf("the first backup sends %d bytes, and %d are unknown", sent, u)
	}
	for _, p := range need(b.Name) {
		if one, ok := target.ParsePack(p); !ok || one.ID() != h.Whose().ID {
			t.Errorf("%s needs %s", b.Name, p)
		}
	}
	h.now(t)
	h.want("1 3 5 6", "then")
	for range 3 {
		h.now(t)
	}
	left := map[string]bool{}
	for _, p := range need(target.Name(h.Label, 1, start.Add(time.Hour), false)) {
		left[p] = true
	}
	for _, f := range packsIn(t, h) { // those of this state that nothing needs any more are gone
		if one, _ := target.ParsePack(filepath.Base(f)); one.ID() == "" && !left[filepath.Base(f)] {
			t.Errorf("%s is left", f)
		}
	}
	all, err := h.List(ctx)
	must(t, err)
	for _, one := range all {
		must(t, h.opens(one.Name)) // the packs of the one before this state, too
	}

	// Two states of that release have written in turn: the one before cannot tell what is its own.
	to, err = target.Parse(t.TempDir(), target.Options{})
	must(t, err)
	h = earlier("this pool")
	write(h, 1, true)
	last = write(h, 2, true)
	write(h, 3, true)
	remember(h, last)
	must(t, h.Look(ctx))
	if w := h.Whose(); !slices.Equal(w.Adopted, []string{last}) || h.Status().Unknown.Count != 2 {
		t.Errorf("%+v, %+v", w, h.Status())
	}
	// With less room than for twice the data the error says why, not at the first try alone.
	to, err = target.Parse(t.TempDir(), target.Options{})
	must(t, err)
	h = earlier("this pool")
	remember(h, write(h, 1, true))
	q := &quota{Target: to, most: 5 << 20}
	h.Target, h.Data.Target = q, q
	for range 2 {
		if _, err := h.Backup(ctx); !errors.Is(err, target.ErrFull) || !strings.Contains(err.Error(), "room for it twice") {
			t.Errorf("without the room: %v", err)
		}
	}
	// One that never stored a backup adopts none.
	h = earlier("this pool")
	must(t, h.Look(ctx))
	if w := h.Whose(); len(w.Adopted) > 0 || w.Earlier {
		t.Errorf("%+v", w)
	}
}

// takeAs is the file of a backup with data, with the packs that it needs.
func (h *host) takeAs(ctx context.Context) (f *os.File, packs []string, d *backup.Data, err error) {
	s, err := h.Data.Begin(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	defer s.Close() //nolint:errcheck // its journal is synced
	f, d, err = h.take(ctx, s)
	if err == nil {
		for _, p := range d.Catalog.Packs {
			packs = append(packs, p.Name)
		}
	}
	return f, packs, d, err
}
