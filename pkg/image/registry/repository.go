package registry

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Repository is one repository, in its registry and that registry's mirrors. Its
// methods may be called concurrently.
type Repository struct {
	sources []*source // the registry itself is the last
}

// source is a repository in one place.
type source struct {
	host   string
	repo   name.Repository
	auth   authn.Authenticator
	said   string // origin of auth, for people; empty: no auth
	secret string
	guard  *guard
	mirror bool
	down   atomic.Bool // a mirror that could not be reached is not tried again

	mu   sync.Mutex
	http *http.Client // set once the way to authenticate is known; guarded by mu
}

// retries is how many times a request is made if its errors are temporary. pause is the
// wait in between, doubled each time.
const (
	retries = 3
	pause   = time.Second / 2
)

// Manifest reads the manifest or index of a tag or a digest, and its own digest. It has
// at most limit bytes.
//
// It fails with errs.NotFound if there is none, errs.Denied if the registry wants
// (other) credentials, errs.Unavailable if it cannot be reached, errs.Invalid if it
// sends wrong content.
func (r *Repository) Manifest(ctx context.Context, ref string, limit int64) (b []byte, digest string, err error) {
	_, err = r.ask(ctx, 0, func(s *source) error {
		b, digest, err = s.manifest(ctx, ref, limit)
		return err
	})
	return b, digest, err
}

// Sources is the number of places that may have a blob.
func (r *Repository) Sources() int { return len(r.sources) }

// Blob opens a blob of size bytes from byte at on. The body may begin at 0
// nevertheless, as begins says. The first from places are skipped; of is the one that
// answered. The caller checks size and digest. Errors are those of Manifest.
func (r *Repository) Blob(ctx context.Context, digest string, at, size int64, from int) (body io.ReadCloser, begins int64, of int,
	err error,
) {
	of, err = r.ask(ctx, from, func(s *source) error {
		body, begins, err = s.blob(ctx, digest, at, size)
		return err
	})
	return body, begins, of, err
}

// Explain makes an error of reading a body from place of readable.
func (r *Repository) Explain(of int, err error) error { return r.sources[of].explain(err) }

// ask calls f for one place after the other, and for all again if that may help.
func (r *Repository) ask(ctx context.Context, from int, f func(*source) error) (of int, err error) {
	wait := pause
	for try := 1; ; try++ {
		var missed []string // errors of the mirrors
		for i := from; i < len(r.sources); i++ {
			if r.sources[i].down.Load() {
				continue
			}
			if err = f(r.sources[i]); err == nil {
				return i, nil
			}
			if ctx.Err() != nil {
				return i, context.Cause(ctx)
			}
			if r.sources[i].mirror {
				r.sources[i].down.Store(errs.Is(err, errs.Unavailable))
				missed = append(missed, text(err))
			}
		}
		if !errs.Is(err, errs.Unavailable) || try == retries {
			if e, ok := errors.AsType[*errs.Error](err); ok && len(missed) > 0 {
				err = errs.Wrap(err, e.Code, "%s (mirrors tried first: %s)", e.Text, strings.Join(missed, "; "))
			}
			return 0, err
		}
		select {
		case <-time.After(wait):
			wait *= 2
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

func text(err error) string {
	if e, ok := errors.AsType[*errs.Error](err); ok {
		return e.Text
	}
	return err.Error()
}

// documentLimit bounds the whole of a handshake, or of reading a manifest.
const documentLimit = 90 * time.Second

var errSlow = errors.New("it took too long to answer")

// accepts are the media types accepted for a manifest.
var accepts = strings.Join([]string{
	string(types.OCIManifestSchema1), string(types.DockerManifestSchema2),
	string(types.OCIImageIndex), string(types.DockerManifestList),
}, ", ")

func (s *source) manifest(ctx context.Context, ref string, limit int64) ([]byte, string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, documentLimit, errSlow)
	defer cancel()
	resp, err := s.get(ctx, "manifests", ref, http.Header{"Accept": {accepts}}, http.StatusOK)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return nil, "", s.explain(err)
	}
	if int64(len(b)) > limit {
		return nil, "", errs.New(errs.Invalid, "registry %s sent a manifest of %s with more than %d bytes; no image needs that many",
			s.host, s.repo.RepositoryStr(), limit)
	}
	sum := sha256.Sum256(b)
	digest := "sha256:" + hex.EncodeToString(sum[:])
	want := resp.Header.Get("Docker-Content-Digest")
	if strings.HasPrefix(ref, "sha256:") {
		want = ref
	}
	if want != "" && want != digest {
		return nil, "", errs.New(errs.Invalid, "registry %s sent a wrong manifest of %s: it has the digest %s, want %.100s", s.host,
			s.repo.RepositoryStr(), digest, want)
	}
	return b, digest, nil
}

func (s *source) blob(ctx context.Context, digest string, at, size int64) (io.ReadCloser, int64, error) {
	h := http.Header{}
	if at > 0 {
		h.Set("Range", fmt.Sprintf("bytes=%d-%d", at, size-1))
	}
	resp, err := s.get(ctx, "blobs", digest, h, http.StatusOK, http.StatusPartialContent, http.StatusRequestedRangeNotSatisfiable)
	if err != nil {
		return nil, 0, err
	}
	switch resp.StatusCode {
	case http.StatusOK: // it does not support ranges
		return resp.Body, 0, nil
	case http.StatusRequestedRangeNotSatisfiable:
		resp.Body.Close()
		if at > 0 {
			return s.blob(ctx, digest, 0, size)
		}
	default:
		var first int64
		span, ok := strings.CutPrefix(resp.Header.Get("Content-Range"), "bytes ")
		if start, _, cut := strings.Cut(span, "-"); ok && cut {
			if first, err = strconv.ParseInt(start, 10, 64); err == nil && first == at && at > 0 {
				return resp.Body, at, nil
			}
		}
		resp.Body.Close()
	}
	return nil, 0, errs.New(errs.Invalid, "registry %s answered a request for %s from byte %d on with the wrong range %.60q", s.host,
		digest, at, resp.Header.Get("Content-Range"))
}

// get makes a request. Its answer must have one of the statuses in good.
func (s *source) get(ctx context.Context, kind, ref string, h http.Header, good ...int) (*http.Response, error) {
	c, err := s.client(ctx)
	if err != nil {
		return nil, s.explain(err)
	}
	u := url.URL{Scheme: "https", Host: s.repo.RegistryStr(), Path: "/v2/" + s.repo.RepositoryStr() + "/" + kind + "/" + ref}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header = h
	resp, err := c.Do(req)
	if err != nil {
		return nil, s.explain(err)
	}
	for _, status := range good {
		if resp.StatusCode == status {
			return resp, nil
		}
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxHeader))
	return nil, s.refusal(resp.StatusCode, s.words(body), ref)
}

