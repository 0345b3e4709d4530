package packages

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/image/archive/archivetest"
)

// debian is the archive of an image that has one Debian package.
func debian(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, text := range map[string]string{
		"etc/os-release": "ID=debian\nVERSION_ID=\"12\"\n",
		"var/lib/dpkg/status": "Package: libc6\nStatus: install ok installed\nMaintainer: A <a@example.com>\nArchitecture: amd64\n" +
			"Version: 2.36-9\nDescription: C\n",
	} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return archivetest.Docker(t, archivetest.Image(t, b.Bytes()), "tiny:latest")
}

// TestBundle: scripts/bundle.sh puts a bill of materials into a bundle, of the programs in the package
// and of the image, whatever lay there before. It bundles no package of sandboxd of another version. A
// small program stands for all of them. The key is encrypted, and its password comes from a file.
func TestBundle(t *testing.T) {
	hosttest.Root(t)
	dir := t.TempDir()
	programs := []string{"sandboxd", "sandboxctl", "runsc", "sandboxd-runc", "agent/sandbox-agent"}
	run(t, "mkdir", dir+"/images", dir+"/agent")
	run(t, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", dir+"/small", top+"/test/attacks/guest")
	for _, name := range programs {
		run(t, "cp", dir+"/small", filepath.Join(dir, name))
	}
	for name, b := range map[string][]byte{"images/tiny.tar": debian(t), "sbom.cdx.json": []byte(`{"components": []}`)} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	public, secret := dir+"/bundle.pub", dir+"/key"
	password := dir + "/password"
	if err := os.WriteFile(password, []byte("a long word\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	makeKey := exec.Command("minisign", "-G", "-p", public, "-s", secret)
	makeKey.Stdin = strings.NewReader("a long word\na long word\n")
	if out, err := makeKey.CombinedOutput(); err != nil {
		t.Fatalf("minisign -G: %v\n%s", err, out)
	}
	bundle := func(packages string) (string, error) {
		if err := os.RemoveAll(dir + "/packages"); err != nil {
			t.Fatal(err)
		}
		run(t, "mv", packages, dir+"/packages")
		cmd := exec.Command(top+"/scripts/bundle.sh", secret)
		cmd.Env = append(os.Environ(), "BUILD="+dir, "PASSWORD_FILE="+password)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := bundle(pack(t, "0.1.0-dev+1a2b3c4")); err == nil || !strings.Contains(out, "has no .deb of sandboxd") {
		t.Errorf("with a package of another version: %v\n%s", err, out)
	}
	version := strings.Fields(run(t, top+"/build/bin/sandboxd", "--version"))[2]
	if out, err := bundle(pack(t, version, "-bin", dir)); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	run(t, top+"/build/bin/sandboxd", "bundle", "verify", one(t, dir+"/*.bundle"), "--key", public, "--force", "--extract", dir+"/out")
	for _, file := range []string{"CHANGELOG.md", "docs/monitoring/alerts.yml", "deploy/cloud-init/bundle.yaml"} {
		one(t, dir+"/out/documents/"+file)
	}
	var bill struct {
		Components []struct {
			Name       string
			Components []struct{ Purl string }
		}
	}
	b, err := os.ReadFile(dir + "/out/sbom/sbom.cdx.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &bill); err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, c := range bill.Components {
		for _, p := range c.Components {
			found = append(found, c.Name+" "+p.Purl)
		}
	}
	all := strings.Join(found, "\n") + "\n"
	if !strings.Contains(all, "pkg:deb/debian/libc6@2.36-9") {
		t.Errorf("the bill lacks the Debian package of the image:\n%s", all)
	}
	for _, name := range programs {
		if !strings.Contains(all, filepath.Base(name)+" pkg:golang/") {
			t.Errorf("the bill lacks the modules of %s:\n%s", name, all)
		}
	}
	if left, err := filepath.Glob(dir + "/bundle.??????"); err != nil || len(left) > 0 {
		t.Errorf("%q is left, %v", left, err)
	}
}
