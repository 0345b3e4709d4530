package backup

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"filippo.io/age"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// Recipients are the keys that an encrypted backup is for (age-encryption.org/v1). Each of them
// opens it alone.
type Recipients []age.Recipient

// ParseRecipients reads public keys of age, such as age1…; nil if there are none.
func ParseRecipients(keys []string) (to Recipients, err error) {
	for _, k := range keys {
		r, err := age.ParseRecipients(strings.NewReader(k))
		if err != nil || len(r) != 1 || strings.ContainsAny(k, "\n#") {
			return nil, fmt.Errorf("%q is no public key of age, age1…: `age-keygen -y FILE` prints it", k)
		}
		to = append(to, r[0])
	}
	return to, nil
}

// Encrypt writes what is read from r to w, encrypted. Without recipients it changes nothing.
func (to Recipients) Encrypt(w io.Writer, r io.Reader) error {
	if len(to) == 0 {
		_, err := io.Copy(w, r)
		return err
	}
	e, err := age.Encrypt(w, to...)
	if err == nil {
		_, err = io.Copy(e, r)
		err = errors.Join(err, e.Close())
	}
	if err != nil {
		return fmt.Errorf("encrypt the backup: %w", err)
	}
	return nil
}

// Identities are private keys that open encrypted backups.
type Identities []age.Identity

// ReadIdentities reads a file of `age-keygen`, which only its owner may read.
func ReadIdentities(file string) (Identities, error) {
	text, err := target.Secret(file)
	if err != nil {
		return nil, fmt.Errorf("read the identity: %w", err)
	}
	defer clear(text)
	ids, err := age.ParseIdentities(strings.NewReader(string(text)))
	if err != nil {
		// Not %w: the cause may have the line that it could not read.
		return nil, fmt.Errorf("read the identity: %s has no private key of age, AGE-SECRET-KEY-1…, or a line that is none", file)
	}
	return ids, nil
}

// ErrEncrypted says that a backup is encrypted, and that none of the identities opens it.
var ErrEncrypted = errors.New("it is encrypted")

// sealedMark is how each file of age begins.
const sealedMark = "age-encryption.org/"

// Open returns the content of a backup that may be encrypted.
func (ids Identities) Open(r io.Reader) (io.Reader, error) {
	b := bufio.NewReader(r)
	if head, err := b.Peek(len(sealedMark)); err != nil || string(head) != sealedMark {
		return b, nil //nolint:nilerr // Read says what it is
	}
	if len(ids) == 0 {
		return nil, fmt.Errorf("%w: it takes the private key of one of its recipients, which is not on this host unless you have put it "+
			"there", ErrEncrypted)
	}
	content, err := age.Decrypt(b, ids...)
	if none, ok := errors.AsType[*age.NoIdentityMatchError](err); ok {
		return nil, fmt.Errorf("%w: none of the private keys opens it (%w)", ErrEncrypted, none)
	}
	return content, err
}

// Place is what a backup must be of, to be restored.
type Place struct{ Instance, AddressPool string }

// Unpack writes the store of a backup to path, synced, and reads all of it. It refuses a backup of
// another instance. After an error path may hold a part.
func Unpack(r io.Reader, ids Identities, path string, here Place) (m Manifest, err error) {
	if r, err = ids.Open(r); err != nil {
		return m, fmt.Errorf("read backup: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return m, err
	}
	m, err = Read(r, f)
	if err == nil {
		// To the end of what is encrypted or compared: only there a change shows.
		_, err = io.Copy(io.Discard, io.LimitReader(r, maxManifest))
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return m, err
	}
	if m.Instance != here.Instance {
		return m, fmt.Errorf("the backup is of instance %q, and this is instance %q: use --config with the configuration of the backup's "+
			"instance", m.Instance, here.Instance)
	}
	if m.AddressPool != here.AddressPool {
		return m, fmt.Errorf("the backup's sandboxes have addresses of %s, and network.address_pool is %s: set it to that of the backup",
			m.AddressPool, here.AddressPool)
	}
	m.State, err = store.Examine(path)
	return m, err
}
