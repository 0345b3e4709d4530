package target

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// Credential is the name of the key of S3-compatible storage among the credentials of the
// service (LoadCredentialEncrypted=, systemd.exec(5)).
const Credential = "sandboxd-backup.s3"

// Bounds of a request: storage that does not answer must not keep a backup waiting for hours.
const (
	dialLimit   = 15 * time.Second
	answerLimit = 2 * time.Minute
	tries       = 3 // of each request that may succeed later
)

// maxPut is the most that one request stores, so that a file is there whole or not at all.
// (S3's limit of PutObject)
const maxPut = 5 << 30

// bucket is a Target: what is below a prefix of a bucket.
type bucket struct {
	address        string
	server         *url.URL
	bucket, prefix string // prefix is empty or ends with a slash
	o              Options
}

func parseS3(address string, o Options) (Target, error) {
	const want = "want s3:https://HOST[:PORT]/BUCKET[/PREFIX]"
	u, err := url.Parse(strings.TrimPrefix(address, scheme))
	if err != nil {
		return nil, errors.New(want) // the cause would have the address, and that a password
	}
	if u.User != nil {
		return nil, errors.New(want + ", without a user: credentials are in a file of mode 0600")
	}
	name, prefix, _ := strings.Cut(strings.Trim(u.Path, "/"), "/")
	if u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || name == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("%q: %s", address, want)
	}
	if prefix != "" {
		if path.Clean("/"+prefix) != "/"+prefix {
			return nil, fmt.Errorf("%q: %s, without . and .. in the prefix", address, want)
		}
		prefix += "/"
	}
	server := &url.URL{Scheme: u.Scheme, Host: u.Host}
	if _, err := minio.New(server.Host, &minio.Options{}); err != nil {
		return nil, fmt.Errorf("%q: %w", address, err)
	}
	return &bucket{address, server, name, prefix, o}, nil
}

// InClear reports whether an address sends backups unencrypted through a network.
func InClear(address string) bool {
	u, err := url.Parse(strings.TrimPrefix(address, scheme))
	if err != nil || u.Scheme != "http" {
		return false
	}
	a, err := netip.ParseAddr(u.Hostname())
	return u.Hostname() != "localhost" && (err != nil || !a.IsLoopback())
}

func (b *bucket) String() string { return b.address }

// client makes a client with the credentials and certificates of now. A backup is a handful of
// requests, so none of their connections are kept.
func (b *bucket) client() (*minio.Core, error) {
	user, secret, err := b.o.read()
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		Proxy:       http.ProxyFromEnvironment,
		DialContext: (&net.Dialer{Timeout: dialLimit}).DialContext, TLSHandshakeTimeout: dialLimit,
		ResponseHeaderTimeout: answerLimit, DisableKeepAlives: true, DisableCompression: true,
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12},
	}
	if b.o.CA != "" {
		if transport.TLSClientConfig.RootCAs, err = b.o.roots(); err != nil {
			return nil, err
		}
	}
	return minio.NewCore(b.server.Host, &minio.Options{
		Creds: credentials.NewStaticV4(user, secret, ""), Secure: b.server.Scheme == "https", Transport: transport,
		Region: b.o.Region, MaxRetries: tries,
	})
}

// Check reads the files that are named.
func (o Options) Check() error {
	_, _, err := o.read()
	if o.CA != "" {
		_, cerr := o.roots()
		err = errors.Join(err, cerr)
	}
	return err
}

// read reads the credentials. Errors have nothing of them.
func (o Options) read() (user, secret string, err error) {
	file := o.Credentials
	if o.Directory != "" {
		if in := filepath.Join(o.Directory, Credential); exists(in) {
			file = in
		}
	}
	if file == "" {
		return "", "", fmt.Errorf("there are no credentials: name a file in backup.credentials, or give the service the credential %s",
			Credential)
	}
	text, err := Secret(file)
	if err != nil {
		return "", "", err
	}
	user, secret, ok := strings.Cut(strings.TrimSpace(string(text)), ":")
	if !ok || user == "" || secret == "" || strings.ContainsAny(user+secret, " \t\r\n") {
		return "", "", fmt.Errorf("%s: want one line, ACCESS_KEY:SECRET_KEY", file)
	}
	return user, secret, nil
}

