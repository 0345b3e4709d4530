package schedule

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/target"
)

// A DataRun is what a backup has done with data.
type DataRun struct {
	Bytes int64 `json:"bytes"` // of the files in it
	Sent  int64 `json:"sent"`  // bytes of packs that the target did not have
	Packs int   `json:"packs"` // that it needs
	Left  int   `json:"left"`  // volumes and snapshots that could not be read
}

func (d *DataRun) text() string {
	if d == nil {
		return ""
	}
	out := fmt.Sprintf("; %d bytes of data, of which %d were sent", d.Bytes, d.Sent)
	if d.Left > 0 {
		out += fmt.Sprintf("; %d volumes or snapshots are not in it: see the log", d.Left)
	}
	return out
}

// takeData sends the data in a thread of low priority.
func (k *Keeper) takeData(ctx context.Context) (f *os.File, packs []string, run *DataRun, err error) {
	var data *backup.Data
	var stats chunks.Stats
	k.Data.Whose = k.Whose()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if k.Low {
			low()
		}
		var s *chunks.Session
		if s, err = k.Data.Begin(ctx); err != nil {
			return
		}
		f, data, err = k.Take(ctx, s)
		stats, k.sent = s.Stats(), s.Used()
		err = errors.Join(err, s.Close())
	}()
	<-done
	if err != nil {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
		return nil, nil, nil, err
	}
	if lost, err := data.Catalog.Lost(ctx, k.Target); err != nil || len(lost) > 0 {
		if err == nil {
			err = fmt.Errorf("%d packs that it needs were removed meanwhile, such as %s: another daemon writes there", len(lost), lost[0])
		}
		return nil, nil, nil, errors.Join(err, f.Close())
	}
	run = &DataRun{Bytes: data.Bytes(), Sent: stats.Sent, Packs: len(data.Catalog.Packs), Left: len(data.Left)}
	packs = []string{}
	for _, p := range data.Catalog.Packs {
		packs = append(packs, p.Name)
	}
	k.Log.Info("data of the backup", "bytes", run.Bytes, "chunks", stats.Chunks, "new", stats.NewChunks, "sent", run.Sent,
		"packs", run.Packs, "worn", stats.Worn, "left_out", run.Left)
	return f, packs, run, nil
}

// low gives the thread of this goroutine a low priority of CPU and disk. The lowest would starve it on
// a busy host, and others wait for what it writes: a backup of 170 MB took six minutes that way, with
// nice 19 beside 20 processes that wanted two CPUs. The thread ends with the goroutine, since it stays
// locked to it.
func low() {
	runtime.LockOSThread()
	const who, last = 1, 2<<13 | 7 // IOPRIO_WHO_PROCESS; the lowest of IOPRIO_CLASS_BE (ioprio_set(2))
	tid := unix.Gettid()
	unix.Setpriority(unix.PRIO_PROCESS, tid, 10)                        //nolint:errcheck // it works anyway
	unix.Syscall(unix.SYS_IOPRIO_SET, who, uintptr(tid), uintptr(last)) //nolint:errcheck // likewise
}

// Every pack is compared with its name within a month: a part of them each day.
const (
	checkEvery = 24 * time.Hour
	checkParts = 30
)

// checkDue reports whether packs are to be compared. A check that has found a damage stands until there is a
// backup since: the next part would pass, and bad packs be forgotten. One that could not read all is repeated, at
// the same pack.
func (s *Status) checkDue(now time.Time) bool {
	last := s.Check.Last
	return s.Check.due(checkEvery, now) && (last.Error == "" || last.Unread || s.Backup.Good.Time.After(last.Time))
}

// isDamage reports whether a check has failed because something on the target is missing, or not what was stored.
func isDamage(err error) bool {
	list := errors.Is(err, errUnread) && (errors.Is(err, target.ErrLied) || errors.Is(err, fs.ErrNotExist))
	return list || errors.Is(err, chunks.ErrBad)
}

// CheckFailed is the kind of what a Keeper tells when packs are missing or bad.
const CheckFailed = "backup_check_failed"

// Check compares some packs with their names, the next in order. It returns how many it has read.
// What was in a bad one is sent again by the next backup; backups that need it are not whole.
func (k *Keeper) Check(ctx context.Context) (n int, err error) {
	if err := k.enter(ctx); err != nil {
		return 0, err
	}
	defer func() { <-k.turn }()
	began := k.Now()
	bounded, cancel := context.WithTimeoutCause(ctx, dataLimit, fmt.Errorf("%s has not sent them within %s", k.Target, dataLimit))
	defer cancel()
	n, after, err := k.check(bounded, k.Status().After)
	if err != nil && ctx.Err() != nil {
		return n, err
	}
	run := Run{Time: began}
	if err != nil {
		run.Error, run.Unread = err.Error(), !isDamage(err)
	}
	k.note(func(s *Status) *History {
		s.After = after
		return &s.Check
	}, run)
	if err != nil {
		text := "packs of backups are bad: backups that need them cannot be restored whole; the next one sends what was in them again"
		if run.Unread {
			text = "packs of backups could not be read, so it is not known whether they are good; the timer tries again"
		}
		k.Log.Error(text, "target", k.Target.String(), "err", err)
		k.Tell(CheckFailed, run.Error)
		return n, fmt.Errorf("check packs: %w", err)
	}
	return n, nil
}

// check goes on after a name. Bad packs do not end it.
func (k *Keeper) check(ctx context.Context, after string) (n int, last string, err error) {
	mine, _, err := k.own(ctx)
	if err != nil {
		return 0, after, err
	}
	need, err := k.needs(ctx, k.Whose(), mine)
	if err != nil {
		return 0, after, err
	}
	names := slices.Sorted(maps.Keys(need.packs))
	begin, _ := slices.BinarySearch(names, after+"\x00")
	bad := need.damages()
	for n < (len(names)+checkParts-1)/checkParts {
		name := names[(begin+n)%len(names)]
		_, err := chunks.Verify(ctx, k.Target, name)
		switch {
		case errors.Is(err, chunks.ErrBad):
			bad = errors.Join(bad, err, k.Data.Forget(name))
		case err != nil:
			return n, after, errors.Join(bad, err)
		}
		after = name
		n++
	}
	return n, after, bad
}
