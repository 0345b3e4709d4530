package e2e_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// TestVolumes tells stories of volumes on both runtimes.
func TestVolumes(t *testing.T) {
	lent := t.TempDir()
	if err := os.Chmod(lent, 0o755); err != nil {
		t.Fatal(err)
	}
	h := newHost(t, daemontest.Options{Storage: []string{fmt.Sprintf("allowed_host_paths = [%q]", lent)}})
	h.deleteVolumes(t) // of an earlier run that was killed
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			for _, s := range []struct {
				name string
				tell func(*testing.T, *lab, string)
			}{
				{"Kept", tellVolumeKept},
				{"Shared", tellVolumeShared},
				{"ReadOnly", tellVolumeReadOnly},
				{"Quota", tellVolumeQuota},
				{"Owned", tellVolumeOwned},
				{"Nested", tellVolumeNested},
				{"Host", tellHostPath},
				{"HostRace", tellHostPathRace},
				{"Refused", tellVolumeRefused},
				{"Links", tellVolumeLinks},
			} {
				t.Run(s.name, func(t *testing.T) {
					l := &lab{host: h, T: t, runtime: runtime}
					defer h.deleteVolumes(t)
					defer h.deleteAll(t)
					s.tell(t, l, lent)
				})
			}
		})
	}
}

func (h host) deleteVolumes(t testing.TB) {
	t.Helper()
	all, err := h.api.Volumes().List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range all {
		if err := h.api.Volumes().Remove(t.Context(), v.Name); err != nil {
			t.Errorf("delete volume %s: %v", v.Name, err)
		}
	}
}

// sh runs a script in a sandbox and returns what it printed.
func (l *lab) sh(id, script string) string {
	l.Helper()
	return l.ok("exec", id, "--", "sh", "-c", script)
}

func (l *lab) volume(name string) wire.Volume {
	l.Helper()
	var all []wire.Volume
	if err := json.Unmarshal([]byte(l.ok("volume", "inspect", name)), &all); err != nil || len(all) != 1 {
		l.Fatalf("volume inspect %s: %v", name, err)
	}
	return all[0]
}

// volumeDir is where the files of a volume lie on the host.
func (l *lab) volumeDir(name string) string {
	return filepath.Join(l.StateDir, "pool", l.volume(name).ID, "d")
}

