package schedule

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"filippo.io/age"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// flip changes a byte of a file, at a part of its size.
func flip(t *testing.T, path string, part float64) {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	b[int(float64(len(b))*part)] ^= 1
	must(t, os.WriteFile(path, b, 0o600))
}

// largest is the largest pack on the target.
func largest(t *testing.T, h *host) (path string) {
	t.Helper()
	most := int64(0)
	for _, p := range packsIn(t, h) {
		if fi, err := os.Stat(p); err == nil && fi.Size() > most {
			path, most = p, fi.Size()
		}
	}
	return path
}

// checks is what a check of backups says.
func (h *host) checks(names ...string) (c Checked, found []Damage, err error) {
	c, err = h.CheckAll(h.t.Context(), names, Listener{
		Progress: func(Checked) {}, Damage: func(d Damage) { found = append(found, d) },
	})
	return c, found, err
}

// TestCheckAll: a check of all backups finds each thing that is wrong, and says in which backup, tree and file;
// also of what other hosts have stored. The next backup is whole again.
func TestCheckAll(t *testing.T) {
	id, err := age.GenerateX25519Identity()
	must(t, err)
	for how, c := range map[string]Config{"clear": {}, "encrypted": {Recipients: backup.Recipients{id.Recipient()}}} {
		for what, damage := range map[string]struct {
			do    func(t *testing.T, h *host, last string)
			backs int    // backups that are damaged
			says  string // in one of the damages: problem and file
		}{
			"nothing": {func(*testing.T, *host, string) {}, 0, ""},
			"a byte of a pack": {
				func(t *testing.T, h *host, _ string) { flip(t, largest(t, h), 0.5) },
				2, `other than it was sent|file "large"`,
			},
			"a missing pack": {
				func(t *testing.T, h *host, _ string) { must(t, os.Remove(largest(t, h))) },
				2, `is not on |file "large"`,
			},
			"a missing list": {func(t *testing.T, h *host, last string) {
				must(t, os.Remove(filepath.Join(h.Target.String(), last+target.ListSuffix)))
			}, 1, "the list of its packs cannot be read"},
			"a byte of a list": {func(t *testing.T, h *host, last string) {
				flip(t, filepath.Join(h.Target.String(), last+target.ListSuffix), 0.9)
			}, 1, "the list of its packs cannot be read"},
			"the first byte": {
				func(t *testing.T, h *host, last string) { flip(t, filepath.Join(h.Target.String(), last), 0) },
				1, "stored something else",
			},
			"the last byte": {
				func(t *testing.T, h *host, last string) { flip(t, filepath.Join(h.Target.String(), last), 0.9999) },
				1, "stored something else",
			},
			"a byte of the mark": {func(t *testing.T, h *host, last string) {
				flip(t, filepath.Join(h.Target.String(), last+target.Suffix), 0)
			}, 1, ""},
		} {
			if how == "encrypted" && !strings.Contains(what, "pack") {
				continue // the same for both
			}
			t.Run(how+", "+what, func(t *testing.T) {
				c.Keep.Count = 3
				c.Trial.Identities = func() (backup.Identities, error) { return backup.Identities{id}, nil }
				h := newDataHost(t, c)
				h.Data.Sealer = c.Recipients.Sealer([]string{id.Recipient().String()})
				h.now(t)
				h.write("small", 100)
				last := h.now(t).Name
				other := newHost(t, Config{Target: h.Target, Keep: h.Keep})
				other.Label = target.Label("b", "other")
				other.now(t)
				damage.do(t, h, last)
				got, found, err := h.checks()
				if err != nil || got.Damaged != damage.backs || got.Of != 3 || got.Backups != 3 || got.Packs < 2 || got.Bytes < 3<<20 {
					t.Errorf("%+v, %v; %+v", got, err, found)
				}
				text := fmt.Sprintf("%+v", found)
				for _, d := range found {
					if d.Tree != "" && d.File != "" {
						text += fmt.Sprintf("file %q of %s", d.File, d.Tree)
					}
				}
				for _, want := range strings.Split(damage.says, "|") {
					if want == "other than it was sent" {
						want = target.ErrLied.Error()
					}
					if !strings.Contains(text, want) {
						t.Errorf("%q is not in %s", want, text)
					}
				}
				if st := h.Status().Check.Last.Error; (st != "") != (damage.backs > 0) {
					t.Errorf("the status says %q", st)
				}
				h.write("more", 100)
				b := h.now(t)
				must(t, h.comesBack(target.Latest))
				if got, found, err := h.checks(b.Name); err != nil || got.Damaged > 0 || got.Of != 1 {
					t.Errorf("the next backup: %+v, %v, %+v", got, err, found)
				}
			})
		}
	}
}

