package runtimetest

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/oci/trust"
)

// Stores of the guest of testTrust. The first is what the link leads to.
const (
	linkedStore = "/usr/share/tls/bundle.pem"
	storeLink   = "/etc/ssl/certs/ca-certificates.crt"
	hiddenStore = "/etc/pki/tls/cert.pem" // in memory of the sandbox
	guestRoots  = "# roots\n-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
)

// testTrust: a guest reads the authority at all places of a plan, whether its root is
// read-only or not. It can change none of them, and neither its root nor the agent's
// directory is changed.
func testTrust(t *testing.T, h *Host, rt Runtime) {
	for _, readOnly := range []bool{false, true} {
		t.Run(fmt.Sprintf("ReadOnly=%t", readOnly), func(t *testing.T) { testTrustOn(t, h, rt, readOnly) })
	}
}

func testTrustOn(t *testing.T, h *Host, rt Runtime, readOnly bool) {
	b := h.NewBox(t, rt)
	b.Config.ReadOnly = readOnly
	b.Config.Tmpfs = []oci.Tmpfs{{Path: "/etc/pki", Bytes: 1 << 20, Mode: 0o755}}
	plantStores(t, b.Config.RootFS)
	before := contents(t, b.Config.RootFS)

	ca := hosttest.NewAuthority("authority of a test").PEM()
	root, err := os.Open(b.Config.RootFS)
	must(t, err)
	defer root.Close()
	plan, err := trust.NewPlan(root, ca, nil, []string{"/etc/pki"})
	must(t, err)
	for _, f := range plan.Files {
		must(t, oci.WriteFile(h.Bundle(b.ID), f.Name, f.Data, 0o644))
	}
	of := func(mounts []trust.Mount) (all []oci.File) {
		for _, m := range mounts {
			all = append(all, oci.File{Source: filepath.Join(h.Bundle(b.ID), m.File), Path: m.Target})
		}
		return all
	}
	b.Config.Stores, b.Config.AgentFiles = of(plan.StoreMounts), of(plan.AgentMounts)
	must(t, b.Start(t.Context()))

	var got map[string]map[string]string
	must(t, b.Ask("stores", &got))
	for name, want := range map[string]string{
		trust.CertPath: string(ca), trust.BundlePath: string(ca) + guestRoots, linkedStore: string(ca) + guestRoots,
		storeLink: string(ca) + guestRoots,
	} {
		if got[name]["text"] != want {
			t.Errorf("%s reads %q, want %q", name, got[name]["text"], want)
		}
		if say := got[name]["chmod"]; !strings.Contains(say, "read-only file system") {
			t.Errorf("chmod of %s says %q", name, say)
		}
		// On runc the file is no user's of the guest, and open(2) looks at that first.
		say, foreign := got[name]["write"], h.runtime == oci.Runc && strings.Contains(got[name]["write"], "permission denied")
		if !foreign && !strings.Contains(say, "read-only file system") {
			t.Errorf("write to %s says %q", name, say)
		}
	}
	// What update-ca-certificates(8) does.
	refused := "device or resource busy"
	if readOnly {
		refused = "read-only file system"
	}
	for _, change := range []string{"rename", "remove"} {
		if say := got[linkedStore][change]; !strings.Contains(say, refused) {
			t.Errorf("%s of a store says %q, want %q", change, say, refused)
		}
	}
	if say := got[hiddenStore]["text"]; !strings.Contains(say, "no such file") {
		t.Errorf("in memory of the sandbox there is %q", say)
	}

	b.Kill(t)
	if after := contents(t, b.Config.RootFS); !maps.Equal(after, before) {
		t.Errorf("the root was\n%v\nand is\n%v", before, after)
	}
	for _, target := range trust.AgentFiles {
		if fi, err := os.Stat(filepath.Join(h.agent, filepath.Base(target))); err != nil || fi.Size() > 0 {
			t.Errorf("the host's file for %s: %v, %v", target, fi, err)
		}
	}
}

// plantStores writes stores into a root, which belong to who owns the root.
func plantStores(t *testing.T, root string) {
	t.Helper()
	fi, err := os.Stat(root)
	must(t, err)
	owner := fi.Sys().(*syscall.Stat_t)
	for _, name := range []string{linkedStore, hiddenStore} {
		must(t, os.MkdirAll(filepath.Join(root, filepath.Dir(name)), 0o755))
		must(t, os.WriteFile(filepath.Join(root, name), []byte(guestRoots), 0o644))
	}
	must(t, os.MkdirAll(filepath.Join(root, filepath.Dir(storeLink)), 0o755))
	must(t, os.Symlink(linkedStore, filepath.Join(root, storeLink)))
	must(t, filepath.WalkDir(root, func(name string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(name, int(owner.Uid), int(owner.Gid))
	}))
}

// contents are mode and text of all that is in a tree.
func contents(t *testing.T, root string) map[string]string {
	t.Helper()
	all := map[string]string{}
	must(t, filepath.WalkDir(root, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		var text []byte
		switch {
		case fi.Mode().IsRegular():
			text, err = os.ReadFile(name)
		case fi.Mode()&fs.ModeSymlink != 0:
			var to string
			to, err = os.Readlink(name)
			text = []byte(to)
		}
		all[strings.TrimPrefix(name, root)] = fi.Mode().String() + " " + string(text)
		return err
	}))
	return all
}
