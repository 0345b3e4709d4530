// The command guest speaks protocols from inside of a sandbox, for TestInspected. It trusts
// what the environment and the stores of its image have it trust.
//
//	guest speak URL                        each protocol; prints "ok", or what went wrong, for each
//	guest bulk 1|2 up|down BYTES URL       a large body, by HTTP/1.1 or HTTP/2
//	guest get URL                          prints the answer
//	guest get-by-stores URL                the same, without the variables of the environment
//	guest get-pinned NAME URL              the same; the certificate must be of the authority NAME
//	guest get-as-client FILE URL           the same, with a certificate of its own; trusts that FILE
package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/test/internet/bulk"
)

func main() {
	if err := run(context.Background(), os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, what string, args []string) error {
	url, conf := args[len(args)-1], &tls.Config{}
	switch what {
	case "speak":
		return speakAll(ctx, url)
	case "bulk":
		n, err := strconv.ParseInt(args[2], 10, 64)
		if err != nil {
			return err
		}
		return large(ctx, client(args[0] == "2", conf), args[1], n, url)
	case "get":
	case "get-by-stores":
		for _, name := range []string{"SSL_CERT_FILE", "SSL_CERT_DIR"} { // those that crypto/x509 reads
			if err := os.Unsetenv(name); err != nil {
				return err
			}
		}
	case "get-pinned":
		conf.VerifyConnection = func(s tls.ConnectionState) error {
			if by := s.PeerCertificates[0].Issuer.CommonName; by != args[0] {
				return fmt.Errorf("the certificate is pinned, and this one is of %q", by)
			}
			return nil
		}
	case "get-as-client":
		if err := identify(conf, args[0]); err != nil {
			return err
		}
	default:
		return fmt.Errorf("nobody knows how to %s", what)
	}
	resp, err := do(ctx, client(false, conf), http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err = io.Copy(os.Stdout, resp.Body); err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	return err
}

// client speaks one version of HTTP, on connections of its own.
func client(h2 bool, conf *tls.Config) *http.Client {
	p := &http.Protocols{}
	p.SetHTTP1(!h2)
	p.SetHTTP2(h2)
	return &http.Client{Transport: &http.Transport{
		Protocols: p, TLSClientConfig: conf, DisableCompression: true,
		ExpectContinueTimeout: time.Minute, // it never sends a body unasked
	}}
}

func do(ctx context.Context, c *http.Client, method, url string, body io.Reader, header ...string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return nil, err
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return c.Do(r)
}

// large sends or gets n bytes.
func large(ctx context.Context, c *http.Client, way string, n int64, url string) error {
	if way == "down" {
		resp, err := do(ctx, c, http.MethodGet, fmt.Sprintf("%s/give/%d", url, n), nil)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		got, err := bulk.Check(resp.Body)
		if err == nil && (got != n || resp.ContentLength != n) {
			err = fmt.Errorf("%s with %d bytes, of %d announced", resp.Status, got, resp.ContentLength)
		}
		return err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/take", bulk.Reader(n))
	if err != nil {
		return err
	}
	r.ContentLength = n
	resp, err := c.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if want := fmt.Sprintln(n, error(nil)); err == nil && string(b) != want {
		err = fmt.Errorf("%s %q, want %q", resp.Status, b, want)
	}
	return err
}

// identify gives a client a certificate, and the authority that it trusts.
func identify(conf *tls.Config, file string) error {
	ca, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if conf.RootCAs = x509.NewCertPool(); !conf.RootCAs.AppendCertsFromPEM(ca) {
		return fmt.Errorf("%s has no certificate", file)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	of := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, of, of, key.Public(), key)
	conf.Certificates = []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}
	return err
}

// speakAll speaks each protocol, and fails if one does.
func speakAll(ctx context.Context, url string) error {
	var failed []string
	for _, s := range sayings {
		for _, version := range s.versions {
			name := s.name + "/" + version
			err := s.say(ctx, client(version == "2", &tls.Config{}), url)
			fmt.Printf("%s: %v\n", name, errOr(err))
			if err != nil {
				failed = append(failed, name)
			}
		}
	}
	if failed != nil {
		return errors.New("failed: " + strings.Join(failed, ", "))
	}
	return nil
}

func errOr(err error) string {
	if err == nil {
		return "ok"
	}
	return err.Error()
}