// client is the authenticated HTTP client of the source.
func (s *source) client(ctx context.Context) (*http.Client, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.http == nil {
		ctx, cancel := context.WithTimeoutCause(ctx, documentLimit, errSlow)
		defer cancel()
		rt, err := transport.NewWithContext(ctx, s.repo.Registry, s.auth, s.guard, []string{s.repo.Scope(transport.PullScope)})
		if err != nil {
			return nil, err
		}
		s.http = &http.Client{Transport: rt} // the guard also checks redirects
	}
	return s.http, nil
}

// explain makes an error of a request readable. It shows no address of a redirect,
// which may be signed.
func (s *source) explain(err error) error {
	if e, ok := errors.AsType[*errs.Error](err); ok {
		return e
	}
	if t, ok := errors.AsType[*transport.Error](err); ok {
		var said []string
		for _, d := range t.Errors {
			said = append(said, string(d.Code)+" "+d.Message)
		}
		return s.refusal(t.StatusCode, s.clean(strings.Join(said, "; ")), "")
	}
	why := err
	if u, ok := errors.AsType[*url.Error](err); ok {
		why = u.Err
	}
	if errors.Is(err, context.Canceled) {
		return err
	}
	return errs.Wrap(errors.New(s.clean(err.Error())), errs.Unavailable, "registry %s cannot be read: %s", s.host, s.clean(why.Error()))
}

// refusal is the error for a status that is no success.
func (s *source) refusal(status int, words, ref string) error {
	said := fmt.Sprintf("%d %s", status, http.StatusText(status))
	if words != "" {
		said += ": " + words
	}
	what := s.repo.RepositoryStr()
	switch {
	case strings.HasPrefix(ref, "sha256:"):
		what += "@" + ref
	case ref != "":
		what += ":" + ref
	}
	switch {
	case (status == http.StatusUnauthorized || status == http.StatusForbidden) && s.said != "":
		return errs.New(errs.Denied, "registry %s denies access to %s with the user name and password %s (%s)", s.host, what, s.said, said)
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return errs.New(errs.Denied, "registry %s denies access to %s without a user name and a password (%s): send them with the request "+
			"(image.auth, or `sandboxctl image pull -u`), or set credentials in its [[registries]]", s.host, what, said)
	case status == http.StatusNotFound:
		return errs.New(errs.NotFound, "registry %s has no %s (%s)", s.host, what, said)
	case status == http.StatusTooManyRequests || status >= 500:
		return errs.New(errs.Unavailable, "registry %s cannot serve %s now (%s); try again later", s.host, what, said)
	}
	return errs.New(errs.Invalid, "registry %s refuses to serve %s (%s)", s.host, what, said)
}

// words are the texts of the errors in a body, by the distribution specification.
func (s *source) words(body []byte) string {
	var all struct {
		Errors []struct{ Code, Message string }
	}
	if json.Unmarshal(body, &all) != nil || len(all.Errors) == 0 {
		return ""
	}
	return s.clean(strings.TrimSpace(all.Errors[0].Code + " " + all.Errors[0].Message))
}

// clean makes one short line of a text that may come from a registry. The text may
// repeat the request; clean cuts the secret out.
func (s *source) clean(t string) string {
	if s.secret != "" {
		basic := ""
		if c, err := s.auth.Authorization(); err == nil {
			basic = base64.StdEncoding.EncodeToString([]byte(c.Username + ":" + c.Password))
		}
		for _, secret := range []string{basic, s.secret, url.QueryEscape(s.secret), base64.StdEncoding.EncodeToString([]byte(s.secret))} {
			if secret != "" {
				t = strings.ReplaceAll(t, secret, "(hidden)")
			}
		}
	}
	t = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, t)
	return cmp.Or(strings.TrimSpace(fmt.Sprintf("%.300s", t)), "no reason is given")
}
