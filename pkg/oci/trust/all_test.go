//go:build all

package trust

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// extended writes the store name of testdata, with the authority added, and returns its path.
func extended(t *testing.T, name string) string {
	t.Helper()
	b, err := testPlanner(t).withStore(stored(t, name))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestKeytool: Java's own tool lists both entries of each store.
func TestKeytool(t *testing.T) {
	for _, name := range []string{"changeit.jks", "open.p12", encrypted} {
		out, err := exec.Command("keytool", "-J-Duser.language=en", "-list", "-keystore", extended(t, name),
			"-storepass", "changeit").CombinedOutput()
		if err != nil || !strings.Contains(string(out), "2 entries") ||
			strings.Count(string(out), "trustedCertEntry") != 2 || !strings.Contains(string(out), "sandboxd,") {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}

// TestJVM: a JVM that has one of the stores as its cacerts, for which it has no password,
// trusts a server with a leaf of the authority, and does not with the store as it was.
func TestJVM(t *testing.T) {
	const name = "api.example.com"
	leaf, der, err := vouches.Leaf(name, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		t.Fatal(err)
	}
	host, port := hosttest.ServeTLS(t, tls.Certificate{Certificate: [][]byte{leaf}, PrivateKey: key})
	ask := func(store string) (string, error) {
		argv := append(hosttest.JavaClient(t, "-Djavax.net.ssl.trustStore="+store), host, port, name)
		out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
		return string(out), err
	}
	for _, store := range []string{"changeit.jks", "open.p12", encrypted} {
		if out, err := ask(extended(t, store)); err != nil {
			t.Errorf("%s: %v\n%s", store, err, out)
		}
	}
	if out, err := ask(filepath.Join("testdata", "changeit.jks")); err == nil || !strings.Contains(out, "PKIX path building failed") {
		t.Errorf("without the authority: %v\n%s", err, out)
	}
}