// TestCheckAllForeign: of a backup that this host has no key for every byte is compared all the same, and what
// is found there is not this host's failure.
func TestCheckAllForeign(t *testing.T) {
	id, err := age.GenerateX25519Identity()
	must(t, err)
	theirs := newDataHost(t, Config{Keep: Limits{Count: 3}, Recipients: backup.Recipients{id.Recipient()}})
	theirs.Data.Sealer = theirs.Recipients.Sealer([]string{"them"})
	theirs.Label = target.Label("b", "other")
	b := theirs.now(t)
	h := newHost(t, Config{Target: theirs.Target, Keep: Limits{Count: 3}})
	h.now(t)
	if c, found, err := h.checks(); err != nil || c.Sealed != 1 || c.Damaged != 0 || c.Packs != len(packsIn(t, theirs)) {
		t.Errorf("%+v, %v, %+v", c, err, found)
	}
	flip(t, largest(t, theirs), 0.5)
	flip(t, filepath.Join(h.Target.String(), b.Name), 0.5)
	c, found, err := h.checks(b.Owner)
	if err != nil || c.Damaged != 1 || len(found) != 2 || c.Of != 1 || h.Status().Check.Last.Error != "" || len(h.told) != 1 {
		t.Errorf("%+v, %v, %+v; told %q", c, err, found, h.told)
	}
	if _, _, err := h.checks("sandboxd-x"); !errs.Is(err, errs.NotFound) {
		t.Errorf("one that is not there: %v", err)
	}
	half := filepath.Join(h.Target.String(), target.Name("b-third", 1, h.clock, false))
	must(t, os.WriteFile(half, []byte("half"), 0o600))
	if c, _, err := h.checks(); err != nil || c.Partial != 1 || c.Backups != 2 {
		t.Errorf("with half a backup: %+v, %v", c, err)
	}
	if c, found, err := h.checks("b-third"); err != nil || c.Damaged != 1 {
		t.Errorf("half a backup by its name: %+v, %v, %+v", c, err, found)
	}
	must(t, os.Rename(h.Target.String(), h.Target.String()+".away"))
	if _, _, err := h.checks(); err == nil || !strings.Contains(err.Error(), "mount it") {
		t.Errorf("a target that is gone: %v", err)
	}
	must(t, os.Rename(h.Target.String()+".away", h.Target.String()))
}

// TestCheckAllMeanwhile: backups that are taken and rotated while a check runs are no damage; a target that goes
// away ends it, and so does its client.
func TestCheckAllMeanwhile(t *testing.T) {
	h := newDataHost(t, Config{Keep: Limits{Count: 2}})
	h.now(t)
	must(t, os.Remove(filepath.Join(h.files, "large")))
	h.write("large", 2<<20)
	h.now(t)
	var found []Damage
	l := Listener{Damage: func(d Damage) { found = append(found, d) }}
	done := false
	l.Progress = func(c Checked) {
		if !done { // at the first backup: it is rotated away, and its packs go
			done = true
			h.write("small", 100)
			h.now(t)
		}
	}
	c, err := h.CheckAll(t.Context(), nil, l)
	if err != nil || len(found) > 0 || c.RemovedBefore != 1 || c.Backups != 1 || !done {
		t.Errorf("%+v, %v, %+v", c, err, found)
	}
	if _, err := h.CheckAll(t.Context(), nil, Listener{Damage: l.Damage, Progress: func(Checked) {
		if _, err := h.CheckAll(t.Context(), nil, l); !errs.Is(err, errs.WrongState) {
			t.Errorf("a check beside a check: %v", err)
		}
	}}); err != nil {
		t.Error(err)
	}
	dir := h.Target.String()
	l.Progress = func(c Checked) {
		if c.Packs == 1 {
			must(t, os.Rename(dir, dir+".away"))
		}
	}
	if _, err := h.CheckAll(t.Context(), nil, l); err == nil || !strings.Contains(err.Error(), "mount it") || len(found) > 0 {
		t.Errorf("a target that goes away: %v, %+v", err, found)
	}
	must(t, os.Rename(dir+".away", dir))
	ctx, cancel := context.WithCancelCause(t.Context())
	left := errors.New("the client has left")
	l.Progress = func(Checked) { cancel(left) }
	if _, err := h.CheckAll(ctx, nil, l); !errors.Is(err, left) || len(found) > 0 {
		t.Errorf("a client that has left: %v, %+v", err, found)
	}
}

