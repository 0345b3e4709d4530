package bundle

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"path/filepath"
	"testing"

	"aead.dev/minisign"
	"golang.org/x/crypto/blake2b"
	"golang.org/x/crypto/scrypt"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// encrypted is a file with a secret key, as `minisign -G` writes it but for the cost of scrypt: the
// library encrypts with 1 GiB, and takes more than ten seconds each time.
func encrypted(t *testing.T, key minisign.PrivateKey, password string) string {
	t.Helper()
	plain, err := key.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := bytes.Cut(plain, []byte("\n"))
	b := decode(t, string(line))
	copy(b[2:], "Sc")
	binary.LittleEndian.PutUint64(b[38:], 1<<15) // operations
	binary.LittleEndian.PutUint64(b[46:], 1<<20) // bytes; both make N = 1024, r = 8, p = 1
	sum := blake2b.Sum256(append([]byte("Ed"), b[54:126]...))
	copy(b[126:], sum[:])
	stream, err := scrypt.Key([]byte(password), b[6:38], 1024, 8, 1, 104)
	if err != nil {
		t.Fatal(err)
	}
	for i, k := range stream {
		b[54+i] ^= k
	}
	return "untrusted comment: minisign encrypted secret key\n" + base64.StdEncoding.EncodeToString(b) + "\n"
}

// TestSecretKey: a key that is encrypted needs its password, and another one does not ask.
func TestSecretKey(t *testing.T) {
	by := newSigner(t)
	file := put(t, filepath.Join(t.TempDir(), "key"), encrypted(t, by.secret, "word"), 0o600)
	key, err := ReadSecretKey(file, func() (string, error) { return "word", nil })
	if err != nil || !key.Equal(by.secret) {
		t.Error(err)
	}
	_, err = ReadSecretKey(file, func() (string, error) { return "another", nil })
	refused(t, err, errs.Denied, file, "password is wrong")
	nobody := errors.New("nobody to ask")
	never := func() (string, error) { return "", nobody }
	if _, err := ReadSecretKey(file, never); err != nobody {
		t.Errorf("without a password: %v", err)
	}
	plain, err := by.secret.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	if key, err := ReadSecretKey(put(t, file, string(plain), 0o600), never); err != nil || !key.Equal(by.secret) {
		t.Error(err)
	}
	_, err = ReadSecretKey(put(t, file, by.public.key.String(), 0o600), never)
	refused(t, err, errs.Invalid, file, "minisign -G")
}
