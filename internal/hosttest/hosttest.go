// Package hosttest serves tests that need a real host: root, a kernel, and the
// promise that nothing is left behind.
package hosttest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// Root skips t unless SANDBOXD_TEST=root is set; then a missing prerequisite
// is a failure, not a skip.
func Root(t testing.TB) {
	t.Helper()
	if os.Getenv("SANDBOXD_TEST") != "root" {
		t.Skip("needs root and SANDBOXD_TEST=root")
	}
	if os.Geteuid() != 0 {
		t.Fatal("SANDBOXD_TEST=root is set, but this is not root")
	}
}

// Patient is d, multiplied by SANDBOXD_TEST_SCALE, which a slow host sets to a factor
// above 1.
func Patient(d time.Duration) time.Duration {
	scale, err := strconv.ParseFloat(os.Getenv("SANDBOXD_TEST_SCALE"), 64)
	if err != nil || scale < 1 {
		return d
	}
	return time.Duration(float64(d) * scale)
}

// Leaks records what the host holds for inst and checks, when t ends, that nothing was
// added: links, namespaces, mounts, cgroups, chains, sets, loop devices, processes. The
// constructor of every environment calls it, so that no test forgets it. Call it before
// registering a Cleanup that removes things.
func Leaks(t testing.TB, inst instance.Instance) {
	t.Helper()
	before := Held(inst)
	t.Cleanup(func() {
		err := Settles(t, func() error {
			if extra := added(before, Held(inst)); len(extra) > 0 {
				return errors.New("left on the host:\n" + strings.Join(extra, "\n"))
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

func added(before, after []string) (extra []string) {
	had := map[string]bool{}
	for _, s := range before {
		had[s] = true
	}
	for _, s := range after {
		if !had[s] {
			extra = append(extra, s)
		}
	}
	return extra
}

// Held lists everything on the host that has a name of inst, sorted.
func Held(inst instance.Instance) []string {
	var held []string
	links, _ := filepath.Glob("/sys/class/net/" + inst.LinkPrefix() + "*")
	for _, l := range links {
		held = append(held, "link "+filepath.Base(l))
	}
	run, state := inst.RunDir(), inst.StateDir()
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && (under(f[4], run) || under(f[4], state)) {
			held = append(held, "mount "+f[4])
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		groups, _ := filepath.Glob(pattern + inst.CgroupRoot() + "/*")
		for _, g := range groups {
			if fi, err := os.Stat(g); err == nil && fi.IsDir() {
				held = append(held, "cgroup "+g)
			}
		}
	}
	for _, table := range []string{"raw", "mangle", "nat", "filter"} {
		for line := range bytes.Lines(output("iptables", "-w", "-t", table, "-S")) {
			if bytes.Contains(line, []byte(inst.Chain(""))) || bytes.Contains(line, []byte("--comment "+inst.Set(""))) {
				held = append(held, "rule "+table+" "+strings.TrimSpace(string(line)))
			}
		}
	}
	held = append(held, rules6(inst)...)
	for line := range bytes.Lines(output("ipset", "list", "-n")) {
		if bytes.HasPrefix(line, []byte(inst.Set(""))) {
			held = append(held, "set "+strings.TrimSpace(string(line)))
			for member := range strings.Lines(string(output("ipset", "list", strings.TrimSpace(string(line)), "-o", "save"))) {
				if strings.HasPrefix(member, "add ") {
					held = append(held, "entry "+memberOf(member))
				}
			}
		}
	}
	held = append(held, tables(inst)...)
	held = append(held, files(inst)...)
	for device, file := range loops(state) {
		if !others(inst, device) {
			held = append(held, "loop device over "+file)
		}
	}
	held = append(held, processes(run, state)...)
	sort.Strings(held)
	return held
}

// rules6 lists the rules of ip6tables that name the links of inst.
func rules6(inst instance.Instance) (held []string) {
	table := ""
	for line := range strings.Lines(string(output("ip6tables-save"))) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "*"); ok {
			table = name
		}
		if strings.HasPrefix(line, "-A ") && strings.Contains(line, " "+inst.LinkMatch()+" ") {
			held = append(held, "rule of IPv6 "+table+" "+line)
		}
	}
	return held
}

// tables lists the tables of nf_tables that have a name of inst.
func tables(inst instance.Instance) (held []string) {
	c, err := nftables.New()
	if err != nil {
		return nil
	}
	all, _ := c.ListTables()
	for _, t := range all {
		if strings.HasPrefix(t.Name, inst.Set("")) {
			held = append(held, "table "+t.Name)
		}
	}
	return held
}

// memberOf is "set address" of "add set address timeout 3": it leaves out the timeout,
// which changes all the time.
func memberOf(line string) string {
	f := strings.Fields(line)
	return strings.Join(f[1:min(3, len(f))], " ")
}

// files lists the files that are named after a sandbox of inst, in its run directory
// (namespace pins, bundles, mount points, states of runtimes) and in its pool.
func files(inst instance.Instance) (held []string) {
	id := inst.String() + strings.Repeat("[a-z2-7]", 11) + "*"
	for _, dir := range []string{inst.RunDir(), inst.RunDir() + "/*", inst.StateDir() + "/pool"} {
		found, _ := filepath.Glob(filepath.Join(dir, id))
		for _, f := range found {
			held = append(held, "file "+f)
		}
	}
	return held
}

// loops maps loop devices to their backing files below dir.
func loops(dir string) map[string]string {
	files := map[string]string{}
	found, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range found {
		b, _ := os.ReadFile(f)
		if file := strings.TrimSpace(string(b)); under(file, dir) {
			files["/dev/"+filepath.Base(filepath.Dir(filepath.Dir(f)))] = file
		}
	}
	return files
}

// others reports whether only strangers use a device: it is mounted in mount namespaces
// that were made while it was mounted on the host (unshare(1), a service with
// PrivateTmp), and no process of inst is in any of them. The kernel frees the device
// when the last of these namespaces ends; inst has no influence on that.
func others(inst instance.Instance, device string) (used bool) {
	mine := mountNamespace("self")
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		pid := filepath.Base(dir)
		mounts, _ := os.ReadFile(dir + "/mountinfo")
		if !bytes.Contains(mounts, []byte(" "+device+" ")) {
			continue
		}
		group, _ := os.ReadFile(dir + "/cgroup")
		ours := bytes.Contains(group, []byte("/"+inst.CgroupRoot()+"/")) || of(pid, inst.RunDir(), inst.StateDir()) != ""
		if ours || mountNamespace(pid) == mine {
			return false
		}
		used = true
	}
	return used
}

func mountNamespace(pid string) string {
	ns, _ := os.Readlink("/proc/" + pid + "/ns/mnt")
	return ns
}

func under(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

func output(name string, args ...string) []byte {
	out, _ := exec.Command(name, args...).Output()
	return out
}

// processes lists processes whose arguments name a directory of the instance.
func processes(run, state string) (held []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		if args := of(filepath.Base(dir), run, state); args != "" {
			held = append(held, "process "+filepath.Base(dir)+" "+args)
		}
	}
	return held
}

// of is the arguments of a process if they name a directory of the instance.
func of(pid, run, state string) string {
	b, _ := os.ReadFile("/proc/" + pid + "/cmdline")
	args := strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
	for _, a := range args {
		if under(strings.TrimPrefix(a, "--root="), run) || under(a, state) {
			return strings.Join(args, " ")
		}
	}
	return ""
}

// Kernel reports whether this host runs that release of Linux or a later one.
func Kernel(t testing.TB, major, minor int) bool {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var x, y int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &x, &y); err != nil {
		t.Fatal(err)
	}
	return x > major || x == major && y >= minor
}