// TestRemove: own and adopted backups go, with what only they need; others and the last whole one do not.
func TestRemove(t *testing.T) {
	h := newDataHost(t, Config{Keep: Limits{Count: 9}})
	var names []string
	for i := range 4 {
		h.write("small", 100)
		if i == 2 {
			must(t, os.Remove(filepath.Join(h.files, "large")))
			h.write("large", 2<<20)
		}
		names = append(names, h.now(t).Name)
	}
	other := newDataHost(t, Config{Target: h.Target, Keep: Limits{Count: 9}})
	other.Label = target.Label("b", "other")
	theirs := other.now(t).Name
	again := newHost(t, Config{Target: h.Target, Keep: Limits{Count: 9}}) // the host was installed again
	unknown := again.now(t).Name
	for what, c := range map[string]struct {
		names []string
		code  errs.Code
		says  string
	}{
		"nothing of that name": {[]string{names[0], "sandboxd-x"}, errs.NotFound, "backups ls"},
		"another host's":       {[]string{names[0], theirs}, errs.WrongState, "backups adopt " + theirs},
		"another state's":      {[]string{unknown}, errs.WrongState, "backups adopt " + unknown},
		"all":                  {names, errs.WrongState, "backups now"},
		"no backup":            {[]string{filepath.Base(largest(t, h))}, errs.NotFound, "has no backup"},
	} {
		if r, err := h.Remove(t.Context(), c.names); !errs.Is(err, c.code) || !strings.Contains(err.Error(), c.says) || len(r.Backups) > 0 {
			t.Errorf("%s: %+v, %v", what, r, err)
		}
	}
	if got := strings.Fields(h.numbers()); len(got) != 6 {
		t.Errorf("%v are left, and nothing was to go", got)
	}
	r, err := h.Remove(t.Context(), []string{names[0], names[1], names[0]})
	if err != nil || len(r.Backups) != 2 || r.Packs < 2 || r.Bytes < 3<<20 || r.Kept != "" {
		t.Errorf("%+v, %v", r, err)
	}
	if got := strings.Fields(h.numbers()); len(got) != 4 || slices.Contains(got, "2") {
		t.Errorf("%v are left, and two were to go", got)
	}
	r, err = h.Remove(t.Context(), []string{names[3]}) // the newest
	if err != nil || len(r.Backups) != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	must(t, h.opens(names[2]), other.comesBack(theirs))
	if _, err := h.Remove(t.Context(), names[2:3]); !errs.Is(err, errs.WrongState) {
		t.Errorf("the last whole one: %v", err)
	}
	if _, err := h.Adopt(t.Context(), []string{unknown}); err != nil {
		t.Error(err)
	}
	for _, these := range [][]string{names[2:3], {names[2], unknown}} { // the adopted one is not of this host's data
		if r, err := h.Remove(t.Context(), these); !errs.Is(err, errs.WrongState) || len(r.Backups) > 0 {
			t.Errorf("the last that it has written: %+v, %v", r, err)
		}
	}
	if r, err := h.Remove(t.Context(), []string{unknown}); err != nil || len(r.Backups) != 1 {
		t.Errorf("one that is adopted: %+v, %v", r, err)
	}
	if b := h.now(t); b.Number < 4 {
		t.Errorf("%+v", b)
	}
	must(t, h.comesBack(target.Latest), h.opens(names[2]), other.comesBack(theirs))
}

// TestRemoveBeside: a removal waits for the backup that is being taken, and takes nothing of it.
func TestRemoveBeside(t *testing.T) {
	h := newDataHost(t, Config{Keep: Limits{Count: 9}})
	first := h.now(t).Name
	h.now(t)
	inside, take := make(chan error, 1), h.Take
	h.Take = func(ctx context.Context, s *chunks.Session) (*os.File, *backup.Data, error) {
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if r, err := h.Remove(gone, []string{first}); !errors.Is(err, context.Canceled) || len(r.Backups) > 0 {
			t.Errorf("a client that does not wait: %+v, %v", r, err)
		}
		go func() {
			_, err := h.Remove(context.WithoutCancel(ctx), []string{first})
			inside <- err
		}()
		return take(ctx, s)
	}
	h.write("small", 100)
	h.now(t)
	must(t, <-inside)
	h.want("2 3", "after both")
	must(t, h.comesBack(target.Latest))
	h.whole()
}

