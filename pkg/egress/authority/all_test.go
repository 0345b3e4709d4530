//go:build all

package authority

import (
	"os"
	"path/filepath"
	"testing"
)

// TestNode: Node adds the authority to its own roots by a variable.
func TestNode(t *testing.T) {
	const client = `
const [host, port, servername] = process.argv.slice(1);
const socket = require('tls').connect({ host, port, servername }, () => process.exit(socket.authorized ? 0 : 1));
socket.on('error', e => { console.error(e.message); process.exit(1); });
`
	judged(t, judge{
		"node", func(_, _, host, port, name string) []string { return []string{"node", "-e", client, host, port, name} },
		func(ca string) []string { return []string{"NODE_EXTRA_CA_CERTS=" + ca} },
		"unable to verify", "does not match",
	})
}

// TestJava: the JVM takes the authority as an anchor, and the leaf for an HTTPS server.
func TestJava(t *testing.T) {
	const client = `
import java.io.*;
import java.net.*;
import java.security.*;
import java.security.cert.*;
import javax.net.ssl.*;

class Client {
	public static void main(String[] args) throws Exception {
		KeyStore store = KeyStore.getInstance("JKS");
		store.load(null, null);
		try (InputStream in = new FileInputStream(args[0])) {
			store.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(in));
		}
		TrustManagerFactory trust = TrustManagerFactory.getInstance("PKIX");
		trust.init(store);
		SSLContext context = SSLContext.getInstance("TLS");
		context.init(null, trust.getTrustManagers(), null);
		Socket plain = new Socket(args[1], Integer.parseInt(args[2]));
		SSLSocket socket = (SSLSocket) context.getSocketFactory().createSocket(plain, args[3], Integer.parseInt(args[2]), true);
		SSLParameters p = socket.getSSLParameters();
		p.setEndpointIdentificationAlgorithm("HTTPS");
		socket.setSSLParameters(p);
		socket.startHandshake();
		socket.close();
	}
}
`
	source := filepath.Join(t.TempDir(), "Client.java")
	if err := os.WriteFile(source, []byte(client), 0o600); err != nil {
		t.Fatal(err)
	}
	judged(t, judge{
		"java", func(ca, _, host, port, name string) []string {
			return []string{"java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", source, ca, host, port, name}
		}, nil, "PKIX path", "No subject alternative DNS name matching",
	})
}
