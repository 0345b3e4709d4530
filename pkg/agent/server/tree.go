package server

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
	"time"
)

// procStat is what /proc/<pid>/stat says of a process.
type procStat struct {
	pid, ppid, pgrp, sid int
	state                byte
	tasks                int    // threads
	ticks                uint64 // user and system time, its own and that of children it waited for
}

// killTree kills with SIGKILL all that p has started, directly or not: whoever
// descends from it, is of its session or process group, or carries its marker.
// It looks again until nobody is left, because a process may fork between a
// look and a kill, for at most 5 s.
//
// What escapes: a process that changed its own RLIMIT_RSS and its session and
// lost its parents. It must do all three on purpose.
func (r *reaper) killTree(p *process) {
	r.killAll(p, func() []int { return tree(scan(), p.pid, p.marker) })
	r.signal(p, syscall.SIGKILL, true) //nolint:errcheck // where /proc is not mounted, the group at least
}

// urge sends p a SIGURG and, if p slept before that, its process group a SIGINT.
// A process that is preempted runs, by proc_pid_stat(5).
func (r *reaper) urge(p *process) {
	b, err := readSmall("/proc/" + strconv.Itoa(p.pid) + "/stat")
	s, ok := parseStat(b)
	r.signal(p, syscall.SIGURG, false) //nolint:errcheck // gone is what is wanted
	if err == nil && ok && s.state == 'S' {
		r.signal(p, syscall.SIGINT, true) //nolint:errcheck // gone is what is wanted
	}
}

// killAll kills whom find finds, p and its group by way of signal, until it
// finds nobody.
func (r *reaper) killAll(p *process, find func() []int) {
	deadline := time.Now().Add(5 * time.Second)
	pause := time.Millisecond
	for {
		victims := find()
		for _, v := range victims {
			if p != nil && v == p.pid {
				r.signal(p, syscall.SIGKILL, true) //nolint:errcheck // gone is what is wanted
				continue
			}
			syscall.Kill(v, syscall.SIGKILL) //nolint:errcheck // gone is what is wanted
		}
		if len(victims) == 0 || time.Now().After(deadline) {
			break
		}
		// Others than p die without an event for us: their parent, if it lives, reaps them.
		time.Sleep(pause)
		pause = min(2*pause, 20*time.Millisecond)
	}
}

// tree returns the pids that live and belong to root: itself, descendants,
// members of its session or group, bearers of its marker. Never this process.
func tree(procs []procStat, root int, marker uint64) (pids []int) {
	self := os.Getpid()
	in := map[int]bool{root: true}
	for _, s := range procs {
		if s.pid == self {
			continue // it carries the marker it set last, and is everybody's ancestor
		}
		if s.sid == root || s.pgrp == root || marker != 0 && markerOf(s.pid) == marker {
			in[s.pid] = true
		}
	}
	return living(procs, in)
}

// bearers returns the pids of those who live and carry one of certain markers,
// and of what descends from them, but for one pid and this process.
func bearers(procs []procStat, meant func(marker uint64) bool, but int) []int {
	self := os.Getpid()
	in := map[int]bool{}
	for _, s := range procs {
		if s.pid != self && s.pid != but && meant(markerOf(s.pid)) {
			in[s.pid] = true
		}
	}
	return living(procs, in)
}

// living returns those in a set, and all that descends from them, who live.
// Never this process.
func living(procs []procStat, in map[int]bool) (pids []int) {
	self := os.Getpid()
	for grown := true; grown; {
		grown = false
		for _, s := range procs {
			if !in[s.pid] && in[s.ppid] {
				in[s.pid], grown = true, true
			}
		}
	}
	for _, s := range procs {
		if in[s.pid] && s.pid != self && s.state != 'Z' && s.state != 'X' {
			pids = append(pids, s.pid)
		}
	}
	return pids
}

// killDescendants kills all that descends from this process. As PID 1 that is
// everybody. It never signals by -1, which outside of a pid namespace would be
// the host.
func killDescendants(limit time.Duration) {
	deadline := time.Now().Add(limit)
	for {
		victims := tree(scan(), os.Getpid(), 0)
		for _, v := range victims {
			syscall.Kill(v, syscall.SIGKILL) //nolint:errcheck // gone is what is wanted
		}
		if len(victims) == 0 || time.Now().After(deadline) {
			return
		}
		time.Sleep(time.Millisecond) // no event tells of grandchildren
	}
}

// scan lists the processes of this pid namespace.
func scan() (procs []procStat) {
	briefTurns.do(func() { procs = readProcs() })
	return procs
}

func readProcs() (procs []procStat) {
	d, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	for _, n := range names {
		if n[0] < '0' || n[0] > '9' {
			continue
		}
		b, err := readSmall("/proc/" + n + "/stat")
		if err != nil {
			continue
		}
		if s, ok := parseStat(b); ok {
			procs = append(procs, s)
		}
	}
	return procs
}

// parseStat takes proc_pid_stat(5) apart. The name in it may hold anything,
// ")" and newlines included, so it is cut at the last ")".
func parseStat(b []byte) (s procStat, ok bool) {
	open, end := bytes.IndexByte(b, ' '), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return s, false
	}
	s.pid, _ = strconv.Atoi(string(b[:open]))
	f := bytes.Fields(b[end+1:])
	if s.pid <= 0 || len(f) < 18 {
		return s, false
	}
	num := func(i int) uint64 { n, _ := strconv.ParseUint(string(f[i]), 10, 63); return n }
	s.state = f[0][0]
	s.ppid, s.pgrp, s.sid = int(num(1)), int(num(2)), int(num(3))
	s.tasks = int(num(17))
	s.ticks = num(11) + num(12) + num(13) + num(14)
	return s, true
}

// markerOf reads the soft RLIMIT_RSS of pid. Unlike prlimit(2) and
// /proc/<pid>/environ, /proc/<pid>/limits may be read of other users'
// processes without any capability.
func markerOf(pid int) uint64 {
	b, err := readSmall("/proc/" + strconv.Itoa(pid) + "/limits")
	if err != nil {
		return 0
	}
	_, rest, ok := bytes.Cut(b, []byte("Max resident set"))
	if !ok {
		return 0
	}
	f := bytes.Fields(rest)
	if len(f) == 0 {
		return 0
	}
	n, _ := strconv.ParseUint(string(f[0]), 10, 64) // "unlimited" is 0
	return n
}

// readSmall reads at most 4 KiB of a file of /proc.
func readSmall(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b := make([]byte, 4<<10)
	n, err := f.Read(b)
	if n > 0 {
		return b[:n], nil
	}
	return nil, err
}
