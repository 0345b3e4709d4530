// Package appliance installs a bundle on a host that has no network.
//
//	signature ─▶ host, version ─▶ what the host lacks ─▶ packages, by dpkg or rpm ─▶ images
//	└─────────── nothing is written ────────────────┘
//
// What can be refused is refused before anything is installed. Packages lie in a private directory
// meanwhile, which is removed, by the next Install if the power was cut. A second Install of the
// same bundle does what a first one that was interrupted has left: dpkg and rpm begin again.
package appliance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/bundle"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Order is what is to be installed.
type Order struct {
	File string       // the bundle
	Keys []bundle.Key // that are trusted
	// Force takes a release that is older than the installed one.
	Force bool
	// Lacks says what this host lacks, beside packages: each with the command that helps.
	Lacks func(context.Context) []string
	Out   io.Writer // what is done, and what dpkg or rpm say
	// Work is the directory for packages and images while they are installed.
	Work string
}

// manager is a manager of packages.
type manager interface {
	form() string // of the names of its files: ".deb"
	// choose says which of the packages are to be installed, and names what they need and nobody has.
	choose(ctx context.Context, all []packed, force bool) (files, missing []string, err error)
	install(ctx context.Context, files []string, older bool, out io.Writer) error
	// unpack writes what a package has below dir instead of the root of the host. It runs no scripts.
	unpack(ctx context.Context, file, dir string) error
}

// A packed is a file of a package.
type packed struct {
	file     string
	ifNeeded bool // bundle.Member.IfNeeded
}

// Install installs the packages of a bundle, and imports its images if the daemon answers then.
func Install(ctx context.Context, o Order) (err error) {
	b, err := bundle.Open(ctx, o.File, o.Keys)
	if err != nil {
		return err
	}
	defer b.Close()
	installed := Installed(ctx)
	if err := b.For(bundle.Host{OS: runtime.GOOS, Architecture: runtime.GOARCH, Installed: installed, Force: o.Force}); err != nil {
		return err
	}
	m, err := managerOf(ctx, b)
	if err != nil {
		return err
	}
	p, err := prepare(ctx, o, b, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.remove()) }()
	if installed != "" && installed != b.Version {
		fmt.Fprintf(o.Out, "sandboxd %s is installed; this replaces it without a trial, which \"sandboxd upgrade\" makes\n", installed)
	}
	fmt.Fprintf(o.Out, "installing sandboxd %s\n", b.Version)
	if err := m.install(ctx, p.files, o.Force, o.Out); err != nil {
		return fmt.Errorf("install %s: %w; when the cause is mended, install the bundle again", o.File, err)
	}
	return images(ctx, b, p.dir, o.Out)
}

// parts is what was extracted of a bundle.
type parts struct {
	work   string // the directory for all of it
	remove func() error
	dir    string   // below work: the members
	files  []string // the packages
}

// prepare checks that the host has what the bundle needs, and extracts its packages and images.
func prepare(ctx context.Context, o Order, b *bundle.Bundle, m manager) (p parts, err error) {
	if p.work, p.remove, err = newWork(o.Work); err != nil {
		return p, fmt.Errorf("install %s: %w", o.File, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.remove())
		}
	}()
	lacking := o.Lacks(ctx)
	if os.Geteuid() != 0 {
		lacking = append(lacking, "the rights of root: run it as root")
	}
	packages := func(f bundle.Member) bool { return ours(f, m) }
	why, wanted := space(p.work, b, wholly), wholly
	if why != "" {
		lacking = append(lacking, why)
		if wanted = packages; space(p.work, b, packages) != "" {
			return p, lacks(o.File, lacking)
		}
	}
	p.dir = filepath.Join(p.work, "bundle")
	err = b.Extract(ctx, p.dir, func(f bundle.Member) bool { return packages(f) || f.Kind == bundle.Image && wanted(f) })
	if err != nil {
		return p, err
	}
	var all []packed
	var brought []string
	for _, f := range b.Members {
		if ours(f, m) {
			all = append(all, packed{filepath.Join(p.dir, f.Name), f.IfNeeded})
			brought = append(brought, f.Package)
		}
	}
	var missing []string
	if p.files, missing, err = m.choose(ctx, all, o.Force); err != nil {
		return p, fmt.Errorf("install %s: %w", o.File, err)
	}
	if lacking = merged(lacking, missing, brought); len(lacking) > 0 {
		return p, lacks(o.File, lacking)
	}
	return p, nil
}

