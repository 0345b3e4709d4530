package config

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/image/registry"
	"github.com/sandboxd/sandboxd/pkg/validity"
)

func load(t *testing.T, text string) (*Config, error) {
	t.Helper()
	p := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return Load(p)
}

func TestDefault(t *testing.T) {
	c, err := Load("")
	if err != nil {
		t.Fatal(err)
	}
	if c.StateDir != "/var/lib/sandboxd" || c.Listen.Socket != "/run/sandboxd/sandboxd.sock" {
		t.Errorf("directories: %q, %q", c.StateDir, c.Listen.Socket)
	}
	if c.Defaults.Memory != 512<<20 || c.Defaults.CPU != 1000 || time.Duration(c.Limits.RetainEnded) != time.Hour {
		t.Errorf("defaults: %+v %+v", c.Defaults, c.Limits)
	}
	if got := c.Network.Pool.String(); got != "10.160.0.0/16" {
		t.Errorf("pool %s", got)
	}
}

func TestBad(t *testing.T) {
	for text, want := range map[string]string{
		"colour = 1":              "colour",
		"[listen]\nsokcet = '/x'": "sokcet",
		"instance = 'AB'":         "one character",

		"instance = 'd'\n[listen]\ntcp = '[::1]:1'":                  "api_key_file",
		"[listen]\ntcp = '127.0.0.1:1'\ninsecure = 'yes'":            "anyone who can connect",
		"[listen]\ntcp = '127.0.0.1:1'\ninsecure = 1":                "set it to true",
		"[listen]\ntcp = '127.0.0.1:1'\ninsecure = ['true']":         "set it to true",
		"[listen]\ntcp = '127.0.0.1:1'\ninsecure = false":            "api_key_file",
		"[listen]\ntcp = 'localhost'\ninsecure = '" + Insecure + "'": "address:port",
		"[defaults]\nmemory = '-1'":                                  "whole number",
		"[defaults]\nmemory = '99999999Ti'":                          "whole number",
		"[defaults]\ncpu = 'NaN'":                                    "cores",
		"[defaults]\ncpu = '0'":                                      "cores",
		"[defaults]\npids = 0":                                       "pids > 0",
		"[limits]\nmax_sandboxes = 3000":                             "2000",
		"[prepared]\nrunc = -1":                                      "prepared.runc",
		"[snapshots]\nmax = -1":                                      "snapshots.max",
		"[snapshots]\nmax_per_sandbox = 10001":                       "1 to 10000",
		"[snapshots]\nmax_age = \"59s\"":                             "at least 1m",
		"[snapshots]\nmax_bytes = \"much\"":                          "snapshots.max_bytes",
		"[backup]\ntarget = 'srv'":                                   "absolute path",
		"[backup]\ntarget = '/var/lib/sandboxd/backups'":             "overlaps the directories",
		"[backup]\ntarget = 's3:http://s.example.com/b'":             "without https",
		"[backup]\nevery = '59s'":                                    "at least 1m",
		"[backup]\nkeep = -1":                                        "1 to 10000",
		"[backup]\nkeep = 0":                                         "both 0",
		"[backup]\nmax_age = '1m'":                                   "at least 1h",
		"[backup]\nencrypt = ['age1x']":                              "no public key",
		"[backup]\ndrill = '1s'":                                     "at least 1m",
		"[backup]\nidentity = 'key'":                                 "absolute path, or",
		"[backup]\ncredentials = 'key'":                              "absolute path",
		"[prepared]\nrunsc = 33":                                     "1 to 32",
		"[limits]\nmax_creating = -1":                                "max_creating",
		"[limits]\nmemory_reserve = '-1'":                            "whole number",
		"[limits]\nrequests_per_second = -1":                         "requests_per_second",
		"[storage]\nreserve = 'much'":                                "whole number",
		"[limits]\nretain_ended = '-1s'":                             "duration",
		"[limits]\nretain_ended = '0s'":                              "at least 1s",
		"[[registries]]\nprefix = 'team'":                            "names no host",
		"[[registries]]\nprefix = ''\nurl = 'x'":                     "url",
		"[storage]\npool = 'zfs'":                                    "zfs",
		"run_dir = '/srv/sb'\nstate_dir = '/srv/sb/state'":           "overlap: keep them apart",
		"state_dir = 'here'":                                         "absolute",
		"libexec_dir = '/usr/libexec'\nstate_dir = '/usr/libexec/s'": "apart",
		"[network]\naddress_pool = '10.0.0.0/24'":                    "/20",
		"[network]\nupstreams = ['dns']":                             "upstreams",
		"[network]\nroots = 'ca.pem'":                                "absolute",
		"[network]\nmax_flows = 255":                                 "256 to 65536",
		"[network]\nmax_flows = 100000":                              "256 to 65536",
		"[network]\nmax_open_flows = 0":                              "max_open_flows = 0",
		"[network]\nmax_flows = 1024":                                "max_open_flows = 2048",
		"[upgrade]\ngate = '0s'":                                     "at least 1s",
		"[log]\nlevel = 'loud'":                                      "loud",
		"[security]\nlevels = ['lax', 'default']":                    "want a list of strict, default and compat",
		"[security]\nlevels = ['strict']":                            "it is not in security.levels",
		"[defaults]\nsecurity = 'compat'":                            "it is not in security.levels",
		"[defaults]\nsecurity = 'lax'":                               "want strict, default or compat",
		"[images.aliases]\n'ubuntu*' = 'base'":                       "end of a tag",
		"[images.aliases]\nubuntu = 'BASE'":                          "not a valid name",
		"[images.aliases]\nubuntu = 1":                               "want text in quotes",
		"[images]\nalias = 1":                                        "alias",
		"[images]\nother_versions = 'warn'":                          "note or refuse",
		"[gateway]\ndomain = 'x.test'":                               "gateway.listen",
		"[gateway]\nlisten = '127.0.0.1:1'\ndomain = '*.x.test'":     "without *.",
		"[gateway]\nlisten = '8081'":                                 "address:port",
		"[gateway]\naddress = 'http://x'\nlisten = '127.0.0.1:1'":    "without a scheme",
		"[gateway]\npublic = 'maybe'":                                "auto, yes or no",
		"[gateway]\ntls_key = '/k.pem'":                              "needs its key",
		"[listen]\ntls_cert = '/c.pem'":                              "needs its key",
		"[listen]\ntls_cert = 'c.pem'\ntls_key = '/k.pem'":           "absolute",
		"[listen]\ntrusted_proxies = ['proxy']":                      "trusted_proxies",
	} {
		_, err := load(t, text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want it to name %q", text, err, want)
		}
	}
}

