package schedule

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"filippo.io/age"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/files"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/failpoint"
)

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// takeData sends the files of the host as one volume.
func (h *host) takeData(ctx context.Context, s *chunks.Session) (*backup.Data, error) {
	s.BeginTree()
	tree, err := files.Save(ctx, s, h.files, h.Dir)
	if err != nil {
		return nil, err
	}
	d := &backup.Data{Trees: []backup.Tree{{Kind: backup.Volume, ID: "vol-x", Tree: tree}}}
	d.Catalog, err = s.Finish(ctx, h.Dir)
	return d, err
}

// write gives a file random content.
func (h *host) write(name string, n int) {
	h.t.Helper()
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	must(h.t, os.WriteFile(filepath.Join(h.files, name), b, 0o600))
}

// comesBack restores a backup, and compares its files with those of now.
func (h *host) comesBack(name string) error {
	h.t.Helper()
	ctx := h.t.Context()
	b, err := target.Find(ctx, h.Target, h.Whose(), name)
	must(h.t, err)
	r, err := target.Open(ctx, h.Target, b.Name)
	must(h.t, err)
	defer r.Close() //nolint:errcheck // read only
	ids, err := h.Trial.Identities()
	must(h.t, err)
	m, err := backup.Unpack(r, ids, filepath.Join(h.t.TempDir(), "state"), here)
	must(h.t, err)
	from, err := chunks.NewReader(ctx, h.Target, m.Data.Catalog, ids.Opener())
	if err != nil {
		return err
	}
	defer from.Close()
	dir := h.t.TempDir()
	if err := files.Restore(ctx, from, m.Data.Trees[0].Tree, dir, nil); err != nil {
		return err
	}
	out, err := exec.Command("diff", "-r", h.files, dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("other files come back: %w: %s", err, out)
	}
	return nil
}

// whole fails unless the target has what its backups need, and nothing else.
func (h *host) whole() {
	h.t.Helper()
	all, err := target.Backups(h.t.Context(), h.Target)
	must(h.t, err)
	n, err := h.needs(h.t.Context(), h.Whose(), all)
	must(h.t, err, n.damages())
	need := n.packs
	for _, b := range all {
		need[b.Name], need[b.Name+target.Suffix], need[b.Name+target.ListSuffix] = true, true, true
		if !b.Whole {
			h.t.Errorf("%s is not whole", b.Name)
		}
	}
	entries, err := os.ReadDir(h.Target.String())
	must(h.t, err)
	for _, e := range entries {
		if !need[e.Name()] {
			h.t.Errorf("nothing needs %s", e.Name())
		}
		delete(need, e.Name())
	}
	for name := range need {
		h.t.Errorf("%s is missing", name)
	}
}

func newDataHost(t *testing.T, c Config) *host {
	t.Helper()
	c.Data = &chunks.Store{}
	h := newHost(t, c)
	h.write("large", 3<<20)
	h.write("small", 100)
	return h
}

// TestData: backups with data come back, encrypted or not; what no backup needs goes, and a drill
// opens them.
func TestData(t *testing.T) {
	id, err := age.GenerateX25519Identity()
	must(t, err)
	for how, c := range map[string]Config{"clear": {}, "encrypted": {Recipients: backup.Recipients{id.Recipient()}}} {
		t.Run(how, func(t *testing.T) {
			c.Keep.Count = 2
			c.Trial.Identities = func() (backup.Identities, error) { return backup.Identities{id}, nil }
			h := newDataHost(t, c)
			h.Data.Sealer = c.Recipients.Sealer([]string{id.Recipient().String()})
			for i := range 5 {
				if i > 2 {
					must(t, os.Remove(filepath.Join(h.files, "large"))) // so packs go
					h.write("large", 2<<20)
				}
				_, err := h.Backup(t.Context())
				must(t, err)
				h.whole()
				if sent := h.Status().Backup.Good.Data.Sent; i > 0 && i < 3 && sent > 10<<10 {
					t.Errorf("%d bytes are sent again", sent)
				}
			}
			must(t, h.comesBack(target.Latest))
			if d, err := h.Drill(t.Context()); err != nil {
				t.Errorf("%+v, %v", d, err)
			}
			for _, f := range packsIn(t, h) {
				b, err := os.ReadFile(f)
				must(t, err)
				must(t, os.WriteFile(f, append(b, 'x'), 0o600))
			}
			if _, err := h.Drill(t.Context()); !errors.Is(err, chunks.ErrBad) {
				t.Errorf("a drill with bad packs: %v", err)
			}
		})
	}
}

