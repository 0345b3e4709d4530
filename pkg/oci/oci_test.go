package oci

import (
	"encoding/json"
	"errors"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/quick"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

var update = flag.Bool("update", false, "rewrite testdata")

var sample = Config{
	ID:           "rabcdefghijk",
	Hostname:     "lab",
	RootFS:       "/run/sandboxd-r/rabcdefghijk/rootfs",
	NetNS:        "/run/sandboxd-r/ns/rabcdefghijk.net",
	UserNS:       "/run/sandboxd-r/ns/rabcdefghijk.user",
	UIDBase:      2_000_000,
	CgroupsPath:  "/sandboxd-r/rabcdefghijk/run",
	ResolvConf:   "/run/sandboxd-r/bundles/rabcdefghijk/resolv.conf",
	Hosts:        "/run/sandboxd-r/bundles/rabcdefghijk/hosts",
	HostnameFile: "/run/sandboxd-r/bundles/rabcdefghijk/hostname",
	BootID:       "/run/sandboxd-r/bundles/rabcdefghijk/boot_id",
	AgentDir:     "/usr/libexec/sandboxd/agent",
	Env:          []string{"LANG=C.UTF-8"},
	MemoryBytes:  512 << 20,
	CPUMillis:    1500,
	Pids:         256,
}

// trusting is a Config with all that is mounted, in a sandbox that trusts an authority.
var trusting = func() Config {
	c := sample
	bundle := "/run/sandboxd-r/bundles/rabcdefghijk/"
	c.ReadOnly, c.AgentState = true, "/run/sandboxd-r/rabcdefghijk/rootfs/.sandboxd"
	c.Stores = []File{
		{bundle + "trust-1", "/etc/ssl/certs/ca-certificates.crt"},
		{bundle + "trust-2", "/usr/lib/jvm/jdk/lib/security/cacerts"},
	}
	c.AgentFiles = []File{{bundle + "trust-0", AgentDir + "/mitmproxy-ca-cert.pem"}, {bundle + "trust-1", AgentDir + "/ca-bundle.pem"}}
	c.Tmpfs = []Tmpfs{{Path: "/work", Bytes: 8 << 20, Mode: 0o1777}}
	c.Volumes = []Volume{{Source: "/run/sandboxd-r/volumes/rabcdefghijk/0", Path: "/data"}}
	return c
}()

// TestTrustOrder: nothing that comes later hides what a guest trusts, and no file of ours is
// looked for in memory or in a volume.
func TestTrustOrder(t *testing.T) {
	for _, name := range []string{Runsc, Runc} {
		at := map[string]int{}
		for i, m := range NewSpec(name, trusting).Mounts {
			at[m.Destination] = i
			for _, f := range slices.Concat(trusting.Stores, trusting.AgentFiles) {
				if m.Destination == f.Path && (m.Source != f.Source || m.Type != "bind" ||
					!slices.Equal(m.Options, []string{"bind", "ro", "nosuid", "nodev", "noexec", "rprivate"})) {
					t.Errorf("%s: %+v, want a read-only mount of %s", name, m, f.Source)
				}
			}
		}
		for _, f := range trusting.Stores {
			if i, ok := at[f.Path]; !ok || i > at["/etc/resolv.conf"] || i > at["/work"] || i > at["/data"] || i < at["/run"] {
				t.Errorf("%s: %s is mount number %d of %v", name, f.Path, i, at)
			}
		}
		for _, f := range trusting.AgentFiles {
			if i, ok := at[f.Path]; !ok || i < at[AgentDir] || i > at["/data"] {
				t.Errorf("%s: %s is mount number %d of %v", name, f.Path, i, at)
			}
		}
	}
}

func TestGolden(t *testing.T) {
	for _, name := range []string{Runsc, Runc} {
		golden(t, name, newSpec(name, "amd64", sample))
		golden(t, name+".trust", newSpec(name, "amd64", trusting).Mounts)
	}
}

// golden compares v as JSON with the file name.json of testdata.
func golden(t *testing.T, name string, v any) {
	t.Helper()
	got, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	path := filepath.Join("testdata", name+".json")
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("%s differs from %s; go test ./pkg/oci -update, and read the diff", name, path)
	}
}

