package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/egress/authority"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/oci/trust"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
)

// TestSharedBundle: of the users of a host, only the mapped root of a sandbox reaches the
// files that its first process binds, and nobody the spec or the names of other bundles.
func TestSharedBundle(t *testing.T) {
	hosttest.Root(t)
	run := t.TempDir()
	if err := os.Chmod(filepath.Dir(run), 0o755); err != nil {
		t.Fatal(err)
	}
	b := &bundles{cfg: &config.Config{Instance: 'g', RunDir: run}}
	r := &record.Record{ID: "gabcdefghijk", Slot: 3}
	dir := b.dir(r.ID)
	for range 2 { // a start writes it again
		if err := b.makeDir(); err != nil {
			t.Fatal(err)
		}
		if err := oci.Write(dir, &specs.Spec{}); err != nil {
			t.Fatal(err)
		}
		if err := oci.WriteFile(dir, "hosts", []byte("127.0.0.1 localhost\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := b.share(dir, r); err != nil {
			t.Fatal(err)
		}
	}
	own := b.cfg.Instance.UIDBase(r.Slot)
	for _, tt := range []struct {
		id      uint32
		command string
		works   bool
	}{
		{own, "cat hosts", true},
		{own, "cat config.json", false},
		{own, "ls .", false},
		{own, "ls ..", false},
		{own, "touch x", false},
		{b.cfg.Instance.UIDBase(r.Slot + 1), "cat hosts", false},
		{65534, "cat hosts", false},
		{65534, "ls ..", false},
	} {
		cmd := exec.Command("/bin/sh", "-c", fmt.Sprintf("cd %s && %s", dir, tt.command))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: tt.id, Gid: tt.id}}
		if out, err := cmd.CombinedOutput(); (err == nil) != tt.works {
			t.Errorf("%s as %d: %v\n%s", tt.command, tt.id, err, out)
		}
	}
}

// A trustHost is where bundles are written that trust an authority: a root file system and an
// agent's directory, in the working directory.
type trustHost struct {
	*bundles
	ca  []byte
	log bytes.Buffer
	r   *record.Record
}

const (
	ownRoots = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
	ownStore = "/etc/ssl/certs/ca-certificates.crt"
)

