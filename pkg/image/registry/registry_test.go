package registry

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

func TestPublic(t *testing.T) {
	for _, a := range []string{"8.8.8.8", "2600::1", "100.63.255.255", "172.32.0.1"} {
		if !public(netip.MustParseAddr(a)) {
			t.Errorf("%s is not public", a)
		}
	}
	for _, a := range []string{
		"127.0.0.1", "127.8.8.8", "::1", "::", "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.160.0.2", "172.16.0.1", "192.168.1.1", "100.64.0.1",
		"169.254.169.254", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1", "198.18.0.1",
		"::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001::1",
	} {
		if public(netip.MustParseAddr(a)) {
			t.Errorf("%s is public", a)
		}
	}
}

// No address of this host is elsewhere, be it one of the public network.
func TestOwnAddresses(t *testing.T) {
	own, err := net.InterfaceAddrs()
	if err != nil || len(own) == 0 {
		t.Fatalf("%v, %v", own, err)
	}
	g := newGuard("registry.example.com", true, nil, nil)
	for _, o := range own {
		a, ok := netip.AddrFromSlice(o.(*net.IPNet).IP)
		if a = a.Unmap(); !ok || elsewhere(a) {
			t.Errorf("%s, which this host has, is elsewhere", a)
		}
		if c, err := g.dial(t.Context(), "tcp", netip.AddrPortFrom(a, 1).String()); !errs.Is(err, errs.Denied) {
			t.Errorf("%s, which this host has: %v, %v", a, c, err)
		}
	}
	if !elsewhere(netip.MustParseAddr("8.8.8.8")) {
		t.Error("nothing is elsewhere")
	}
}

// TestRepositories says where names are looked for.
func TestRepositories(t *testing.T) {
	c, err := New([]Registry{
		{Prefix: "registry.example.com"},
		{
			Prefix: "registry.example.com/team", Location: "10.0.0.1:5000/of/team",
			Mirrors: []string{"mirror.example.com/m", "registry.example.com"},
		},
		{Prefix: "", Location: "hub.example.com", Namespace: "library"},
		{Prefix: "opensandbox", Location: "10.0.0.1:5000/os"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for uri, want := range map[string]string{
		"registry.example.com/app":      "registry.example.com/app",
		"registry.example.com/teamwork": "registry.example.com/teamwork",
		"registry.example.com/team/app": "mirror.example.com/m/app registry.example.com/app 10.0.0.1:5000/of/team/app",
		"python":                        "hub.example.com/library/python",
		"a/b":                           "hub.example.com/a/b",
		"opensandbox/code-interpreter":  "10.0.0.1:5000/os/code-interpreter",
		"other.example.com/app":         "",
		"localhost/app":                 "",
	} {
		r, err := c.Repository(uri, &Auth{"u", "p"})
		if want == "" {
			if !errs.Is(err, errs.NotFound) || c.Host(uri) != "" {
				t.Errorf("%s: %v, %q", uri, err, c.Host(uri))
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", uri, err)
			continue
		}
		var got []string
		for i, s := range r.sources {
			got = append(got, s.host+"/"+s.repo.RepositoryStr())
			if last := i == len(r.sources)-1; (s.secret == "p") != last || s.mirror == last {
				t.Errorf("%s: source %d has the credentials %q, is a mirror: %v", uri, i, s.secret, s.mirror)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s is looked for in %q, want %q", uri, got, want)
		}
	}
	var none *Client
	if none.Host("python") != "" {
		t.Error("no configuration has a registry")
	}
}

func TestBadConfig(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for say, r := range map[string]Registry{
		"names no host":                     {Prefix: "team"},
		"without https://":                  {Prefix: "a", Location: "https://registry.example.com"},
		"want host":                         {Prefix: "a", Location: "registry.example.com:/x"},
		"mirrors":                           {Prefix: "registry.example.com", Mirrors: []string{"http://x"}},
		"no such file":                      {Prefix: "registry.example.com", CA: filepath.Join(dir, "none")},
		"no certificate":                    {Prefix: "registry.example.com", CA: file("ca", "none", 0o600)},
		"may be read by others":             {Prefix: "registry.example.com", Credentials: file("open", "u:p", 0o644)},
		"want one line":                     {Prefix: "registry.example.com", Credentials: file("form", "u", 0o600)},
		"want host or host:port":            {Prefix: "registry.example.com", Redirects: []string{"https://x/y"}},
		"another entry has the same prefix": {Prefix: "registry.example.com/"},
	} {
		list := []Registry{r}
		if strings.HasPrefix(say, "another entry") {
			list = append(list, Registry{Prefix: "registry.example.com"})
		}
		_, err := New(list)
		if err == nil || !strings.Contains(err.Error(), say) {
			t.Errorf("%+v: %v, want it to say %q", r, err, say)
		}
	}
}
