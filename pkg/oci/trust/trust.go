// Package trust plans how a guest comes to trust a certificate authority, without a change
// to its disk.
//
//	the guest's root ── NewPlan ──▶ Files        for the bundle's directory (oci.WriteFile)
//	                                StoreMounts  of these files, read-only, over the guest's own
//	                                AgentMounts  of these files, read-only, in oci.AgentDir
//	                                Env          for programs that read other files
//	                                Left         what could not be changed, for the log
//
// The daemon plans at each start, in the row "trust" of the resource table (pkg/sandbox).
//
// Each store of the guest (a bundle of PEM, or a store of Java) is copied with the authority
// added, and the copy is mounted over it. So it works on a read-only root, and neither a diff
// nor a snapshot has it: the mounts end with the sandbox.
//
// The root is hostile: a guest has written it. Paths are resolved within it, only regular
// files are opened, and every length has a bound. What stands in them is not parsed: PEM is
// copied, and java.go adds an entry to a Java store by a few lengths at its head. So the
// daemon needs no confined child for that. No part of a guest's tree makes NewPlan fail.
//
// The surprise, which users must be told: a program of the guest cannot replace a store while
// it is mounted over, because rename(2) onto a mount point fails with EBUSY. So in a sandbox
// with inspected hosts update-ca-certificates(8) and update-ca-trust(8) fail, and so does an
// upgrade of the package ca-certificates: apt ends with 100, and does so again until
// "dpkg --configure -a" has run after a start without inspected hosts. Upgrade the package
// when the image is built, or hold it (apt-mark(8)). Its first installation works, for nothing
// is mounted where the image has no bundle.
//
// No other layout avoids that and keeps what the guest writes. In a directory that is mounted
// over /etc/ssl/certs the rename works; but then the new files are gone at the next start,
// while dpkg has them as installed, and the new bundle is without the authority. If an image
// has a link in the place of the bundle, it is the link's target that is mounted over: a
// rename replaces the link, and programs lose the authority instead.
package trust

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Files of a guest that are there whatever its image has. Both lie in oci.AgentDir, on which
// neither a volume nor memory can be mounted. That is a directory of the host, shared and
// read-only, so it must have an empty file of each name to mount on. If one is missing, runc
// fails to make it, and runsc makes it on the host.
const (
	// CertPath has the authority alone. It is where OpenSandbox's own egress puts it.
	CertPath = "/opt/opensandbox/mitmproxy-ca-cert.pem"
	// BundlePath has the authority, and what the guest's first bundle trusts. If the guest has
	// none, or only empty ones, it has the authority alone: with the roots of the host,
	// programs would trust what the image does not. Programs that have roots compiled in and
	// still read SSL_CERT_FILE, such as uv, then reach no other host.
	BundlePath = "/opt/opensandbox/ca-bundle.pem"
)

// AgentFiles are these files. The Makefile and scripts/install.sh make an empty one of each
// name in the host's directory, and replace none: a rename over a file would end its mounts in
// all sandboxes that run (mount_namespaces(7)).
var AgentFiles = []string{CertPath, BundlePath}

// Bounds of what a root may cost. Mozilla's roots are 220 KiB as PEM, and 160 KiB for Java.
const (
	maxFile   = 4 << 20  // bytes of a store
	maxRead   = 16 << 20 // bytes of all stores: also the memory of a plan, and of its files
	maxMounts = 32       // of stores
	maxNames  = 64       // of a directory with versions of Java or Python
	maxListed = 1024     // of all names in such a directory: 256 KiB
)

// A Plan says what to write, to mount and to set. Equal roots, authorities and environments
// give equal plans.
type Plan struct {
	Files []File
	// StoreMounts are over stores of the guest, none of which memory or a volume hides. They
	// belong before the memory and the volumes of a sandbox.
	StoreMounts []Mount
	// AgentMounts are at CertPath and BundlePath. They belong after oci.AgentDir.
	AgentMounts []Mount
	Env         map[string]string // variables to add; the guest has set none of them
	Left        []Left
}

// A File is for the directory of the sandbox's bundle, with mode 0644: the users of a runc
// sandbox have host ids of their own, and must read it.
type File struct {
	Name string // without a directory
	Data []byte
}

// A Mount binds a File of the plan over another file, read-only.
type Mount struct {
	File string
	// Target is a path of the guest: absolute, clean, and without a symbolic link when it
	// was planned. Both runtimes resolve it within the root once more (runc: createOpenMountpoint
	// in libcontainer/rootfs_linux.go; runsc: ResolveSymlinks in runsc/cmd/sandboxsetup/fs.go).
	Target string
}

// A Left is a store that stays as it is. Programs that read it do not trust the authority.
type Left struct{ Path, Why string }

