package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup/schedule"
)

// backups checks that the last backup of the timer is not too old.
var backups = check{
	name: "backup", protects: "the records of sandboxes, if the disk of the state directory fails", root: true,
	run: func(_ context.Context, h *host) Finding { return h.backups() },
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
	if s.Backup.Late(every, h.now()) {
		return warn(mend, "%s; there should be one every %s", last, every)
	}
	return ok("%s", last)
}
