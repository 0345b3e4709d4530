//go:build all

package year

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// measures are what a day's row has. A bound is what the same state varies by.
var measures = []Measure{
	{Name: "state_bytes", Unit: "B", Bound: 1 << 20}, // on disk, without the pool
	{Name: "state_files", Bound: 2},
	{Name: "db_bytes", Unit: "B", Bound: 128 << 10},
	{Name: "run_bytes", Unit: "B", Bound: 64 << 10},
	{Name: "run_files", Bound: 2},
	{Name: "pool_bytes", Unit: "B", Bound: 8 << 20},
	{Name: "pool_entries", Bound: 1},
	{Name: "backup_bytes", Unit: "B", Bound: 64 << 10},
	{Name: "backup_files", Bound: 1},
	{Name: "log_bytes", Unit: "B", Bound: 16 << 10}, // that a day adds
	{Name: "complaints", Bound: 1},                  // lines of it that are warnings or errors
	{Name: "memory", Unit: "B", Bound: 6 << 20, Slow: true},
	{Name: "heap", Unit: "B", Bound: 2 << 20, Slow: true}, // that is live
	{Name: "descriptors", Bound: 5},
	{Name: "goroutines", Bound: 6},
	{Name: "threads", Bound: 3, Slow: true},
	{Name: "guest_memory", Unit: "B", Bound: 8 << 20, Slow: true}, // of the sandboxes that live all year
	{Name: "sandboxes", Bound: 1},
	{Name: "snapshots", Bound: 1},
	{Name: "images", Bound: 1},
	{Name: "volumes", Bound: 1},
	{Name: "links", Bound: 0.5},
	{Name: "mounts", Bound: 0.5},
	{Name: "cgroups", Bound: 0.5},
	{Name: "rules", Bound: 0.5},
	{Name: "sets", Bound: 0.5},
	{Name: "entries", Bound: 1},
	{Name: "files", Bound: 0.5}, // named after sandboxes
	{Name: "loops", Bound: 0.5},
	{Name: "processes", Bound: 0.5},
}

// A row is what was measured on a day.
type row map[string]float64

// kinds maps the words of hosttest.Held to measures.
var kinds = map[string]string{
	"link": "links", "mount": "mounts", "cgroup": "cgroups", "rule": "rules", "set": "sets", "table": "sets", "entry": "entries",
	"file": "files", "loop": "loops", "process": "processes",
}

// measure measures what the daemon has, and counts what the host holds.
func (b *box) measure(ctx context.Context, held []string) (row, error) {
	r := row{}
	for _, line := range held {
		word, _, _ := strings.Cut(line, " ")
		name, ok := kinds[word]
		if !ok {
			return nil, fmt.Errorf("the host holds %q, and nothing counts that", line)
		}
		r[name]++
	}
	// Twice: what finalizers free goes with the second collection.
	for range 2 {
		if _, err := b.ask("/debug/pprof/heap?gc=1"); err != nil {
			return nil, err
		}
	}
	text, err := b.ask("/metrics")
	if err != nil {
		return nil, err
	}
	r["goroutines"], r["heap"] = metric(text, "go_goroutines"), metric(text, "go_memstats_heap_alloc_bytes")
	proc := fmt.Sprintf("/proc/%d/", b.Pid())
	r["descriptors"], r["threads"] = entries(proc+"fd"), entries(proc+"task")
	r["memory"] = resident(strconv.Itoa(b.Pid()))
	for _, c := range b.lives {
		r["guest_memory"] += groupResident(b.Instance.CgroupRoot() + "/" + c.id)
	}
	poolDir := filepath.Join(b.StateDir, "pool")
	r["state_bytes"], r["state_files"] = usage(b.StateDir, poolDir, pool.Image(b.StateDir))
	r["run_bytes"], r["run_files"] = usage(b.Instance.RunDir())
	r["backup_bytes"], r["backup_files"] = usage(b.backups)
	r["pool_entries"] = entries(poolDir) + entries(filepath.Join(poolDir, pool.LostDir)) + entries(filepath.Join(poolDir, pool.TrashDir)) +
		entries(filepath.Join(poolDir, pool.MemoryDir))
	if r["pool_bytes"], err = used(poolDir); err != nil {
		return nil, err
	}
	if fi, err := os.Stat(filepath.Join(b.StateDir, "sandboxd.db")); err == nil {
		r["db_bytes"] = float64(fi.Size())
	}
	b.read(r)
	return r, b.records(ctx, r)
}

