package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// sums and sumsSigned are the files that have the hashes of all packages in a directory, and the signature of that.
const sums, sumsSigned = "SHA256SUMS", "SHA256SUMS.asc"

// sign returns gpg's detached signature of data by the key of -sign. gpg has the key: it may be encrypted, or on a card.
func (b *build) sign(data io.Reader, options ...string) ([]byte, error) {
	args := []string{"--batch", "--yes", "--local-user", b.key, "--digest-algo", "SHA512"}
	if b.passphrase != "" {
		args = append(args, "--pinentry-mode", "loopback", "--passphrase-file", b.passphrase)
	}
	var said bytes.Buffer
	cmd := exec.Command("gpg", append(append(args, options...), "--detach-sign")...)
	cmd.Stdin, cmd.Stderr = data, &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("sign with the key %q: gpg: %w: %s; gpg --list-secret-keys lists the keys that are there", b.key, err,
			bytes.TrimSpace(said.Bytes()))
	}
	return out, nil
}

// signSums writes the hashes of all packages in the directory, as sha256sum does, and signs them: dpkg knows no
// signature in a .deb.
func (b *build) signSums() error {
	var names []string
	for _, f := range formats {
		found, err := filepath.Glob(filepath.Join(b.out, "*."+f.name))
		if err != nil {
			return err
		}
		names = append(names, found...)
	}
	var text strings.Builder
	for _, name := range names {
		sum, err := hash(name)
		if err != nil {
			return err
		}
		fmt.Fprintf(&text, "%x  %s\n", sum, filepath.Base(name))
	}
	signature, err := b.sign(strings.NewReader(text.String()), "--armor")
	if err != nil {
		return err
	}
	for name, data := range map[string][]byte{sums: []byte(text.String()), sumsSigned: signature} {
		if err := os.WriteFile(filepath.Join(b.out, name), data, 0o644); err != nil {
			return err
		}
	}
	fmt.Println(filepath.Join(b.out, sumsSigned))
	return nil
}

func hash(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return h.Sum(nil), nil
}
