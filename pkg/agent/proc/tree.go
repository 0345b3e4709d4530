package proc

import (
	"os"
	"slices"
	"syscall"
	"time"
)

// KillTree kills with SIGKILL all processes that p has started, directly or not: those
// that descend from it, are in its session or process group, or carry its marker. It
// repeats that until none is left, for at most 5 s, because a process may fork between
// the search and the kill.
//
// A process escapes only if it has changed its own RLIMIT_RSS, has changed its session
// and has lost its parents. It must do all three on purpose.
func (p *Process) KillTree() {
	killAll(p, func() []int { return tree(List(), p.PID, p.Marker) })
	p.Signal(syscall.SIGKILL, true) //nolint:errcheck // where /proc is not mounted, the group at least
}

// Waits reports whether p lives, and waits for something with all that it has started:
// none of them computes, or waits for a disk.
func (p *Process) Waits() bool {
	procs, there := List(), false
	for _, pid := range tree(procs, p.PID, 0) {
		i := slices.IndexFunc(procs, func(s Stat) bool { return s.PID == pid })
		if procs[i].State != 'S' && procs[i].State != 'T' {
			return false
		}
		there = there || pid == p.PID
	}
	return there
}

// Urge sends p a SIGURG and, if p slept before that, its process group a SIGINT. A
// preempted process counts as running, as in proc_pid_stat(5).
func (p *Process) Urge() {
	s, ok := StatOf(p.PID)
	p.Signal(syscall.SIGURG, false) //nolint:errcheck // gone is what is wanted
	if ok && s.State == 'S' {
		p.Signal(syscall.SIGINT, true) //nolint:errcheck // gone is what is wanted
	}
}

// KillAll kills the processes that find returns until it returns none twice, for at most 5 s: a
// process that was forked during one search may have a number that this had passed.
func KillAll(find func() []int) { killAll(nil, find) }

// killAll is KillAll; p and its group are killed by Signal.
func killAll(p *Process, find func() []int) {
	deadline := time.Now().Add(5 * time.Second)
	pause := time.Millisecond
	for none := 0; none < 2 && time.Now().Before(deadline); {
		victims := find()
		if len(victims) == 0 {
			none++
			continue
		}
		none = 0
		for _, v := range victims {
			if p != nil && v == p.PID {
				p.Signal(syscall.SIGKILL, true) //nolint:errcheck // gone is what is wanted
				continue
			}
			syscall.Kill(v, syscall.SIGKILL) //nolint:errcheck // gone is what is wanted
		}
		// Only the end of p is an event here: the others are reaped by their parents,
		// if those live.
		time.Sleep(pause)
		pause = min(2*pause, 20*time.Millisecond)
	}
}

// tree returns the pids that live and belong to root: itself, descendants,
// members of its session or group, carriers of its marker. Never this process.
func tree(procs []Stat, root int, marker uint64) (pids []int) {
	self := os.Getpid()
	in := map[int]bool{root: true}
	for _, s := range procs {
		if s.PID == self {
			continue // it carries the marker that it set last, and is an ancestor of every process
		}
		if s.Session == root || s.Group == root || marker != 0 && markerOf(s.PID) == marker {
			in[s.PID] = true
		}
	}
	return living(procs, in)
}

// Marked returns the pids of living processes that carry one of certain markers,
// and of their descendants, but for one pid and this process.
func Marked(meant func(marker uint64) bool, but int) []int {
	procs := List()
	self := os.Getpid()
	in := map[int]bool{}
	for _, s := range procs {
		if s.PID != self && s.PID != but && meant(markerOf(s.PID)) {
			in[s.PID] = true
		}
	}
	return living(procs, in)
}

// living returns the live processes of a set, and their live descendants. Never this
// process.
func living(procs []Stat, in map[int]bool) (pids []int) {
	self := os.Getpid()
	for grown := true; grown; {
		grown = false
		for _, s := range procs {
			if !in[s.PID] && in[s.Parent] {
				in[s.PID], grown = true, true
			}
		}
	}
	for _, s := range procs {
		if in[s.PID] && s.PID != self && s.State != 'Z' && s.State != 'X' {
			pids = append(pids, s.PID)
		}
	}
	return pids
}

// KillDescendants kills all descendants of this process. For PID 1 those are all
// processes. It never signals pid -1, which outside a pid namespace would be the whole
// host.
func KillDescendants(limit time.Duration) {
	deadline := time.Now().Add(limit)
	for {
		victims := tree(List(), os.Getpid(), 0)
		for _, v := range victims {
			syscall.Kill(v, syscall.SIGKILL) //nolint:errcheck // gone is what is wanted
		}
		if len(victims) == 0 || time.Now().After(deadline) {
			return
		}
		time.Sleep(time.Millisecond) // there is no event for grandchildren
	}
}
