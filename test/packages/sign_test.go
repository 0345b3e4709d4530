package packages

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestSign: rpm accepts the signature of an .rpm, and the signed hashes have each package. What was changed, what
// another key signed, and a key that is not there are refused.
func TestSign(t *testing.T) {
	hosttest.Root(t)
	home := t.TempDir()
	if err := os.Chmod(home, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GNUPGHOME", home)
	t.Cleanup(func() { exec.Command("gpgconf", "--kill", "gpg-agent").Run() }) //nolint:errcheck // there may be none
	public := map[string]string{}
	for _, key := range []string{"ours@example.com", "other@example.com"} {
		run(t, "gpg", "--batch", "--passphrase", "", "--quick-generate-key", key, "rsa2048", "sign")
		public[key] = filepath.Join(home, key+".asc")
		run(t, "gpg", "--batch", "--armor", "--output", public[key], "--export", key)
	}
	dir := pack(t, "0.1.0-dev+1", "-sign", "ours@example.com")

	checks := func(key, file string) (string, error) {
		db := t.TempDir()
		run(t, "rpmkeys", "--dbpath", db, "--import", public[key])
		out, err := exec.Command("rpmkeys", "--dbpath", db, "--checksig", "--verbose", file).CombinedOutput()
		return string(out), err
	}
	rpms, err := filepath.Glob(dir + "/*.rpm")
	if err != nil || len(rpms) != 2 {
		t.Fatalf("%q, %v", rpms, err)
	}
	for _, file := range rpms {
		out, err := checks("ours@example.com", file)
		if err != nil || !strings.Contains(out, "Header V4 RSA/SHA512 Signature") || strings.Count(out, "Signature, key ID") != 2 {
			t.Errorf("%s: %v\n%s", file, err, out)
		}
		if out, err := checks("other@example.com", file); err == nil || !strings.Contains(out, "NOKEY") {
			t.Errorf("%s, with another key: %v\n%s", file, err, out)
		}
	}
	for name, at := range map[string]int{"header": 5000, "content": -100} {
		b, err := os.ReadFile(rpms[0])
		if err != nil {
			t.Fatal(err)
		}
		if at < 0 {
			at += len(b)
		}
		b[at] ^= 1
		file := filepath.Join(t.TempDir(), name+".rpm")
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := checks("ours@example.com", file); err == nil {
			t.Errorf("a changed %s: it is accepted:\n%s", name, out)
		}
	}

	check := exec.Command("sh", "-c", "gpg --verify SHA256SUMS.asc SHA256SUMS && sha256sum --check SHA256SUMS")
	check.Dir = dir
	out, err := check.CombinedOutput()
	if err != nil || strings.Count(string(out), ": OK\n") != 4 {
		t.Errorf("the signed hashes: %v\n%s", err, out)
	}

	made := filepath.Dir(dir)
	missing := exec.Command(filepath.Join(top, "build/tools/packages"), "-source", top, "-bin", made+"/bin", "-native", made+"/bin",
		"-man", made+"/man", "-images", made+"/images", "-licences", made+"/licences", "-out", t.TempDir(), "-version", "0.1.0-dev+1",
		"-sign", "nobody@example.com")
	if out, err := missing.CombinedOutput(); err == nil || !strings.Contains(string(out), `sign with the key "nobody@example.com"`) {
		t.Errorf("a key that is not there: %v\n%s", err, out)
	}
}