func newTrustHost(t *testing.T) *trustHost {
	t.Helper()
	dir := t.TempDir()
	t.Chdir(dir) // the mechanisms, of which only the names are asked for, have no directories
	h := &trustHost{r: &record.Record{ID: "gabcdefghijk", Slot: 3, Token: "token", Spec: record.Spec{
		Runtime: oci.Runsc, Inspect: true, Env: map[string]string{"OWN": "1"},
	}}}
	a, err := authority.New(h.r.ID, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	h.ca = a.Certificate()
	cfg := &config.Config{Instance: 'g', RunDir: filepath.Join(dir, "run"), LibexecDir: filepath.Join(dir, "libexec")}
	cfg.Network.Pool = netip.MustParsePrefix("198.51.100.0/24")
	h.bundles = &bundles{
		cfg:    cfg,
		mounts: &snapshot.Mounts{}, volumes: &snapshot.Volumes{}, ns: &netns.Manager{}, cgroups: &cgroups.Tree{},
		log:       slog.New(slog.NewTextHandler(&h.log, nil)),
		authority: func(context.Context, *record.Record) ([]byte, error) { return h.ca, nil },
	}
	for _, target := range trust.AgentFiles {
		h.put(t, filepath.Join("libexec/agent", filepath.Base(target)), "")
	}
	h.put(t, h.guest(ownStore), ownRoots)
	return h
}

// guest is where a file of the guest is.
func (h *trustHost) guest(name string) string { return filepath.Join(h.mounts.RootfsDir(h.r.ID), name) }

func (h *trustHost) put(t *testing.T, name, text string) {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(name), 0o755)
	if err == nil {
		err = os.WriteFile(name, []byte(text), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// mounted is what the runtime of the sandbox will mount from the bundle over files that the
// tests of this file look at.
func (h *trustHost) mounted(t *testing.T) map[string]string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(h.dir(h.r.ID), "config.json"))
	var spec specs.Spec
	if err == nil {
		err = json.Unmarshal(b, &spec)
	}
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, m := range spec.Mounts {
		if filepath.Dir(m.Source) != h.dir(h.r.ID) || filepath.Dir(m.Destination) == "/etc" {
			continue
		}
		b, err := os.ReadFile(m.Source)
		if err != nil {
			t.Fatal(err)
		}
		all[m.Destination] = string(b)
		if fi, err := os.Stat(m.Source); err != nil || fi.Mode() != 0o644 || !slices.Contains(m.Options, "ro") {
			t.Errorf("%s is mounted %v, from a file of mode %v, %v", m.Destination, m.Options, fi.Mode(), err)
		}
	}
	return all
}

func (h *trustHost) agents() *agents {
	return newAgents(h.cfg, nil, h.trusted, func(context.Context, *record.Record) (map[string]string, error) {
		return map[string]string{"API_TOKEN": "sbxph_x"}, nil
	})
}

// environment is what the agent of the sandbox gets.
func (h *trustHost) environment(t *testing.T) map[string]string {
	t.Helper()
	f, err := h.agents().Bootstrap(h.r)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := agent.ReadBootstrap(f)
	if err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(b.Variables, map[string]string{"API_TOKEN": "sbxph_x"}) == h.r.Spec.Inspect {
		t.Errorf("inspected: %v; it gets %v", h.r.Spec.Inspect, b.Variables)
	}
	return b.Env
}

// start is what the table does for one life.
func (h *trustHost) start(t *testing.T) error {
	t.Helper()
	if err := h.makeDir(); err != nil {
		t.Fatal(err)
	}
	if err := h.Write(t.Context(), h.r); err != nil {
		t.Fatal(err)
	}
	return h.Trust(t.Context(), h.r)
}

// TestTrust: each life of a sandbox trusts its authority, by mounts of its bundle and by
// variables, and what it has itself is as it was.
func TestTrust(t *testing.T) {
	h := newTrustHost(t)
	ca := string(h.ca)
	if err := h.start(t); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{trust.CertPath: ca, trust.BundlePath: ca + ownRoots, ownStore: ca + ownRoots}
	if got := h.mounted(t); !maps.Equal(got, want) {
		t.Errorf("mounted is %q, want %q", got, want)
	}
	env := h.environment(t)
	if env["OWN"] != "1" || env["SSL_CERT_FILE"] != trust.BundlePath || env["NODE_EXTRA_CA_CERTS"] != trust.CertPath {
		t.Errorf("the environment is %v", env)
	}
	if !maps.Equal(h.r.Spec.Env, map[string]string{"OWN": "1"}) {
		t.Errorf("the record has the environment %v", h.r.Spec.Env)
	}
	if b, err := os.ReadFile(h.guest(ownStore)); err != nil || string(b) != ownRoots {
		t.Errorf("the guest's own file is %q, %v", b, err)
	}
	if fi, err := os.Stat(filepath.Join(h.dir(h.r.ID), trustedFile)); err != nil || fi.Mode() != 0o600 {
		t.Errorf("the file of the variables: %v, %v", fi, err)
	}

	// The guest changes a store and names another; the authority is renewed.
	if err := h.Remove(t.Context(), h.r.ID); err != nil {
		t.Fatal(err)
	}
	const more = "# more\n"
	h.put(t, h.guest(ownStore), ownRoots+more)
	h.put(t, h.guest("/opt/own.pem"), ownRoots)
	h.r.Spec.Image.Config.Env = []string{"SSL_CERT_FILE=/opt/own.pem"}
	a, err := authority.New(h.r.ID, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	h.ca, ca = a.Certificate(), string(a.Certificate())
	if err := h.start(t); err != nil {
		t.Fatal(err)
	}
	want = map[string]string{
		trust.CertPath: ca, trust.BundlePath: ca + ownRoots + more, ownStore: ca + ownRoots + more, "/opt/own.pem": ca + ownRoots,
	}
	if got := h.mounted(t); !maps.Equal(got, want) {
		t.Errorf("in the second life mounted is %q, want %q", got, want)
	}
	if env := h.environment(t); env["SSL_CERT_FILE"] != "/opt/own.pem" || env["DENO_CERT"] != trust.CertPath {
		t.Errorf("in the second life the environment is %v", env)
	}
	if err := h.Remove(t.Context(), h.r.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(h.dir(h.r.ID)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of the bundle there is left: %v", err)
	}
}

// TestNoTrust: a sandbox without inspected hosts gets neither mounts nor variables.
func TestNoTrust(t *testing.T) {
	h := newTrustHost(t)
	h.r.Spec.Inspect = false
	h.authority = func(context.Context, *record.Record) ([]byte, error) { return nil, errors.New("somebody asked") }
	if err := errors.Join(h.makeDir(), h.Write(t.Context(), h.r)); err != nil {
		t.Fatal(err)
	}
	if got, env := h.mounted(t), h.environment(t); len(got) > 0 || !maps.Equal(env, map[string]string{"OWN": "1"}) {
		t.Errorf("mounted is %q, the environment is %v", got, env)
	}
}

// TestTrustHidden: nothing is mounted where the sandbox has memory or a volume.
func TestTrustHidden(t *testing.T) {
	for what, hide := range map[string]func(*record.Spec){
		"memory":   func(s *record.Spec) { s.Tmpfs = []record.Tmpfs{{Path: "/etc/ssl", Bytes: 1 << 20}} },
		"a volume": func(s *record.Spec) { s.Volumes = []record.VolumeMount{{Path: "/etc/ssl/certs", Claim: "v"}} },
	} {
		t.Run(what, func(t *testing.T) {
			h := newTrustHost(t)
			hide(&h.r.Spec)
			if err := h.start(t); err != nil {
				t.Fatal(err)
			}
			want := map[string]string{trust.CertPath: string(h.ca), trust.BundlePath: string(h.ca) + ownRoots}
			if got := h.mounted(t); !maps.Equal(got, want) {
				t.Errorf("mounted is %q, want %q", got, want)
			}
			if log := h.log.String(); !strings.Contains(log, h.r.ID) || !strings.Contains(log, ownStore) {
				t.Errorf("the log does not name the store: %s", log)
			}
		})
	}
}

// TestTrustLog: the log has few words about a guest with many stores, and no values of its
// variables.
func TestTrustLog(t *testing.T) {
	h := newTrustHost(t)
	for i := range 60 {
		h.put(t, h.guest(fmt.Sprintf("/usr/lib/jvm/%03d%s/lib/security/cacerts", i, strings.Repeat("\x1b", 200))), "no store\n")
	}
	h.r.Spec.Env["SSL_CERT_FILE"] = "hunter2"
	if err := h.start(t); err != nil {
		t.Fatal(err)
	}
	log := h.log.String()
	if n := strings.Count(log, "\n"); n != 1 || len(log) > 20_000 || strings.ContainsRune(log, '\x1b') || !strings.Contains(log, "n=61") {
		t.Errorf("%d lines of %d bytes: %.3000s", n, len(log), log)
	}
	if strings.Contains(log, "hunter2") {
		t.Errorf("the log has the value of a variable: %s", log)
	}
}

// TestTrustFails: without a mount point, an authority or a root file system there is no start,
// and the error says what is missing. A client reads no path of the host.
func TestTrustFails(t *testing.T) {
	for what, c := range map[string]struct {
		spoil    func(*trustHost) error
		code     errs.Code
		log, say string
	}{
		"no file to mount on": {
			func(*trustHost) error { return os.Remove("libexec/agent/ca-bundle.pem") },
			errs.Unavailable, "libexec/agent/ca-bundle.pem: no such file", "install sandboxd again (scripts/install.sh)",
		},
		"a link to mount on": {
			func(*trustHost) error {
				const name = "libexec/agent/mitmproxy-ca-cert.pem"
				return errors.Join(os.Remove(name), os.Symlink("/dev/null", name))
			},
			errs.Unavailable, "is not a regular file: remove it", "lacks mitmproxy-ca-cert.pem",
		},
		"no authority": {
			func(h *trustHost) error {
				h.authority = func(context.Context, *record.Record) ([]byte, error) {
					return nil, errs.New(errs.Unavailable, "the key is missing")
				}
				return nil
			},
			errs.Unavailable, "the key is missing", "the key is missing",
		},
		"a daemon without authorities": {
			func(h *trustHost) error { h.authority = nil; return nil }, errs.Internal, "no authorities", "",
		},
		"an authority that is none": {func(h *trustHost) error { h.ca = nil; return nil }, errs.Internal, "not one certificate", ""},
		"no root file system": {
			func(h *trustHost) error { return os.RemoveAll(h.guest("/")) }, errs.Internal, "open the root file system of gabcdefghijk", "",
		},
	} {
		t.Run(what, func(t *testing.T) {
			h := newTrustHost(t)
			if err := c.spoil(h); err != nil {
				t.Fatal(err)
			}
			err := h.start(t)
			if err == nil || errs.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.log) {
				t.Fatalf("%v, want %s: %s", err, c.code, c.log)
			}
			if e, ok := errors.AsType[*errs.Error](err); ok {
				if !strings.Contains(e.Text, c.say) || strings.Contains(e.Text, h.cfg.LibexecDir) {
					t.Errorf("a client reads %q, want %q", e.Text, c.say)
				}
			}
			if got := h.mounted(t); len(got) > 0 {
				t.Errorf("half of it is mounted: %q", got)
			}
			if _, err := h.agents().Bootstrap(h.r); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("it would start: %v", err)
			}
		})
	}
}