func packsIn(t *testing.T, h *host) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(h.Target.String(), "*-pack-*"))
	must(t, err)
	return all
}

// TestDataOfOthers: two instances on one target remove nothing of each other, and one without data
// does not remove packs that its backups need.
func TestDataOfOthers(t *testing.T) {
	a := newDataHost(t, Config{Keep: Limits{Count: 1}})
	b := newDataHost(t, Config{Keep: Limits{Count: 1}, Target: a.Target})
	b.Label = target.Label("b", "box")
	for range 3 {
		for _, h := range []*host{a, b} {
			h.write("small", 100)
			_, err := h.Backup(t.Context())
			must(t, err)
		}
	}
	must(t, a.comesBack(target.Latest), b.comesBack(target.Latest))
	a.Keep.Count, a.Data = 2, nil
	_, err := a.Backup(t.Context())
	must(t, err)
	all, err := target.Backups(t.Context(), a.Target)
	must(t, err)
	must(t, a.comesBack(all[0].Name))
	_, err = a.Backup(t.Context())
	must(t, err)
	for _, f := range packsIn(t, a) {
		if p, _ := target.ParsePack(filepath.Base(f)); p.Owner == a.Whose().Owner() {
			t.Errorf("nothing needs %s", f)
		}
	}
	must(t, b.comesBack(target.Latest))
}

// TestUnknownNeed: if it is not known what a backup needs, no pack goes.
func TestUnknownNeed(t *testing.T) {
	h := newDataHost(t, Config{Keep: Limits{Count: 2}})
	first, err := h.Backup(t.Context())
	must(t, err)
	list := filepath.Join(h.Target.String(), first.Name+target.ListSuffix)
	text, err := os.ReadFile(list)
	must(t, err)
	h.write("large", 2<<20)
	for _, b := range [][]byte{nil, text[:len(text)/2], append(text, "sandboxd-x\n"...)} {
		must(t, os.WriteFile(list, b, 0o600))
		if b == nil {
			must(t, os.Remove(list))
		}
		before := packsIn(t, h)
		h.Keep.Count++
		_, err := h.Backup(t.Context())
		must(t, err)
		for _, f := range before {
			if !slices.Contains(packsIn(t, h), f) {
				t.Errorf("%s is removed", f)
			}
		}
	}
	must(t, os.WriteFile(list, text, 0o600))
	h.Keep.Count = 1
	_, err = h.Backup(t.Context())
	must(t, err)
	h.whole()
}

// TestDataTargetGone: after a week without its target a host sends what is new, and loses nothing.
func TestDataTargetGone(t *testing.T) {
	h := newDataHost(t, Config{Every: day, Keep: Limits{Count: 3}})
	h.step(2*day, day)
	dir := h.Target.String()
	must(t, os.Rename(dir, dir+".away"))
	h.write("new", 100<<10)
	h.step(7*day, 6*time.Hour)
	if h.Status().Backup.Since.IsZero() || h.Failures() < 7 {
		t.Errorf("%+v", h.Status())
	}
	must(t, os.Rename(dir+".away", dir))
	h.step(day, time.Hour)
	if run := h.Status().Backup.Good.Data; run == nil || run.Sent > 200<<10 || run.Sent < 100<<10 {
		t.Errorf("%+v", run)
	}
	h.whole()
	must(t, h.comesBack(target.Latest))
}