// complaint is a line of the log that is worth a look.
var complaint = regexp.MustCompile(`(?m) level=((?:WARN|ERROR) msg=(?:"(?:[^"\\]|\\.)*"|\S+))`)

// read reads what the daemon has logged since.
func (b *box) read(r row) {
	log := b.Log()[b.logged:]
	r["log_bytes"], b.logged = float64(len(log)), b.logged+len(log)
	for _, m := range complaint.FindAllStringSubmatch(log, -1) {
		b.complaints[m[1]]++
		r["complaints"]++
	}
}

// records counts what clients see.
func (b *box) records(ctx context.Context, r row) error {
	sandboxes, err := b.api.List(ctx, client.Filter{})
	if err != nil {
		return err
	}
	snapshots, err := b.api.Snapshots().List(ctx, "")
	if err != nil {
		return err
	}
	images, err := b.api.Images().List(ctx)
	if err != nil {
		return err
	}
	volumes, err := b.api.Volumes().List(ctx)
	if err != nil {
		return err
	}
	r["sandboxes"], r["snapshots"], r["images"], r["volumes"] = float64(len(sandboxes)), float64(len(snapshots)),
		float64(len(images)), float64(len(volumes))
	return nil
}

// ask gets a path of the socket for operators.
func (b *box) ask(path string) (string, error) {
	resp, err := b.admin().Get("http://sandboxd" + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != 200 {
		err = fmt.Errorf("%s: %s: %.200s", path, resp.Status, text)
	}
	return string(text), err
}

// metric is the value of a series without labels.
func metric(text, name string) float64 {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name+" "); ok {
			v, _ := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			return v
		}
	}
	return 0
}

func entries(dir string) float64 {
	all, _ := os.ReadDir(dir)
	return float64(len(all))
}

// resident is the memory of a process, in bytes: its own, and its part of what it shares.
func resident(pid string) (n float64) {
	f, err := os.Open("/proc/" + pid + "/smaps_rollup")
	if err != nil {
		return 0
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "Pss:"); ok {
			_, _ = fmt.Sscan(rest, &n)
			return n * 1024
		}
	}
	return 0
}

// groupResident is the memory of the processes in a cgroup, which is found by one hierarchy.
func groupResident(group string) (n float64) {
	for _, top := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/unified/", "/sys/fs/cgroup/memory/"} {
		b, err := os.ReadFile(top + group + "/run/cgroup.procs")
		if err != nil {
			continue
		}
		for _, pid := range strings.Fields(string(b)) {
			n += resident(pid)
		}
		return n
	}
	return 0
}

// usage is how many bytes of disk, and files, are below a directory, on its file system, without some.
func usage(dir string, but ...string) (bytes, files float64) {
	var top unix.Stat_t
	if unix.Lstat(dir, &top) != nil {
		return 0, 0
	}
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		for _, b := range but {
			if path == b {
				if d.IsDir() {
					return fs.SkipDir
				}
				return nil
			}
		}
		if err != nil {
			return nil //nolint:nilerr // it went away
		}
		fi, err := d.Info()
		if err != nil {
			return nil //nolint:nilerr // likewise
		}
		st := fi.Sys().(*syscall.Stat_t)
		if st.Dev != top.Dev {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		bytes, files = bytes+float64(st.Blocks*512), files+1
		return nil
	})
	return bytes, files
}

// used is how many bytes of a file system are in use.
func used(dir string) (float64, error) {
	f, err := os.Open(dir)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil { // what is deleted is freed by the next transaction
		return 0, err
	}
	var st unix.Statfs_t
	err = unix.Statfs(dir, &st)
	return float64(st.Blocks-st.Bfree) * float64(st.Bsize), err
}
