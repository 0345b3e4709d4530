package server

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// Files of a guest that say which machine it is, relative to its root.
var machineIDs = []string{"etc/machine-id", "var/lib/dbus/machine-id"}

const (
	hostKeys   = "etc/ssh/ssh_host_*_key"
	draftName  = ".sandboxd-new"
	keygenTime = 5 * time.Minute // RSA, on a busy host
)

// keygens are where images have ssh-keygen. It runs as root of the guest, so the PATH of the
// sandbox, which other users may fill, does not count.
var keygens = []string{"usr/bin/ssh-keygen", "usr/local/bin/ssh-keygen", "bin/ssh-keygen"}

// copied is what makes a copy another machine than the one that it is a copy of. The zero
// value changes nothing.
type copied struct {
	root   *os.Root // nil: nothing is to be changed
	drafts []string // names of files that stand beside these as drafts
	keys   []string // private host keys
	keygen string   // ""; there is none, and keys stay
}

// draftIdentity writes files beside their names. Where an image's files cannot be written, they
// are the image's and not the copy's: they stay.
func (s *Server) draftIdentity(c *agent.Copy) (d copied, err error) {
	if d.root, err = os.OpenRoot(s.root); err != nil {
		return d, fmt.Errorf("give the copy its own identity: %w", err)
	}
	for _, name := range machineIDs {
		fi, err := d.root.Lstat(name)
		if err != nil || !fi.Mode().IsRegular() {
			continue
		}
		if err := d.draft(name, strings.ToLower(c.MachineID)+"\n", fi); err != nil && !errors.Is(err, unix.EROFS) {
			d.discard()
			return d, fmt.Errorf("give the copy its own machine id: %w", err)
		}
	}
	generation := strings.TrimPrefix(agent.GenerationFile, "/")
	if err = d.root.MkdirAll(path.Dir(generation), 0o755); err == nil {
		err = d.draft(generation, c.Generation+"\n", nil)
	}
	if err != nil {
		d.discard()
		return d, fmt.Errorf("give the copy its own generation: %w", err)
	}
	d.findKeys(s.root)
	return d, nil
}

// draft writes text beside name, with owner and mode of what is there.
func (d *copied) draft(name, text string, like fs.FileInfo) error {
	beside := name + draftName
	d.root.RemoveAll(beside) //nolint:errcheck // creating fails then
	f, err := d.root.OpenFile(beside, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	d.drafts = append(d.drafts, name)
	mode := fs.FileMode(0o644)
	if like != nil {
		mode = like.Mode().Perm()
		if st, ok := like.Sys().(*syscall.Stat_t); ok {
			err = f.Chown(int(st.Uid), int(st.Gid))
		}
	}
	_, writeErr := f.WriteString(text)
	return errors.Join(err, writeErr, f.Chmod(mode), f.Close())
}

// findKeys finds the host keys and the program that makes others.
func (d *copied) findKeys(root string) {
	for _, name := range keygens {
		if fi, err := d.root.Stat(name); err == nil && fi.Mode().IsRegular() {
			d.keygen = filepath.Join(root, name)
			break
		}
	}
	names, _ := fs.Glob(d.root.FS(), hostKeys) // the pattern is ours
	for _, name := range names {
		if fi, err := d.root.Lstat(name); err == nil && fi.Mode().IsRegular() && d.keygen != "" {
			d.keys = append(d.keys, name)
		}
	}
}

// commit puts the drafts in place and removes the host keys.
func (d *copied) commit() error {
	if d.root == nil {
		return nil
	}
	for len(d.drafts) > 0 {
		name := d.drafts[0]
		if err := d.root.Rename(name+draftName, name); err != nil {
			return err
		}
		d.drafts = d.drafts[1:]
	}
	for _, key := range d.keys {
		for _, name := range []string{key, key + ".pub"} {
			if err := d.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EROFS) {
				return err
			}
		}
	}
	return nil
}

// discard removes drafts that are not in place.
func (d *copied) discard() {
	if d.root == nil {
		return
	}
	for _, name := range d.drafts {
		d.root.Remove(name + draftName) //nolint:errcheck // what stays is in nobody's way
	}
	d.root.Close()
}

// makeKeys makes host keys in place of those that commit has removed. RSA takes seconds on a slow
// host, so nobody waits for it.
func (d *copied) makeKeys(root string, null *os.File) {
	for _, name := range d.keys {
		kind := strings.TrimSuffix(strings.TrimPrefix(path.Base(name), "ssh_host_"), "_key")
		out := null.Fd()
		p, err := proc.Start(proc.Spec{
			Path: d.keygen, Argv: []string{"ssh-keygen", "-q", "-t", kind, "-N", "", "-f", filepath.Join(root, name)},
			Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}, Dir: "/", Files: [3]uintptr{out, out, out},
		})
		if err != nil {
			continue // a guest at its limit of processes: without a key, no sshd can be mistaken for the first one
		}
		late := time.AfterFunc(keygenTime, p.KillTree)
		<-p.Done()
		late.Stop()
	}
}

// diverge has everything draw random numbers that no other copy has.
func (s *Server) diverge(c *agent.Copy, identity *copied) {
	stir(c.Seed)
	s.code.contexts.Reseed(c.Seed)
	identity.root.Close()
	if len(identity.keys) > 0 {
		go proc.Guarded(func() { identity.makeKeys(s.root, s.devNull) })
	}
}

// stir writes a seed into the kernel's pool (random(4)). gVisor throws it away: its getrandom(2) and
// its devices read the host's, which no copy shares.
func stir(seed []byte) {
	fd, err := unix.Open("/dev/urandom", unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return // it adds to what the kernel has
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR {
		unix.Write(fd, seed) //nolint:errcheck // as above
	}
}
