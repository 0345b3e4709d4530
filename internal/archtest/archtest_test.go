// Package archtest holds the house rules that a compiler does not check: which package
// may import which, which package alone may use a dependency, and how large a file or a
// function may grow. Each rule gives its reason.
package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/sandboxd/sandboxd/"

// layers lists the packages from the lowest layer up. A package may import only packages
// of lower layers. Packages of one layer do not import one another, so that each can be
// read, tested and replaced alone. A path also covers the packages below it; the longest
// match counts.
var layers = [][]string{
	0: {
		"internal/certs", "internal/instance", "internal/keylock", "internal/relay", "internal/framing", "internal/fields",
		"internal/durable", "internal/dump", "internal/failpoint", "internal/history", "internal/journal", "internal/pidfd",
		"internal/release", "internal/seccomp", "internal/systemd", "internal/tarball",
		"internal/testcache", "internal/weak", "pkg/errs",
	},
	1: {"pkg/sandbox/record", "internal/hosttest", "internal/confine", "internal/sealed", "internal/uptime", "internal/versions"},
	2: {
		"internal/manual", "internal/metrics", "pkg/oci", "pkg/netns", "pkg/egress", "pkg/cgroups", "pkg/snapshot", "pkg/image",
		"pkg/agent", "pkg/store", "pkg/publish",
	},
	3: {"pkg/sandbox", "pkg/secrets", "internal/backup", "internal/sbom"},
	4: {
		"pkg/expiry", "pkg/health", "pkg/idle", "pkg/retention", "pkg/admission", "pkg/fork", "pkg/pools", "pkg/validity", "pkg/pressure",
		"pkg/kmem",
	},
	5:  {"pkg/api", "api"},
	6:  {"pkg/client", "internal/config", "internal/bundle"},
	7:  {"internal/doctor", "internal/cli"},
	8:  {"internal/upgrade"},
	9:  {"internal/appliance"},
	10: {"internal/daemon", "internal/daemontest", "internal/support"},
	11: {"cmd", "test"},
}

// walls names, for a dependency, the only packages that may import it.
var walls = []struct {
	dep     string
	allowed []string
	reason  string
}{
	{
		"github.com/vishvananda/netlink",
		[]string{"pkg/netns", "pkg/egress", "internal/dump"},
		"links and sets are changed in one place each",
	},
	{"github.com/coreos/go-iptables", []string{"pkg/egress"}, "one owner of the chains"},
	{"github.com/google/nftables", []string{"pkg/egress", "internal/hosttest"}, "one owner of the lock; tests see that it is gone"},
	{"github.com/containerd/cgroups", []string{"pkg/cgroups"}, "two libraries never write one cgroup"},
	{"github.com/CycloneDX", []string{"internal/sbom"}, "one place knows the form of a bill of materials"},
	{"go.etcd.io/bbolt", []string{"pkg/store"}, "one owner of the schema"},
	{"github.com/opencontainers/runc", []string{"cmd/sandboxd-runc"}, "libcontainer is cgo, and its init re-executes the binary that " +
		"links it"},
	{"github.com/spf13/cobra", []string{"internal/cli", "cmd/sandboxd", "internal/manual"}, "flags are the programs' business"},
	{"github.com/miekg/dns", []string{"pkg/egress/names"}, "hostile DNS is parsed in one place, in a child"},
	{"github.com/pelletier/go-toml", []string{"internal/config", "internal/doctor", "pkg/image"}, "what is not TOML on disk is JSON"},
	{"aead.dev/minisign", []string{"internal/bundle"}, "one place says which signatures count"},
	{"github.com/google/go-containerregistry/pkg/v1/remote", []string{"pkg/image/registry"}, "one place speaks to registries"},
	{"github.com/coreos/go-systemd", []string{"internal/systemd"}, "a host without systemd must do as well"},
	{"github.com/godbus/dbus", []string{"internal/systemd"}, "a host without systemd must do as well"},
	{"github.com/prometheus", []string{"internal/metrics"}, "what counts and how it is shown is one place's business"},
	{"github.com/minio/minio-go", []string{"internal/backup/target"}, "one place speaks to S3-compatible storage"},
	{"filippo.io/age", []string{"internal/backup"}, "one place decides how a backup is encrypted"},
	{"github.com/restic/chunker", []string{"internal/backup/chunks"}, "where data is cut depends on one key"},
	{"mvdan.cc/sh", []string{"pkg/agent/shell"}, "a guest's command is parsed inside of the guest"},
	{"gvisor.dev/gvisor", nil, "tools/runsc holds the only pin"},
}

