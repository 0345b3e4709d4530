package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
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
		"[listen]\ntcp = 'localhost'\ninsecure = '" + Insecure + "'": "address:port",
		"[defaults]\nmemory = '-1'":                                  "whole number",
		"[defaults]\nmemory = '99999999Ti'":                          "whole number",
		"[defaults]\ncpu = 'NaN'":                                    "cores",
		"[defaults]\ncpu = '0'":                                      "cores",
		"[defaults]\npids = 0":                                       "pids > 0",
		"[limits]\nmax_sandboxes = 3000":                             "2000",
		"[limits]\nretain_ended = '-1s'":                             "duration",
		"[limits]\nretain_ended = '0s'":                              "at least 1s",
		"[storage]\npool = 'zfs'":                                    "zfs",
		"run_dir = '/srv/sb'\nstate_dir = '/srv/sb/state'":           "lie in each other",
		"state_dir = 'here'":                                         "absolute",
		"state_dir = '/usr/libexec/sandboxd/state'":                  "apart",
		"[network]\naddress_pool = '10.0.0.0/24'":                    "/20",
		"[network]\nupstreams = ['dns']":                             "upstreams",
		"[log]\nlevel = 'loud'":                                      "loud",
	} {
		_, err := load(t, text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want it to name %q", text, err, want)
		}
	}
}

func TestEveryProblemAtOnce(t *testing.T) {
	_, err := load(t, "[log]\nlevel = 'loud'\n[storage]\npool = 'zfs'")
	if err == nil || !strings.Contains(err.Error(), "loud") || !strings.Contains(err.Error(), "zfs") {
		t.Fatal(err)
	}
}

func TestUnknownKeyNamesLine(t *testing.T) {
	_, err := load(t, "\n\ncolour = 1\n")
	if err == nil || !strings.Contains(err.Error(), "3|") {
		t.Fatal(err)
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