// ours reports whether f is a package for this host.
func ours(f bundle.Member, m manager) bool {
	return f.Kind == bundle.Package && filepath.Ext(f.Name) == m.form()
}

// managerOf finds the manager that has this host's packages.
func managerOf(ctx context.Context, b *bundle.Bundle) (manager, error) {
	var found manager
	// Fedora has dpkg, too, and there it has not installed itself.
	_, err := ask(ctx, "dpkg-query", "--show", "dpkg")
	switch {
	case err == nil:
		found = debian{}
	case has("rpm"):
		found = rpm{}
	default:
		return nil, errs.New(errs.Unsupported, "install: this host has neither dpkg nor rpm: "+
			"extract the bundle by sandboxd bundle verify --extract and install its files by hand")
	}
	for _, f := range b.Members {
		if ours(f, found) {
			return found, nil
		}
	}
	return nil, errs.New(errs.Unsupported, "install: the bundle has no package %s, which this host needs: "+
		"get a bundle with packages for this distribution", found.form())
}

func has(program string) bool {
	_, err := exec.LookPath(program)
	return err == nil
}

// reported is what sandboxd --version prints.
var reported = regexp.MustCompile(`^sandboxd version (\S+)\n$`)

// Installed returns the version of the sandboxd that is installed: of the one in PATH, or else of
// the one of the packages. "" is none; another program of this name has no version.
func Installed(ctx context.Context) string {
	for _, program := range []string{"sandboxd", "/usr/bin/sandboxd"} {
		out, err := exec.CommandContext(ctx, program, "--version").Output()
		if m := reported.FindSubmatch(out); err == nil && m != nil && semver.IsValid("v"+string(m[1])) {
			return string(m[1])
		}
	}
	return ""
}

func wholly(bundle.Member) bool { return true }

// space says what is missing of the bytes that the members which are extracted need meanwhile.
func space(dir string, b *bundle.Bundle, of func(bundle.Member) bool) string {
	var want uint64
	for _, f := range b.Members {
		if of(f) {
			want += uint64(f.Size)
		}
	}
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return fmt.Sprintf("a file system whose free space can be asked: %s: %v", dir, err)
	}
	if free := s.Bavail * uint64(s.Bsize); free < want {
		return fmt.Sprintf("free space: %s has %d MB, and %d MB are needed while this installs; name another directory by TMPDIR",
			filepath.Dir(dir), free>>20, want>>20+1)
	}
	return ""
}

// merged puts the packages that are missing in front of what else is lacking. It leaves out what these and the
// packages that the bundle brings mend.
func merged(lacking, missing, brought []string) (all []string) {
	names := slices.Clone(brought)
	for _, p := range missing {
		all = append(all, "the package "+p)
		name, _, _ := strings.Cut(p, " ")
		names = append(names, name)
	}
	return append(all, slices.DeleteFunc(lacking, func(l string) bool {
		return slices.ContainsFunc(names, func(name string) bool {
			return strings.HasSuffix(l, "apt-get install "+name) || strings.Contains(l, "install the Debian package "+name+";")
		})
	})...)
}

func lacks(file string, lacking []string) error {
	return errs.New(errs.Unsupported, "install %s: this host lacks what sandboxd needs, and nothing was installed:\n  %s",
		file, strings.Join(lacking, "\n  "))
}

// images imports the images of the bundle.
func images(ctx context.Context, b *bundle.Bundle, dir string, out io.Writer) error {
	var failed []error
	for _, f := range b.Members {
		if f.Kind != bundle.Image {
			continue
		}
		said, err := exec.CommandContext(ctx, "sandboxctl", "image", "import", filepath.Join(dir, f.Name)).CombinedOutput()
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w: %s", f.Name, err, strings.TrimSpace(string(said))))
			continue
		}
		fmt.Fprintf(out, "imported %s\n", f.Name)
	}
	if failed != nil {
		return fmt.Errorf("sandboxd is installed, and images were not imported:\n%w\nwhen the daemon runs, install the bundle again, "+
			"or extract it by sandboxd bundle verify --extract and import its images", errors.Join(failed...))
	}
	return nil
}
