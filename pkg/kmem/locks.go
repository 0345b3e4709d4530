package kmem

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Locks is how many locks on parts of files (fcntl(2)) a sandbox may hold. A lock has 192 bytes, so these are 3 MiB.
// Databases hold some ten for each connection. flock(2) and leases need no bound: there is one for each open
// file, and a cgroup is charged with that.
const Locks = 16_384

// allLocks is the list of all locks (proc_locks(5)). It costs more with each line: for each 4 KiB the kernel begins at
// the first lock again, and no lock is made in the meantime.
const allLocks = "/proc/locks"

// lockBounds bound a look.
var lockBounds = bounds{locks: Locks, time: 500 * time.Millisecond}

type bounds struct {
	locks int           // that a sandbox may hold
	time  time.Duration // that its open files may take; one takes 5 µs
}

// look adds to over those of ids that hold too many locks, with the reason. It reports whether there are many locks
// that none of them shows.
//
// The list of all locks says that there are many. It does not say whose they are: it has the process that made a
// lock, which may be gone, and whose number another one may have by now. Locks of open file descriptions have
// none. So the locks of a sandbox are counted where each process shows those of its open files
// (proc_pid_fdinfo(5)). A lock of a process ends when its file is closed there, so none is hidden. A lock of an open
// file description is, if that lives on without a descriptor: in a mapping, or in a message of a Unix socket. The
// security level strict refuses those locks.
func (b bounds) look(ids []string, processes func(id string) ([]int, error), over map[string]string) (unseen bool, err error) {
	all, err := read(allLocks, b.locks+1)
	if err != nil || all.lines <= b.locks {
		return false, err
	}
	var failed []error
	hold, rest := []string{}, map[string][]int{}
	for _, id := range ids {
		pids, err := processes(id)
		s := survey{bounds: b, until: time.Now().Add(b.time)}
		for _, pid := range pids {
			err = errors.Join(err, s.process(pid))
		}
		failed = append(failed, err)
		if s.held() > b.locks {
			hold = append(hold, id)
		} else if s.late {
			rest[id] = pids
		}
	}
	if len(hold) == 0 && len(rest) > 0 {
		all, err = read(allLocks, 2*b.locks) // for two sandboxes that hold as many as they may
		hold, failed = all.holders(rest, b.locks), append(failed, err)
	}
	for _, id := range hold {
		over[id] = fmt.Sprintf("it held more than %d locks on parts of files (fcntl), in memory of the kernel that its memory limit does "+
			"not count: release locks, or lock whole files (flock)", b.locks)
	}
	return len(hold) == 0, errors.Join(failed...)
}

// A list is what the first lines of allLocks say.
type list struct {
	lines int
	of    map[int]int // how many locks on parts of files each process has made
}

// read reads so many lines of the list at path, or all.
func read(path string, lines int) (list, error) {
	l := list{of: map[int]int{}}
	f, err := os.Open(path)
	if err != nil {
		return l, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); l.lines < lines; l.lines++ {
		if !s.Scan() {
			return l, s.Err()
		}
		if f := strings.Fields(s.Text()); len(f) > 4 && f[1] == "POSIX" {
			if pid, _ := strconv.Atoi(f[4]); pid > 0 {
				l.of[pid]++
			}
		}
	}
	return l, nil
}

// holders are those sandboxes, with their processes, that may hold more than most of the locks: those that their
// processes made, or that processes made that are gone. It is for sandboxes whose open files took too long, when no
// other one holds the locks.
func (l list) holders(sandboxes map[string][]int, most int) (ids []string) {
	for id, pids := range sandboxes {
		sum := 0
		for pid, n := range l.of {
			if slices.Contains(pids, pid) || !exists(pid) {
				sum += n
			}
		}
		if sum > most {
			ids = append(ids, id)
		}
	}
	return ids
}

func exists(pid int) bool {
	_, err := os.Stat("/proc/" + strconv.Itoa(pid))
	return err == nil
}

// A survey counts the locks that the processes of one sandbox show, until they are too many.
type survey struct {
	bounds bounds
	until  time.Time
	late   bool            // not all was looked at until then
	tables []int           // a thread of each table of open files that was looked at
	files  []int           // a descriptor of each open file of the last table that showed locks, in the kernel's order
	posix  int             // locks of the tables
	open   map[string]bool // locks of open files, which several tables may have
	line   []byte
}

func (s *survey) held() int { return s.posix + len(s.open) }

