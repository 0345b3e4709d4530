package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestMain lets this program become sandboxd.
func TestMain(m *testing.M) {
	if os.Getenv("BE_SANDBOXD") != "" {
		main()
		os.Exit(0)
	}
	if os.Getenv(readyEnv) != "" { // a daemon that is never ready
		for {
			unix.Poll(nil, -1) //nolint:errcheck // until it is killed
		}
	}
	os.Exit(m.Run())
}

// TestInstallWithoutUserNamespaces: if the kernel lacks something, nothing is installed. To a process
// in a chroot it refuses user namespaces, as one that was built without them.
func TestInstallWithoutUserNamespaces(t *testing.T) {
	hosttest.Root(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	t.Chdir(dir)
	const installed = "Package: dpkg\nStatus: install ok installed\nArchitecture: all\nVersion: 1.21.22\nDescription: a\n"
	for name, text := range map[string]string{
		"root/var/lib/dpkg/status": installed, "root/var/lib/dpkg/info/format": "1\n", "root/var/lib/dpkg/updates/.keep": "",
		"chroot/.keep": "", "verifier": "#!/bin/sh\n",
		"deb/DEBIAN/control": "Package: ta\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@example.org>\nDescription: a\n",
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	make := exec.Command("sh", "-ec", "minisign -G -W -p key.pub -s key.sec >/dev/null; dpkg-deb --build deb ta_1.0_all.deb >/dev/null")
	if out, err := make.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "1767225600")
	_, err = run("bundle", "create", "-o", "1.bundle", "--key", "key.sec", "--verifier", "verifier", "--arch", runtime.GOARCH, "--release",
		"1000.0.0", "--package", "ta_1.0_all.deb")
	if err != nil {
		t.Fatal(err)
	}
	install := exec.Command("unshare", "-m", "sh", "-ec", `mount --rbind / chroot; exec chroot chroot "$@"`, "sh",
		self, "bundle", "install", dir+"/1.bundle", "--key", dir+"/key.pub")
	install.Env = append(os.Environ(), "BE_SANDBOXD=1", "DPKG_ROOT="+dir+"/root", "TMPDIR="+dir)
	out, err := install.CombinedOutput()
	for _, want := range []string{"lacks what sandboxd needs, and nothing was installed:\n", "\n  create a user namespace"} {
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%v: %s; want %q", err, out, want)
		}
	}
	status, err := os.ReadFile("root/var/lib/dpkg/status")
	if err != nil || string(status) != installed {
		t.Errorf("dpkg has %s, %v", status, err)
	}
	if left, err := filepath.Glob("sandboxd-install.*"); err != nil || left != nil {
		t.Errorf("left %q, %v", left, err)
	}
}
