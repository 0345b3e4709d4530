package cgroups

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// The hosts that there are, as their mountinfo shows them.
const (
	unifiedHost = `22 1 8:1 / / rw,relatime - ext4 /dev/root rw
30 22 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
`
	// The development machines: one controller each, an empty v2 tree.
	hybridHost = `31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
34 31 0:31 / /sys/fs/cgroup/blkio rw,relatime - cgroup cgroup rw,blkio
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
37 31 0:34 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
99 31 0:32 /docker/abc /run/x/memory rw,relatime - cgroup cgroup rw,memory
`
	// systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller
	legacyHost = `25 24 0:22 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
27 25 0:25 / /sys/fs/cgroup/systemd rw shared:9 - cgroup cgroup rw,xattr,release_agent=/lib/systemd/systemd-cgroups-agent,name=systemd
28 25 0:26 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct
29 25 0:27 / /sys/fs/cgroup/memory rw shared:11 - cgroup cgroup rw,memory
30 25 0:28 / /sys/fs/cgroup/pids rw shared:12 - cgroup cgroup rw,pids
31 25 0:29 / /sys/fs/cgroup/freezer rw shared:13 - cgroup cgroup rw,freezer
`
)

func describe(lay *layout) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:", lay.mode())
	for _, c := range []string{"memory", "pids", "cpu", "cpuacct", "freezer", "io"} {
		if h := lay.of[c]; h != nil {
			fmt.Fprintf(&b, " %s=%s", c, h.mount)
		}
	}
	b.WriteString("; made in")
	for _, h := range lay.ours {
		b.WriteString(" " + h.mount)
	}
	fmt.Fprintf(&b, "; removed from %d", len(lay.all))
	return b.String()
}

