package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup/schedule"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// backups checks that the last backup of the timer is not too old.
var backups = check{
	name: "backup", protects: "the records of sandboxes, if the disk of the state directory fails", root: true,
	run: func(_ context.Context, h *host) Finding { return h.backups() },
}

// drills checks that the newest backup can be restored.
var drills = check{
	name: "backup-drill", protects: "a restore, when it is needed", root: true,
	run: func(_ context.Context, h *host) Finding { return h.drills() },
}

// drills is the check. It reads what the daemon remembers.
func (h *host) drills() Finding {
	c := h.cfg.Backup
	every := time.Duration(c.Drill)
	if c.Target == "" {
		return ok("no target is configured (backup.target)")
	}
	s, err := schedule.ReadStatus(h.cfg.StateDir)
	if err != nil {
		return skipped("%v", err)
	}
	d := s.Drill
	const mend = "run `sandboxctl system backups drill`: its error says what is wrong; then take a new backup, " +
		"`sandboxctl system backups now`"
	switch {
	case d.Last.Error != "":
		return warn(mend, "the newest backup cannot be restored, since %s: %s", d.Since.Format(time.RFC3339), d.Last.Error)
	case c.Data && s.Check.Last.Unread:
		return warn("make the target send them: the daemon tries again within the hour, as does `sandboxctl system backups check --all`",
			"packs of backups could not be read, since %s: %s", s.Check.Since.Format(time.RFC3339), s.Check.Last.Error)
	case c.Data && s.Check.Last.Error != "":
		return warn("take a new backup, `sandboxctl system backups now`: it sends what was in bad packs again",
			"the data of backups is damaged on the target, since %s: %s", s.Check.Since.Format(time.RFC3339), s.Check.Last.Error)
	case d.Good.Time.IsZero() && (every == 0 || s.Backup.Good.Time.IsZero()):
		return ok("no backup was tried yet")
	case d.Late(every, h.now()):
		return warn(mend, "the last restore drill is of %s; there should be one every %s", day(d.Good.Time), every)
	}
	return ok("%s was restored on %s", d.Good.Name, day(d.Good.Time))
}

func day(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return t.Format(time.RFC3339)
}

// backups is the check. It reads what the daemon remembers, and not the target, which may hang.
func (h *host) backups() Finding {
	c := h.cfg.Backup
	every := time.Duration(c.Every)
	switch {
	case c.Target == "":
		return ok("no target is configured (backup.target); `sandboxctl system backup` writes one to a file")
	case every == 0:
		return ok("to %s, on request only", c.Target)
	}
	s, err := schedule.ReadStatus(h.cfg.StateDir)
	if err != nil {
		return warn("see the log of sandboxd, which takes a backup when it starts", "%v", err)
	}
	const mend = "make the target reachable, and run `sandboxctl system backups now`: its error says what is wrong"
	last := "there is no backup yet"
	if !s.Backup.Good.Time.IsZero() {
		last = fmt.Sprintf("the last backup is of %s", s.Backup.Good.Time.Format(time.RFC3339))
	}
	if why := s.Backup.Last.Error; why != "" {
		last += fmt.Sprintf("; since %s it fails: %s", s.Backup.Since.Format(time.RFC3339), why)
	}
	if n := s.Unknown.Count; n > 0 && !s.Backup.Late(every, h.now()) {
		return warn("`sandboxctl system backups ls` lists them; if no other host writes them, `sandboxctl system backups adopt --all` "+
			"makes them count", "the target has %s under the name of this host that this state has not written, such as %s: they are not "+
			"counted, and never removed; %s", errs.Count(n, "backup", "backups"), s.Unknown.Newest, last)
	}
	if s.Refused != "" && !s.Backup.Late(every, h.now()) {
		return warn("let the key of the target remove objects, or, if the target is append-only on purpose, set backup.append_only = "+
			"true, and let the storage remove old ones", "the target lets no old backup be removed, so it grows without end: %s; %s",
			s.Refused, last)
	}
	if s.Kept != "" && !s.Backup.Late(every, h.now()) {
		return warn("`sandboxctl system backups check NAME` says what is damaged", "the target keeps data that may be in no use: %s; %s",
			s.Kept, last)
	}
	if s.Backup.Late(every, h.now()) {
		return warn(mend, "%s; there should be one every %s", last, every)
	}
	if c.AppendOnly {
		last += "; the target is append-only, so its storage says how long backups stay"
	}
	return ok("%s", last)
}