// TestEveryProblemAtOnce: unknown keys, values of another kind, values that make no sense
// and files that are missing are all reported, in words of the file and not of Go.
func TestEveryProblemAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(path, []byte(`instance = 5
retain_ended = "2h"
[listen]
tcp = "127.0.0.1:8080"
api_key_file = "/nowhere/key"
tls_cert = "/nowhere/cert.pem"
tls_key = "/nowhere/key.pem"
trusted_proxies = "127.0.0.1"
[limits]
max_sandbox = 10
max_sandboxes = "many"
max_creating = -3
[defaults]
memory = "much"
shell_ahead = "yes"
[log]
level = "loud"
[storage]
pool = "zfs"
allowed_host_paths = ["/nowhere/at/all"]
device = "sdb"
[[registries]]
prefix = "registry.example.com"
insecure = "no"
[[registries]]
prefix = "other.example.com"
mirror = ["x"]
[images.aliases]
"ubuntu:*" = 22
[gateway]
listen = [8081]
[network]
roots = "/nowhere/ca.pem"
[backup]
target = "/nowhere/backups"
encrypt = "age1"
credentials = "/nowhere/s3"
`), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Check(path)
	if err == nil {
		t.Fatal("no error")
	}
	want := []string{
		`line 1: instance = 5: want text in quotes`,
		`line 2: unknown key retain_ended; did you mean limits.retain_ended?`,
		`line 5: listen.api_key_file = "/nowhere/key": there is no such file`,
		`line 6: listen.tls_cert = "/nowhere/cert.pem": there is no such file`,
		`line 7: listen.tls_key = "/nowhere/key.pem": there is no such file`,
		`line 8: listen.trusted_proxies = "127.0.0.1": want a list of texts`,
		`line 10: unknown key limits.max_sandbox; did you mean limits.max_sandboxes?`,
		`line 11: limits.max_sandboxes = "many": want a whole number, without quotes`,
		`line 12: limits.max_creating = -3: want 1 to 2000`,
		`line 14: defaults.memory = "much": size "much": want a whole number with Ki, Mi, Gi or Ti`,
		`line 15: defaults.shell_ahead = "yes": want true or false`,
		`line 17: log.level = "loud"`,
		`line 19: storage.pool = "zfs"`,
		`line 20: storage.allowed_host_paths = "/nowhere/at/all": there is no such file`,
		`line 21: storage.device = "sdb": want the absolute path of a block device, and storage.pool = "btrfs" with it`,
		`line 24: registries[0].insecure = "no": want true or false`,
		`line 27: unknown key registries[1].mirror; did you mean registries[1].mirrors?`,
		`line 29: images.aliases.ubuntu:* = 22: want text in quotes`,
		`line 31: gateway.listen = [8081]: want text in quotes`,
		`line 33: network.roots = "/nowhere/ca.pem": there is no such file`,
		`line 35: backup.target = "/nowhere/backups": there is no such file`,
		`line 36: backup.encrypt = "age1": want a list of texts`,
		`line 37: backup.credentials = "/nowhere/s3": there is no such file`,
	}
	got := strings.Split(err.Error(), "\n")[1:]
	for i, w := range want {
		if i >= len(got) || !strings.HasPrefix(got[i], w) {
			t.Errorf("problem %d is missing: %s", i+1, w)
		}
	}
	if len(got) != len(want) || strings.Contains(err.Error(), "config.") && strings.Contains(err.Error(), "struct") {
		t.Errorf("%d problems, want %d:\n%v", len(got), len(want), err)
	}
	if _, err := Load(path); err == nil || strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("Load reads no files, and says %v", err)
	}
}