// NewPlan plans for a guest whose root file system is the directory root and whose first
// process has the environment env. ca is the certificate of the authority, one block of PEM.
// On the paths hidden, memory and volumes will be mounted. The guest must not run.
//
// No store that is hidden is mounted over. runsc mounts in the order of the lengths of the
// paths (prepareMounts in runsc/boot/vfs.go), whatever the specification has: it would make
// the mount point in the volume.
//
// A variable that the guest has set stays, and so does the effect that it has. If it names a
// store, that one is extended as the image's are: the guest trusts what it chose, and the
// authority.
func NewPlan(root *os.File, ca []byte, env map[string]string, hidden []string) (*Plan, error) {
	p, err := newPlanner(root, ca)
	if err != nil {
		return nil, fmt.Errorf("plan the trust of a guest: %w", err)
	}
	for _, name := range hidden {
		p.hidden = append(p.hidden, path.Clean(name), p.place(name))
	}
	cert := p.mount(CertPath, p.ca)
	first := p.bundles()
	if first == nil {
		first = p.programRoots()
	}
	for _, name := range p.javaStores(env["JAVA_HOME"]) {
		p.extend(name, p.withStore)
	}
	bare := first == nil
	if bare {
		first = p.ca
	}
	p.plan.AgentMounts = []Mount{cert, p.mount(BundlePath, first)}
	p.variables(env, bare)
	return &p.plan, nil
}

// bundles extends the bundles of the guest, and returns the first one that has roots; nil if
// there is none.
func (p *planner) bundles() (first []byte) {
	for _, name := range bundles {
		b := p.extend(name, p.withPEM)
		if first == nil && !bytes.Equal(b, p.ca) {
			first = b
		}
	}
	return first
}

// programRoots is the authority and the roots that some program has brought along; nil if
// there are none that can be read.
func (p *planner) programRoots() []byte {
	for _, pattern := range programRoots {
		for _, name := range p.glob(pattern) {
			f, err := p.open(name)
			if isAbsent(err) {
				continue
			}
			var b []byte
			if err == nil {
				b, err = p.withPEM(f.data)
			}
			switch {
			case err != nil:
				p.leave(name, err)
			case !bytes.Equal(b, p.ca):
				return b
			}
		}
	}
	return nil
}

// A planner is a Plan that is being made.
type planner struct {
	root *os.File
	base string // the path of root, as the kernel has it
	cert *x509.Certificate
	ca   []byte // PEM

	hidden []string // paths where something else will be mounted, as given and without links

	plan Plan
	read int64           // bytes of stores
	seen map[string]bool // paths that were looked at, and targets
}

func newPlanner(root *os.File, ca []byte) (*planner, error) {
	block, rest := pem.Decode(ca)
	if block == nil || block.Type != "CERTIFICATE" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("the authority is not one certificate as PEM")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read the certificate of the authority: %w", err)
	}
	base, err := nameOf(root)
	if err != nil {
		return nil, fmt.Errorf("find the path of the root: %w", err)
	}
	return &planner{
		root: root, base: base, cert: cert, ca: pem.EncodeToMemory(block), plan: Plan{Env: map[string]string{}},
		seen: map[string]bool{},
	}, nil
}

// extend has the store at name mounted over by what with makes of it, and returns that; nil
// if it stays as it is, or has been looked at by another name. An absent store is none. A
// hidden one is returned, and not mounted over: the image trusts what it has.
func (p *planner) extend(name string, with func([]byte) ([]byte, error)) []byte {
	name = path.Clean(name)
	if p.seen[name] {
		return nil
	}
	p.seen[name] = true
	f, err := p.open(name)
	switch {
	case isAbsent(err):
		return nil
	case err != nil:
		p.leave(name, err)
		return nil
	case f.target != name && p.seen[f.target]:
		return nil
	}
	p.seen[f.target] = true
	b, err := with(f.data)
	switch {
	case err != nil:
		p.leave(name, err)
		return nil
	case slices.ContainsFunc(p.hidden, func(dir string) bool { return record.Within(f.target, dir) }):
		p.leave(name, errors.New("memory or a volume of the sandbox hides it"))
		return b
	case len(p.plan.StoreMounts) >= maxMounts:
		p.leave(name, fmt.Errorf("%d stores are mounted already", maxMounts))
		return nil
	}
	p.plan.StoreMounts = append(p.plan.StoreMounts, p.mount(f.target, b))
	return b
}

// leave notes a store, or a variable, that stays as it is.
func (p *planner) leave(name string, err error) {
	p.plan.Left = append(p.plan.Left, Left{name, err.Error()})
}

// mount is a mount of b on target. It adds the file, unless there is one with the same content.
func (p *planner) mount(target string, b []byte) Mount {
	i := slices.IndexFunc(p.plan.Files, func(f File) bool { return bytes.Equal(f.Data, b) })
	if i < 0 {
		i = len(p.plan.Files)
		p.plan.Files = append(p.plan.Files, File{"trust-" + strconv.Itoa(i), b})
	}
	return Mount{p.plan.Files[i].Name, target}
}

// withPEM adds the authority to a bundle. It stands first: a block that the guest's bytes
// leave open cannot contain it. A bundle without a certificate becomes the authority alone.
func (p *planner) withPEM(b []byte) ([]byte, error) {
	if len(bytes.TrimSpace(b)) == 0 {
		return p.ca, nil
	}
	// A variable may name any file.
	if !bytes.Contains(b, []byte("-----BEGIN ")) {
		return nil, errors.New("not a bundle of certificates as PEM")
	}
	return append(bytes.Clone(p.ca), b...), nil
}
