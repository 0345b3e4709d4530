package sandbox

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// maxOutput bounds the last output that a record keeps of a sandbox, in bytes.
const maxOutput = 8 << 10

// A death is what a record keeps of how its sandbox ended.
type death struct {
	reason  record.Reason
	message string
	code    *int
	output  string
	ran     bool // its entrypoint ran, however briefly
}

func (d death) write(r *record.Record) {
	r.Reason, r.Message = d.reason, d.message
	r.ExitCode, r.LastOutput = d.code, d.output
	r.Hibernation = nil // a dead sandbox has no memory
}

// well reports whether the entrypoint ended by itself, with success.
func (d death) well() bool { return d.code != nil && *d.code == 0 }

// upIn notes that r comes up now, in this boot and user space.
func (c *Config) upIn(r *record.Record) { r.BootID, r.Userspace = c.BootID, c.Userspace }

// sameUserspace reports whether r may have come up in this user space of the boot.
func (c *Config) sameUserspace(r *record.Record) bool {
	return r.Userspace == c.Userspace || r.Userspace == "" || c.Userspace == ""
}

// hostDown is the death of a sandbox, in state s, with its host.
func hostDown(s record.State) death {
	return death{reason: record.HostReboot, message: "the host went down while it was " + string(s) + "; its disk is kept"}
}

// ofBackup is how r, whose record was restored, ended: nobody knows more than that it ran when the backup was made, if
// d, which is how it would have ended by its record, knows no more.
func (m recovery) ofBackup(r *record.Record, d death) death {
	if !m.life.cfg.Restored || r.Changed.After(m.began) || d.reason != record.RuntimeCrash && d.reason != record.HostReboot {
		return d
	}
	return death{
		reason:  record.Restored,
		message: "it was " + string(r.State) + " when the backup was made from which the state was restored, and its processes are gone",
	}
}

// withHost reports whether r, which died as d says, died because the host ends now: processes are killed
// one after the other, links and mounts go. Its record is left as it is then, and the next start, which
// knows more, finishes it. If the host does not end after all, the sweep does.
func withHost(ctx context.Context, l *life, r *record.Record, d death) bool {
	if l.cfg.HostEnds == nil || d.well() || d.reason == record.HostReboot || !l.cfg.HostEnds(ctx) {
		return false
	}
	l.cfg.Log.Info("a sandbox ended with the host; the next start of sandboxd records it", "sandbox", r.ID)
	return true
}

// How much of the last output goes into the message of a sandbox that did not come up.
const (
	messageLines = 20
	messageBytes = 2 << 10
)

// lastLines returns the end of the output of a sandbox that failed, for its message,
// without characters that would control a terminal.
func (d *death) lastLines() string {
	if d.output == "" || d.code != nil && *d.code == 0 {
		return ""
	}
	lines := strings.Split(strings.Trim(printable(d.output), "\n"), "\n")
	last := strings.Join(lines[max(0, len(lines)-messageLines):], "\n")
	if over := len(last) - messageBytes; over > 0 {
		last = strings.ToValidUTF8(last[over:], "")
	}
	if last == "" {
		return ""
	}
	return record.LastLines + last
}

// printable is what a guest has said, without characters that would control a terminal.
func printable(said string) string {
	return strings.Map(func(c rune) rune {
		if c == '\n' || c == '\t' || unicode.IsPrint(c) {
			return c
		}
		return -1
	}, strings.ToValidUTF8(said, ""))
}

// counts are the kernel's counters of a sandbox.
type counts struct {
	ooms, refused uint64 // processes killed for memory, and processes refused at the pids limit
}

// counted reads the counters of r, dead or alive. An unreadable counter counts as zero:
// there may never have been a cgroup.
func (l *life) counted(r *record.Record) (n counts) {
	var err error
	if n.ooms, err = l.Cgroups.OOMKills(r.ID); err != nil {
		l.cfg.Log.Debug("cannot read the OOM kills of a sandbox", "sandbox", r.ID, "err", err)
	}
	if l.Runtimes[r.Spec.Runtime].HostPids == 0 { // else the runtime enforces that limit
		if n.refused, err = l.Cgroups.PidsRefused(r.ID); err != nil {
			l.cfg.Log.Debug("cannot read whether a sandbox reached its process limit", "sandbox", r.ID, "err", err)
		}
	}
	return n
}

// past holds earlier counts of sandboxes. A counter covers a whole life, and an event
// that a sandbox survived is not the cause of its death days later.
type past struct {
	mu sync.Mutex
	of map[string]*pastLife // by sandbox
}

type pastLife struct {
	started time.Time // the life they belong to
	before  counts    // at least a sweep old; anything above it is recent
	last    counts
	noted   time.Time // when last was noted
}

// pastAge is the least age of counts in before: the cause of a death may be counted
// right before a sweep.
const pastAge = 45 * time.Second

