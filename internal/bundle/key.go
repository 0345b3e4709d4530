package bundle

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"aead.dev/minisign"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Key is a public key that may have signed a bundle.
type Key struct {
	From string // the file, or "the given text"
	key  minisign.PublicKey
}

// ID is the key's ID, as minisign prints it.
func (k Key) ID() string { return keyName(k.key.ID()) }

// keyName is a key's ID as minisign prints it.
func keyName(id uint64) string { return fmt.Sprintf("%016X", id) }

// ReadKey reads a public key: text is a file as `minisign -G` writes it, or the key itself, the
// last line of such a file.
func ReadKey(text string) (Key, error) {
	k := Key{From: "the given text"}
	if k.key.UnmarshalText([]byte(text)) == nil {
		return k, nil
	}
	k.From = text
	b, err := os.ReadFile(text)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return k, errs.New(errs.NotFound, "no public key %s: get it from whoever makes the bundles, or name another by --key", text)
	case err != nil:
		return k, fmt.Errorf("read the public key: %w", err)
	}
	if err := k.key.UnmarshalText(bytes.TrimSpace(b)); err != nil {
		return k, errs.New(errs.Invalid, "%s is no public key of minisign: name the file with two lines that minisign -G wrote, "+
			"or the second of them", text)
	}
	return k, nil
}

// ReadSecretKey reads a file that `minisign -G` wrote. If the key is encrypted, password is asked.
func ReadSecretKey(file string, password func() (string, error)) (key minisign.PrivateKey, err error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return key, fmt.Errorf("read the secret key: %w", err)
	}
	b = bytes.TrimSpace(b)
	if !minisign.IsEncrypted(b) {
		if err = key.UnmarshalText(b); err != nil {
			return key, errs.New(errs.Invalid, "%s is no secret key of minisign: make one with minisign -G", file)
		}
		return key, nil
	}
	word, err := password()
	if err != nil {
		return key, err
	}
	if key, err = minisign.DecryptKey(word, b); err != nil {
		return key, errs.New(errs.Denied, "the secret key %s cannot be decrypted: the password is wrong, or the file is damaged", file)
	}
	return key, nil
}

// untrusted is the first line of every signature. minisign does not sign it, so it says nothing,
// and a reader accepts no other.
const untrusted = "signature of a sandboxd bundle"

// sign returns the signature of what r has read.
func sign(r *minisign.Reader, key minisign.PrivateKey, comment string) []byte {
	return r.SignWithComments(key, comment, untrusted)
}

// signatureSize is how large sign's answer is.
func signatureSize(comment string) int64 {
	b, err := minisign.Signature{Algorithm: minisign.HashEdDSA, TrustedComment: comment, UntrustedComment: untrusted}.MarshalText()
	if err != nil {
		panic(err) // of an unknown algorithm only
	}
	return int64(len(b))
}

// trusted is the beginning of the comment that is signed beside the bundle. The name that its file
// was made with follows.
func trusted(m *Manifest) string {
	return fmt.Sprintf("sandboxd %s %s/%s ", m.Version, m.OS, m.Architecture)
}

// findKey reads a signature and returns the key that may have made it. One signature has one
// form here: minisign ignores differences that no signature protects.
func findKey(text []byte, keys []Key) (k Key, comment string, err error) {
	var s minisign.Signature
	damaged := errs.New(errs.Invalid, "its signature was changed: copy it again, or get another")
	if s.UnmarshalText(text) != nil || s.Algorithm != minisign.HashEdDSA || s.UntrustedComment != untrusted {
		return k, "", damaged
	}
	if again, err := s.MarshalText(); err != nil || !bytes.Equal(again, text) {
		return k, "", damaged
	}
	var have []string
	for _, k := range keys {
		if k.key.ID() == s.KeyID {
			return k, s.TrustedComment, nil
		}
		have = append(have, k.ID()+" ("+k.From+")")
	}
	return k, "", errs.New(errs.Denied, "it was signed with the key %s, and trusted here is %s: name its public key by --key, "+
		"if you know who signed it", keyName(s.KeyID), strings.Join(have, ", "))
}
