package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/validity"
)

// checkFiles reads the files that the configuration names, except those of registries,
// which validate reads.
func (c *Config) checkFiles(bad func(format string, args ...any)) {
	there := func(key, path string) bool {
		_, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			bad("%s = %q: there is no such file", key, path)
		} else if err != nil {
			bad("%s = %q: %w", key, path, err)
		}
		return err == nil
	}
	if path := c.Listen.APIKeyFile; path != "" && there("listen.api_key_file", path) {
		if _, err := c.APIKeys(); err != nil {
			bad("listen.api_key_file: %w", err)
		}
	}
	pair := func(table, cert, key string) {
		if cert == "" || key == "" {
			return
		}
		hasCert, hasKey := there(table+".tls_cert", cert), there(table+".tls_key", key)
		if hasCert && hasKey {
			if _, err := tls.LoadX509KeyPair(cert, key); err != nil {
				bad("%s.tls_cert: %s and %s cannot be used: %w", table, cert, key, err)
			}
		}
	}
	pair("listen", c.Listen.TLSCert, c.Listen.TLSKey)
	pair("gateway", c.Gateway.TLSCert, c.Gateway.TLSKey)
	for _, dir := range c.Storage.AllowedHostPaths {
		there("storage.allowed_host_paths", dir)
	}
	c.checkBackup(there, bad)
	if path := c.Network.Roots; path != "" && there("network.roots", path) {
		if _, err := c.Network.ReadRoots(); err != nil {
			bad("network.roots: %w", err)
		}
	}
}

// Certificates are the files of certificates that the configuration names.
func (c *Config) Certificates() (all []validity.File) {
	add := func(key, path string, trusted bool) {
		if path != "" {
			all = append(all, validity.File{Key: key, Path: path, Trusted: trusted})
		}
	}
	add("listen.tls_cert", c.Listen.TLSCert, false)
	add("gateway.tls_cert", c.Gateway.TLSCert, false)
	add("network.roots", c.Network.Roots, true)
	for i := range c.Registries {
		if f := (validity.File{Key: "registries.ca", Path: c.Registries[i].CA, Trusted: true}); !slices.Contains(all, f) {
			add(f.Key, f.Path, f.Trusted)
		}
	}
	add("backup.ca", c.Backup.CA, true)
	return all
}

// ReadRoots reads the certificates of network.roots, in PEM; nil if no file is named.
func (n *Network) ReadRoots() ([]byte, error) {
	if n.Roots == "" {
		return nil, nil
	}
	b, err := os.ReadFile(n.Roots)
	if err != nil {
		return nil, fmt.Errorf("read the certificates of servers: %w", err)
	}
	if !x509.NewCertPool().AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("%s has no certificate in PEM", n.Roots)
	}
	return b, nil
}

// APIKeys reads the API keys, one per line; none if no file is named.
func (c *Config) APIKeys() ([]string, error) {
	if c.Listen.APIKeyFile == "" {
		return nil, nil
	}
	fi, err := os.Stat(c.Listen.APIKeyFile)
	if err != nil {
		return nil, fmt.Errorf("read API keys: %w", err)
	}
	if fi.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("read API keys: %s may be read by others (mode %04o): chmod 600 it", c.Listen.APIKeyFile, fi.Mode().Perm())
	}
	b, err := os.ReadFile(c.Listen.APIKeyFile)
	if err != nil {
		return nil, fmt.Errorf("read API keys: %w", err)
	}
	keys := strings.Fields(string(b))
	if len(keys) == 0 {
		return nil, fmt.Errorf("read API keys: %s is empty", c.Listen.APIKeyFile)
	}
	return keys, nil
}
