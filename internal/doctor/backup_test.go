package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/config"
)

// TestBackups: a backup that is older than twice the interval is a warning, with the reason.
func TestBackups(t *testing.T) {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	const good = `"good": {"time": %q, "name": "x"}`
	at := func(ago time.Duration) string { return fmt.Sprintf(good, now.Add(-ago).Format(time.RFC3339)) }
	const failed = `"last": {"time": "2026-11-27T11:00:00Z", "error": "it is full"}, "failsSince": "2026-11-25T11:00:00Z"`
	for what, c := range map[string]struct {
		target string
		every  time.Duration
		file   string
		status Status
		want   string
	}{
		"none configured": {"", time.Hour, "", OK, "no target"},
		"no timer":        {"/srv", 0, "", OK, "on request only"},
		"never":           {"/srv", time.Hour, "", Warn, "no backup yet"},
		"fresh":           {"/srv", time.Hour, at(2 * time.Hour), OK, "2026-11-27T10:00:00Z"},
		"late":            {"/srv", time.Hour, at(2*time.Hour + time.Second), Warn, "every 1h0m0s"},
		"fails":           {"/srv", 24 * time.Hour, at(30*time.Hour) + "," + failed, OK, "since 2026-11-25T11:00:00Z it fails: it is full"},
		"fails for long":  {"/srv", 24 * time.Hour, at(49*time.Hour) + "," + failed, Warn, "it is full"},
		"unreadable":      {"/srv", time.Hour, "{", Warn, "backups.json"},
		"append-only":     {"/srv", time.Hour, at(0) + `}, "removalRefused": "denied", "drill": {`, Warn, "grows without end: denied"},
		"a bad list":      {"/srv", time.Hour, at(0) + `}, "packsKept": "2 packs stay", "drill": {`, Warn, "in no use: 2 packs stay"},
		"unknown ones":    {"/srv", time.Hour, at(0) + `}, "unknown": {"count": 3, "newest": "sandboxd-a-b-000003"`, Warn, "3 backups under"},
	} {
		dir := t.TempDir()
		if c.file != "" {
			if err := os.WriteFile(filepath.Join(dir, "backups.json"), []byte(`{"backup": {`+c.file+`}}`), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		h := &host{now: func() time.Time { return now }, cfg: &config.Config{
			StateDir: dir, Backup: config.Backup{Target: c.target, Every: config.Duration(c.every)},
		}}
		if d := h.drills(); d.Status != OK && d.Status != Skipped && !strings.Contains(d.Detail, "cannot be restored") {
			t.Errorf("%s: no drill: %+v", what, d)
		}
		f := h.backups()
		if f.Status != c.status || !strings.Contains(f.Detail, c.want) || (f.Status == Warn) != (f.Mend != "") {
			t.Errorf("%s: %+v; want %s, %q", what, f, c.status, c.want)
		}
	}
}

// TestDrills: a backup that cannot be restored is a warning, and so is a drill that is late.
func TestDrills(t *testing.T) {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	const good = `"good": {"time": "2026-11-20T12:00:00Z", "name": "x"}`
	for what, c := range map[string]struct {
		every  time.Duration
		file   string
		status Status
		want   string
	}{
		"never":      {time.Hour, `"backup": {` + good + `}`, Warn, "of never"},
		"no backup":  {time.Hour, `"drill": {}`, OK, "no backup was tried"},
		"on request": {0, `"backup": {` + good + `}`, OK, "no backup was tried"},
		"done":       {84 * time.Hour, `"drill": {` + good + `}`, OK, "x was restored on 2026-11-20"},
		"late":       {83 * time.Hour, `"drill": {` + good + `}`, Warn, "every 83h"},
		"bad pack": {
			84 * time.Hour, `"drill": {` + good + `}, "check": {"last": {"time": "2026-11-27T11:00:00Z", "error": "the pack is bad"}}`, Warn,
			"the pack is bad",
		},
		"failed": {
			84 * time.Hour, `"drill": {` + good + `, "last": {"time": "2026-11-27T11:00:00Z", "error": "it is damaged"}}`, Warn, "it is damaged",
		},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "backups.json"), []byte("{"+c.file+"}"), 0o600); err != nil {
			t.Fatal(err)
		}
		h := &host{now: func() time.Time { return now }, cfg: &config.Config{
			StateDir: dir, Backup: config.Backup{Target: "/srv", Data: true, Drill: config.Duration(c.every)},
		}}
		if f := h.drills(); f.Status != c.status || !strings.Contains(f.Detail, c.want) || (f.Status == Warn) != (f.Mend != "") {
			t.Errorf("%s: %+v; want %s, %q", what, f, c.status, c.want)
		}
	}
}
