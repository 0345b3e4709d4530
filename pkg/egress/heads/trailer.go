package heads

import (
	"io"
	"net/http"
	"net/http/httputil"

	"golang.org/x/net/http/httpguts"
)

// A trailed is the body of a request with trailers (RFC 9110, section 6.5). Those that the head
// has announced go on, if a trailer may have such a name: net/http also takes what was not
// announced, such as another Host, and servers that merge trailers would take it as a header.
type trailed struct {
	io.ReadCloser
	in, out http.Header // out has the names from the beginning, and values at the end
}

// keepTrailers lets the trailers of a request go on. ReverseProxy copies the names alone.
func keepTrailers(p *httputil.ProxyRequest) {
	p.Out.Trailer = nil
	if p.Out.Body == nil {
		return
	}
	out := http.Header{}
	for name := range p.In.Trailer {
		if httpguts.ValidHeaderFieldName(name) && httpguts.ValidTrailerHeader(name) {
			out[name] = nil
		}
	}
	if len(out) > 0 {
		p.Out.Trailer, p.Out.Body = out, &trailed{p.Out.Body, p.In.Trailer, out}
	}
}

// Read reads the body. Its end comes when the trailers are there.
func (t *trailed) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if err == io.EOF && t.in != nil {
		for name := range t.out { // what is not there any more, an Inspector has taken out
			t.out[name] = t.in[name]
		}
		t.in = nil
	}
	return n, err
}