// TestNotTOML: where the text is no TOML, nothing else can be said, but the line is.
func TestNotTOML(t *testing.T) {
	_, err := load(t, "[listen]\nsocket = \n")
	if err == nil || !strings.Contains(err.Error(), "2|") {
		t.Error(err)
	}
}

func TestUnknownKeyNamesLine(t *testing.T) {
	_, err := load(t, "\n\ncolour = 1\n")
	if err == nil || !strings.Contains(err.Error(), "line 3: unknown key colour") {
		t.Fatal(err)
	}
}

// TestAliases: aliases of a file are added to the defaults, and an empty one removes a
// default.
func TestAliases(t *testing.T) {
	c, err := load(t, "[images.aliases]\n'node:*' = 'javascript'\n'ubuntu:*' = 'jammy:22'\n'debian:*' = ''")
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, a := range c.Images.Names {
		got[a.Name] = a.Image
	}
	for name, want := range map[string]string{"node:*": "javascript", "ubuntu:*": "jammy:22", "debian:*": "", "python:3*": "python"} {
		if got[name] != want {
			t.Errorf("%s stands for %q, want %q", name, got[name], want)
		}
	}
}

func TestTrustedProxies(t *testing.T) {
	c, err := load(t, "[listen]\ntrusted_proxies = ['127.0.0.1', '10.1.2.3/16', '::1']")
	if err != nil || fmt.Sprint(c.Listen.Proxies) != "[127.0.0.1/32 10.1.0.0/16 ::1/128]" {
		t.Error(c.Listen.Proxies, err)
	}
}

