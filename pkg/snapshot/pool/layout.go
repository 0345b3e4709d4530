package pool

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Names in the directory of a pool, beside disks, snapshots and volumes.
const (
	LostDir   = "lost+found" // disks and snapshots without an owner, see StrayName
	TrashDir  = ".trash"     // what is being destroyed
	BackupDir = ".backup"    // volumes of one moment, for a backup; what a restore has not finished
	MemoryDir = "memory"     // the memory images of snapshots and of sandboxes that hibernate
	IDFile    = "id"         // the random name of the pool
)

// StrayName is the name in lost+found of a disk or snapshot that came there at since.
func StrayName(id string, since time.Time) string {
	return id + "-" + strconv.FormatInt(since.Unix(), 10)
}

// CutStray is the inverse of StrayName. The time of any other name is zero.
func CutStray(name string) (id string, since time.Time) {
	i := strings.LastIndexByte(name, '-')
	if i < 0 || record.IsSnapshotID(name) {
		return name, time.Time{}
	}
	n, err := strconv.ParseInt(name[i+1:], 10, 64)
	if err != nil {
		return name, time.Time{}
	}
	return name[:i], time.Unix(n, 0)
}

// Disks lists the directories of the disks, snapshots and volumes in a pool, strays
// included.
func Disks(pool string) (dirs []string, err error) {
	for _, in := range []string{pool, filepath.Join(pool, LostDir)} {
		entries, err := os.ReadDir(in)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			if id, _ := CutStray(e.Name()); record.IsID(id) || record.IsSnapshotID(id) || record.IsVolumeID(id) {
				dirs = append(dirs, filepath.Join(in, e.Name()))
			}
		}
	}
	return dirs, nil
}
