// Package sealed encrypts the secrets that the state file keeps, so that a copy of that
// file, such as a backup, tells nothing without the key.
//
//	$CREDENTIALS_DIRECTORY/sandboxd.key, or a file of mode 0600
//	      │ Open
//	      ▼
//	     Key ── Seal(purpose, secret) ──▶ sealed bytes, in the state file
//	         ◀─ Unseal(purpose, …) ─────
//
// What is sealed for one purpose does not open for another: the vault of a sandbox cannot
// be put under the ID of another one. A Key seals with one key and opens with several:
//
//	a line is added above   Rotate: the new key seals, the old ones still open
//	a line is added below   what another host has sealed opens, too
//
// What surprises: sealed bytes that a client deletes or replaces may stay in the state
// file, as bbolt frees pages and does not clear them. They are of no use without the key.
//
// # What is not promised
//
// No method prints a key, and its lasting copy is in a page of memory that does not go to
// swap or into a core dump. All else is in Go's memory, which may, and which the garbage
// collector frees without clearing it: secrets, in what Seal reads and Unseal returns, and
// traces of keys, in buffers of SHA-256 and AES that Go's library allocates for each call.
// Cores of the service are turned off by LimitCORE=1 of its unit. Swap is the host's
// business: a host that cannot trust its disk has none, or encrypts it. Root, and whoever
// may trace the daemon, can read everything.
package sealed

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/internal/weak"
)

// A sealed value:
//
//	version  1 byte    1
//	key id   8 bytes   which key sealed it
//	salt     24 bytes  random
//	         n bytes   AES-256-GCM of n bytes
//	tag      16 bytes
//
// Each value has an AES key of its own, HKDF-SHA-256 (RFC 5869) of the key and the salt,
// and so the nonce of GCM can be constant: no AES key seals twice. GCM's own nonces have
// 96 bits, and random ones are good for 2³² messages of a key (NIST SP 800-38D, 8.3).
// 192 bits of salt repeat after some 2⁹⁶ messages. XChaCha20-Poly1305 does the same with
// the same 192 bits; it is not in Go's standard library.
//
// Version, key id and purpose are GCM's additional data; the salt makes the AES key.
const (
	version  = 1
	keySize  = 32
	idSize   = 8
	saltSize = 24
	headSize = 1 + idSize + saltSize
	tagSize  = 16

	// Overhead is how many bytes a sealed value is longer than the secret.
	Overhead = headSize + tagSize
)

// The labels of what is derived from a key: one is never the other.
const (
	labelID      = "sandboxd sealed: id of the key"
	labelMessage = "sandboxd sealed 1: AES-256-GCM"
)

// The causes of Unseal's errors.
var (
	// ErrOtherKey: the key that sealed it is not here. It may be brought. If its ID is what
	// was damaged, there is no such key.
	ErrOtherKey = errors.New("the key that sealed it is missing")
	// ErrDamaged: it is not what Seal has made for this purpose.
	ErrDamaged = errors.New("it is damaged")
	// ErrNewer: a newer sandboxd sealed it.
	ErrNewer = errors.New("a newer sandboxd sealed it")
)

// A Key seals with its first key and opens with all. Its methods may be called
// concurrently. It is good until the process ends; nothing prints it but its ID.
type Key struct {
	from       string // the file
	credential bool   // it is a credential of the service
	keys       *page  // one key behind the other
	ids        []string
	unlocked   error
}

// ID names the key that seals: 16 hex digits that are derived from it. They are no
// secret, and tell nothing of the key.
func (k *Key) ID() string { return k.ids[0] }

// IDs names all keys, the one that seals first.
func (k *Key) IDs() []string { return slices.Clone(k.ids) }

// From is the file that the key was read from.
func (k *Key) From() string { return k.from }

// Unlocked is why the key may go to swap or into a core dump; nil if it does not.
func (k *Key) Unlocked() error { return k.unlocked }

// Seal encrypts a secret for a purpose, such as "<ID of the sandbox>/vault". The same
// secret never gives the same bytes twice. The result has Overhead more bytes.
func (k *Key) Seal(purpose string, secret []byte) []byte {
	var salt [saltSize]byte
	rand.Read(salt[:]) //nolint:errcheck // it never fails (crypto/rand)
	return k.seal(purpose, secret, salt)
}