// note keeps the present counts of r. All earlier counts of an adopted sandbox are old,
// since this daemon did not see them grow.
func (p *past) note(r *record.Record, n counts, adopted bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.of[r.ID]
	switch {
	case e == nil, !e.started.Equal(r.Started):
		e = &pastLife{started: r.Started, last: n, noted: time.Now()}
		if adopted {
			e.before = n
		}
		if p.of == nil {
			p.of = map[string]*pastLife{}
		}
		p.of[r.ID] = e
	case time.Since(e.noted) >= pastAge:
		e.before, e.last, e.noted = e.last, n, time.Now()
	}
}

// since returns the recent part of n: all of it if nothing was noted.
func (p *past) since(r *record.Record, n counts) counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.of[r.ID]; e != nil && e.started.Equal(r.Started) {
		n.ooms -= min(n.ooms, e.before.ooms)
		n.refused -= min(n.refused, e.before.refused)
	}
	return n
}

func (p *past) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.of, id)
}

// diagnose finds out how the dead sandbox r ended. Its cgroup is still there.
func (l *life) diagnose(ctx context.Context, r *record.Record) death {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepLimit)
	defer cancel()
	n := l.past.since(r, l.counted(r))
	o, left := l.Agents.Obituary(ctx, r.ID)
	d := death{output: o.LastOutput[max(0, len(o.LastOutput)-maxOutput):]}
	if !left {
		d.output = o.Kept[max(0, len(o.Kept)-maxOutput):]
	} else {
		code := o.ExitCode
		d.code = &code
		d.ran = o.Message == ""
	}
	switch {
	case n.ooms > 0 && (!left || o.ExitCode != 0):
		d.reason = record.OOM
		d.message = outOfMemory(l, r)
	case !left && l.diskFull(r):
		d.reason = record.DiskFull
		d.message = fmt.Sprintf("it filled its disk of %s, so its exit code could not be saved; give it more (--disk), or let it write "+
			"less", record.Mebibytes(r.Spec.DiskBytes))
	case !left && o.LastOutput != "":
		first, _, _ := strings.Cut(printable(o.LastOutput), "\n")
		d.reason = record.RuntimeCrash
		d.message = fmt.Sprintf("its agent crashed: %.200s", first)
		d.output = o.LastOutput[:min(len(o.LastOutput), maxOutput)]
	case !left:
		d.reason = record.RuntimeCrash
		d.message = fmt.Sprintf("its runtime (%s) or its agent ended without a report: it crashed, or it was killed; "+
			"see the daemon's log", r.Spec.Runtime)
	case o.Message != "":
		d.reason = record.Exited
		d.message = o.Message
	case o.Signal != "":
		d.reason = record.Killed
		d.message = "its entrypoint was killed by " + o.Signal
	default:
		d.reason = record.Exited
		d.message = fmt.Sprintf("its entrypoint exited with code %d", o.ExitCode)
		if o.ExitCode != 0 {
			l.blame(r, o, n, &d)
		}
	}
	return d
}

// outOfMemory says which memory a sandbox that the kernel has killed for it ran out of.
func outOfMemory(l *life, r *record.Record) string {
	limit := record.Mebibytes(r.Spec.MemoryBytes)
	hit, err := l.Cgroups.MemoryLimitHit(r.ID)
	if err != nil {
		l.cfg.Log.Debug("cannot read whether a sandbox hit its memory limit", "sandbox", r.ID, "err", err)
	}
	if hit || err != nil {
		return fmt.Sprintf("it went over its memory limit of %s; give it more (--memory), or let it use less", limit)
	}
	return fmt.Sprintf("the host had no memory left for it, although it was below its limit of %s: run fewer sandboxes at once, or let "+
		"the host keep more free (limits.memory_reserve)", limit)
}

// blame looks for a limit that made the entrypoint fail.
func (l *life) blame(r *record.Record, o Obituary, n counts, d *death) {
	switch {
	case l.diskFull(r):
		d.reason = record.DiskFull
		d.message += fmt.Sprintf(" while its disk of %s was full; give it more (--disk), or let it write less",
			record.Mebibytes(r.Spec.DiskBytes))
	case n.refused > 0, o.Reason == string(record.PidsLimit) && l.Runtimes[r.Spec.Runtime].HostPids > 0: // only the agent knows
		d.reason = record.PidsLimit
		d.message += fmt.Sprintf(" after it reached its limit of %s; give it more (--pids), or let it start fewer",
			errs.Count(r.Spec.Pids, "process", "processes"))
	}
}

// diskFull reports whether the disk of r is full by its quota: less is left than
// programs write at once.
func (l *life) diskFull(r *record.Record) bool {
	if r.Spec.DiskBytes == 0 {
		return false
	}
	used, limit, err := l.Disks.Usage(r.ID)
	if err != nil {
		l.cfg.Log.Debug("cannot read the disk usage of a dead sandbox", "sandbox", r.ID, "err", err)
		return false
	}
	return limit > 0 && limit-used < min(limit/16, fullMargin)
}

// fullMargin is how many bytes a full disk may still have.
const fullMargin = 2 << 20
