package proc

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Accounts answers questions to the guest's own /etc/passwd and /etc/group. It reads
// them again when they changed: commands may add users. os/user does not serve: it does
// not know docker's syntax for users, and it reads the files each time.
type Accounts struct {
	Passwd, Group string // the files' names

	mu     sync.Mutex
	passwd table
	group  table
}

// A table is a file of colon-separated lines.
type table struct {
	stamp fileStamp
	rows  [][]string
}

type fileStamp struct {
	size  int64
	mtime time.Time
	ino   uint64
}

// MaxID is the highest user or group that a sandbox has on the host (pkg/netns). On runc none
// above it exists. On gVisor a process may run as one, but no file belongs to it.
const MaxID = 65535

// Identity is whom a process runs as.
type Identity struct {
	UID, GID uint32
	Groups   []uint32 // beside GID
	Name     string   // "" if the guest knows none
	Home     string
}

// maxAccounts bounds how much of either file is read, in bytes.
const maxAccounts = 4 << 20

func (t *table) load(path string, fields int) [][]string {
	fi, err := os.Stat(path)
	if err != nil {
		*t = table{}
		return nil
	}
	stamp := fileStamp{size: fi.Size(), mtime: fi.ModTime()}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		stamp.ino = st.Ino
	}
	if stamp == t.stamp {
		return t.rows
	}
	f, err := OpenRegular(path) // the guest may have put a FIFO there, to which nobody writes
	if err != nil {
		*t = table{}
		return nil
	}
	defer f.Close()
	t.stamp, t.rows = stamp, nil
	sc := bufio.NewScanner(io.LimitReader(f, maxAccounts))
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		row := strings.Split(strings.TrimSpace(sc.Text()), ":")
		if len(row) >= fields && row[0] != "" && row[0][0] != '#' {
			t.rows = append(t.rows, row)
		}
	}
	return t.rows
}

func (a *Accounts) users() [][]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.passwd.load(a.Passwd, 6)
}

func (a *Accounts) allGroups() [][]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.group.load(a.Group, 4)
}

// Resolve finds docker's user[:group]; each is a name or a number, and digits are never a
// name. Without a group, the user has its own group and the groups that list it. A number
// that the guest does not know has group 0 and home "/".
func (a *Accounts) Resolve(spec string) (Identity, error) {
	user, group, hasGroup := strings.Cut(spec, ":")
	if user == "" {
		user = "0"
	}
	id := Identity{Home: "/"}
	row := findExact(a.users(), user, 2)
	switch {
	case row != nil:
		uid, err1 := ParseID(row[2])
		gid, err2 := ParseID(row[3])
		if err1 != nil || err2 != nil {
			return id, fmt.Errorf("user %.80q: %s of the image has no usable numbers for it", user, a.Passwd)
		}
		id.UID, id.GID, id.Name = uid, gid, row[0]
		if row[5] != "" {
			id.Home = row[5]
		}
	default:
		uid, err := ParseID(user)
		if err != nil {
			return id, fmt.Errorf("user %.80q: no such user in %s of the image", user, a.Passwd)
		}
		id.UID = uid
		if uid == 0 {
			id.Name = "root"
		}
	}
	if hasGroup && group != "" {
		gid, err := a.exactGID(group)
		if err != nil {
			return id, fmt.Errorf("group %.80q: no such group in %s of the image", group, a.Group)
		}
		id.GID = gid
		return id, nil
	}
	if id.Name != "" {
		id.Groups = a.groupsOf(id.Name)
	}
	return id, nil
}

// groupsOf returns the groups that list name as a member.
func (a *Accounts) groupsOf(name string) (gids []uint32) {
	for _, row := range a.allGroups() {
		gid, err := ParseID(row[2])
		if err != nil {
			continue
		}
		for _, m := range strings.Split(row[3], ",") {
			if m == name {
				gids = append(gids, gid)
				break
			}
		}
	}
	return gids
}

// UID finds a user by name or number.
func (a *Accounts) UID(user string) (uint32, error) {
	if row := find(a.users(), user, 2); row != nil {
		return ParseID(row[2])
	}
	id, err := ParseID(user)
	if err != nil {
		return 0, fmt.Errorf("no such user in the sandbox: %q", user)
	}
	return id, nil
}

// GID finds a group by name or number.
func (a *Accounts) GID(group string) (uint32, error) {
	if row := find(a.allGroups(), group, 2); row != nil {
		return ParseID(row[2])
	}
	id, err := ParseID(group)
	if err != nil {
		return 0, fmt.Errorf("no such group in the sandbox: %q", group)
	}
	return id, nil
}

// exactGID finds a group as Resolve does.
func (a *Accounts) exactGID(group string) (uint32, error) {
	if row := findExact(a.allGroups(), group, 2); row != nil {
		return ParseID(row[2])
	}
	return ParseID(group)
}

// UserName returns the name of uid, or the number.
func (a *Accounts) UserName(uid uint32) string { return nameOf(a.users(), uid) }

// GroupName returns the name of gid, or the number.
func (a *Accounts) GroupName(gid uint32) string { return nameOf(a.allGroups(), gid) }

func nameOf(rows [][]string, id uint32) string {
	n := strconv.FormatUint(uint64(id), 10)
	for _, row := range rows {
		if row[2] == n {
			return row[0]
		}
	}
	return n
}

// find returns the row named key or, failing that, numbered key.
func find(rows [][]string, key string, number int) []string {
	for _, row := range rows {
		if row[0] == key {
			return row
		}
	}
	for _, row := range rows {
		if row[number] == key {
			return row
		}
	}
	return nil
}

// findExact returns the row numbered key or, if key is no number, named key. So an image
// cannot make another user of a number.
func findExact(rows [][]string, key string, number int) []string {
	field := 0
	if n, err := strconv.ParseUint(key, 10, 64); err == nil {
		field, key = number, strconv.FormatUint(n, 10)
	}
	for _, row := range rows {
		if row[field] == key {
			return row
		}
	}
	return nil
}

// ParseID takes a user or group number; 2^32-1 means "none" to the kernel.
func ParseID(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err == nil && n == 1<<32-1 {
		err = strconv.ErrRange
	}
	return uint32(n), err
}