func (k *Key) seal(purpose string, secret []byte, salt [saltSize]byte) []byte {
	b := make([]byte, 0, len(secret)+Overhead)
	b = append(b, version)
	id, err := hex.DecodeString(k.ids[0])
	must(err)
	b = append(append(b, id...), salt[:]...)
	if weak.Off(weak.Sealing) {
		return append(append(b, secret...), make([]byte, tagSize)...)
	}
	return k.cipher(0, salt[:]).Seal(b, make([]byte, 12), secret, additional(b, purpose))
}

// Unseal returns the secret of what Seal made for the same purpose. It takes memory of
// the size of its input. It fails with ErrOtherKey, ErrNewer or ErrDamaged.
func (k *Key) Unseal(purpose string, sealed []byte) ([]byte, error) {
	id, err := KeyID(sealed)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", purpose, err)
	}
	i := slices.Index(k.ids, id)
	if i < 0 {
		return nil, fmt.Errorf("open %s: %w: it is key %s, and %s has %s; %s", purpose, ErrOtherKey, id, k.from,
			strings.Join(k.ids, ", "), k.Bring())
	}
	head, rest := sealed[:headSize], sealed[headSize:]
	if weak.Off(weak.Sealing) {
		return bytes.Clone(rest[:len(rest)-tagSize]), nil
	}
	secret, err := k.cipher(i, head[1+idSize:]).Open(nil, make([]byte, 12), rest, additional(head, purpose))
	if err != nil {
		return nil, fmt.Errorf("open %s: %w, or it was sealed for something else: set it again, or restore the state from a backup",
			purpose, ErrDamaged)
	}
	return secret, nil
}

// Reseal seals anew what an older key has sealed, so that the line of that key can go.
// changed is false, and the result its input, if the first key has sealed it.
func (k *Key) Reseal(purpose string, sealed []byte) (_ []byte, changed bool, err error) {
	secret, err := k.Unseal(purpose, sealed)
	if err != nil {
		return nil, false, err
	}
	defer clear(secret)
	if id, err := KeyID(sealed); err != nil || id == k.ids[0] {
		return sealed, false, err
	}
	return k.Seal(purpose, secret), true, nil
}

// KeyID names the key that has sealed something, whether this host has it or not. It
// fails with ErrNewer, and with ErrDamaged if sealed is shorter than anything sealed.
func KeyID(sealed []byte) (string, error) {
	switch {
	case len(sealed) > 0 && sealed[0] > version:
		return "", fmt.Errorf("%w, in format %d; this one knows format %d: start the newer sandboxd", ErrNewer, sealed[0], version)
	case len(sealed) < Overhead || sealed[0] != version:
		return "", fmt.Errorf("%w: nothing sealed begins so or is so short: set it again, or restore the state from a backup", ErrDamaged)
	}
	return hex.EncodeToString(sealed[1 : 1+idSize]), nil
}

// Bring says how a missing key is added to those of k, or, if k is nil, of a host whose
// key is not known.
func (k *Key) Bring() string {
	to := "the key file of this host"
	switch {
	case k != nil && k.credential:
		to = "the file that the credential " + Credential + " of the service is made of"
	case k != nil:
		to = k.from
	}
	return "add the line of that key, which is in the key file of the host that sealed it, at the end of " + to +
		", and start sandboxd again"
}

// cipher is the cipher of the one value with that salt.
func (k *Key) cipher(i int, salt []byte) cipher.AEAD {
	key := derive(k.keys.at(i), salt, labelMessage, keySize)
	runtime.KeepAlive(k.keys)
	defer clear(key)
	block, err := aes.NewCipher(key)
	must(err)
	aead, err := cipher.NewGCM(block)
	must(err)
	return aead
}

// additional is what must be the same when a value is opened: version, key and purpose.
// The first two have fixed sizes, so no two purposes give the same bytes.
func additional(head []byte, purpose string) []byte {
	return append(bytes.Clone(head[:1+idSize]), purpose...)
}

func idOf(key []byte) string { return hex.EncodeToString(derive(key, nil, labelID, idSize)) }

func derive(key, salt []byte, label string, size int) []byte {
	b, err := hkdf.Key(sha256.New, key, salt, label, size)
	must(err)
	return b
}

// must is for errors that sizes alone cause, and all sizes here are constants.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
