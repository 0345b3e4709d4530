package proc

import (
	"bytes"
	"os"
	"strconv"
)

// Stat is a process as /proc/<pid>/stat describes it (proc_pid_stat(5)).
type Stat struct {
	PID, Parent, Group, Session int
	State                       byte   // R S D Z …
	Tasks                       int    // threads
	ticks                       uint64 // user and system time, its own and that of children it waited for
}

// List lists the processes of this pid namespace.
func List() (procs []Stat) {
	BriefTurns.Do(func() { procs = readProcs() })
	return procs
}

func readProcs() (procs []Stat) {
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

// StatOf reads the Stat of one process. It reports false if there is none.
func StatOf(pid int) (Stat, bool) {
	b, err := readSmall("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return Stat{}, false
	}
	return parseStat(b)
}

// parseStat parses proc_pid_stat(5). The name in it may hold anything, ")" and newlines
// included, so it is cut at the last ")".
func parseStat(b []byte) (s Stat, ok bool) {
	open, end := bytes.IndexByte(b, ' '), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return s, false
	}
	s.PID, _ = strconv.Atoi(string(b[:open]))
	f := bytes.Fields(b[end+1:])
	if s.PID <= 0 || len(f) < 18 {
		return s, false
	}
	num := func(i int) uint64 { n, _ := strconv.ParseUint(string(f[i]), 10, 63); return n }
	s.State = f[0][0]
	s.Parent, s.Group, s.Session = int(num(1)), int(num(2)), int(num(3))
	s.Tasks = int(num(17))
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