// sandboxctl must stay a client: any client can do what it can do. internal/tarball knows files and
// no daemon.
var clientOnly = []string{"pkg/client", "pkg/errs", "pkg/agent", "pkg/api/wire", "internal/tarball", "internal/release"}

type source struct {
	dir, path string // relative to the module
	file      *ast.File
	set       *token.FileSet
}

// sources are the Go files of the module. No test changes them.
func sources(t *testing.T) []source {
	t.Helper()
	all, err := parsed()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 20 {
		t.Fatalf("found only %d files: archtest looks in the wrong place", len(all))
	}
	return all
}

// parsed reads the files once for all tests.
var parsed = sync.OnceValues(func() (all []source, err error) {
	root := "../.."
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		if d.IsDir() && (strings.HasPrefix(d.Name(), ".") && p != root || rel == "build" || rel == "tools" || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(p, ".go") {
			return nil
		}
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, p, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		all = append(all, source{filepath.Dir(rel), rel, f, set})
		return nil
	})
	return all, err
})

func (s source) test() bool { return strings.HasSuffix(s.path, "_test.go") }

func covers(rule, dir string) bool { return dir == rule || strings.HasPrefix(dir, rule+"/") }

// layerOf returns the layer and the rule that a package falls under.
func layerOf(dir string) (layer int, rule string) {
	layer = -1
	for l, rules := range layers {
		for _, r := range rules {
			if covers(r, dir) && len(r) > len(rule) {
				layer, rule = l, r
			}
		}
	}
	return layer, rule
}

func TestLayers(t *testing.T) {
	for _, s := range sources(t) {
		if s.test() || s.dir == "internal/archtest" {
			continue
		}
		from, fromRule := layerOf(s.dir)
		if from < 0 {
			t.Errorf("%s: package %s stands in no layer; name it in archtest", s.path, s.dir)
			continue
		}
		for _, imp := range s.file.Imports {
			dep, ok := strings.CutPrefix(strings.Trim(imp.Path.Value, `"`), module)
			if !ok {
				continue
			}
			to, toRule := layerOf(dep)
			if to > from || to == from && toRule != fromRule {
				t.Errorf("%s (layer %d) imports %s (layer %d): imports point down, and neighbours do not know one another", s.path, from,
					dep, to)
			}
		}
	}
}

func TestWalls(t *testing.T) {
	for _, s := range sources(t) {
		for _, imp := range s.file.Imports {
			dep := strings.Trim(imp.Path.Value, `"`)
			for _, w := range walls {
				if !covers(w.dep, dep) || s.test() {
					continue
				}
				if !slices.ContainsFunc(w.allowed, func(a string) bool { return covers(a, s.dir) }) {
					t.Errorf("%s imports %s: only %v may, because %s", s.path, dep, w.allowed, w.reason)
				}
			}
		}
	}
}

func TestClientOnly(t *testing.T) {
	for _, s := range sources(t) {
		program := covers("cmd/sandboxctl", s.dir) || covers("internal/cli", s.dir)
		if !program && !covers("pkg/client", s.dir) || s.test() {
			continue
		}
		for _, imp := range s.file.Imports {
			dep, ok := strings.CutPrefix(strings.Trim(imp.Path.Value, `"`), module)
			if ok && !slices.Contains(clientOnly, dep) && !covers(s.dir, dep) && !(program && covers("internal/cli", dep)) {
				t.Errorf("%s imports %s: a client talks to the daemon through %v only", s.path, dep, clientOnly)
			}
		}
	}
}

// TestNoGhosts holds that the rules name only packages that exist.
func TestNoGhosts(t *testing.T) {
	var dirs []string
	for _, s := range sources(t) {
		dirs = append(dirs, s.dir)
	}
	named := slices.Concat(layers...)
	for _, w := range walls {
		named = append(named, w.allowed...)
	}
	for family, table := range rooms {
		for room, may := range table {
			named = append(named, path.Join(family, room))
			for _, m := range may {
				named = append(named, path.Join(family, m))
			}
		}
	}
	for _, n := range append(named, clientOnly...) {
		if !slices.ContainsFunc(dirs, func(d string) bool { return covers(n, d) }) {
			t.Errorf("a rule names %s, and there is no such package", n)
		}
	}
}

func TestNames(t *testing.T) {
	for _, s := range sources(t) {
		switch strings.TrimSuffix(s.file.Name.Name, "_test") {
		case "util", "utils", "common", "helpers", "types", "misc":
			t.Errorf("%s: package %s says nothing; name it after what it provides", s.path, s.file.Name.Name)
		}
	}
}