// done reports whether a survey ends that has counted more locks beside the known ones.
func (s *survey) done(more int) bool {
	s.late = s.late || time.Now().After(s.until)
	return s.late || s.held()+more > s.bounds.locks
}

// process looks at the open files of a process. Its threads may have tables of their own, and the first
// thread may have ended.
func (s *survey) process(pid int) error {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return unlessGone(err)
	}
	for _, t := range threads {
		tid, _ := strconv.Atoi(t.Name()) // the kernel's
		if s.done(0) {
			return nil
		}
		if s.known(tid) {
			continue
		}
		s.tables = append(s.tables, tid)
		if err := s.table(tid); err != nil {
			return err
		}
	}
	return nil
}

// unlessGone is nil for a thread that has ended, or a file that was closed, in the meantime. A later look finds
// where its locks went.
func unlessGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// known reports whether a thread has a table that was looked at. Without kcmp(2) it says no, and locks count
// more than once.
func (s *survey) known(tid int) bool {
	const files = 2 // KCMP_FILES
	for _, other := range slices.Backward(s.tables) {
		if compare(files, other, tid, 0, 0) == 0 {
			return true
		}
	}
	return false
}

// compare compares two things of the kernel by kcmp(2): 0 says that they are the same, 1 that the first one stands
// before the other one, 2 that it stands behind. Without an answer it is -1.
func compare(kind, tid1, tid2, fd1, fd2 int) int {
	r, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(tid1), uintptr(tid2), uintptr(kind), uintptr(fd1), uintptr(fd2), 0)
	if errno != 0 {
		return -1
	}
	return int(r)
}

// find returns where a descriptor of a thread belongs in s.files, and whether its open file is there. All descriptors
// of an open file (dup(2)) show the same locks, and each costs as much as the first one. Another open file of
// the same inode has to be read: it shows the locks that were made through it, those of the process, too. A guest
// that gives a descriptor another file after it was read hides that file in this look; the next one finds it there.
func (s *survey) find(tid, fd int) (at int, found bool) {
	const file = 0 // KCMP_FILE
	low, high := 0, len(s.files)
	for low < high {
		mid := (low + high) / 2
		switch compare(file, tid, tid, s.files[mid], fd) {
		case 0:
			return mid, true
		case 1:
			low = mid + 1
		case 2:
			high = mid
		default: // one of the two was closed in the meantime
			if compare(file, tid, tid, fd, fd) != 0 {
				return mid, false
			}
			s.files = slices.Delete(s.files, mid, mid+1)
			high--
		}
	}
	return low, false
}

// table looks at the open files of a thread.
func (s *survey) table(tid int) error {
	path := fmt.Sprintf("/proc/%d/fdinfo/", tid)
	dir, err := os.Open(path)
	if err != nil {
		return unlessGone(err)
	}
	defer dir.Close()
	s.files = s.files[:0]
	own := map[string]bool{} // an open file may be read twice, if others are closed in the meantime
	defer func() { s.posix += len(own) }()
	for {
		names, err := dir.Readdirnames(256)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return unlessGone(err)
		}
		for _, name := range names {
			if s.done(len(own)) {
				return nil
			}
			fd, _ := strconv.Atoi(name) // the kernel's
			at, found := s.find(tid, fd)
			if found {
				continue
			}
			locked, err := s.file(path+name, own)
			if err != nil {
				return err
			}
			if locked {
				s.files = slices.Insert(s.files, at, fd)
			}
		}
	}
}

// file reads the locks of an open file: those of this table, into own, and those of the file itself. It reports
// whether there are any.
func (s *survey) file(path string, own map[string]bool) (locked bool, err error) {
	f, err := os.Open(path)
	if err != nil {
		return false, unlessGone(err)
	}
	defer f.Close()
	if s.line == nil {
		s.line, s.open = make([]byte, 4096), map[string]bool{}
	}
	lines := bufio.NewScanner(f)
	lines.Buffer(s.line, len(s.line))
	for s.held()+len(own) <= s.bounds.locks && lines.Scan() {
		text, ok := strings.CutPrefix(lines.Text(), "lock:\t")
		_, lock, _ := strings.Cut(text, ": ") // before it stands a number
		switch {
		case !ok:
		case strings.HasPrefix(lock, "POSIX"):
			own[lock], locked = true, true
		case strings.HasPrefix(lock, "OFDLCK"):
			s.open[lock], locked = true, true
		}
	}
	return locked, unlessGone(lines.Err())
}