// TestCheck: a pack that the target has changed is found within a month. A restore then names it, and
// the next backup is whole again.
func TestCheck(t *testing.T) {
	h := newDataHost(t, Config{Keep: Limits{Count: 1}})
	_, err := h.Backup(t.Context())
	must(t, err)
	packs := packsIn(t, h)
	file := packs[len(packs)-1]
	for _, f := range packs {
		if fi, err := os.Stat(f); err == nil && fi.Size() > 1<<20 {
			file = f
		}
	}
	b, err := os.ReadFile(file)
	must(t, err)
	b[len(b)/2] ^= 1
	must(t, os.WriteFile(file, b, 0o600))
	if err := h.comesBack(target.Latest); !errors.Is(err, target.ErrLied) || !strings.Contains(err.Error(), filepath.Base(file)) {
		t.Errorf("a restore with a changed pack: %v", err)
	}
	read, found := 0, 0
	for range checkParts {
		n, err := h.Check(t.Context())
		if read += n; err != nil {
			found++
			if !errors.Is(err, chunks.ErrBad) || !strings.Contains(err.Error(), filepath.Base(file)) {
				t.Errorf("it finds %v", err)
			}
		}
	}
	if found == 0 || read < len(packs) || !slices.ContainsFunc(h.told, func(s string) bool { return strings.HasPrefix(s, CheckFailed) }) {
		t.Errorf("%d packs were read, %d bad ones found, and told %q", read, found, h.told)
	}
	_, err = h.Backup(t.Context())
	must(t, err, h.comesBack(target.Latest))
	h.whole()
	if n, err := h.Check(t.Context()); err != nil || n == 0 {
		t.Errorf("%d, %v", n, err)
	}
}

// TestCheckStands: a bad pack is said until there is another backup.
func TestCheckStands(t *testing.T) {
	now := start.Add(2 * day)
	failed := History{Good: Run{Time: start.Add(-day)}, Last: Run{Time: start, Error: "bad"}, Since: start}
	for what, c := range map[string]struct {
		check  History
		backup time.Time
		due    bool
	}{
		"never":          {History{}, start, true},
		"just now":       {History{Good: Run{Time: now}, Last: Run{Time: now}}, start, false},
		"a day ago":      {History{Good: Run{Time: start}, Last: Run{Time: start}}, start, true},
		"failed":         {failed, start.Add(-time.Hour), false},
		"failed, backup": {failed, start.Add(time.Hour), true},
		"not sent":       {History{Last: Run{Time: start, Error: "503", Unread: true}}, start.Add(-time.Hour), true},
		"not sent now":   {History{Last: Run{Time: now, Error: "503", Unread: true}}, start, false},
	} {
		s := Status{Backup: History{Good: Run{Time: c.backup}}, Check: c.check}
		if got := s.checkDue(now); got != c.due {
			t.Errorf("%s: %v", what, got)
		}
	}
}

// steps are where a backup with data can be killed.
var steps = []string{
	"backup:send", "backup:sent", "backup:noted", "backup:noted:2", "backup:listed", "backup:stored", "backup:prune", "backup:prune:2",
}

// TestDataKilled: a daemon that is killed at any step of a backup leaves what the next one needs, and
// nothing else once that is done.
func TestDataKilled(t *testing.T) {
	if dir := os.Getenv("SANDBOXD_TEST_KILLED"); dir != "" {
		child(t, dir)
		return
	}
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			h := newDataHost(t, Config{Keep: Limits{Count: 2}})
			for range 2 {
				_, err := h.Backup(t.Context())
				must(t, err)
				h.write("large", 2<<20)
				h.write("small", 100)
			}
			must(t, h.db.Close())
			cmd := exec.Command(os.Args[0], "-test.run=^TestDataKilled$")
			cmd.Env = append(os.Environ(), failpoint.Env+"="+step+"=kill",
				"SANDBOXD_TEST_KILLED="+strings.Join([]string{h.Target.String(), h.Dir, h.files}, ":"))
			out, err := cmd.CombinedOutput()
			if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("%v\n%s", err, out)
			}
			before, err := target.Find(t.Context(), h.Target, h.Whose(), target.Latest)
			must(t, err)
			next := reopen(t, h)
			if err := next.comesBack(before.Name); err != nil && !strings.Contains(err.Error(), "other files") {
				t.Errorf("the newest whole one: %v", err)
			}
			_, err = next.Backup(t.Context())
			must(t, err, next.comesBack(target.Latest))
			next.whole()
		})
	}
}

// reopen is the next daemon on the directories of a host.
func reopen(t *testing.T, was *host) *host {
	t.Helper()
	h := newHost(t, Config{Keep: was.Keep, Target: was.Target, Data: &chunks.Store{}, Dir: was.Dir})
	h.files = was.files
	return h
}

