package inject

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// whole is the longest body that is read before the request is sent.
const whole = 64 << 10

// bodyEncoding is how a value is written in a body with these headers: escaped in a JSON string
// and in a form, else as it is. ok is false where nothing is replaced: OpenSandbox leaves
// compressed and multipart bodies as they are, and messages of gRPC have lengths before them.
func bodyEncoding(h http.Header) (enc encoding, ok bool) {
	if !identity(h) {
		return asItIs, false
	}
	kind, _, _ := mime.ParseMediaType(h.Get("Content-Type")) //nolint:errcheck // then it is empty, or all that could be read
	switch {
	case kind == "application/json" || strings.HasSuffix(kind, "+json"):
		return inJSON, true
	case kind == "application/x-www-form-urlencoded":
		return url.QueryEscape, true
	case strings.HasPrefix(kind, "multipart/") || strings.HasPrefix(kind, "application/grpc"):
		return asItIs, false
	}
	return asItIs, true
}

// identity reports whether a body is not compressed.
func identity(h http.Header) bool {
	for _, v := range h["Content-Encoding"] {
		if v = strings.TrimSpace(v); v != "" && !strings.EqualFold(v, "identity") {
			return false
		}
	}
	return true
}

// body replaces placeholders in the body, and looks for those that may not stand there.
func (a *apply) body() error {
	r := a.r
	r.GetBody = nil // it would give what the guest has sent
	if r.Body == nil || r.Body == http.NoBody {
		return nil
	}
	x := a.inspect("body")
	if enc, ok := bodyEncoding(r.Header); ok {
		x = a.exchange(vault.InBody, enc)
	}
	src := r.Body
	s := newStream(src, &x.searcher, x.swap, a.trailers)
	r.Body = s
	rewrites := len(x.needles) > 0
	if 0 < r.ContentLength && r.ContentLength <= whole && r.Header.Get("Expect") == "" {
		data, err := io.ReadAll(io.LimitReader(s, 2*whole))
		if err != nil {
			if _, ok := errors.AsType[*Denied](err); ok {
				return err
			}
			return fmt.Errorf("read the body of the request: %w", err)
		}
		if len(data) < 2*whole {
			r.ContentLength = int64(len(data))
			r.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }
			r.Body = rest{bytes.NewReader(data), src}
			delete(r.Header, "Content-Length")
			return nil
		}
		r.Body = rest{io.MultiReader(bytes.NewReader(data), s), src}
	}
	if rewrites {
		// Its length is known when it has been sent: net/http sends it in chunks.
		r.ContentLength, r.TransferEncoding = -1, nil
		delete(r.Header, "Content-Length")
	}
	return nil
}

// rest is the rest of a body, some of which was read.
type rest struct {
	io.Reader
	io.Closer
}

// trailers looks at the trailers when the body has ended. In them nothing is replaced.
func (a *apply) trailers() error {
	for name, values := range a.r.Trailer {
		if a.trailer(name); len(a.r.Trailer[name]) == 0 {
			continue
		}
		for _, v := range values {
			if _, err := a.inspect("trailer").field(v, maxAdded); err != nil {
				return err
			}
		}
	}
	return nil
}
