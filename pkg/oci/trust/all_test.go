//go:build all

package trust

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
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
	const client = `
import java.net.*;
import javax.net.ssl.*;

class Client {
	public static void main(String[] args) throws Exception {
		Socket plain = new Socket(args[0], Integer.parseInt(args[1]));
		SSLSocketFactory factory = (SSLSocketFactory) SSLSocketFactory.getDefault();
		SSLSocket socket = (SSLSocket) factory.createSocket(plain, args[2], Integer.parseInt(args[1]), true);
		SSLParameters p = socket.getSSLParameters();
		p.setEndpointIdentificationAlgorithm("HTTPS");
		socket.setSSLParameters(p);
		socket.startHandshake();
		socket.close();
	}
}
`
	source := filepath.Join(t.TempDir(), "Client.java")
	if err := os.WriteFile(source, []byte(client), 0o644); err != nil {
		t.Fatal(err)
	}
	const name = "api.example.com"
	leaf, der, err := vouches.Leaf(name, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{leaf}, PrivateKey: key}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(time.Minute)) //nolint:errcheck // the client's side shows it
				if c.(*tls.Conn).Handshake() == nil {      // then it waits for the client to close
					c.Read(make([]byte, 1)) //nolint:errcheck // as above
				}
			}()
		}
	}()
	host, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	ask := func(store string) (string, error) {
		out, err := exec.Command("java", "-Djavax.net.ssl.trustStore="+store, "-XX:TieredStopAtLevel=1", source, host, port,
			name).CombinedOutput()
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
