package hosttest

import (
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// ServeTLS does the handshake of TLS with every client of a port of this host, with
// certificate c, and then waits for the client to close, until t ends.
func ServeTLS(t testing.TB, c tls.Certificate) (host, port string) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{c}})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(time.Minute)) //nolint:errcheck // the client's side shows it
				if conn.(*tls.Conn).Handshake() == nil {
					conn.Read(make([]byte, 1)) //nolint:errcheck // as above
				}
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	host, port, err = net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return host, port
}

// ServeHTTP runs s at l until t ends, and logs nothing. It speaks TLS if s has a TLSConfig.
func ServeHTTP(t testing.TB, l net.Listener, s *http.Server) {
	s.ErrorLog = log.New(io.Discard, "", 0)
	t.Cleanup(func() { s.Close() })
	if s.TLSConfig == nil {
		go s.Serve(l) //nolint:errcheck // ends with the test
	} else {
		go s.ServeTLS(l, "", "") //nolint:errcheck // likewise
	}
}

// javaClient connects to host and port (its first two arguments) and wants a certificate
// for a name (the third). It trusts the authorities of the JVM or, with a fourth argument,
// the certificate in that file and no other.
const javaClient = `
import java.io.*;
import java.net.*;
import java.security.*;
import java.security.cert.*;
import javax.net.ssl.*;

class Client {
	static SSLSocketFactory trusting(String file) throws Exception {
		KeyStore store = KeyStore.getInstance("JKS");
		store.load(null, null);
		try (InputStream in = new FileInputStream(file)) {
			store.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(in));
		}
		TrustManagerFactory trust = TrustManagerFactory.getInstance("PKIX");
		trust.init(store);
		SSLContext context = SSLContext.getInstance("TLS");
		context.init(null, trust.getTrustManagers(), null);
		return context.getSocketFactory();
	}

	public static void main(String[] args) throws Exception {
		int port = Integer.parseInt(args[1]);
		SSLSocketFactory factory = args.length > 3 ? trusting(args[3]) : (SSLSocketFactory) SSLSocketFactory.getDefault();
		SSLSocket socket = (SSLSocket) factory.createSocket(new Socket(args[0], port), args[2], port, true);
		SSLParameters p = socket.getSSLParameters();
		p.setEndpointIdentificationAlgorithm("HTTPS");
		socket.setSSLParameters(p);
		socket.startHandshake();
		socket.close();
	}
}
`

// JavaClient is the command line of a client in Java, without its last arguments: host,
// port, the name that the server must have and, to trust it instead of the authorities of
// the JVM, a file with a certificate. The client exits with 0 after a handshake. options
// are the JVM's.
func JavaClient(t testing.TB, options ...string) (argv []string) {
	t.Helper()
	source := filepath.Join(t.TempDir(), "Client.java")
	if err := os.WriteFile(source, []byte(javaClient), 0o600); err != nil {
		t.Fatal(err)
	}
	argv = append([]string{"java", "-Xshare:auto", "-XX:TieredStopAtLevel=1"}, options...)
	return append(argv, source)
}