func TestAPIKeys(t *testing.T) {
	p := filepath.Join(t.TempDir(), "key")
	c := &Config{Listen: Listen{APIKeyFile: p}}
	if err := os.WriteFile(p, []byte("one\ntwo\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if keys, err := c.APIKeys(); err != nil || strings.Join(keys, ",") != "one,two" {
		t.Fatal(keys, err)
	}
	if err := os.Chmod(p, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := c.APIKeys(); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Fatal(err)
	}
}

// TestStorage: a host path that would expose the daemon's own files, or that is not a
// clean absolute path, is refused; so is a volume size that is too small.
func TestStorage(t *testing.T) {
	for value, want := range map[string]string{
		`allowed_host_paths = ["/"]`:                             "cannot be allowed",
		`allowed_host_paths = ["srv"]`:                           "absolute",
		`allowed_host_paths = ["/srv/"]`:                         "slash at its end",
		`allowed_host_paths = ["/srv/../etc"]`:                   "absolute path without",
		`allowed_host_paths = ["/var/lib/sandboxd/pool/x"]`:      "the directories of sandboxd",
		`allowed_host_paths = ["/srv", "/run/sandboxd"]`:         "the directories of sandboxd",
		`volume_size = "1Mi"`:                                    "at least 16Mi",
		"allowed_host_paths = [\"/srv/a\"]\nvolume_size = \"0\"": "",
	} {
		path := filepath.Join(t.TempDir(), "c.toml")
		if err := os.WriteFile(path, []byte("[storage]\n"+value+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Load(path)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", value, err, want)
		}
	}
}

// TestInsecure: an address that others reach needs a key, or that somebody says true.
func TestInsecure(t *testing.T) {
	for address, loopback := range map[string]bool{
		"127.0.0.1:8080": true, "127.9.9.9:8080": true, "[::1]:8080": true, "[::ffff:127.0.0.1]:8080": true,
		"0.0.0.0:8080": false, "[::]:8080": false, "192.0.2.1:8080": false, "[2001:db8::1]:8080": false, "10.0.0.1:8080": false,
	} {
		for _, c := range []struct {
			line string
			ok   bool
		}{
			{"insecure = true", true},
			{"insecure = '" + Insecure + "'", loopback},
			{"", false},
			{"insecure = false", false},
			{"insecure = ''", false},
			{"api_key_file = '/etc/sandboxd/api-key'", true},
			{"api_key_file = '/etc/sandboxd/api-key'\ninsecure = '" + Insecure + "'", true},
		} {
			cfg, err := load(t, "[listen]\ntcp = '"+address+"'\n"+c.line)
			if (err == nil) != c.ok {
				t.Errorf("%s, %q: %v", address, c.line, err)
			}
			if err == nil && cfg.Listen.Insecure != strings.Contains(c.line, "insecure") {
				t.Errorf("%s, %q: insecure is %v", address, c.line, cfg.Listen.Insecure)
			}
			if err == nil || loopback {
				continue
			}
			for _, want := range []string{"listen.tcp", address, "listen.api_key_file", "listen.insecure = true"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%s, %q: the text does not say %s: %v", address, c.line, want, err)
				}
			}
		}
	}
}

func TestUpstreams(t *testing.T) {
	for s, want := range map[string]egress.Upstream{
		"192.0.2.1":                       {Addr: netip.MustParseAddrPort("192.0.2.1:53")},
		"192.0.2.1:5353":                  {Addr: netip.MustParseAddrPort("192.0.2.1:5353")},
		"2001:db8::1":                     {Addr: netip.MustParseAddrPort("[2001:db8::1]:53")},
		"tls://192.0.2.1#dns.example":     {Addr: netip.MustParseAddrPort("192.0.2.1:853"), TLS: "dns.example"},
		"tls://192.0.2.1:443#dns.example": {Addr: netip.MustParseAddrPort("192.0.2.1:443"), TLS: "dns.example"},
		"tls://192.0.2.1":                 {}, // whose certificate?
		"tls://192.0.2.1#":                {},
		"tls://dns.example#dns.example":   {},
		"192.0.2.1#dns.example":           {},
		"":                                {},
	} {
		if got, ok := parseUpstream(s); ok != want.Addr.IsValid() || ok && got != want {
			t.Errorf("%q: %v, %v", s, got, ok)
		}
	}
}

// TestSlots: sandboxes have the addresses, and slots the rest.
func TestSlots(t *testing.T) {
	for _, c := range []struct {
		sandboxes, runsc, runc int
		want                   Prepared
	}{
		{1000, 32, 32, Prepared{32, 32}},
		{1936, 32, 32, Prepared{32, 32}},
		{1937, 32, 32, Prepared{32, 31}},
		{1990, 32, 4, Prepared{6, 4}},
		{1990, 0, 11, Prepared{0, 10}},
		{1999, 1, 1, Prepared{1, 0}},
		{2000, 32, 32, Prepared{}},
		{2000, 0, 0, Prepared{}},
	} {
		cfg, err := load(t, fmt.Sprintf("[limits]\nmax_sandboxes = %d\n[prepared]\nrunsc = %d\nrunc = %d", c.sandboxes, c.runsc, c.runc))
		if err != nil {
			t.Errorf("%+v: %v", c, err)
		} else if got := cfg.Slots(); got != c.want {
			t.Errorf("%+v: %+v", c, got)
		}
	}
}

// TestCertificates: each file once, and no key.
func TestCertificates(t *testing.T) {
	c := &Config{
		Listen: Listen{TLSCert: "/a", TLSKey: "/k"}, Gateway: Gateway{TLSCert: "/a", TLSKey: "/k"}, Network: Network{Roots: "/r"},
		Registries: []registry.Registry{{CA: "/c"}, {}, {CA: "/d"}, {CA: "/c"}}, Backup: Backup{CA: "/b"},
	}
	want := []validity.File{
		{Key: "listen.tls_cert", Path: "/a"},
		{Key: "gateway.tls_cert", Path: "/a"},
		{Key: "network.roots", Path: "/r", Trusted: true},
		{Key: "registries.ca", Path: "/c", Trusted: true},
		{Key: "registries.ca", Path: "/d", Trusted: true},
		{Key: "backup.ca", Path: "/b", Trusted: true},
	}
	if got := c.Certificates(); !slices.Equal(got, want) {
		t.Errorf("%+v", got)
	}
	if got := (&Config{}).Certificates(); len(got) > 0 {
		t.Errorf("without any: %+v", got)
	}
}

// TestCertificateKeys: each key whose name says that it is a file of certificates is in Certificates.
func TestCertificateKeys(t *testing.T) {
	c := &Config{}
	var keys []string
	var set func(key string, v reflect.Value)
	set = func(key string, v reflect.Value) {
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				if name := v.Type().Field(i).Tag.Get("toml"); name != "" && name != "-" {
					set(strings.TrimPrefix(key+"."+name, "."), v.Field(i))
				}
			}
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
			set(key, v.Index(0))
		case reflect.Map:
			set(key, reflect.New(v.Type().Elem()).Elem())
		case reflect.String:
			if strings.HasSuffix(key, "cert") || strings.HasSuffix(key, ".ca") || strings.HasSuffix(key, "roots") {
				keys = append(keys, key)
				v.SetString("/" + key)
			}
		}
	}
	set("", reflect.ValueOf(c).Elem())
	var got []string
	for _, f := range c.Certificates() {
		if f.Path != "/"+f.Key {
			t.Errorf("%s has the file of %s", f.Key, f.Path)
		}
		got = append(got, f.Key)
	}
	slices.Sort(keys)
	slices.Sort(got)
	if len(keys) < 5 || !slices.Equal(got, keys) {
		t.Errorf("Certificates has %q; the configuration has %q", got, keys)
	}
}

