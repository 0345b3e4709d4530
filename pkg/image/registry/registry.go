// Package registry reads images from registries, by the protocol of
// github.com/opencontainers/distribution-spec.
//
//	name ─▶ Registry, by its prefix ─▶ mirrors, in order, then the registry
//
// Repository.Manifest, Repository.Blob: from the first that has it
//
// go-containerregistry does the handshake of credentials and tokens. The two requests
// that read are made here: those of go-containerregistry cannot go on in the middle of
// a blob, and accept manifests of 100 MiB.
//
// What surprises: a registry is trusted with its own content only. A redirect, or the
// address of its token server, is followed by TLS (unless insecure), and only to public
// addresses: not to this host, nor to its network (address.go).
package registry

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Registry says where names that begin with Prefix are pulled from.
type Registry struct {
	// Prefix is whole components of a name, the first perhaps a host. If several fit,
	// the longest is used. Empty: names without a host.
	Prefix string `toml:"prefix"`
	// Location is host[:port][/path], which replaces Prefix; Prefix itself if empty.
	Location string `toml:"location"`
	// Namespace is put before a name that has only one component behind Location.
	Namespace string `toml:"namespace"`
	// Mirrors are asked first, in order: host[:port][/path] instead of Prefix. The
	// Registry whose prefix a mirror has says how to speak to it.
	Mirrors []string `toml:"mirrors"`
	// Insecure allows HTTP without TLS if there is no HTTPS.
	Insecure bool `toml:"insecure"`
	// CA is a file of certificates (PEM) that sign for it, beside the system's.
	CA string `toml:"ca"`
	// Credentials is a file of mode 0600 with one line, USER:PASSWORD. It is read for
	// each pull that brings no credentials.
	Credentials string `toml:"credentials"`
	// Redirects are host[:port] inside this network that it may redirect to, as the
	// store of its blobs, or its token server.
	Redirects []string `toml:"redirects"`
}

// Auth is a user name and a password for a registry. It is comparable, and prints as
// "(hidden)".
type Auth struct{ Username, Password string }

// String hides the secret in all output.
func (Auth) String() string { return "(hidden)" }

// GoString does so too.
func (Auth) GoString() string { return "(hidden)" }

// Client pulls from registries.
type Client struct {
	all []*place // the longest prefix first
}

// place is a Registry, checked and ready.
type place struct {
	Registry
	host, path string // of Location
	guard      *guard
}

// New checks the configuration of registries. The error names everything that is wrong.
func New(list []Registry) (*Client, error) {
	c := &Client{}
	var bad []error
	seen := map[string]bool{}
	for _, r := range list {
		r.Prefix = strings.Trim(r.Prefix, "/")
		p, err := newPlace(r)
		if err == nil && seen[r.Prefix] {
			err = errors.New("another entry has the same prefix")
		}
		seen[r.Prefix] = true
		if err != nil {
			bad = append(bad, fmt.Errorf("prefix = %.200q: %w", r.Prefix, err))
			continue
		}
		c.all = append(c.all, p)
	}
	slices.SortStableFunc(c.all, func(a, b *place) int { return cmp.Compare(len(b.Prefix), len(a.Prefix)) })
	return c, errors.Join(bad...)
}

func newPlace(r Registry) (*place, error) {
	if r.Location == "" {
		if !hasHost(r.Prefix + "/x") {
			return nil, errors.New("it names no host: set location to the registry of these images, for example \"registry.example.com\"")
		}
		r.Location = r.Prefix
	}
	p := &place{Registry: r}
	var err error
	if p.host, p.path, err = splitLocation(r.Location); err != nil {
		return nil, fmt.Errorf("location = %.200q: %w", r.Location, err)
	}
	for _, m := range r.Mirrors {
		if _, _, err := splitLocation(m); err != nil {
			return nil, fmt.Errorf("mirrors: %.200q: %w", m, err)
		}
	}
	var roots *x509.CertPool
	if r.CA != "" {
		pem, err := os.ReadFile(r.CA)
		if err != nil {
			return nil, fmt.Errorf("ca: %w", err)
		}
		if roots, err = x509.SystemCertPool(); err != nil {
			roots = x509.NewCertPool()
		}
		if !roots.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca: %s contains no certificate in PEM", r.CA)
		}
	}
	if r.Credentials != "" {
		if _, err := readCredentials(r.Credentials); err != nil {
			return nil, err
		}
	}
	for _, h := range r.Redirects {
		if u, err := url.Parse("https://" + h); err != nil || u.Host != h || u.Hostname() == "" {
			return nil, fmt.Errorf("redirects: %.200q: want host or host:port", h)
		}
	}
	p.guard = newGuard(p.host, r.Insecure, roots, r.Redirects)
	return p, nil
}