func child(t *testing.T, dirs string) {
	all := strings.Split(dirs, ":")
	to, err := target.Parse(all[0], target.Options{})
	must(t, err)
	h := newHost(t, Config{Keep: Limits{Count: 2}, Target: to, Data: &chunks.Store{}, Dir: all[1]})
	h.files = all[2]
	_, err = h.Backup(t.Context())
	t.Fatalf("it was not killed: %v", err)
}

// TestFullData: of a target that is full nothing is left that is not whole, and what it has taken is
// not sent again.
func TestFullData(t *testing.T) {
	h := newDataHost(t, Config{Keep: Limits{Count: 2}})
	_, err := h.Backup(t.Context())
	must(t, err)
	real := h.Target
	h.write("large", 20<<20)
	full := &fullTarget{Target: real, left: 18 << 20}
	h.Target, h.Data.Target = full, full
	if _, err := h.Backup(t.Context()); err == nil || !strings.Contains(err.Error(), "full") {
		t.Errorf("%v", err)
	}
	full.left = 1 << 40
	_, err = h.Backup(t.Context())
	must(t, err)
	if sent := h.Status().Backup.Good.Data.Sent; sent > 8<<20 {
		t.Errorf("%d bytes are sent", sent)
	}
	h.Target, h.Data.Target = real, real
	h.whole()
	must(t, h.comesBack(target.Latest))
}

// fullTarget takes so many bytes.
type fullTarget struct {
	target.Target
	left int64
}

func (f *fullTarget) Put(ctx context.Context, name string, r io.ReadSeeker, n int64) error {
	if f.left -= n; f.left < 0 {
		return fmt.Errorf("%s %w: %w", f, target.ErrFull, syscall.ENOSPC)
	}
	var b bytes.Buffer
	if _, err := b.ReadFrom(r); err != nil {
		return err
	}
	return f.Target.Put(ctx, name, bytes.NewReader(b.Bytes()), n)
}

// TestBadByte: of a pack with a bad byte the files beside it come back, encrypted or not.
func TestBadByte(t *testing.T) {
	id, err := age.GenerateX25519Identity()
	must(t, err)
	ids := backup.Identities{id}
	for how, c := range map[string]Config{"clear": {}, "encrypted": {Recipients: backup.Recipients{id.Recipient()}}} {
		t.Run(how, func(t *testing.T) {
			ctx := t.Context()
			h := newDataHost(t, c)
			h.Data.Sealer = c.Recipients.Sealer([]string{id.Recipient().String()})
			const n = 20
			for i := range n {
				h.write(fmt.Sprintf("file %02d", i), 200<<10)
			}
			h.Data.Whose = h.Whose()
			s, err := h.Data.Begin(ctx)
			must(t, err)
			d, err := h.takeData(ctx, s)
			must(t, err, s.Close())
			name := filepath.Join(h.Target.String(), d.Catalog.Packs[0].Name)
			b, err := os.ReadFile(name)
			must(t, err)
			b[len(b)/3] ^= 1
			must(t, os.WriteFile(name, b, 0o600))
			from, err := chunks.NewReader(ctx, h.Target, d.Catalog, ids.Opener())
			must(t, err)
			defer from.Close()
			left := map[string]bool{}
			dir := t.TempDir()
			must(t, files.Restore(ctx, from, d.Trees[0].Tree, dir, func(path string, err error) {
				left[path] = true
				if !errors.Is(err, chunks.ErrBad) || !strings.Contains(err.Error(), filepath.Base(name)) {
					t.Errorf("%s is left out: %v", path, err)
				}
			}))
			// What age encrypts at once, 64 KiB, may be of two chunks of two files.
			if len(left) == 0 || len(left) > 2 || how == "clear" && len(left) > 1 {
				t.Errorf("%v are left out", left)
			}
			entries, err := os.ReadDir(h.files)
			must(t, err)
			for _, e := range entries {
				want, err := os.ReadFile(filepath.Join(h.files, e.Name()))
				must(t, err)
				got, err := os.ReadFile(filepath.Join(dir, e.Name()))
				if left[e.Name()] != errors.Is(err, fs.ErrNotExist) || err == nil && !bytes.Equal(got, want) {
					t.Errorf("%s comes back with %d bytes of %d, %v", e.Name(), len(got), len(want), err)
				}
			}
			if err := from.Bad(); !errors.Is(err, chunks.ErrBad) {
				t.Errorf("the reader says %v", err)
			}
		})
	}
}