// tellVolumeKept: a volume begins as what the image has, and outlives sandboxes,
// snapshots, stops and the daemon.
func tellVolumeKept(t *testing.T, l *lab, _ string) {
	plain := l.make("base")
	list := "cd /etc/pam.d && ls -ln --time-style=+%s && cat *"
	want := l.sh(plain, list)
	id := l.make("-v", "seeded:/etc/pam.d", "-v", "data:/data", "base")
	if got := l.sh(id, list); got != want {
		t.Errorf("the volume begins as\n%s\nand the image has\n%s", got, want)
	}
	l.sh(id, "echo mine >/data/f && chown 33:44 /data/f && chmod 640 /data/f && mkdir /data/d && ln -s f /data/l && rm "+
		"/etc/pam.d/passwd && sync")
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(l.volumeDir("data"), "f"), &st); err != nil || st.Uid != 33 || st.Gid != 44 ||
		st.Mode&0o7777 != 0o640 {
		t.Errorf("on the disk the file is %d:%d %o, %v", st.Uid, st.Gid, st.Mode, err)
	}
	census := "stat -c '%n %u:%g %a' /data /data/* && cat /data/l && ls /etc/pam.d | wc -l"
	before := l.sh(id, census)
	if !strings.Contains(before, "/data 0:0 755\n") {
		t.Errorf("a new volume is %s", before)
	}

	if v := l.volume("data"); !slices.Equal(v.UsedBy, []string{id}) || v.SizeBytes == 0 || v.UsedBytes == nil || *v.UsedBytes == 0 {
		t.Errorf("inspect says %+v", v)
	}
	l.wants(l.ctl("volume", "rm", "data"), 125, "in use by "+id)
	if out := l.ok("volume", "ls", "-q"); out != "data\nseeded\n" {
		t.Errorf("volume ls -q printed %q", out)
	}
	if i := l.inspect(id); len(i.Volumes) != 2 || i.Volumes[1].PVC == nil || i.Volumes[1].PVC.ClaimName != "data" {
		t.Errorf("inspect of the sandbox says %+v", i.Volumes)
	}

	l.ok("pause", id)
	l.ok("resume", id)
	snap := strings.TrimSpace(l.ok("snapshot", "create", id))
	defer l.deleteSnapshots(t)
	l.Kill()
	if err := l.TryStart(); err != nil {
		t.Fatal(err)
	}
	if got := l.sh(id, census); got != before {
		t.Errorf("after the daemon was killed: %s", got)
	}
	l.ok("stop", "-t", "0", id)
	l.wants(l.ctl("volume", "rm", "data"), 125, "in use by "+id) // it will be mounted again
	l.ok("start", id)
	if got := l.sh(id, census); got != before {
		t.Errorf("after stop and start: %s", got)
	}
	l.ok("rm", "-f", id)
	other := runtimes[1-slices.Index(runtimes, l.runtime)]
	again := strings.TrimSpace(l.ok("create", "--runtime", other, "-v", "data:/data", "-v", "seeded:/etc/pam.d", "base"))
	if got := l.sh(again, census); got != before {
		t.Errorf("on %s: %s", other, got)
	}
	// A snapshot holds the mount point, and not the volume.
	without := l.from(snap, l.runtime)
	if got := l.sh(without, "ls -A /data; ls /etc/pam.d/passwd"); got != "/etc/pam.d/passwd\n" {
		t.Errorf("a sandbox from the snapshot has %q", got)
	}
	l.ok("rm", "-f", again, without)
	dir := l.volumeDir("data")
	if out := l.ok("volume", "rm", "data"); out != "data\n" {
		t.Errorf("volume rm printed %q", out)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Errorf("%s is still there", dir)
	}
	l.wants(l.ctl("volume", "prune", "-f"), 0, "no volume was removed")
	l.wants(l.ctl("system", "prune", "-f", "--volumes"), 0, "no volume was removed")
	if out := l.ok("volume", "ls", "-q"); out != "seeded\n" {
		t.Errorf("after a prune without -a there are %q", out)
	}
	if out := l.ok("volume", "prune", "-af"); out != "seeded\n" {
		t.Errorf("volume prune -a printed %q", out)
	}
	l.wants(l.ctl("volume", "rm", "data"), 125, "no volume")
}

// tellVolumeShared: what one sandbox writes others see at once, on any runtime.
func tellVolumeShared(t *testing.T, l *lab, _ string) {
	other := runtimes[1-slices.Index(runtimes, l.runtime)]
	a := l.make("-v", "shared:/a", "base")
	b := l.make("-v", "shared:/b", "base")
	c := strings.TrimSpace(l.ok("create", "--runtime", other, "-v", "shared:/c:ro", "base"))
	for i := range 5 {
		l.sh(a, fmt.Sprintf("echo %d >/a/f; echo x >>/a/log; mkdir /a/d%d", i, i))
		if got := l.sh(b, "cat /b/f; ls -d /b/d*|wc -l; wc -l </b/log"); got != fmt.Sprintf("%d\n%d\n%d\n", i, i+1, i+1) {
			t.Errorf("round %d: the second has %q", i, got)
		}
		if got := l.sh(c, "cat /c/f; ls -d /c/d*|wc -l"); got != fmt.Sprintf("%d\n%d\n", i, i+1) {
			t.Errorf("round %d: the third has %q", i, got)
		}
		l.sh(b, "echo back >/b/f && mv /b/f /b/g && mv /b/g /b/f")
		if got := l.sh(a, "cat /a/f"); got != "back\n" {
			t.Errorf("round %d: the first has %q", i, got)
		}
	}
	// What is gone for one is gone for all, also while it is open.
	l.sh(a, "rm -r /a/*")
	if got := l.sh(b, "ls -A /b"); got != "" {
		t.Errorf("the second still has %q", got)
	}
}

