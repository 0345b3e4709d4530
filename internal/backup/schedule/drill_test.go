package schedule

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// nothingLeft holds that no copy is left, and that the state is what it was.
func (h *host) nothingLeft(what string, state []byte) {
	h.t.Helper()
	entries, err := os.ReadDir(h.Dir)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != "sandboxd.db" && e.Name() != statusFile {
			h.t.Errorf("%s: the drill left %s", what, e.Name())
		}
	}
	if !slices.Equal(h.state(), state) {
		h.t.Errorf("%s: the drill changed the state", what)
	}
}

func (h *host) state() []byte {
	h.t.Helper()
	b, err := os.ReadFile(filepath.Join(h.Dir, "sandboxd.db"))
	if err != nil {
		h.t.Fatal(err)
	}
	return b
}

// TestDrill is a drill a week, of which one finds that the newest backup has rotted.
func TestDrill(t *testing.T) {
	h := newHost(t, Config{Every: day, Keep: Limits{Count: 2}, Trial: Trial{Every: 7 * day}})
	if _, err := h.Drill(t.Context()); !errs.Is(err, errs.NotFound) {
		t.Errorf("a drill without a backup: %v", err)
	}
	h.Keeper = New(h.Config)
	state := h.state()
	h.step(time.Hour, time.Hour)
	s := h.Status().Drill
	if s.Good.Name == "" || s.Good.Name != h.Status().Backup.Good.Name || !s.Since.IsZero() {
		t.Errorf("after the first backup: %+v", s)
	}
	h.nothingLeft("the first drill", state)
	h.step(6*day, time.Hour)
	if got := h.Status().Drill.Good; got != s.Good {
		t.Errorf("before a week: %+v", got)
	}
	// The next backup rots before its drill.
	rot := func() {
		path := filepath.Join(h.Target.String(), h.Status().Backup.Good.Name)
		b, err := os.ReadFile(path)
		if err == nil {
			b[len(b)/2] ^= 1
			err = os.WriteFile(path, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	h.step(23*time.Hour, time.Hour)
	rot()
	h.Keeper.Every = 0 // nothing better comes meanwhile
	h.told = nil
	h.step(5*time.Hour, 10*time.Minute)
	s = h.Status().Drill
	if s.Last.Error == "" || s.Since.IsZero() ||
		!slices.ContainsFunc(h.told, func(s string) bool { return strings.HasPrefix(s, DrillFailed) }) {
		t.Errorf("the newest backup has rotted: %+v, %q", s, h.told)
	}
	if len(h.told) < 3 || len(h.told) > 6 {
		t.Errorf("in five hours it was tried %d times", len(h.told))
	}
	h.nothingLeft("a drill that failed", state)
	h.Keeper.Every = day
	h.step(2*day, time.Hour)
	if s := h.Status().Drill; s.Last.Error != "" || !s.Since.IsZero() || s.Late(7*day, h.clock) {
		t.Errorf("with a new backup: %+v", s)
	}
	if !slices.ContainsFunc(h.told, func(s string) bool { return strings.HasPrefix(s, DrillDone) }) {
		t.Errorf("it told %q", h.told)
	}
}

// TestDrillFinds holds what a drill finds that no checksum does.
func TestDrillFinds(t *testing.T) {
	file, public := newIdentity(t)
	to, err := backup.ParseRecipients([]string{public})
	if err != nil {
		t.Fatal(err)
	}
	read := func() (backup.Identities, error) { return backup.ReadIdentities(file) }
	keys := t.TempDir()
	key := func(name string) func() (*sealed.Key, error) {
		return func() (*sealed.Key, error) { return sealed.Open("", filepath.Join(keys, name), true) }
	}
	for what, c := range map[string]struct {
		config Config
		break_ func(h *host)
		want   string
	}{
		"nothing":                     {Config{}, nil, ""},
		"nothing, encrypted":          {Config{Recipients: to, Trial: Trial{Identities: read}}, nil, ""},
		"nothing, with its key":       {Config{Trial: Trial{Key: key("own")}}, nil, ""},
		"no key of the encrypted one": {Config{Recipients: to}, nil, "it is encrypted"},
		"the key of the secrets is lost": {Config{Trial: Trial{Key: key("own")}}, func(h *host) {
			h.Trial.Key = key("other")
		}, "this host does not have key"},
		"no key at all": {Config{Trial: Trial{Key: key("own")}}, func(h *host) {
			h.Trial.Key = func() (*sealed.Key, error) { return nil, errors.New("the credential is gone") }
		}, "the credential is gone"},
		"a secret is damaged": {Config{Trial: Trial{Key: key("own")}}, func(h *host) {
			h.secret("aaaaaaaaaaab", nil)
		}, "cannot be opened"},
		"another address pool": {Config{}, func(h *host) { h.Trial.Here.AddressPool = "10.0.0.0/8" }, "set it to that of the backup"},
	} {
		h := newHost(t, c.config)
		if k, err := h.Trial.Key(); err == nil {
			h.secret("aaaaaaaaaaaa", k)
		}
		if c.break_ != nil {
			c.break_(h)
		}
		if _, err := h.Backup(t.Context()); err != nil {
			t.Fatal(err)
		}
		left := filepath.Join(h.Dir, drillDir+"of-a-daemon-that-was-killed")
		if err := os.Mkdir(left, 0o700); err != nil {
			t.Fatal(err)
		}
		state := h.state()
		d, err := h.Drill(t.Context())
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v; want %q", what, err, c.want)
		}
		if s := h.Status().Drill; (err == nil) != (s.Good.Name != "") || d.Backup.Name == "" || s.Last.Name != d.Backup.Name {
			t.Errorf("%s: %+v, %+v", what, d, s)
		}
		h.nothingLeft(what, state)
	}
}

// secret gives a new sandbox a vault, sealed with key or, without one, with bytes that no key
// opens.
func (h *host) secret(id string, key *sealed.Key) {
	h.t.Helper()
	if err := h.db.Insert(h.t.Context(), &record.Record{ID: id, State: record.Creating}); err != nil {
		h.t.Fatal(err)
	}
	s := record.Secret{Sandbox: id, Kind: record.Vault, Sealed: []byte("nobody sealed this")}
	if key != nil {
		s.Sealed = key.Seal(s.Name(), []byte("a secret"))
	}
	if err := h.db.PutSecret(h.t.Context(), s, record.Secret{}); err != nil {
		h.t.Fatal(err)
	}
}