// TestBackup: the files that the table names are read, and no error has a secret.
func TestBackup(t *testing.T) {
	const public = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"
	dir := t.TempDir()
	key := filepath.Join(dir, "key")
	check := func(text string) error {
		p := filepath.Join(dir, "config.toml")
		if err := os.WriteFile(p, []byte("[backup]\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Check(p)
		return err
	}
	for name, c := range map[string]struct {
		text, key string
		want      string
	}{
		"a directory": {"target = '" + dir + "'\nencrypt = ['" + public + "']\ndrill = '0s'", "", ""},
		"a drill":     {"target = '" + dir + "'\nencrypt = ['" + public + "']", "", "name the private key in backup.identity"},
		"a bad one":   {"target = '" + dir + "'\nidentity = '" + key + "'", "AGE-SECRET-KEY-1hunter2", "no private key"},
		"credential":  {"target = '" + dir + "'\nencrypt = ['" + public + "']\nidentity = '" + Identity + "'", "", ""},
		"storage":     {"target = 's3:https://s.example.com/b/p'\ncredentials = '" + key + "'", "user:hunter2", ""},
		"encrypted": {
			"target = 's3:http://s.example.com/b'\nencrypt = ['" + public + "']\ndrill = '0s'\ncredentials = '" + key + "'", "u:hunter2",
			"",
		},
		"no key":    {"target = 's3:https://s.example.com/b'", "", "no credentials"},
		"a bad key": {"target = 's3:https://s.example.com/b'\ncredentials = '" + key + "'", "hunter2", "ACCESS_KEY:SECRET_KEY"},
		"a bad ca":  {"target = 's3:https://s.example.com/b'\ncredentials = '" + key + "'\nca = '" + key + "'", "u:hunter2", "PEM"},
	} {
		if err := os.WriteFile(key, []byte(c.key), 0o600); err != nil {
			t.Fatal(err)
		}
		err := check(c.text)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) ||
			err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
}
