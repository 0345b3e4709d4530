package registry

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// said is a registry that answers every request with the same bytes.
type said []byte

func (s said) RoundTrip(r *http.Request) (*http.Response, error) {
	return http.ReadResponse(bufio.NewReader(bytes.NewReader(s)), r)
}

// FuzzRegistry: what a registry answers is the document or the blob that was asked for,
// within its bound, or an error in one printable line, without the secret of the client.
func FuzzRegistry(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nDocker-Content-Digest: sha256:x\r\n\r\n{}"), int64(0))
	f.Add([]byte("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 5-9/10\r\n\r\n56789"), int64(5))
	f.Add([]byte("HTTP/1.1 401 Unauthorized\r\n\r\n"+
		"{\"errors\":[{\"code\":\"DENIED\",\"message\":\"not hunter2-secret\\u001b[2J\"}]}"), int64(1))
	f.Add([]byte("HTTP/1.1 302 Found\r\nLocation: https://x/hunter2-secret\r\n\r\n"), int64(0))
	const secret = "hunter2-secret"
	repo, err := name.NewRepository("registry.example.com/app", name.StrictValidation)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, answer []byte, from int64) {
		from &= 1<<20 - 1
		s := &source{
			host: "registry.example.com", repo: repo, said: "of the request (image.auth)", secret: secret,
			auth: authn.FromConfig(authn.AuthConfig{Username: "u", Password: secret}), http: &http.Client{Transport: said(answer)},
		}
		check := func(err error) {
			c, e := errs.CodeOf(err), err.Error()
			if c != errs.Invalid && c != errs.Denied && c != errs.NotFound && c != errs.Unavailable || len(e) > 3000 {
				t.Fatalf("%s: %v", c, e)
			}
			if strings.Contains(e, secret) || strings.ContainsFunc(e, func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Fatalf("%q says %q", answer, e)
			}
		}
		const limit = 64
		for _, ref := range []string{"latest", "sha256:" + strings.Repeat("a", 64)} {
			b, digest, err := s.manifest(t.Context(), ref, limit)
			if err != nil {
				check(err)
				continue
			}
			sum := sha256.Sum256(b)
			if digest != "sha256:"+hex.EncodeToString(sum[:]) || len(b) > limit || strings.HasPrefix(ref, "sha256:") && ref != digest {
				t.Fatalf("%q is taken for %s", b, digest)
			}
		}
		body, begins, err := s.blob(t.Context(), "sha256:"+strings.Repeat("a", 64), from, 1<<20)
		if err != nil {
			check(err)
			return
		}
		if begins != 0 && begins != from {
			t.Fatalf("asked from %d on, it begins at %d", from, begins)
		}
		if _, err := io.Copy(io.Discard, body); err != nil {
			check(s.explain(err))
		}
		body.Close()
	})
}