// TestRemoveKilled: a daemon that is killed in a removal leaves all other backups whole, and the next one goes on.
func TestRemoveKilled(t *testing.T) {
	if dir := os.Getenv("SANDBOXD_TEST_REMOVED"); dir != "" {
		all := strings.Split(dir, ":")
		to, err := target.Parse(all[0], target.Options{})
		must(t, err)
		h := newHost(t, Config{Keep: Limits{Count: 9}, Target: to, Data: &chunks.Store{}, Dir: all[1]})
		_, err = h.Remove(t.Context(), all[2:])
		t.Fatalf("it was not killed: %v", err)
	}
	for _, step := range []string{"backup:unmarked", "backup:unmarked:2", "backup:prune", "backup:prune:2"} {
		t.Run(step, func(t *testing.T) {
			h := newDataHost(t, Config{Keep: Limits{Count: 9}})
			var names []string
			for range 3 {
				h.write("large", 2<<20)
				h.write("small", 100)
				names = append(names, h.now(t).Name)
			}
			must(t, h.db.Close())
			cmd := exec.Command(os.Args[0], "-test.run=^TestRemoveKilled$")
			cmd.Env = append(os.Environ(), failpoint.Env+"="+step+"=kill",
				"SANDBOXD_TEST_REMOVED="+strings.Join([]string{h.Target.String(), h.Dir, names[0], names[1]}, ":"))
			out, err := cmd.CombinedOutput()
			if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("%v\n%s", err, out)
			}
			next := reopen(t, h)
			must(t, next.comesBack(target.Latest))
			left := slices.DeleteFunc(names[:2:2], func(name string) bool {
				_, err := target.Find(t.Context(), next.Target, next.Whose(), name)
				return err != nil
			})
			if len(left) > 0 {
				_, err := next.Remove(t.Context(), left)
				must(t, err)
			} else {
				next.now(t)
			}
			must(t, next.comesBack(target.Latest))
			next.whole()
			if c, found, err := next.checks(); err != nil || c.Damaged > 0 {
				t.Errorf("%+v, %v, %+v", c, err, found)
			}
		})
	}
}

// noRemoval is a target that says so if it is asked to remove something.
type noRemoval struct {
	target.Target
	asked *[]string
}

func (n noRemoval) Remove(_ context.Context, name string) error {
	*n.asked = append(*n.asked, name)
	return errors.New("denied")
}

// TestAppendOnlyMode: a target that is append-only by the configuration is never asked to remove anything, not even
// what is left of a backup that failed, and that is no error; a removal by hand is refused with the reason.
func TestAppendOnlyMode(t *testing.T) {
	var asked []string
	dir, err := target.Parse(t.TempDir(), target.Options{})
	must(t, err)
	full := &fullTarget{Target: noRemoval{dir, &asked}, left: 1 << 40}
	h := newDataHost(t, Config{Keep: Limits{Count: 1}, Target: target.AppendOnly{Target: full}})
	first := h.now(t)
	h.write("large", 2<<20)
	h.now(t)
	h.write("large", 20<<20)
	for _, left := range []int64{1 << 20, 18 << 20, 2 << 20} {
		full.left = left
		_, err = h.Backup(t.Context())
		if err == nil || !errors.Is(err, target.ErrFull) || errors.Is(err, target.ErrAppendOnly) {
			t.Errorf("with %d bytes left: %v", left, err)
		}
		h.write("small", 100)
		must(t, os.Remove(filepath.Join(h.files, "large")))
		h.write("large", 20<<20)
	}
	full.left = 1 << 40
	h.now(t)
	must(t, h.comesBack(target.Latest), h.opens(first.Name))
	_, err = h.Remove(t.Context(), []string{first.Name})
	if !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "backup.append_only") {
		t.Errorf("a removal by hand: %v", err)
	}
	if st := h.Status(); st.Refused != "" || st.Backup.Last.Error != "" || !h.AppendOnly() {
		t.Errorf("%+v", st)
	}
	if len(asked) > 0 {
		t.Errorf("the target is asked to remove %q", asked)
	}
}