func TestLayout(t *testing.T) {
	const at = "/sys/fs/cgroup"
	for _, tt := range []struct{ name, mounts, offered, want string }{
		{"unified", unifiedHost, "cpuset cpu io memory hugetlb pids rdma misc", "unified: memory=@ pids=@ cpu=@ io=@; made in @; " +
			"removed from 1"},
		{"hybrid", hybridHost, "", "hybrid: memory=@/memory pids=@/pids cpu=@/cpu io=@/blkio; made in @/blkio @/memory @/pids @/cpu " +
			"@/unified; removed from 8"},
		{"hybrid, pids on v2", hybridHost, "pids", "hybrid: memory=@/memory pids=@/unified cpu=@/cpu io=@/blkio; made in @/blkio " +
			"@/memory @/cpu @/unified; removed from 8"},
		{"legacy", legacyHost, "", "legacy: memory=@/memory pids=@/pids cpu=@/cpu,cpuacct cpuacct=@/cpu,cpuacct freezer=@/freezer; " +
			"made in @/freezer @/cpu,cpuacct @/memory @/pids; removed from 5"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			lay, err := newLayout(parseMounts(tt.mounts), strings.Fields(tt.offered))
			if err != nil {
				t.Fatal(err)
			}
			if got, want := describe(lay), strings.ReplaceAll(tt.want, "@", at); got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
}

func TestLayoutNamesWhatIsMissing(t *testing.T) {
	_, err := newLayout(parseMounts(unifiedHost), []string{"cpu", "pids"})
	if err == nil || !strings.Contains(err.Error(), "no controller memory") {
		t.Errorf("without memory: %v", err)
	}
	if _, err = newLayout(parseMounts("1 1 8:1 / / rw - ext4 /dev/root rw\n"), nil); err == nil ||
		!strings.Contains(err.Error(), "mount -t cgroup2") {
		t.Errorf("without cgroups: %v", err)
	}
}

// TestWrites is what is known of v2 on a host that has none: each write, in
// order, for the flavours of hosts.
func TestWrites(t *testing.T) {
	all := Limits{
		MemoryBytes: 64 << 20, HeadroomBytes: 64 << 20, Pids: 256, OOMGroup: true, CPUShares: 2048,
		IOReadBps: 1 << 20, IOWriteIOPS: 100,
	}
	disks := []Disk{{Dev: "7:0"}, {Dev: "254:0", ReadsOnly: true}}
	for _, tt := range []struct {
		name string
		l    Limits
		f    flavour
		want string
	}{
		{"v2 outer", all, flavour{v2: true, swap: true, disks: disks}, `
memory.max=134217728
memory.swap.max=0
memory.oom.group=1
pids.max=256
cpu.weight=174
io.max=7:0 rbps=1048576 wbps=max riops=max wiops=100
io.max=254:0 rbps=1048576 wbps=max riops=max wiops=max`},
		{"v2 unlimited, no swap", Limits{HeadroomBytes: 64 << 20}, flavour{v2: true}, `
memory.max=max
memory.oom.group=0
pids.max=max`},
		{"v1 outer", all, flavour{swap: true, disks: disks[:1]}, `
memory.limit_in_bytes=134217728
memory.memsw.limit_in_bytes=134217728
pids.max=256
cpu.shares=2048
blkio.throttle.read_bps_device=7:0 1048576
blkio.throttle.write_bps_device=7:0 0
blkio.throttle.read_iops_device=7:0 0
blkio.throttle.write_iops_device=7:0 100`},
		{"v1 unlimited, swap not accounted", Limits{}, flavour{}, `
memory.limit_in_bytes=-1
memory.swappiness=0
pids.max=max`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got string
			for _, c := range []string{"memory", "pids", "cpu", "io"} {
				for _, w := range tt.l.writes(c, tt.f) {
					got += "\n" + w.file + "=" + w.value
				}
			}
			if got != tt.want {
				t.Errorf("got%s\nwant%s", got, tt.want)
			}
		})
	}
}

func TestCPUQuota(t *testing.T) {
	for _, c := range []struct {
		millis int64
		v2     bool
		want   write
	}{
		{100, true, write{"cpu.max", "10000 100000"}},
		{0, true, write{"cpu.max", "max 100000"}},
		{1, true, write{"cpu.max", "1000 100000"}},
		{2500, false, write{"cpu.cfs_quota_us", "250000"}},
		{0, false, write{"cpu.cfs_quota_us", "-1"}},
	} {
		if got := cpuQuota(c.millis, c.v2); got != c.want {
			t.Errorf("%d, v2 %v: %+v, want %+v", c.millis, c.v2, got, c.want)
		}
	}
}

func TestAbsurdLimits(t *testing.T) {
	for _, l := range []Limits{
		{MemoryBytes: -1},
		{Pids: -1},
		{HeadroomBytes: -1},
		{MemoryBytes: 1 << 62, HeadroomBytes: 1 << 62},
		{Pids: 1 << 23},
		{CPUShares: -1},
		{CPUShares: 1 << 20},
		{IOReadBps: -1},
		{IOWriteBps: 1 << 62},
		{IOReadIOPS: -5},
		{IOWriteIOPS: 1 << 32},
	} {
		if err := l.check(); !errs.Is(err, errs.Invalid) {
			t.Errorf("%+v: %v", l, err)
		}
	}
	if err := (Limits{}).check(); err != nil {
		t.Errorf("unlimited: %v", err)
	}
}

func TestIDs(t *testing.T) {
	tree := &Tree{inst: 'g', places: places{root: "sandboxd-g"}}
	for id, ok := range map[string]bool{
		"gaaaaaaaaaa2":  true,
		"daaaaaaaaaa2":  false, // another instance's
		"gaaaaaaaaaaa2": false,
		"g/../../../x2": false,
		"g..........2":  false,
		"":              false,
	} {
		if err := tree.check(id); (err == nil) != ok {
			t.Errorf("%q: %v", id, err)
		}
	}
	if got, want := tree.CgroupsPath("gaaaaaaaaaa2"), "/sandboxd-g/gaaaaaaaaaa2/run"; got != want {
		t.Errorf("cgroupsPath %s, want %s", got, want)
	}
}

func TestRootIsClean(t *testing.T) {
	for _, root := range []string{"/x", "x/", "a/../b", "..", "."} {
		if _, err := open(Config{Instance: instance.Instance('g'), Root: root}, &layout{}); err == nil {
			t.Errorf("root %q was taken", root)
		}
	}
}

func TestFields(t *testing.T) {
	const text = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
	if n, ok := field(text, "oom_kill"); n != 3 || !ok {
		t.Error(n, ok)
	}
	if _, ok := field(text, "oom"); ok {
		t.Error("found a prefix")
	}
}

// TestNeverTheMainThread: the main thread must not enter a sandbox.
func TestNeverTheMainThread(t *testing.T) {
	seen := make(chan int, 64)
	var wait []chan error
	for range 64 {
		done := make(chan error, 1)
		wait = append(wait, done)
		go func() {
			done <- onThread(func() (bool, error) { seen <- gettid(); return false, nil })
		}()
	}
	for _, w := range wait {
		if err := <-w; err != nil {
			t.Error(err)
		}
	}
	close(seen)
	var tids []int
	for tid := range seen {
		tids = append(tids, tid)
	}
	if slices.Contains(tids, os.Getpid()) {
		t.Error("ran on the main thread")
	}
}

// TestAwaitClosed: a wait that Close cut short has not seen what it waited for.
func TestAwaitClosed(t *testing.T) {
	dir := t.TempDir() // stands for a cgroup: inotify does not mind
	if err := os.WriteFile(dir+"/cgroup.events", []byte("populated 1\nfrozen 0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	u, err := newUnified()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- u.await(t.Context(), dir, events.empty) }()
	for waits := false; !waits; {
		u.mu.Lock()
		waits = u.byDir[dir] != nil
		u.mu.Unlock()
		runtime.Gosched()
	}
	if err := u.close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil {
		t.Error("populated, and await says that it is empty")
	}
}

// TestWeight: the ends, the default, and more shares are never less weight.
func TestWeight(t *testing.T) {
	for shares, want := range map[int64]int64{2: 1, 1024: 100, 1 << 18: 10000} {
		if got := weight(shares); got != want {
			t.Errorf("%d shares are a weight of %d, want %d", shares, got, want)
		}
	}
	for s := int64(minShares); s < maxShares; s++ {
		if a, b := weight(s), weight(s+1); a > b || a < 1 || b > 10000 {
			t.Fatalf("%d shares are %d, %d are %d", s, a, s+1, b)
		}
	}
}
