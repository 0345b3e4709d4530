package terminate

import (
	"bytes"
	"crypto/sha256"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Where hosts keep the certificates that servers are verified by, as crypto/x509 looks for them
// (root_linux.go): the first file that there is, and all that the directories have.
var (
	rootFiles = []string{
		"/etc/ssl/certs/ca-certificates.crt",                // Debian, Ubuntu, Arch
		"/etc/pki/tls/certs/ca-bundle.crt",                  // Fedora, RHEL 6
		"/etc/ssl/ca-bundle.pem",                            // SUSE
		"/etc/pki/tls/cacert.pem",                           // OpenELEC
		"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // RHEL 7 and later
		"/etc/ssl/cert.pem",                                 // Alpine
	}
	rootDirs = []string{"/etc/ssl/certs", "/etc/pki/tls/certs"}
)

// maxRoots is how many bytes of roots a child gets. Those of Debian 12 are 220 KiB.
const maxRoots = 4 << 20

// HostRoots are the certificates in PEM that this host verifies servers by. As for crypto/x509,
// SSL_CERT_FILE and SSL_CERT_DIR in the environment are in the place of the usual ones.
func HostRoots() ([]byte, error) {
	files, dirs := rootFiles, rootDirs
	if f := os.Getenv("SSL_CERT_FILE"); f != "" {
		files = []string{f}
	}
	if d := os.Getenv("SSL_CERT_DIR"); d != "" {
		dirs = strings.Split(d, ":")
	}
	r := roots{seen: map[[sha256.Size]byte]bool{}}
	for _, f := range files {
		if r.read(f) {
			break
		}
	}
	for _, d := range dirs {
		names, err := os.ReadDir(d)
		if err != nil {
			continue
		}
		for _, n := range names {
			r.read(filepath.Join(d, n.Name()))
		}
	}
	switch {
	case r.size > maxRoots:
		return nil, fmt.Errorf("the certificates of this host are %d bytes; %d are allowed: look for files in %s that do not belong there",
			r.size, maxRoots, strings.Join(dirs, " and "))
	case len(r.pem) == 0:
		return nil, errors.Join(fmt.Errorf("no certificate of an authority is on this host, so no server could be verified: install the "+
			"package ca-certificates, which makes one of %s", strings.Join(files, ", ")), r.err)
	}
	return r.pem, nil
}

// roots are certificates, each once.
type roots struct {
	seen map[[sha256.Size]byte]bool
	pem  []byte
	size int // also of what is too much
	err  error
}

// read adds the certificates of a file, and reports whether it could be read.
func (r *roots) read(path string) bool {
	if r.size > maxRoots {
		return false
	}
	b, err := readSome(path)
	if err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			r.err = errors.Join(r.err, err)
		}
		return false
	}
	for block, rest := pem.Decode(b); block != nil; block, rest = pem.Decode(rest) {
		sum := sha256.Sum256(block.Bytes)
		if block.Type != "CERTIFICATE" || r.seen[sum] {
			continue
		}
		r.seen[sum] = true
		one := pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes})
		if r.size += len(one); r.size > maxRoots {
			return true
		}
		r.pem = append(r.pem, one...)
	}
	return true
}

// readSome reads a file that is not longer than the certificates may be.
func readSome(path string) ([]byte, error) {
	info, err := os.Stat(path) // a device, or a FIFO, would not end
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a file", path)
	}
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var b bytes.Buffer
	if _, err = io.Copy(&b, io.LimitReader(f, maxRoots+1)); err == nil && b.Len() > maxRoots {
		err = fmt.Errorf("%s has more than %d bytes", path, maxRoots)
	}
	return b.Bytes(), err
}
