// Package targettest has S3-compatible storage for tests: a real server on the loopback
// interface (tools/s3), and a way to it that breaks when a test says so.
package targettest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// Key and Secret are the server's credentials.
const (
	Key    = "backup-key"
	Secret = "a-secret-of-the-bucket"
)

// Server is S3-compatible storage with one empty bucket.
type Server struct {
	Target  target.Target
	Address string         // as in the configuration, with a prefix
	Options target.Options // with its credentials
	Files   string         // the directory in which the server has the bucket's files

	// Answer, if set, is asked for each answer of the server, and may change it. It breaks the way
	// to the server, which does not break itself.
	Answer atomic.Pointer[func(*http.Response)]
	// Gone, if set, closes connections without an answer.
	Gone atomic.Bool
	// AppendOnly, if set, refuses each request that removes something, as storage does for a key that
	// may not.
	AppendOnly atomic.Bool
}

// S3 starts a server, which ends with the test.
func S3(t testing.TB) *Server {
	t.Helper()
	dir, at := t.TempDir(), hosttest.FreePort(t)
	files, meta := filepath.Join(dir, "files"), filepath.Join(dir, "meta")
	for _, d := range []string{files, meta} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	cmd := exec.Command(program(t), "--port", at.String(), "--quiet", "posix", "--sidecar", meta, files)
	cmd.Env = append(os.Environ(), "ROOT_ACCESS_KEY="+Key, "ROOT_SECRET_KEY="+Secret)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill() //nolint:errcheck // it may have ended
		cmd.Wait()         //nolint:errcheck // likewise
		if t.Failed() {
			t.Logf("the S3 server: %s", out.Bytes())
		}
	})
	if err := hosttest.Settles(t, func() error {
		c, err := net.Dial("tcp", at.String())
		if err == nil {
			c.Close()
		}
		return err
	}); err != nil {
		t.Fatalf("the S3 server does not listen: %v\n%s", err, out.Bytes())
	}
	s := &Server{Files: filepath.Join(files, "backups")}
	c, err := minio.New(at.String(), &minio.Options{Creds: credentials.NewStaticV4(Key, Secret, ""), Region: "us-east-1"})
	if err == nil {
		err = c.MakeBucket(t.Context(), "backups", minio.MakeBucketOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "credentials")
	if err := os.WriteFile(file, []byte(Key+":"+Secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.Address = "s3:" + s.through(t, "http://"+at.String()) + "/backups/of/hosts"
	s.Options = target.Options{Credentials: file}
	if s.Target, err = target.Parse(s.Address, s.Options); err != nil {
		t.Fatal(err)
	}
	return s
}

// through serves the way to the server.
func (s *Server) through(t testing.TB, server string) string {
	to, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	way := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.Out.Host = r.In.Host // it is signed
		},
		ModifyResponse: func(r *http.Response) error {
			if f := s.Answer.Load(); f != nil {
				(*f)(r)
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	hosttest.ServeHTTP(t, l, &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.Gone.Load() {
			panic(http.ErrAbortHandler)
		}
		if s.AppendOnly.Load() && r.Method == http.MethodDelete {
			w.Header().Set("Content-Type", "application/xml")
			w.WriteHeader(http.StatusForbidden)
			io.WriteString(w, denied) //nolint:errcheck // the client may be gone
			return
		}
		way.ServeHTTP(w, r)
	})})
	return "http://" + l.Addr().String()
}

const denied = `<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>`

// Flip changes the first byte of each body of a file that the server sends.
func Flip(r *http.Response) {
	if r.Request.Method != http.MethodGet || r.Request.URL.RawQuery != "" || r.StatusCode != http.StatusOK {
		return
	}
	b, err := io.ReadAll(r.Body)
	if err == nil && len(b) > 0 {
		b[0] ^= 1
	}
	r.Body = io.NopCloser(bytes.NewReader(b))
}

// Full answers as storage without space.
func Full(r *http.Response) {
	if r.Request.Method != http.MethodPut {
		return
	}
	const text = `<?xml version="1.0"?><Error><Code>XMinioStorageFull</Code><Message>no space is left</Message></Error>`
	r.StatusCode, r.Status = http.StatusInsufficientStorage, "507 Insufficient Storage"
	r.Body, r.ContentLength = io.NopCloser(strings.NewReader(text)), int64(len(text))
	r.Header = http.Header{"Content-Type": {"application/xml"}, "Content-Length": {fmt.Sprint(len(text))}}
}

// program returns the server's program, which it builds if it is not there.
func program(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "scripts/s3.sh")); err == nil {
			break
		}
	}
	out, err := exec.CommandContext(context.WithoutCancel(t.Context()), filepath.Join(dir, "scripts/s3.sh")).Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			t.Fatalf("build the S3 server: %v\n%s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}