func (o Options) roots() (*x509.CertPool, error) {
	text, err := os.ReadFile(o.CA)
	if err != nil {
		return nil, err
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate in PEM", o.CA)
	}
	return pool, nil
}

// maxSecret bounds a file with a secret.
const maxSecret = 64 << 10

// Secret reads a small file that nobody but its owner may read.
func Secret(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // read only
	fi, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !fi.Mode().IsRegular():
		return nil, fmt.Errorf("%s is no file", file)
	case fi.Mode().Perm()&0o077 != 0:
		return nil, fmt.Errorf("%s may be read by others (mode %04o): chmod 600 it", file, fi.Mode().Perm())
	}
	return io.ReadAll(io.LimitReader(f, maxSecret))
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// Put stores r by one request, so storage that is cut off has nothing of it.
func (b *bucket) Put(ctx context.Context, name string, r io.ReadSeeker, bytes int64) error {
	if bytes > maxPut {
		return fmt.Errorf("put %s on %s: it has %d bytes, and S3 takes %d at once", name, b, bytes, int64(maxPut))
	}
	c, err := b.client()
	if err == nil {
		err = b.free(ctx, c, name)
	}
	if err == nil {
		_, err = c.Client.PutObject(ctx, b.bucket, b.prefix+name, r, bytes,
			// A bucket that locks objects by itself takes none without that (PutObject, Object Lock).
			minio.PutObjectOptions{DisableMultipart: true, ContentType: "application/octet-stream", SendContentMd5: true})
	}
	return b.failed("put "+name+" on", err)
}

// free fails with fs.ErrExist if there is an object of that name, which a put would replace. Not all
// storage knows a put on that condition (If-None-Match).
func (b *bucket) free(ctx context.Context, c *minio.Core, name string) error {
	_, err := c.Client.StatObject(ctx, b.bucket, b.prefix+name, minio.StatObjectOptions{})
	if err == nil {
		return fs.ErrExist
	}
	switch minio.ToErrorResponse(err).StatusCode {
	case http.StatusNotFound, http.StatusForbidden: // a key that may not list gets 403; the put says whether it may write
		return nil
	}
	return err
}

// List lists what is directly below the prefix.
func (b *bucket) List(ctx context.Context) (all []Object, err error) {
	c, err := b.client()
	if err != nil {
		return nil, b.failed("list", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // it ends what lists
	for o := range c.Client.ListObjects(ctx, b.bucket, minio.ListObjectsOptions{Prefix: b.prefix}) {
		if o.Err != nil {
			return nil, b.failed("list", o.Err)
		}
		if name := strings.TrimPrefix(o.Key, b.prefix); name != "" && !strings.Contains(name, "/") {
			all = append(all, Object{name, o.Size})
		}
	}
	return all, nil
}

// Get opens an object.
func (b *bucket) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	c, err := b.client()
	if err != nil {
		return nil, b.failed("get "+name+" from", err)
	}
	r, _, _, err := c.GetObject(ctx, b.bucket, b.prefix+name, minio.GetObjectOptions{})
	if err != nil {
		return nil, b.failed("get "+name+" from", err)
	}
	return r, nil
}

// Remove removes an object. In a bucket with versions its old ones stay.
func (b *bucket) Remove(ctx context.Context, name string) error {
	c, err := b.client()
	if err == nil {
		err = c.Client.RemoveObject(ctx, b.bucket, b.prefix+name, minio.RemoveObjectOptions{})
	}
	return b.failed("remove "+name+" from", err)
}

// failed says what was tried on the bucket.
func (b *bucket) failed(what string, err error) error {
	if err == nil {
		return nil
	}
	r := minio.ToErrorResponse(err)
	switch {
	case r.Code == minio.NoSuchKey:
		err = fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	case r.StatusCode == http.StatusInsufficientStorage || strings.Contains(r.Code, "StorageFull") ||
		strings.Contains(r.Code, "QuotaExceeded"): // also of a bucket (XMinioAdminBucketQuotaExceeded)
		err = fmt.Errorf("it %w: %w", ErrFull, err)
	}
	return fmt.Errorf("%s %s: %w", what, b, err)
}