// splitLocation checks a host[:port][/path].
func splitLocation(l string) (host, path string, err error) {
	host, path, _ = strings.Cut(strings.TrimSuffix(l, "/"), "/")
	if _, err := name.NewRegistry(host, name.StrictValidation); err != nil || host == "" {
		return "", "", errors.New("want host, host:port or host/path, without https://")
	}
	if h, port, err := net.SplitHostPort(host); err == nil && (h == "" || port == "") {
		return "", "", errors.New("want host, host:port or host/path, without https://")
	}
	return host, path, nil
}

// hasHost reports whether the first component of a name is a host, by docker's rule.
func hasHost(repo string) bool {
	first, _, more := strings.Cut(repo, "/")
	return more && (strings.ContainsAny(first, ".:") || first == "localhost")
}

// find returns the place of a name, and the rest of the name behind the prefix.
func (c *Client) find(repo string) (p *place, rest string) {
	if c == nil {
		return nil, ""
	}
	for _, p := range c.all {
		if p.Prefix == "" && !hasHost(repo) {
			return p, repo
		}
		if rest, ok := strings.CutPrefix(repo, p.Prefix+"/"); ok && p.Prefix != "" {
			return p, rest
		}
	}
	return nil, ""
}

// Host is where images of a name are pulled from, or empty if no registry is
// configured for it.
func (c *Client) Host(repo string) string {
	if p, _ := c.find(repo); p != nil {
		return p.host
	}
	return ""
}

// Repository returns the repository of a name. auth, if not nil, is for the registry
// itself and never for its mirrors. It fails with errs.NotFound if no registry is
// configured for the name. It sends no request.
func (c *Client) Repository(repo string, auth *Auth) (*Repository, error) {
	p, rest := c.find(repo)
	if p == nil {
		return nil, errs.New(errs.NotFound, "no registry is configured for %.200q", repo)
	}
	r := &Repository{}
	for _, m := range p.Mirrors {
		host, path, _ := splitLocation(m)
		at, _ := c.find(strings.Trim(m, "/") + "/x")
		if at == nil || at.host != host { // a mirror that is not configured
			at = &place{host: host, guard: newGuard(host, false, nil, nil)}
		}
		s, err := newSource(at, path, p.Namespace, rest, nil)
		if err != nil {
			return nil, err
		}
		s.mirror = true
		r.sources = append(r.sources, s)
	}
	s, err := newSource(p, p.path, p.Namespace, rest, auth)
	if err != nil {
		return nil, err
	}
	r.sources = append(r.sources, s)
	return r, nil
}

func newSource(p *place, path, namespace, rest string, auth *Auth) (*source, error) {
	if namespace != "" && !strings.Contains(rest, "/") {
		rest = namespace + "/" + rest
	}
	if path != "" {
		rest = path + "/" + rest
	}
	opts := []name.Option{name.StrictValidation}
	if p.Insecure {
		opts = append(opts, name.Insecure)
	}
	repo, err := name.NewRepository(p.host+"/"+rest, opts...)
	if err != nil {
		return nil, errs.Wrap(err, errs.Invalid, "%.200q is not a valid repository name of registry %s", rest, p.host)
	}
	s := &source{host: p.host, repo: repo, guard: p.guard, auth: authn.Anonymous}
	switch {
	case auth != nil:
		s.said = "of the request (image.auth)"
	case p.Credentials != "":
		if auth, err = readCredentials(p.Credentials); err != nil {
			return nil, errs.Wrap(err, errs.Unavailable, "the credentials of registry %s cannot be read; the daemon's log says why",
				p.host)
		}
		s.said = "of its credentials file"
	}
	if auth != nil {
		s.secret = auth.Password
		s.auth = authn.FromConfig(authn.AuthConfig{Username: auth.Username, Password: auth.Password})
	}
	return s, nil
}

func readCredentials(path string) (*Auth, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("credentials: %w", err)
	}
	if fi.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("credentials: %s may be read by others (mode %04o): chmod 600 it", path, fi.Mode().Perm())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("credentials: %w", err)
	}
	sc := bufio.NewScanner(bytes.NewReader(b))
	sc.Scan()
	user, password, ok := strings.Cut(strings.TrimRight(sc.Text(), "\r"), ":")
	if !ok || user == "" || password == "" {
		return nil, fmt.Errorf("credentials: %s: want one line, USER:PASSWORD", path)
	}
	return &Auth{user, password}, nil
}
