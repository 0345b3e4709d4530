package terminate

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
)

// Kinds of messages, beside those of package heads.
const (
	KindConfigure = 16 // to the child, by Config.Send
	KindLeaf      = 17 // from the child: a name; the answer is a Leaf
	KindNote      = 18 // from the child: a Note
	KindValue     = 19 // from the child: the name of a credential; the answer is a Value
	KindEvent     = 20 // from the child: an Event
)

// MaxBody is the longest message that a child sends: an Event, or one of package heads.
const MaxBody = 1 << 10

// maxToChild is the longest message that a child takes: a Value. A Leaf with a chain of some
// certificates is shorter.
const maxToChild = 1 + MaxValue

// maxConfig is the longest Config. The roots of a host are about 250 KiB, and the vault of a
// sandbox 1 MiB at most.
const maxConfig = 8 << 20

var errForm = errors.New("a message of a wrong form")

// A Config is what a child must know before it gets a flow. One that comes later replaces it
// for new flows, and its Judge for new requests too.
type Config struct {
	Roots []byte // certificates that servers are verified by, in PEM
	Judge []byte // for the JudgeMaker
}

// Send configures a child, and waits until it says so. If it fails, the child goes on with
// what it had.
func (c Config) Send(ctx context.Context, line *child.Conn) error {
	b := c.append(nil)
	if len(b) > maxConfig {
		return fmt.Errorf("configure the child %s: %d bytes are more than the %d that it takes", Verb, len(b), maxConfig)
	}
	f, err := inMemory(b)
	if err != nil {
		return fmt.Errorf("configure the child %s: %w", Verb, err)
	}
	defer f.Close()
	m, err := line.Call(ctx, KindConfigure, nil, f)
	if err == nil && len(m.Body) > 0 {
		err = errors.New(plain(string(m.Body), MaxBody))
	}
	if err != nil {
		return fmt.Errorf("configure the child %s: %w", Verb, err)
	}
	return nil
}

// inMemory is a file on no disk: the values of credentials are in it, and a message of a
// socket would be too short for it.
func inMemory(b []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("configuration", unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("configuration", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "configuration")
	if _, err := f.Write(b); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (c Config) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(c.Roots)))
	return append(append(b, c.Roots...), c.Judge...)
}

// readConfig reads what Send has put into a file.
func readConfig(f io.ReaderAt) (c Config, err error) {
	b, err := io.ReadAll(io.NewSectionReader(f, 0, maxConfig+1))
	if err != nil {
		return c, fmt.Errorf("read the configuration: %w", err)
	}
	if len(b) < 4 || len(b) > maxConfig || uint64(len(b)-4) < uint64(binary.LittleEndian.Uint32(b)) {
		return c, errForm
	}
	n := 4 + int(binary.LittleEndian.Uint32(b))
	return Config{b[4:n], b[n:]}, nil
}

// ParseLeafRequest reads the name of which a child asks the Leaf. A child may have written
// anything, and any number of them: whether the name is marked is for the caller, and that one
// Leaf is made for a child at a time.
func ParseLeafRequest(b []byte) (name string, err error) {
	if len(b) == 0 || heads.PlainName(string(b)) != string(b) {
		return "", errForm
	}
	return string(b), nil
}

// A Leaf is a certificate for a name, as pkg/egress/authority makes it.
type Leaf struct {
	Chain [][]byte // in DER, the leaf first; none: there is no Leaf
	Key   []byte   // PKCS #8 in DER
	Text  string   // why there is no Leaf
}

// Append writes l as the body of a message.
func (l Leaf) Append(b []byte) []byte {
	b = append(b, byte(len(l.Chain)))
	for _, der := range append(l.Chain[:len(l.Chain):len(l.Chain)], l.Key) {
		b = append(binary.LittleEndian.AppendUint16(b, uint16(len(der))), der...)
	}
	return append(b, l.Text...)
}

// ParseLeaf reads what Append has written.
func ParseLeaf(b []byte) (l Leaf, err error) {
	if len(b) < 1 {
		return l, errForm
	}
	n := int(b[0])
	b = b[1:]
	for i := range n + 1 {
		if len(b) < 2 || len(b)-2 < int(binary.LittleEndian.Uint16(b)) {
			return Leaf{}, errForm
		}
		end := 2 + int(binary.LittleEndian.Uint16(b))
		if i < n {
			l.Chain = append(l.Chain, b[2:end])
		} else {
			l.Key = b[2:end]
		}
		b = b[end:]
	}
	l.Text = string(b)
	return l, nil
}

// A NoteKind says what went wrong.
type NoteKind uint8

// The kinds of notes.
const (
	GuestRefuses     NoteKind = iota + 1 // the guest does not trust the sandbox's authority
	GuestHandshake                       // another failure of TLS with the guest
	GuestLeft                            // the guest ended the connection when it had the certificate, and sent no request
	ServerUnverified                     // the certificate of the server does not verify
	ServerWants                          // the server wants a certificate of its client
	noteKinds
)

// A Note tells of a connection that failed because it is decrypted. A child sends as many as
// its Notes let pass. One that a guest has taken over sends what it likes, so the daemon has
// Notes of its own for each child.
type Note struct {
	Kind NoteKind
	Name string // in normal form
	Text string // printable, at most maxNote bytes
}

const maxNote = 240

// Append writes n as the body of a message.
func (n Note) Append(b []byte) []byte {
	b = append(b, byte(n.Kind), byte(len(n.Name)))
	return append(append(b, n.Name...), n.Text...)
}

// ParseNote reads what Append has written. A child may have written anything.
func ParseNote(b []byte) (n Note, err error) {
	if len(b) < 2 || len(b)-2 < int(b[1]) {
		return n, errForm
	}
	end := 2 + int(b[1])
	n = Note{NoteKind(b[0]), string(b[2:end]), string(b[end:])}
	if n.Kind == 0 || n.Kind >= noteKinds || n.Name == "" || heads.PlainName(n.Name) != n.Name || plain(n.Text, maxNote) != n.Text {
		return Note{}, errForm
	}
	return n, nil
}

// plain is s without what a terminal or a log would not print, and at most max bytes long.
// Texts of errors have words of certificates in them.
func plain(s string, max int) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if len(s) <= max {
		return s
	}
	for max > 0 && !utf8.RuneStart(s[max]) {
		max--
	}
	return s[:max]
}
