// Package client is the Go client of sandboxd: the lifecycle API of OpenSandbox,
// commands and files in sandboxes, and what sandboxd adds to that.
//
//	c, err := client.FromEnv()
//	sb, err := c.Create(ctx, wire.CreateRequest{…}, true)
//	p, err := c.Start(ctx, sb.ID, client.Command{Argv: []string{"uname", "-a"}})
//	exit, err := p.Wait(os.Stdout, os.Stderr)
//	err = c.Delete(ctx, sb.ID)
//
// Requests and answers are the JSON of pkg/api/wire and, of the agent in a
// sandbox, of pkg/agent. Errors carry a code of pkg/errs.
//
// What surprises: bytes that come out of a sandbox are hostile. This package
// bounds their size and never takes a path from them. Escape them before they
// are shown on a terminal.
package client

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// DefaultHost is where a daemon of the default instance listens.
const DefaultHost = "unix:///run/sandboxd/sandboxd.sock"

// Client talks to one daemon. It is safe for concurrent use. Its own methods are
// about the life of sandboxes, and Start runs a command in one; the rest is
// grouped by what it is about: c.Files("lab").Put(…), c.Images().Pull(…).
type Client struct{ *daemon }

// Commands are the commands that were started in a sandbox.
func (c *Client) Commands(idOrName string) Commands { return Commands{c.in(idOrName)} }

// Sessions are the shells of a sandbox that run one line after the other.
func (c *Client) Sessions(idOrName string) Sessions { return Sessions{c.in(idOrName)} }

// Terminals are the terminals of a sandbox.
func (c *Client) Terminals(idOrName string) Terminals { return Terminals{c.in(idOrName)} }

// Interpreters are the interpreters of a sandbox.
func (c *Client) Interpreters(idOrName string) Interpreters { return Interpreters{c.in(idOrName)} }

// Files are the files of a sandbox.
func (c *Client) Files(idOrName string) Files { return Files{c.in(idOrName)} }

// Policy is what a sandbox may reach, and what it has reached.
func (c *Client) Policy(idOrName string) Policy { return Policy{c.in(idOrName)} }

// Vault is the credential vault of a sandbox.
func (c *Client) Vault(idOrName string) Vault { return Vault{c.in(idOrName)} }

// Diagnostics say what is wrong with a sandbox.
func (c *Client) Diagnostics(idOrName string) Diagnostics { return Diagnostics{c.in(idOrName)} }

// Images are the images of the host.
func (c *Client) Images() Images { return Images{c.daemon} }

// Snapshots are the snapshots of the host.
func (c *Client) Snapshots() Snapshots { return Snapshots{c.daemon} }

// Volumes are the named volumes of the host.
func (c *Client) Volumes() Volumes { return Volumes{c.daemon} }

// Policies are the named network policies of the host.
func (c *Client) Policies() Policies { return Policies{c.daemon} }

// Keys are the API keys of the daemon.
func (c *Client) Keys() Keys { return Keys{c.daemon} }

// System is the daemon and its host.
func (c *Client) System() System { return System{c.daemon} }

// FromEnv makes a Client of SANDBOXD_HOST, else of what OpenSandbox's SDKs
// read (OPEN_SANDBOX_DOMAIN, OPEN_SANDBOX_PROTOCOL), else of DefaultHost; the
// key is OPEN_SANDBOX_API_KEY.
func FromEnv() (*Client, error) {
	host := os.Getenv("SANDBOXD_HOST")
	if d := os.Getenv("OPEN_SANDBOX_DOMAIN"); host == "" && d != "" {
		host = d
		if !strings.Contains(d, "://") {
			host = cmp.Or(os.Getenv("OPEN_SANDBOX_PROTOCOL"), "http") + "://" + d
		}
	}
	return New(cmp.Or(host, DefaultHost), os.Getenv("OPEN_SANDBOX_API_KEY"))
}

// New makes a Client of host: unix:///path, tcp://host:port or an http(s) URL.
func New(host, key string) (*Client, error) {
	tr := &http.Transport{
		Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 16, IdleConnTimeout: 90 * time.Second, DisableCompression: true,
	}
	d := &daemon{host: host, key: key, answer: answerLimit, ping: pingEvery, look: lookEvery, http: &http.Client{
		Transport: tr,
		// The API does not redirect; a sandbox behind it may, to anywhere.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	dialer := &net.Dialer{Timeout: dialLimit}
	tr.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		return watch(dialer.DialContext(ctx, network, address))
	}
	scheme, rest, ok := strings.Cut(host, "://")
	if !ok {
		scheme, rest = "tcp", host
	}
	switch scheme {
	case "unix":
		if rest == "" {
			return nil, badHost(host)
		}
		tr.Proxy = nil
		d.socket = rest
		tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return watch(dialer.DialContext(ctx, "unix", rest))
		}
		d.base = "http://sandboxd"
		return &Client{d}, nil
	case "tcp":
		scheme = "http"
	case "http", "https":
	default:
		return nil, badHost(host)
	}
	u, err := url.Parse(scheme + "://" + rest)
	if err != nil || u.Host == "" || u.RawQuery != "" || u.User != nil {
		return nil, badHost(host)
	}
	d.base = strings.TrimSuffix(strings.TrimSuffix(u.String(), "/"), "/v1")
	return &Client{d}, nil
}

func badHost(host string) error {
	return errs.New(errs.Invalid, "SANDBOXD_HOST %q is not a valid address; want unix:///run/sandboxd/sandboxd.sock, "+
		"tcp://127.0.0.1:8080 or an http(s) URL", host)
}

// Trying returns a Client of the daemon of c for whoever tries a new version of it: while an upgrade
// is on trial, the daemon serves changes only to requests with the upgrade's nonce.
func Trying(c *Client, nonce string) *Client {
	d := *c.daemon
	d.trial = nonce
	return &Client{&d}
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }
