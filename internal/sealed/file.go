package sealed

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/durable"
)

// A key file has a line for each key, the one that seals first:
//
//	a1b2c3d4e5f60718 000102…1e1f
//
// The first word is the key's ID, so that a digit that a disk or a person changed is not
// another key; it may be left out, as `openssl rand -hex 32` does. The second word is the
// key, 64 hex digits.
const (
	maxKeys = 32
	maxLine = 2*idSize + 1 + 2*keySize + 1
	maxFile = maxKeys * maxLine // 2.6 KiB are read at most
)

// Credential is the name of the key among the credentials of the service
// (LoadCredentialEncrypted=, systemd.exec(5)).
const Credential = "sandboxd.key"

// Open reads the key: the credential of the service if it has that one, else file. If
// neither is there, Open makes the file, with a new key, if mayMake says so: nothing that
// is kept was sealed with another one. Else it fails with fs.ErrNotExist. credentials is
// $CREDENTIALS_DIRECTORY; it may be empty. Open refuses a file that another user owns or
// can read, one that is no file, and one in which a line is no key; it changes none of
// these, and writes nothing if there is a file.
// Preconditions: root alone can rename the directory of file, and the directories above.
func Open(credentials, file string, mayMake bool) (*Key, error) {
	if credentials != "" {
		path := filepath.Join(credentials, Credential)
		text, err := read(path)
		if err == nil {
			k, err := parse(path, text)
			if err == nil {
				k.credential = true
			}
			return k, err
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	text, err := readOwn(file)
	if errors.Is(err, fs.ErrNotExist) {
		if !mayMake {
			return nil, fmt.Errorf("%w, the service has no credential %s, and the state has secrets, which their key alone opens: give "+
				"the service its credential again; or, if it has none, %s", err, Credential, lost)
		}
		text, err = makeFile(file)
	}
	if err != nil {
		return nil, err
	}
	return parse(file, text)
}

// makeFile makes a key file, unless another process was faster, and returns its text.
func makeFile(file string) (text []byte, err error) {
	err = alone(file, func() error {
		if text, err = read(file); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := write(file, nil); err != nil {
			return err
		}
		text, err = read(file)
		return err
	})
	return text, err
}

// Rotate puts a new key above those of the file, and removes what a killed Open or Rotate
// has left beside it. A daemon that starts after it seals with the new one and opens with
// all; the old lines can go when all is sealed anew (see Reseal). Rotate waits for another
// Rotate, and has the preconditions of Open.
func Rotate(file string) error {
	return alone(file, func() error {
		old, err := read(file)
		if err != nil {
			return err
		}
		defer clear(old)
		k, err := parse(file, bytes.Clone(old))
		if err != nil {
			return err
		}
		if len(k.ids) == maxKeys {
			return fmt.Errorf("rotate the key of %s: it has %d keys, the most there may be: seal everything anew, and remove its last "+
				"lines", file, maxKeys)
		}
		return write(file, old)
	})
}

// alone runs f while no other process is in alone for the same file, without what such
// a process left when it was killed. The lock is one of the directory (flock(2)), and
// ends with the process.
func alone(file string, f func() error) error {
	dir := filepath.Dir(file)
	d, err := openDir(file)
	if err != nil {
		return err
	}
	defer d.Close() //nolint:errcheck // only read; this gives the lock back
	for {
		err := unix.Flock(int(d.Fd()), unix.LOCK_EX)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock %s: %w", dir, err)
		}
	}
	if err := removeHalf(file); err != nil {
		return err
	}
	return f()
}

// openDir opens the directory of a key file, in which root and the daemon alone can put
// another file in the key file's place.
func openDir(file string) (d *os.File, err error) {
	dir := filepath.Dir(file)
	if d, err = os.Open(dir); err != nil {
		return nil, fmt.Errorf("open the directory of the key file: %w", err)
	}
	var st unix.Stat_t
	if err = unix.Fstat(int(d.Fd()), &st); err != nil {
		err = fmt.Errorf("look at directory %s: %w", dir, err)
	} else if st.Mode&0o022 != 0 || st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		err = fmt.Errorf("key file %s: others can replace it, as its directory belongs to user %d and has mode %04o: chown root:root %s "+
			"and chmod go-w %s", file, st.Uid, st.Mode&0o7777, dir, dir)
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// readOwn reads a key file in a directory that others cannot write to.
func readOwn(file string) ([]byte, error) {
	d, err := openDir(file)
	if err != nil {
		return nil, err
	}
	defer d.Close() //nolint:errcheck // only looked at
	return read(file)
}

// Text returns all keys of a key file, as they are written there. It fails as Open does, and changes nothing. The
// caller clears the text.
func Text(file string) ([]byte, error) {
	text, err := readOwn(file)
	if err != nil {
		return nil, err
	}
	if _, err := parse(file, bytes.Clone(text)); err != nil {
		clear(text)
		return nil, err
	}
	return text, nil
}

// removeHalf removes what durable.Write leaves when it does not come to its end.
func removeHalf(file string) error {
	if err := os.Remove(file + ".new"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove what is left of a key file that was being written: %w", err)
	}
	return nil
}

// write writes a file with a new key above the lines below.
// Preconditions: alone; others may have no file named like it.
func write(file string, below []byte) error {
	key := make([]byte, keySize)
	rand.Read(key) //nolint:errcheck // it never fails (crypto/rand)
	text := make([]byte, 0, maxLine+len(below))
	text = append(append(text, idOf(key)...), ' ')
	text = append(append(hex.AppendEncode(text, key), '\n'), below...)
	defer clear(key)
	defer clear(text)
	err := durable.Write(file, text, 0o600)
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		err = fmt.Errorf("%w: free some space there, and start sandboxd again", err)
	}
	return errors.Join(fmt.Errorf("write key file %s: %w", file, err), removeHalf(file))
}

// read reads all of a file that only its owner, who is root or the daemon's user, can
// read. It follows no symbolic link, and waits for no pipe. The caller clears the text.
func read(path string) (text []byte, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("key file %s is a symbolic link: put the file itself there", path)
	}
	if err != nil {
		return nil, fmt.Errorf("open key file: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("look at key file %s: %w", path, err)
	}
	if err := guarded(path, &st, os.Geteuid()); err != nil {
		return nil, err
	}
	text = make([]byte, maxFile+1) // read in one piece: no copy of it is left behind
	n, err := io.ReadFull(f, text)
	if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		clear(text)
		if err == nil {
			err = fmt.Errorf("it has more than %d bytes, which %d keys take", maxFile, maxKeys)
		}
		return nil, fmt.Errorf("read key file %s: %w", path, err)
	}
	return text[:n], nil
}

// guarded fails unless only root and the daemon, which has that user id, can read a file.
// Root may read any file, so it is the mode that counts, and not what can be opened.
func guarded(path string, st *unix.Stat_t, uid int) error {
	mode := st.Mode & 0o7777
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return fmt.Errorf("key file %s is no regular file: move it away", path)
	case st.Uid != 0 && int(st.Uid) != uid:
		return fmt.Errorf("key file %s belongs to user %d, who knows the key: if that is right, chown root:root %s, else make a new one",
			path, st.Uid, path)
	case mode&0o077 != 0:
		return fmt.Errorf("key file %s can be read by others, mode %04o: chmod 0600 %s, and consider its keys known to them", path, mode,
			path)
	}
	return nil
}

// parse makes a Key of the text of a file, which it clears. Errors quote nothing of it.
func parse(path string, text []byte) (*Key, error) {
	defer clear(text)
	all := make([]byte, 0, maxKeys*keySize)
	defer func() { clear(all) }()
	k := &Key{from: path}
	for n, line := range bytes.Split(text, []byte("\n")) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 {
			continue
		}
		id, digits, named := bytes.Cut(line, []byte(" "))
		if !named {
			digits = line
		}
		var key [keySize]byte
		defer clear(key[:])
		if len(digits) != 2*keySize {
			return nil, fmt.Errorf("key file %s, line %d: it has no key of %d hex digits: %s", path, n+1, 2*keySize, lost)
		}
		if _, err := hex.Decode(key[:], digits); err != nil { // the error quotes a digit
			return nil, fmt.Errorf("key file %s, line %d: its key has more than hex digits: %s", path, n+1, lost)
		}
		is := idOf(key[:])
		if named && is != string(id) {
			return nil, fmt.Errorf("key file %s, line %d: the key is not the one that the line begins with, but %s: %s", path, n+1, is,
				lost)
		}
		if slices.Contains(k.ids, is) {
			continue
		}
		if len(k.ids) == maxKeys {
			return nil, fmt.Errorf("key file %s has more than %d keys: remove the last lines", path, maxKeys)
		}
		k.ids, all = append(k.ids, is), append(all, key[:]...)
	}
	if len(k.ids) == 0 {
		return nil, fmt.Errorf("key file %s has no key: %s", path, lost)
	}
	var err error
	if k.keys, k.unlocked, err = newPage(all); err != nil {
		return nil, fmt.Errorf("key file %s: %w", path, err)
	}
	return k, nil
}

// lost is what to do about a file that does not have its key.
const lost = "put back a copy of the file; or, if there is none, put a new key there, as (umask 077; openssl rand -hex 32 >sandboxd.key) " +
	"makes one, and set again what was sealed with the old one"