// tellVolumeReadOnly: nothing in the sandbox makes it writable.
func tellVolumeReadOnly(t *testing.T, l *lab, lent string) {
	w := l.make("-v", "ro:/v", "base")
	l.sh(w, "echo kept >/v/f; mkdir /v/d")
	dir := filepath.Join(lent, "ro-"+l.runtime, "mounted")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=755"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH) //nolint:errcheck // below
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("below\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	id := l.make("-v", "ro:/v:ro", "-v", filepath.Dir(dir)+":/h:ro", "base")
	script := `for f in /v/f /v/new /v/d/new /h/new /h/mounted/f /h/mounted/new; do (echo x >$f) 2>/dev/null && echo "wrote $f"; done
for d in /v /h /h/mounted; do
	mount -o remount,rw $d 2>/dev/null && echo "remounted $d"
	mount -o remount,rw,bind $d 2>/dev/null && echo "remounted $d as a bind"
	umount $d 2>/dev/null && echo "unmounted $d"
	touch $d/new 2>/dev/null && echo "touched $d"
done
chmod 777 /v/f 2>/dev/null && echo chmod; chown 1:1 /v/f 2>/dev/null && echo chown; rm /v/f 2>/dev/null && echo rm; mv /v/f /v/g 2>/dev/null && echo mv; ln /v/f /v/h 2>/dev/null && echo ln
(echo x >/v/f) 2>&1 | grep -ic 'read-only file system'
cat /v/f /h/mounted/f`
	out := l.ctl("exec", id, "--", "sh", "-c", script)
	if out.out != "1\nkept\nbelow\n" {
		t.Errorf("read-only is %q, %q", out.out, out.errout)
	}
	if got := l.sh(id, `grep -E ' (/v|/h|/h/mounted) ' /proc/self/mounts | awk '{print $2, $4}'`); strings.Contains(got, " rw") ||
		!strings.Contains(got, "/v ro") {
		t.Errorf("mounted as %s", got)
	}
	l.sh(w, "echo more >>/v/f") // the other one may
	if got := l.sh(id, "cat /v/f"); got != "kept\nmore\n" {
		t.Errorf("it reads %q", got)
	}
	l.ok("rm", "-f", id)
}

// tellVolumeQuota: a volume holds what it may, whoever writes.
func tellVolumeQuota(t *testing.T, l *lab, _ string) {
	if out := l.ok("volume", "create", "small", "--size", "32Mi"); out != "small\n" {
		t.Errorf("volume create printed %q", out)
	}
	l.wants(l.ctl("volume", "create", "small"), 125, "already")
	a, b := l.make("-v", "small:/v", "base"), l.make("-v", "small:/v", "base")
	l.sh(a, "head -c 20000000 /dev/zero | tr '\\0' x >/v/a; sync")
	r := l.ctl("exec", b, "--", "sh", "-c", "head -c 20000000 /dev/zero | tr '\\0' y >/v/b; sync -f /v")
	if !strings.Contains(r.errout, "quota") && !strings.Contains(r.errout, "space") {
		t.Errorf("40 MB in 32 MiB: %d, %q", r.code, r.errout)
	}
	if df, err := l.api.System().DiskUsage(l.Context()); err != nil || !slices.ContainsFunc(df.Volumes, func(d wire.VolumeDisk) bool {
		return d.Name == "small" && d.LimitBytes == 32<<20 && d.Bytes >= 20_000_000 && d.Sandboxes == 2
	}) {
		l.Errorf("system df: %v, %+v", err, df.Volumes)
	}
	if v := l.volume("small"); v.SizeBytes != 32<<20 || *v.UsedBytes < 20_000_000 || *v.UsedBytes > 32<<20 {
		t.Errorf("it holds %d of %d", *v.UsedBytes, v.SizeBytes)
	}
	l.sh(b, "echo on the own disk there is room >/srv/f")
	l.sh(b, "rm /v/a /v/b && sync -f /v && echo again >/v/c")
	// A subvolume in a volume would have no limit of its own (btrfs lets anybody make one).
	for name, ioctl := range map[string]uint64{
		"SUBVOL_CREATE": 0x5000940e, "SUBVOL_CREATE_V2": 0x50009418,
		"with high bits": 0x1_5000940e,
	} {
		at := 8
		if name == "SUBVOL_CREATE_V2" {
			at = 56
		}
		script := fmt.Sprintf(`sysopen(my $d, "/v", 0) or die; my $b = "\0" x %d . "sub" . "\0" x 4096; ioctl($d, %d, $b) and print "made"; print $!+0`, at, ioctl)
		if got := l.ok("exec", b, "--", "perl", "-e", script); got != "25" { // ENOTTY, as on overlayfs
			t.Errorf("%s: %q", name, got)
		}
	}
	if got := l.sh(b, "ls /v"); got != "c\n" {
		t.Errorf("the volume has %q", got)
	}
	big := "1.5Gi"
	sb, err := l.api.Create(t.Context(), l.with(wire.VolumeMount{
		Name: "v", MountPath: "/v",
		PVC: &wire.PVC{ClaimName: "big", Storage: &big},
	}), true)
	if err != nil || sb.Status.State != wire.Running || l.volume("big").SizeBytes != 3<<29 {
		t.Errorf("%v, %+v, %d", err, sb.Status, l.volume("big").SizeBytes)
	}
}

// with is a sandbox with volumes.
func (l *lab) with(all ...wire.VolumeMount) wire.CreateRequest {
	r := spec(l.runtime)
	r.Volumes = all
	return r
}

// tellVolumeOwned: a volume that goes with its sandbox goes, unless it was there
// before or another one has it.
func tellVolumeOwned(t *testing.T, l *lab, _ string) {
	mount := func(name string) wire.VolumeMount {
		return wire.VolumeMount{Name: "v", MountPath: "/v", PVC: &wire.PVC{ClaimName: name, DeleteOnSandboxTermination: true}}
	}
	there := func(want ...string) {
		t.Helper()
		settles(t, func() error {
			if got := strings.Fields(l.ok("volume", "ls", "-q")); !slices.Equal(got, want) {
				return fmt.Errorf("there are %q, want %q", got, want)
			}
			return nil
		})
	}
	l.ok("volume", "create", "before")
	owned, before := l.create(t, l.with(mount("owned"))), l.create(t, l.with(mount("before")))
	lent := l.create(t, l.with(mount("lent")))
	heir := l.make("-v", "lent:/v", "base")
	dir := filepath.Dir(l.volumeDir("owned"))
	l.ok("rm", "-f", owned.ID, before.ID, lent.ID)
	there("before", "lent")
	settles(t, func() error { // deletes go on behind the answer, and lent's is what decides
		v, err := l.api.Volumes().Get(t.Context(), "lent")
		if err == nil && !slices.Equal(v.UsedBy, []string{heir}) {
			err = fmt.Errorf("lent is used by %q, want %q", v.UsedBy, heir)
		}
		return err
	})
	settles(t, func() error { // it is unknown first, and then goes
		if _, err := os.Stat(dir); err == nil {
			return fmt.Errorf("%s is still there", dir)
		}
		return nil
	})
	l.sh(heir, "echo x >/v/f")
	l.ok("rm", "-f", heir)
	there("before", "lent")
	// Whoever mounts it again at once gets a new one.
	last := l.create(t, l.with(mount("again")))
	l.sh(last.ID, "echo x >/v/f")
	for range 3 {
		l.ok("rm", "-f", last.ID)
		last = l.create(t, l.with(mount("again")))
		if out := l.sh(last.ID, "ls /v; echo x >/v/f"); out != "" {
			t.Errorf("it has the files of the one before: %q", out)
		}
	}
	l.ok("rm", "-f", last.ID)
	there("before", "lent")
	no := false
	missing := mount("missing")
	missing.PVC.CreateIfNotExists = &no
	if _, err := l.api.Create(t.Context(), l.with(missing), true); !errs.Is(err, errs.NotFound) {
		t.Errorf("a volume that must be there and is not: %v", err)
	}
	there("before", "lent")
}

// tellVolumeNested: volumes in volumes, in file systems in memory, and parts of
// volumes.
func tellVolumeNested(t *testing.T, l *lab, _ string) {
	l.sh(l.make("-v", "kept:/v", "base"), "echo k >/v/f")
	id := l.make("-v", "outer:/v", "-v", "inner:/v/deep/er", "--mount", "type=volume,src=inner,dst=/part,readonly,volume-subpath=some/part",
		"-v", "kept:/v/kept:ro",
		"-v", "mem:/work/there", "--tmpfs", "/work", "-v", "run:/run/app", "-v", "deep:/"+strings.Repeat("d/", 400)+"d", "base")
	l.sh(id, "echo o >/v/f; echo i >/v/deep/er/f; echo m >/work/there/f; echo r >/run/app/f; cd /$(printf 'd/%.0s' $(seq 400)) && echo "+
		"d >d/f")
	if r := l.ctl("exec", id, "--", "sh", "-c", "echo x >/part/f || echo x >/v/kept/f || echo x >/v/kept/g"); r.code == 0 {
		t.Error("a volume that is mounted read-only can be written to")
	}
	l.sh(id, "mkdir -p /v/deep/er/some/part && echo p >/v/deep/er/some/part/f")
	if got := l.sh(id, "cat /part/f /v/kept/f"); got != "p\nk\n" {
		t.Errorf("the part has %q", got)
	}
	for name, want := range map[string]string{"outer": "o\n", "inner": "i\n", "mem": "m\n", "run": "r\n", "deep": "d\n"} {
		if b, err := os.ReadFile(filepath.Join(l.volumeDir(name), "f")); string(b) != want {
			t.Errorf("volume %s has %q, %v", name, b, err)
		}
	}
	if entries, err := os.ReadDir(filepath.Join(l.volumeDir("outer"), "deep/er")); err != nil || len(entries) > 0 {
		t.Errorf("what is written to the inner one is in the outer: %v, %v", entries, err)
	}
	l.ok("stop", "-t", "0", id)
	l.ok("start", id)
	if got := l.sh(id, "cat /v/f /v/deep/er/f /part/f /work/there/f /run/app/f"); got != "o\ni\np\nm\nr\n" {
		t.Errorf("after stop and start: %q", got)
	}
	ro := l.make("--read-only", "-v", "outer:/not/there/yet", "base")
	l.sh(ro, "echo y >/not/there/yet/g")
	// On gVisor a file that is open for writing there could not be read here.
	twice := l.ctl("create", "--runtime", l.runtime, "-v", "outer:/v", "--mount",
		"type=volume,src=outer,dst=/v/part,readonly,volume-subpath=some", "base")
	if l.runtime == "runsc" {
		l.wants(twice, 125, "twice")
	} else {
		l.wants(twice, 0)
	}
}

// tellHostPath: directories and files that the host lends, and no others.
func tellHostPath(t *testing.T, l *lab, lent string) {
	dir := filepath.Join(lent, "dir-"+l.runtime)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("host\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Lchown(filepath.Join(dir, "file"), 1000, 100); err != nil {
		t.Fatal(err)
	}
	id := l.make("-v", dir+":/h", "-v", dir+"/made/up:/m", "-v", dir+"/file:/srv/one:ro", "base")
	got := l.sh(id, "stat -c '%u:%g' /h/file; cat /h/file /srv/one; echo guest >/m/f; chown 7:8 /m/f; id -u")
	if got != "1000:100\nhost\nhost\n0\n" {
		t.Errorf("it has %q", got)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(dir, "made/up/f"), &st); err != nil || st.Uid != 7 || st.Gid != 8 {
		t.Errorf("on the host the file is %d:%d, %v", st.Uid, st.Gid, err)
	}
	if got := l.sh(id, `grep -E ' /h ' /proc/self/mounts`); l.runtime == "runc" &&
		(!strings.Contains(got, "nosuid") || !strings.Contains(got, "nodev")) {
		t.Errorf("mounted as %s", got)
	}
	if r := l.ctl("exec", id, "--", "sh", "-c", "mknod /h/dev b 7 0 && cat /h/dev"); r.code == 0 {
		t.Error("a guest makes devices in a directory of the host")
	}
	if err := os.WriteFile(filepath.Join(dir, "later"), []byte("later\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := l.sh(id, "cat /h/later"); got != "later\n" {
		t.Errorf("what the host wrote is %q", got)
	}
	if err := os.Symlink("/etc", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	for source, text := range map[string]string{
		"/etc": "not in an allowed directory", lent + "-not": "not in an allowed directory", "/": "not in an allowed directory",
		dir + "/link": "symbolic link", dir + "/link/apt": "symbolic link", dir + "/file/below": "not a directory",
		dir + "/fifo":                          "neither",
		dir + "/" + strings.Repeat("n", 300):   "too long",
		dir + "/" + strings.Repeat("n/", 2500): "at most",
		dir + "/../../etc":                     "without ..",
	} {
		r := l.ctl("create", "--runtime", l.runtime, "-v", source+":/x", "base")
		l.wants(r, 125, text)
	}
	l.ok("rm", "-f", id)
}

// tellHostPathRace swaps a directory for a link to the host's /etc, all the time,
// while sandboxes mount it: they have the directory, or do not start.
func tellHostPathRace(t *testing.T, l *lab, lent string) {
	top := filepath.Join(lent, "race-"+l.runtime)
	for _, dir := range []string{top + "/a/sub", top + "/b"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(top+"/a/sub/mine", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	secret := t.TempDir()
	if err := os.Mkdir(secret+"/sub", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(secret+"/sub/secret", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(secret, top+"/link"); err != nil {
		t.Fatal(err)
	}
	done, stopped := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for {
			select {
			case <-done:
				stopped <- n
				return
			default:
				unix.Renameat2(unix.AT_FDCWD, top+"/a", unix.AT_FDCWD, top+"/link", unix.RENAME_EXCHANGE) //nolint:errcheck // counted
				n++
			}
		}
	}()
	ran, refused := 0, 0
	for range 12 {
		sb, err := l.api.Create(t.Context(), l.with(wire.VolumeMount{
			Name: "h", MountPath: "/h",
			Host: &wire.HostPath{Path: top + "/a/sub"},
		}), true)
		switch {
		case err != nil && errs.Is(err, errs.Invalid), err == nil && sb.Status.State == wire.Failed:
			refused++
		case err != nil:
			t.Fatal(err)
		default:
			ran++
			if got := l.sh(sb.ID, "ls /h"); got != "mine\n" {
				t.Errorf("it has %q", got)
			}
		}
	}
	close(done)
	t.Logf("%d ran, %d were refused, %d swaps", ran, refused, <-stopped)
}

// tellVolumeRefused: what makes no sense says so, and leaves no volume.
func tellVolumeRefused(t *testing.T, l *lab, _ string) {
	pvc := &wire.PVC{ClaimName: "refused"}
	for what, c := range map[string]struct {
		all  []wire.VolumeMount
		text string
	}{
		"proc":    {[]wire.VolumeMount{{Name: "v", MountPath: "/proc", PVC: pvc}}, "its own files"},
		"below":   {[]wire.VolumeMount{{Name: "v", MountPath: "/sys/fs/x", PVC: pvc}}, "its own files"},
		"dev":     {[]wire.VolumeMount{{Name: "v", MountPath: "/dev/shm", PVC: pvc}}, "its own files"},
		"agent":   {[]wire.VolumeMount{{Name: "v", MountPath: "/opt", PVC: pvc}}, "its own files"},
		"etc":     {[]wire.VolumeMount{{Name: "v", MountPath: "/etc", PVC: pvc}}, "its own files"},
		"root":    {[]wire.VolumeMount{{Name: "v", MountPath: "//", PVC: pvc}}, "its own files"},
		"dots":    {[]wire.VolumeMount{{Name: "v", MountPath: "/v/../proc", PVC: pvc}}, "without .."},
		"long":    {[]wire.VolumeMount{{Name: "v", MountPath: "/" + strings.Repeat("x", 4096), PVC: pvc}}, "at most"},
		"twice":   {[]wire.VolumeMount{{Name: "v", MountPath: "/v", PVC: pvc}, {Name: "w", MountPath: "/v/", PVC: pvc}}, "hide the other"},
		"sub":     {[]wire.VolumeMount{{Name: "v", MountPath: "/v", SubPath: "../x", PVC: pvc}}, "without .."},
		"none":    {[]wire.VolumeMount{{Name: "v", MountPath: "/v"}}, "0 backends"},
		"both":    {[]wire.VolumeMount{{Name: "v", MountPath: "/v", PVC: pvc, Host: &wire.HostPath{Path: "/srv"}}}, "2 backends"},
		"name":    {[]wire.VolumeMount{{Name: "V", MountPath: "/v", PVC: pvc}}, "want 1 to 63"},
		"claim":   {[]wire.VolumeMount{{Name: "v", MountPath: "/v", PVC: &wire.PVC{ClaimName: "a_b"}}}, "want 1 to 253"},
		"program": {[]wire.VolumeMount{{Name: "v", MountPath: "/etc/passwd", PVC: pvc}}, "not a directory"},
	} {
		sb, err := l.api.Create(t.Context(), l.with(c.all...), true)
		text := fmt.Sprint(err)
		if err == nil {
			text = sb.Status.Message
		}
		if err == nil && sb.Status.State == wire.Running || !strings.Contains(text, c.text) {
			t.Errorf("%s: %v, %s", what, err, text)
		}
		if (err == nil) != (what == "program") {
			t.Errorf("%s: known late, or early: %v", what, err)
		}
	}
	l.deleteAll(t)
	if out := l.ok("volume", "ls", "-q"); out != "refused\n" { // of the one that was accepted
		t.Errorf("there are the volumes %q", out)
	}
}

// tellVolumeLinks: links that guests made lead nowhere when something is mounted.
func tellVolumeLinks(t *testing.T, l *lab, _ string) {
	evil := l.make("-v", "evil:/v", "base")
	l.sh(evil, "ln -s / /v/root; ln -s ../../.. /v/up; ln -s /proc /v/proc; mkdir /v/dir; echo x >/v/file")
	failed := func(text string, args ...string) {
		t.Helper()
		l.wants(l.ctl(append([]string{"create", "--runtime", l.runtime}, args...)...), 125, text)
	}
	failed("symbolic link", "--mount", "type=volume,src=evil,dst=/x,volume-subpath=root", "base")
	failed("symbolic link", "--mount", "type=volume,src=evil,dst=/x,volume-subpath=up/etc", "base")
	failed("not a directory", "--mount", "type=volume,src=evil,dst=/x,volume-subpath=file/x", "base")
	failed("symbolic link", "-v", "evil:/v", "-v", "other:/v/proc/x", "base")
	failed("symbolic link", "-v", "evil:/v", "-v", "other:/v/root/etc", "base")

	// In the root file system of the image links are followed, as far as they lead
	// where a volume may be; of what a guest made, too, when it starts anew.
	id := l.make("-v", "data:/made/data", "base")
	l.sh(id, "echo kept >/made/data/f")
	l.ok("stop", "-t", "0", id)
	l.ok("start", id)
	l.sh(id, "mv /made /made.old && ln -s /proc /made")
	l.ok("stop", "-t", "0", id)
	l.wants(l.ctl("start", id), 125, "its own files")
	again := l.make("-v", "data:/var/run/data", "base") // a link of the image's
	if got := l.sh(again, "cat /run/data/f"); got != "kept\n" {
		t.Errorf("by a link of the image it has %q", got)
	}
}