// Whatever a Config says beside its level of security, what a sandbox may do is the same.
func TestNoFieldReachesWhatASandboxMay(t *testing.T) {
	for _, name := range []string{Runsc, Runc} {
		for _, level := range record.SecurityLevels {
			testNoField(t, name, level)
		}
	}
}

func testNoField(t *testing.T, name string, level record.Security) {
	t.Helper()
	want := newSpec(name, "amd64", Config{Security: level})
	same := func(c Config) bool {
		c.Security = level
		s := newSpec(name, "amd64", c)
		return reflect.DeepEqual(s.Process.Capabilities, want.Process.Capabilities) &&
			s.Process.NoNewPrivileges == (level != record.SecurityCompat) &&
			reflect.DeepEqual(s.Process.Args, []string{AgentPath}) &&
			reflect.DeepEqual(s.Process.User, specs.User{}) &&
			*s.Process.OOMScoreAdj == OOMScoreAdj &&
			reflect.DeepEqual(s.Process.Rlimits[0], specs.POSIXRlimit{Type: "RLIMIT_CORE", Soft: 1, Hard: 1}) &&
			reflect.DeepEqual(s.Linux.Seccomp, want.Linux.Seccomp) &&
			reflect.DeepEqual(s.Linux.MaskedPaths, want.Linux.MaskedPaths) &&
			reflect.DeepEqual(s.Linux.ReadonlyPaths, want.Linux.ReadonlyPaths) &&
			reflect.DeepEqual(s.Linux.Resources.Devices, want.Linux.Resources.Devices) &&
			s.Hooks == nil && reflect.DeepEqual(s.Annotations, want.Annotations) && s.Linux.Sysctl == nil && s.Linux.Devices == nil &&
			sameMounts(s.Mounts, want.Mounts)
	}
	if err := quick.Check(same, nil); err != nil {
		t.Errorf("%s, %s: %v", name, level, err)
	}
}

// sameMounts: every mount is one of ours, and those that Config adds are read-only files of
// the host in /etc, over the boot ID and over stores of certificates, the agent's directory,
// and memory.
func sameMounts(got, ours []specs.Mount) bool {
	known := map[string]specs.Mount{}
	for _, m := range ours {
		known[m.Destination] = m
	}
	for _, m := range got {
		switch k, ok := known[m.Destination]; {
		case ok && m.Destination == AgentDir:
			k.Source = m.Source
			if !reflect.DeepEqual(m, k) {
				return false
			}
		case ok && reflect.DeepEqual(m, k):
		case ok && m.Type == "devpts": // by its number of terminals
			n, err := strconv.Atoi(strings.TrimPrefix(m.Options[len(m.Options)-1], "max="))
			if last := len(k.Options) - 1; err != nil || n < 64 || n > 1024 || !slices.Equal(m.Options[:last], k.Options[:last]) {
				return false
			}
		case m.Type == "tmpfs" && m.Source == k.Source && hasAll(m.Options, "nosuid", "nodev"): // /dev/shm by its size
		case m.Type == "tmpfs" && m.Source == "tmpfs" && hasAll(m.Options, "nosuid", "nodev"):
		case m.Type == "bind" && m.Options[0] == "rbind" && hasAll(m.Options, "nosuid", "nodev", "rprivate"): // a volume
		case m.Destination == AgentState && hasAll(m.Options, "nosuid", "nodev", "noexec"):
		case filepath.Dir(m.Destination) == "/etc" && m.Options[1] == "ro":
		case m.Destination == BootIDPath && m.Options[1] == "ro" && hasAll(m.Options, "nosuid", "nodev", "noexec"):
		case m.Type == "bind" && slices.Equal(m.Options[:2], []string{"bind", "ro"}) && hasAll(m.Options, "nosuid", "nodev", "noexec"):
			// a file of ours over a store of certificates, or in the agent's directory
		default:
			return false
		}
	}
	return true
}

func hasAll(have []string, want ...string) bool {
	return !slices.ContainsFunc(want, func(w string) bool { return !slices.Contains(have, w) })
}

// TestVolumes: they come after everything else, so that no mount point of ours is
// looked for in one.
func TestVolumes(t *testing.T) {
	c := sample
	c.Tmpfs = []Tmpfs{{Path: "/work", Bytes: 8 << 20, Mode: 0o1777}}
	c.Volumes = []Volume{{Source: "/run/x/volumes/y/0", Path: "/work/v"}, {Source: "/run/x/volumes/y/2", Path: "/w", ReadOnly: true}}
	want := []specs.Mount{
		{Destination: "/work/v", Type: "bind", Source: "/run/x/volumes/y/0", Options: []string{"rbind", "nosuid", "nodev", "rprivate"}},
		{Destination: "/w", Type: "bind", Source: "/run/x/volumes/y/2", Options: []string{"rbind", "nosuid", "nodev", "rprivate", "ro"}},
	}
	for _, name := range []string{Runsc, Runc} {
		m := newSpec(name, "amd64", c).Mounts
		if got := m[len(m)-2:]; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: the last mounts are %+v, want %+v", name, got, want)
		}
	}
}

// TestTmpfs: one takes the place of a mount of ours, and nothing comes on top
// of what is the agent's.
func TestTmpfs(t *testing.T) {
	c := sample
	c.Tmpfs = []Tmpfs{{Path: "/run", Bytes: 1 << 20, Mode: 0o700}, {Path: "/work", Bytes: 8 << 20, Mode: 0o1777, Exec: true}}
	c.ReadOnly, c.AgentState, c.ShmBytes = true, "/x/rootfs/.sandboxd", 128<<20
	for _, name := range []string{Runsc, Runc} {
		s := NewSpec(name, c)
		at := map[string][]string{}
		var order []string
		for _, m := range s.Mounts {
			if at[m.Destination] != nil {
				t.Errorf("%s: two mounts on %s", name, m.Destination)
			}
			at[m.Destination] = m.Options
			order = append(order, m.Destination)
		}
		for dst, want := range map[string][]string{
			"/run":     {"nosuid", "nodev", "noexec", "mode=700", "size=1024k"},
			"/work":    {"nosuid", "nodev", "mode=1777", "size=8192k"},
			"/dev/shm": {"nosuid", "nodev", "noexec", "mode=1777", "size=131072k"},
		} {
			if !hasAll(at[dst], want...) {
				t.Errorf("%s: %s is %v, want %v", name, dst, at[dst], want)
			}
		}
		if slices.Contains(at["/work"], "noexec") {
			t.Errorf("%s: exec was asked for: %v", name, at["/work"])
		}
		if last := order[len(order)-2:]; !slices.Equal(last, []string{AgentState, AgentDir}) {
			t.Errorf("%s: the last mounts are %v", name, last)
		}
	}
}

func TestSpecIsPure(t *testing.T) {
	a, b := NewSpec(Runc, sample), NewSpec(Runc, sample)
	if !reflect.DeepEqual(a, b) {
		t.Error("two specs of one Config differ")
	}
	if len(sample.Env) != 1 {
		t.Error("Config was changed")
	}
}

func TestBundle(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "b", "rabc")
	for range 2 {
		if err := Write(dir, NewSpec(Runsc, sample)); err != nil {
			t.Fatal(err)
		}
		if err := WriteFile(dir, "hosts", []byte("127.0.0.1 localhost\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		mode(t, dir, 0o700)
		mode(t, filepath.Join(dir, "config.json"), 0o600)
		mode(t, filepath.Join(dir, "hosts"), 0o644)
	}
	for range 2 {
		if err := Remove(dir); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("bundle still there: %v", err)
		}
	}
}

func TestRemoveNeverDescends(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "rootfs"), 0o755); err != nil {
		t.Fatal(err)
	}
	keep := filepath.Join(dir, "rootfs", "precious")
	if err := os.WriteFile(keep, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Remove(dir); err == nil {
		t.Error("no error for a bundle with a directory in it")
	}
	if _, err := os.Stat(keep); err != nil {
		t.Error(err)
	}
}

func mode(t *testing.T, path string, want fs.FileMode) {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if fi.Mode().Perm() != want {
		t.Errorf("%s has mode %o, want %o", path, fi.Mode().Perm(), want)
	}
}
